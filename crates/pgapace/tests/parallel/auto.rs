//! `--workers auto`: the number of workers in use follows from what they gain.

use testbed::{Cluster, wait_until};

use crate::support::{
    Case, Database, PATIENCE, must, on_versions, one_or_all, random_pause, servers,
};
use crate::verbs::json;

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];
const TRANSACTIONS: u32 = 25_000;

/// Transactions of two changes, one of them of rows that others change too.
fn load(case: &Case, transactions: u32) {
    case.publisher.sql(&format!(
        "DO $$ BEGIN FOR i IN 1..{transactions} LOOP \
         INSERT INTO t SELECT max(id) + 1, 0 FROM t; \
         UPDATE t SET v = v + i WHERE id = i % 100; COMMIT; END LOOP; END $$"
    ));
}

fn replicated(case: &mut Case) {
    case.tool.args =
        ["--group-transactions", "2", "--log-level", "debug"].map(str::to_owned).into();
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t SELECT i, 0 FROM generate_series(0, 99) i");
    case.publish("FOR TABLE t");
    case.run_until_current();
}

/// The numbers of workers that were decided, in their order.
fn decided(log: &str) -> Vec<u16> {
    let lines = log.lines().filter(|line| line.contains("apply workers in use"));
    let number = |line: &str| {
        let (_, rest) = line.split_once("workers=")?;
        rest.split_whitespace().next()?.parse().ok()
    };
    lines.filter_map(number).collect()
}

#[test]
fn a_backlog_is_applied_while_numbers_of_workers_are_tried() {
    on_versions(&BOTH, |mut case| {
        replicated(&mut case);
        load(&case, TRANSACTIONS);
        let mut process = case.start();
        // The rate rises for long on a busy machine, and another number is tried once it no longer does.
        must(wait_until(PATIENCE, "more than one worker", || {
            load(&case, TRANSACTIONS / 5);
            assert!(process.is_running(), "{}", process.log());
            Ok(decided(&process.log()).iter().any(|workers| *workers > 1))
        }));
        // A run that ends soon has tried no number.
        let decided = decided(&case.stop(process));
        assert!(decided.iter().all(|workers| (1..=16).contains(workers)), "{decided:?}");
        let status = json(&case.tool.finish("status", &["--json"]));
        assert_eq!(status[0]["workers"].as_u64(), decided.last().copied().map(u64::from));
        let reason = status[0]["workers_reason"].as_str().expect("there is a reason");
        assert!(reason.contains("appl"), "{reason}");
        let shown = case.tool.finish("status", &[]).stdout;
        assert!(
            shown.contains(&format!("  workers        {}: {reason}", decided[decided.len() - 1]))
        );
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_number_that_was_set_is_shown_as_such() {
    on_versions(&BOTH[1..], |mut case| {
        replicated(&mut case);
        case.tool.args = vec!["--workers=3".to_owned()];
        case.publisher.sql("UPDATE t SET v = 1");
        case.run_until_current();
        let shown = (case.statistic("workers"), case.statistic("workers_reason"));
        assert_eq!(shown, ("3".to_owned(), "set by --workers".to_owned()));
    });
}

#[test]
fn sessions_are_terminated_and_the_program_is_killed_while_the_number_changes() {
    on_versions(&BOTH, |mut case| {
        replicated(&mut case);
        load(&case, TRANSACTIONS);
        let terminate = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity \
             WHERE application_name = 'pgapace {} apply' ORDER BY random() LIMIT 1) s",
            case.tool.name
        );
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..3 {
            let mut process = case.start();
            for _ in 0..6 {
                random_pause(&mut random, 50..300);
                case.subscriber.value(&terminate);
            }
            must(process.kill9());
        }
        load(&case, TRANSACTIONS / 4);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// A subscriber of its own with PostgreSQL's default limit of replication origins.
pub(super) fn few_origins(major: u16, settings: &[(&str, &str)]) -> Cluster {
    let binaries = must(testbed::servers::find_or_fetch(major));
    let mut builder = Cluster::builder(&binaries).name("subscriber with few origins");
    builder = builder.setting("max_replication_slots", "10");
    if major >= 18 {
        builder = builder.setting("max_active_replication_origins", "10");
    }
    let builder =
        settings.iter().fold(builder, |builder, (name, value)| builder.setting(*name, *value));
    must(builder.start())
}

/// Two subscriptions in one database of this subscriber, and a native subscription beside them.
#[test]
fn origins_are_left_to_native_subscriptions() {
    for &major in one_or_all(&[15, 18]) {
        let cluster = few_origins(major, &[]);
        let publisher = servers(major, major).publisher;
        let mut case = Case::new(major, major);
        let subscriber = Database::create(&cluster, "few", "");
        let ddl = "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE n (id int PRIMARY KEY)";
        case.publisher.sql(ddl);
        subscriber.sql(ddl);
        case.publisher.sql(
            "INSERT INTO t SELECT i, 0 FROM generate_series(0, 99) i; INSERT INTO n VALUES (1); \
             CREATE PUBLICATION native FOR TABLE n",
        );
        case.publish("FOR TABLE t");
        case.tool.subscriber = subscriber.conninfo();
        case.tool.args = ["--group-transactions", "2"].map(str::to_owned).into();
        case.run_until_current();
        let mut other = case.tool.clone();
        other.name.push_str("_other");
        other.publications = "native".to_owned();
        let checked = case.tool.finish("check", &[]).stdout;
        assert!(checked.contains("Sessions that apply: at most 4"), "{checked}");
        load(&case, TRANSACTIONS);
        let mut process = case.start();
        let mut second = other.start(case.log_file("other"));
        case.wait_until_applied(&mut process);
        let origins = "SELECT count(*) FROM pg_replication_origin";
        let used: u32 = must(subscriber.value(origins).parse());
        assert!((2..=8).contains(&used), "{used} of 10");
        // A native subscription finds room for itself and for its table sync.
        subscriber.sql("CREATE TABLE IF NOT EXISTS n2 (id int PRIMARY KEY)");
        case.publisher.sql(
            "CREATE TABLE n2 (id int PRIMARY KEY); INSERT INTO n2 VALUES (7); \
             CREATE PUBLICATION beside FOR TABLE n2",
        );
        let slot = format!("{}_native", case.tool.name);
        subscriber.sql(&format!(
            "CREATE SUBSCRIPTION beside CONNECTION '{}' PUBLICATION beside WITH (slot_name = '{slot}')",
            publisher.conninfo(&case.publisher.name).replace('\'', "''")
        ));
        case.publisher.sql("INSERT INTO n2 VALUES (8)");
        must(wait_until(PATIENCE, "the native subscription", || {
            Ok(subscriber.value("SELECT count(*) FROM n2") == "2")
        }));
        subscriber.sql("DROP SUBSCRIPTION beside");
        case.stop(process);
        must(second.terminate());
        must(second.wait(PATIENCE));
        // The other direction must not get our changes back: all are tagged.
        assert_eq!(subscriber.value("SELECT count(*) FROM n"), "1");
        let rows = "SELECT count(*), sum(v) FROM t";
        assert_eq!(subscriber.value(rows), case.publisher.value(rows));
        for tool in [&case.tool, &other] {
            tool.finish("drop", &[]).expect(0, &[]);
        }
        assert_eq!(subscriber.value(origins), "0");
    }
}

#[test]
fn commits_are_not_tagged_where_no_tag_can_be_seen() {
    for &major in one_or_all(&[15, 18]) {
        let cluster = few_origins(major, &[("wal_level", "replica")]);
        let mut case = Case::new(major, major);
        let subscriber = Database::create(&cluster, "alone", "");
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY)");
        subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        case.tool.subscriber = subscriber.conninfo();
        let checked = case.tool.finish("check", &[]).stdout;
        assert!(checked.contains("commits are not tagged"), "{checked}");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        // Without tags, any number of workers can apply.
        case.tool.args = vec!["--workers=12".to_owned()];
        case.run_until_current();
        assert_eq!(subscriber.value("SELECT count(*) FROM t"), "1");
        assert_eq!(subscriber.value("SELECT count(*) FROM pg_replication_origin"), "0");
        // A user who asks for them gets them.
        case.tool.args = ["--workers=2", "--tag-commits"].map(str::to_owned).into();
        case.publisher.sql("INSERT INTO t VALUES (2)");
        case.run_until_current();
        assert_eq!(subscriber.value("SELECT count(*) FROM pg_replication_origin"), "2");
        // Nobody asks who made a commit, so origins that are not used any more are removed.
        case.tool.args = vec!["--tag-commits".to_owned()];
        case.run_until_current();
        assert_eq!(subscriber.value("SELECT count(*) FROM pg_replication_origin"), "1");
        case.tool.finish("drop", &[]).expect(0, &[]);
    }
}

/// DROP DATABASE removes the subscription's state, but origins belong to the whole server.
#[test]
fn origins_of_dropped_databases_make_room() {
    for &major in one_or_all(&[15, 18]) {
        let cluster = few_origins(major, &[]);
        let mut case = Case::new(major, major);
        let subscriber = Database::create(&cluster, "here", "");
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY)");
        subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        case.tool.subscriber = subscriber.conninfo();
        case.publisher.sql("INSERT INTO t VALUES (1)");
        subscriber.sql("CREATE DATABASE gone");
        subscriber.sql(
            "SELECT pg_replication_origin_create('pgapace_' || oid || '_1_' || worker) \
             FROM pg_database, generate_series(0, 6) worker WHERE datname = 'gone'",
        );
        subscriber.sql("DROP DATABASE gone");
        let kept = ["pgapace_of_a_user", "pgapace_1_1_0"];
        for name in kept {
            subscriber.sql(&format!("SELECT pg_replication_origin_create('{name}')"));
        }
        case.run_until_current();
        assert_eq!(subscriber.value("SELECT count(*) FROM t"), "1");
        let others = "SELECT roname FROM pg_replication_origin WHERE roname !~ ('^pgapace_' || \
             (SELECT oid FROM pg_database WHERE datname = current_database()) || '_') ORDER BY 1";
        assert_eq!(subscriber.rows(others), ["pgapace_1_1_0", "pgapace_of_a_user"]);
        case.tool.finish("drop", &[]).expect(0, &[]);
    }
}
