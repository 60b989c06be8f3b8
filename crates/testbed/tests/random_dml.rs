//! The random workload and the comparison with a native subscription: the native apply worker must
//! replicate everything that the generator does.

use std::time::Duration;

use testbed::compare::expect_equal;
use testbed::workload::random_dml::{Options, RandomDml, RandomSchema, run_sessions};
use testbed::{Cluster, Pair, wait_until};

const SESSIONS: u64 = 3;
const TIMEOUT: Duration = Duration::from_secs(60);
const TRANSACTIONS: u64 = 150;

/// Runs each seed in its own database on one pair of servers.
fn replicates(publisher_major: u16, subscriber_major: u16, seeds: std::ops::Range<u64>) {
    let pair = Pair::start(publisher_major, subscriber_major).unwrap();
    std::thread::scope(|scope| {
        for seed in seeds {
            let pair = &pair;
            scope.spawn(move || replicates_seed(pair, seed));
        }
    });
}

fn replicates_seed(pair: &Pair, seed: u64) {
    let database = format!("seed{seed}");
    // The native apply worker cannot truncate a table while a table that references it is being
    // copied. Half of the seeds therefore make changes during the copy, the others use TRUNCATE.
    let during_copy = seed.is_multiple_of(2);
    let options = Options { two_phase: during_copy, truncate: !during_copy, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    let create = |cluster: &Cluster, ddl: &str| {
        cluster.create_database(&database).unwrap();
        cluster.sql(&database, ddl).unwrap_or_else(|error| panic!("{error}\n{ddl}"));
    };
    create(&pair.publisher, &schema.publisher_ddl);
    create(&pair.subscriber, &schema.subscriber_ddl);
    pair.publisher.sql(&database, &schema.publication_ddl("p")).unwrap();

    // Some rows for the initial copy, then changes during and after it.
    let mut publisher = pair.publisher.connect(&database).unwrap();
    RandomDml::new(&schema, seed).run(&mut publisher, 30).unwrap();
    let subscribe = format!(
        "CREATE SUBSCRIPTION s_{database} CONNECTION '{}' PUBLICATION p WITH (streaming = on)",
        pair.publisher.conninfo(&database).replace('\'', "''")
    );
    pair.subscriber.sql(&database, &subscribe).unwrap();
    let synced = || -> testbed::Result<bool> {
        let sql = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'";
        Ok(pair.subscriber.query_one_text(&database, sql)? == "0")
    };
    if !during_copy {
        wait_until(TIMEOUT, format!("the copy of seed {seed}"), synced).unwrap();
    }
    let conninfo = pair.publisher.conninfo(&database);
    let report = run_sessions(&conninfo, &schema, seed * 100, SESSIONS, TRANSACTIONS).unwrap();
    assert!(report.committed > SESSIONS * TRANSACTIONS / 2, "seed {seed}: {report:?}");
    assert!(report.failed_statements > 0 && report.rows > 0, "seed {seed}: {report:?}");

    let end = pair.publisher.query_one_text(&database, "SELECT pg_current_wal_lsn()").unwrap();
    let arrived = format!(
        "SELECT count(*) FROM pg_stat_replication
         WHERE application_name = 's_{database}' AND replay_lsn >= '{end}'"
    );
    wait_until(TIMEOUT, format!("seed {seed} to replicate"), || {
        Ok(synced()? && pair.publisher.query_one_text(&database, &arrived)? == "1")
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", pair.subscriber.log_tail()));
    let mut subscriber = pair.subscriber.connect(&database).unwrap();
    let equal = expect_equal(&mut publisher, &mut subscriber, &schema.tables);
    equal.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    // The next seed needs the workers, and a subscription prevents dropping its database.
    pair.subscriber.sql(&database, &format!("DROP SUBSCRIPTION s_{database}")).unwrap();
}

#[test]
fn native_subscription_replicates_15_to_18() {
    replicates(15, 18, 1..5);
}

#[test]
fn native_subscription_replicates_18_to_18() {
    replicates(18, 18, 5..9);
}

#[test]
fn the_same_seed_gives_the_same_statements() {
    let options = Options::default();
    let (one, two) = (RandomSchema::generate(9, &options), RandomSchema::generate(9, &options));
    assert_eq!(
        (&one.publisher_ddl, &one.subscriber_ddl),
        (&two.publisher_ddl, &two.subscriber_ddl)
    );
    assert_ne!(one.publisher_ddl, RandomSchema::generate(10, &options).publisher_ddl);

    let cluster = Cluster::builder(&testbed::servers::find_or_fetch(18).unwrap()).start().unwrap();
    let mut reports = Vec::new();
    for database in ["first", "second"] {
        cluster.create_database(database).unwrap();
        let mut client = cluster.connect(database).unwrap();
        client.batch_execute(&one.publisher_ddl).unwrap();
        reports.push(RandomDml::new(&one, 77).run(&mut client, 100).unwrap());
    }
    assert_eq!(reports[0], reports[1]);
    let mut first = cluster.connect("first").unwrap();
    let mut second = cluster.connect("second").unwrap();
    expect_equal(&mut first, &mut second, &one.tables).unwrap();
}
