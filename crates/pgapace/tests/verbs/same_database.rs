//! A database is not its own publisher: nothing is changed.

use crate::adopt::NativeSubscription;
use crate::support::{Case, Tool, on_versions};

const SAID: &str = "publisher and subscriber are the same database";

#[test]
fn a_first_start_is_refused() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        let tool = Tool { subscriber: case.publisher.conninfo(), ..case.tool.clone() };
        let checked = tool.finish("check", &[]);
        checked.expect(6, &[]);
        assert!(checked.stdout.contains(SAID), "{}", checked.stdout);
        assert!(!checked.stdout.contains("TRUNCATE"), "{}", checked.stdout);
        let refused = tool.run();
        refused.expect(3, &[SAID]);
        assert!(!refused.log.to_lowercase().contains("truncate"), "{}", refused.log);
        assert_eq!(case.publisher.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");
        assert_eq!(case.publisher.value("SELECT count(*) FROM t"), "1");
    });
}

#[test]
fn so_are_verbs_that_copy_or_write() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    // A repair needs a difference.
    case.subscriber.sql("DELETE FROM t");
    case.tool.finish("verify", &[]).expect(18, &[]);
    let tool = Tool { publisher: case.subscriber.conninfo(), ..case.tool.clone() };
    tool.run().expect(3, &[SAID]);
    for (verb, args) in [("resync", &["t"][..]), ("refresh", &[]), ("rebase", &[]), ("repair", &[])]
    {
        tool.finish(verb, args).expect(3, &[SAID]);
    }
    case.run_until_current();
    case.tool.finish("repair", &[]).expect(0, &[]);
    case.expect_equal(&["t"]);
    // Another database of the same server is no obstacle.
    let other = Case::new(18, 18);
    let tool = Tool { subscriber: other.publisher.conninfo(), ..case.tool.clone() };
    let checked = tool.finish("check", &[]);
    assert!(checked.stdout.contains("are different databases"), "{}", checked.stdout);
}

#[test]
fn so_is_an_adoption() {
    let case = Case::new(15, 15);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let native = NativeSubscription::ready(&case, "");
    let tool = Tool { publisher: case.subscriber.conninfo(), ..case.tool.clone() };
    tool.finish("adopt", &["--subscription", &native.name]).expect(3, &[SAID]);
    assert_eq!(native.state(), native.running());
}

/// Two servers that are started together may have the same time of start.
#[test]
fn servers_started_at_once_are_two() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY); \
             CREATE OR REPLACE FUNCTION pg_catalog.pg_postmaster_start_time() RETURNS timestamptz \
             LANGUAGE sql STABLE AS $$SELECT 'epoch'::timestamptz$$",
        );
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let tool = Tool { subscriber: case.publisher.conninfo(), ..case.tool.clone() };
        tool.run().expect(3, &[SAID]);
    });
}
