//! A connection pooler on either side is refused before pgapace changes or creates anything.
//! PgBouncer serves as the example. The proxy of Neon is none.

use testbed::{OwnKeysProxy, PoolMode, Pooler};

use crate::support::{Case, Tool, must, on_versions, skipped};

const BOTH: [PoolMode; 2] = [PoolMode::Session, PoolMode::Transaction];

/// Runs a test if PgBouncer is installed.
fn with_pgbouncer(body: impl Fn(Case)) {
    if Pooler::find().is_none() {
        skipped("a pooler is refused", "PgBouncer is not installed (apt-get install pgbouncer)");
        return;
    }
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR TABLE t");
        body(case);
    });
}

/// Checks the state of the pooler's server connection that the next application would get.
fn expect_nothing_left(pooler: &Pooler, case: &Case) {
    let conninfo = pooler.conninfo(&case.subscriber.name);
    let mut application =
        must(testbed::postgres::Client::connect(&conninfo, testbed::postgres::NoTls));
    for (setting, value) in [
        ("session_replication_role", "origin"),
        ("synchronous_commit", "on"),
        ("enable_seqscan", "on"),
        ("row_security", "on"),
    ] {
        let rows = must(application.simple_query(&format!("SHOW {setting}")));
        let found = rows.iter().find_map(|message| match message {
            testbed::postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        });
        assert_eq!(found.as_deref(), Some(value), "{setting}");
    }
    let schema_count = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
    assert_eq!(case.subscriber.value(schema_count), "0");
    assert_eq!(
        case.publisher
            .value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"),
        "0"
    );
}

#[test]
fn a_pooler_as_subscriber_is_refused() {
    with_pgbouncer(|case| {
        // A pooler that ignores the search path of the session lets operators of others be found.
        case.subscriber.shadow_operators();
        let ignored = ["options", "options, search_path"];
        for (mode, ignored) in BOTH.into_iter().flat_map(|mode| ignored.map(|it| (mode, it))) {
            // Without the query that resets the session for the next client.
            let settings = [("server_reset_query", ""), ("ignore_startup_parameters", ignored)];
            let pooler = must(Pooler::start(case.subscriber.cluster, mode, &settings));
            let tool =
                Tool { subscriber: pooler.conninfo(&case.subscriber.name), ..case.tool.clone() };
            for verb in ["run", "status", "sequences", "drop", "skip", "enable", "prepared"] {
                let more: &[&str] = if verb == "skip" { &["--lsn", "0/1"] } else { &[] };
                tool.finish(verb, more).expect(5, &["connection pooler", "PgBouncer"]);
                expect_nothing_left(&pooler, &case);
            }
            let checked = tool.finish("check", &[]);
            checked.expect(5, &[]);
            assert!(checked.stdout.contains("connection pooler"), "{}", checked.stdout);
            expect_nothing_left(&pooler, &case);
        }
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_pooler_as_publisher_is_refused() {
    const IGNORED: &str = "extra_float_digits, intervalstyle, bytea_output, lc_monetary, xmlbinary, quote_all_identifiers, \
        search_path, statement_timeout, lock_timeout, idle_in_transaction_session_timeout, \
        row_security, replication";
    with_pgbouncer(|case| {
        for mode in BOTH {
            // By default PgBouncer rejects pgapace's startup parameters; some configurations ignore
            // them.
            let plain = [("ignore_startup_parameters", "options")];
            let lenient = [("ignore_startup_parameters", IGNORED)];
            for settings in [&plain, &lenient] {
                let pooler = must(Pooler::start(case.publisher.cluster, mode, settings));
                let tool =
                    Tool { publisher: pooler.conninfo(&case.publisher.name), ..case.tool.clone() };
                tool.finish("run", &[]).expect(4, &["connection pooler", "PgBouncer"]);
                tool.finish("sequences", &["--force"]).expect(4, &["connection pooler"]);
                let checked = tool.finish("check", &[]);
                checked.expect(4, &[]);
                assert!(checked.stdout.contains("connection pooler"), "{}", checked.stdout);
                let schema_count = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
                assert_eq!(case.subscriber.value(schema_count), "0");
            }
        }
    });
}

#[test]
fn the_proxy_of_neon_before_a_publisher_is_no_pooler() {
    const DIRECT: &str = "ep-cool-1.eu-2.aws.neon.tech";
    const POOLED: &str = "ep-cool-1-pooler.eu-2.aws.neon.tech";
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, d date, i interval, f float8)");
    case.publisher.sql("INSERT INTO t VALUES (1, '2026-02-01', '-1 day 02:00', pi())");
    case.publish("FOR TABLE t");
    let proxy = must(OwnKeysProxy::in_front_of(case.publisher.cluster));
    let tool =
        |host| Tool { publisher: proxy.conninfo(host, &case.publisher.name), ..case.tool.clone() };
    // A proxy that may be a pooler.
    tool(DIRECT).finish("run", &[]).expect(4, &["connection pooler"]);
    // The proxy leaves out the settings that pgapace asks for at the start of a session.
    case.publisher.shadow_operators();
    for setting in [
        "neon.timeline_id = 'f00'",
        "datestyle = 'German'",
        "intervalstyle = 'sql_standard'",
        "extra_float_digits = -10",
    ] {
        case.publisher.sql(&format!("ALTER DATABASE {} SET {setting}", case.publisher.name));
    }
    tool(POOLED).finish("run", &[]).expect(4, &["connection pooler"]);
    let direct = tool(DIRECT);
    direct.finish("run", &["--until", "current"]).expect(0, &[]);
    case.publisher.sql("INSERT INTO t VALUES (2, '2026-03-02', '-2 days 03:00', exp(1))");
    direct.finish("run", &["--until", "current"]).expect(0, &[]);
    case.expect_equal(&["t"]);
    direct.finish("verify", &[]).expect(0, &[]);
    // On the subscriber, settings would affect applications.
    let subscriber = must(OwnKeysProxy::in_front_of(case.subscriber.cluster));
    let conninfo = subscriber.conninfo(DIRECT, &case.subscriber.name);
    let tool = Tool { subscriber: conninfo, ..case.tool.clone() };
    tool.finish("status", &[]).expect(5, &["connection pooler"]);
}
