//! Tables into which several subscriptions copy, from publishers that each have a part of the rows. No copy of one
//! removes the rows of another.

use crate::adopt::NativeSubscription;
use crate::support::{Case, Tool, on_versions};

const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, v text)";

/// A second publisher for the subscriber of a case, with its subscription.
fn second(case: &Case, publisher_major: u16) -> (Case, Tool) {
    let other = Case::new(publisher_major, publisher_major);
    other
        .publisher
        .sql(&format!("{TABLE}; INSERT INTO t SELECT -i, 'second' FROM generate_series(1, 9) i"));
    other.publish("FOR ALL TABLES");
    let subscriber = case.subscriber.conninfo();
    let tool = Tool { subscriber, ..other.tool.clone() };
    (other, tool)
}

fn rows(case: &Case) -> String {
    case.subscriber
        .value("SELECT count(*) FILTER (WHERE id > 0), count(*) FILTER (WHERE id < 0) FROM t")
}

#[test]
fn an_interrupted_copy_keeps_the_rows_of_another_subscription() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLE);
        // One part of the copy fails.
        case.subscriber.sql("ALTER TABLE t ADD CHECK (id < 19000)");
        case.publisher
            .sql("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i");
        case.publish("FOR ALL TABLES");
        let parts = ["--until", "current", "--copy-split-size", "1MB"];
        assert_ne!(case.tool.finish("run", &parts).code, Some(0));
        assert_ne!(rows(&case), "0|0");
        let (_other, tool) = second(&case, 15);
        tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
        case.subscriber.sql("ALTER TABLE t DROP CONSTRAINT t_id_check");
        let refused = case.tool.finish("run", &parts);
        refused
            .expect(6, &["rows of other subscriptions are not emptied: public.t (subscription "]);
        assert!(rows(&case).ends_with("|9"), "{}", rows(&case));
        // As the hint says.
        case.tool.finish("drop", &[]).expect(0, &[]);
        case.subscriber.sql("DELETE FROM t WHERE id > 0");
        let keep = ["--until", "current", "--copy-split-size", "1MB", "--if-not-empty", "keep"];
        case.tool.finish("run", &keep).expect(0, &[]);
        assert_eq!(rows(&case), "20000|9");
    });
}

/// Without `keep` too: the table of another subscription is copied in one transaction.
#[test]
fn nothing_empties_the_table_of_another_subscription() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(TABLE);
        case.publish("FOR ALL TABLES");
        let (other, tool) = second(&case, 18);
        tool.run_until_current();
        case.publisher
            .sql("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i");
        let checked = case.tool.finish("check", &[]);
        checked.expect(6, &[]);
        for said in ["is changed by subscription", "--if-not-empty keep"] {
            assert!(checked.stdout.contains(said), "{said}:\n{}", checked.stdout);
        }
        assert!(!checked.stdout.contains("TRUNCATE"), "{}", checked.stdout);
        let named = case.tool.run();
        named.expect(6, &["rows of other subscriptions", "--if-not-empty keep"]);
        assert!(!named.log.contains("--truncate"), "{}", named.log);
        let decided = case.subscriber.value("SELECT 't@' || pg_current_snapshot()");
        let truncate = ["--until", "current", "--truncate", &decided];
        case.tool.finish("run", &truncate).expect(6, &["rows of other subscriptions"]);
        let rebase = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &rebase).expect(6, &["is changed by subscription"]);
        assert_eq!(rows(&case), "0|9");
        case.tool.finish("run", &["--until", "current", "--if-not-empty", "keep"]).expect(0, &[]);
        for tool in [&case.tool, &tool] {
            tool.finish("resync", &["t"])
                .expect(6, &["rows of other subscriptions", "pgapace repair"]);
            tool.finish("rebase", &[]).expect(6, &["is changed by subscription"]);
        }
        // As the hint says.
        case.subscriber.sql("DELETE FROM t WHERE id = 7; UPDATE t SET v = '' WHERE id = 8");
        let others = "may be those of other subscriptions: public.t (subscription ";
        case.tool.finish("verify", &[]).expect(18, &[others]);
        let repaired = case.tool.finish("repair", &[]);
        repaired.expect(18, &["9 rows that only the subscriber has were left", others]);
        assert!(!repaired.log.contains("--delete-extra"), "{}", repaired.log);
        case.tool
            .finish("repair", &["--delete-extra"])
            .expect(6, &["rows of other subscriptions", "--table"]);
        assert_eq!(rows(&case), "20000|9");
        case.tool.finish("verify", &["--where", "id > 0"]).expect(0, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        // A subscription that is gone keeps nobody from it.
        tool.finish("drop", &[]).expect(0, &[]);
        drop(other);
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn rows_of_a_native_subscription_are_kept() {
    let case = Case::new(18, 18);
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); \
         CREATE TABLE t_1 PARTITION OF t DEFAULT",
    );
    case.publisher.sql("INSERT INTO t VALUES (1, '')");
    case.publish("FOR ALL TABLES WITH (publish_via_partition_root = false)");
    let native = NativeSubscription::ready(&case, "");
    let (_other, tool) = second(&case, 18);
    let said = format!("public.t (native subscription {})", native.name);
    tool.run().expect(6, &["rows of other subscriptions", &said]);
    assert_eq!(rows(&case), "1|0");
}
