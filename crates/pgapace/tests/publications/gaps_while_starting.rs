//! Tables that are not published during a start.

use super::gaps::{
    ALL, AWAY, BACK, BLOCKED, expect_blocked_and_repair, one_by_one, replicate, state,
};
use crate::support::on_versions;

/// A start while the table is not published is no decision about it: `--on-missed-changes` decides when it comes back.
#[test]
fn a_start_while_a_table_is_not_published_decides_nothing() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        let relations = || case.subscriber.value("SELECT count(*) FROM pgapace.relation");
        case.tool.args = vec!["--on-missed-changes=resync".to_owned()];
        one_by_one(&case, AWAY);
        for _ in 0..2 {
            case.run_until_current();
            assert_eq!(state(&case, "t"), "ready false");
        }
        assert!(case.tool.finish("status", &[]).stdout.contains("public.t: no longer published"));
        one_by_one(&case, BACK);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);

        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        one_by_one(&case, AWAY);
        case.run_until_current();
        one_by_one(&case, BACK);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready true");
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE v = 2"), "10");

        case.tool.args.clear();
        one_by_one(&case, AWAY);
        case.run_until_current();
        one_by_one(&case, BACK);
        expect_blocked_and_repair(&case);

        // A copy that was requested is made, although the table holds rows.
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        one_by_one(&case, AWAY);
        case.run().expect(BLOCKED, &["public.t"]);
        case.run_until_current();
        one_by_one(&case, BACK);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);

        // A dropped table is forgotten: a later one is new.
        case.publisher.sql("DROP TABLE t");
        case.run_until_current();
        assert_eq!(relations(), "1");
        case.subscriber.sql("TRUNCATE t");
        case.publisher
            .sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 7)");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE t");
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
    });
}

/// With --copy-data=false, a start while the table is not published does not forget that it lacks changes. A copy that
/// was requested before is made when the table is published again.
#[test]
fn a_table_that_is_unpublished_during_a_start_is_not_new_without_copy_data() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        replicate(&mut case);
        case.tool.args = vec!["--copy-data=false".to_owned()];
        one_by_one(&case, AWAY);
        case.run_until_current();
        assert!(case.tool.finish("status", &[]).stdout.contains("public.t: no longer published"));
        one_by_one(&case, BACK);
        expect_blocked_and_repair(&case);

        case.tool.finish("resync", &["t"]).expect(0, &[]);
        one_by_one(&case, AWAY);
        case.run().expect(BLOCKED, &["public.t"]);
        case.run_until_current();
        one_by_one(&case, BACK);
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
        case.expect_equal(&["t", "other"]);

        // A dropped table is forgotten when all of its changes are applied.
        case.publisher.sql("DROP TABLE t");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO other SELECT max(id) + 1, 0 FROM other");
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.run_until_current();
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.relation"), "1");
    });
}
