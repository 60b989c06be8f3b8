//! A complete verification ends the mark that a table may lack changes.

use super::{BOTH_WAYS, verify};
use crate::support::{Case, on_versions};

fn is_stale(case: &Case) -> bool {
    case.subscriber
        .value("SELECT stale_lsn IS NOT NULL FROM pgapace.relation WHERE table_name = 't'")
        == "t"
}

#[test]
fn a_mark_ends_when_the_whole_table_is_equal_behind_it() {
    on_versions(&BOTH_WAYS, |mut case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE other (id int PRIMARY KEY)",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) i; CREATE PUBLICATION others FOR TABLE other",
        );
        case.publish("FOR TABLE t");
        case.tool.publications = "pub,others".to_owned();
        case.tool.args = vec!["--on-missed-changes=ignore".to_owned()];
        case.run_until_current();
        for statement in [
            "ALTER PUBLICATION pub DROP TABLE t",
            "UPDATE t SET v = 1 WHERE id = 7; INSERT INTO other VALUES (1)",
            "ALTER PUBLICATION pub ADD TABLE t",
            "INSERT INTO t VALUES (500, 0)",
        ] {
            case.publisher.sql(statement);
        }
        case.run_until_current();
        assert!(is_stale(&case));
        assert_eq!(verify(&case, 18, &[])["tables"][1]["different"], 1);
        assert!(is_stale(&case), "it differs");
        case.tool.finish("repair", &[]).expect(0, &[]);
        verify(&case, 0, &["--sample", "100%"]);
        verify(&case, 0, &["--where", "true"]);
        verify(&case, 0, &["--except-column", "t.v"]);
        assert!(is_stale(&case), "not all of it was compared");
        // A mark that is set behind the snapshots.
        let through = "SELECT stale_through FROM pgapace.relation WHERE table_name = 't'";
        let found = case.subscriber.value(through);
        let set = |lsn: &str| {
            case.subscriber.sql(&format!(
                "UPDATE pgapace.relation SET stale_through = '{lsn}' WHERE table_name = 't'"
            ));
        };
        set("FFFFFFFF/0");
        verify(&case, 0, &[]);
        assert!(is_stale(&case), "changes may be missing behind the snapshots");
        set(&found);
        let finished = case.tool.finish("verify", &[]);
        finished.expect(0, &["stale_mark_ended"]);
        assert!(!is_stale(&case));
        case.tool.finish("status", &["--check"]).expect(16, &[]);
    });
}
