//! A transaction that the publisher cannot decode at its PREPARE. It is a bug of PostgreSQL, which these versions have.

use super::held;
use crate::support::{PATIENCE, must, on_versions, wait_until_log};

/// A PREPARE with a TRUNCATE and a change of the table in another subtransaction is rolled back before it is decoded: the
/// publisher does not see that, and finds no table of that file.
#[test]
fn a_truncate_of_a_rolled_back_prepare_is_passed_without_two_phase() {
    on_versions(&[(15, 15), (17, 18), (18, 18)], |mut case| {
        held(&mut case);
        case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE m (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        case.stop(case.start());
        let name = case.tool.name.clone();
        case.publisher.sql(&format!(
            "BEGIN; SAVEPOINT a; TRUNCATE t; RELEASE a; SAVEPOINT b; INSERT INTO t VALUES (1); \
             PREPARE TRANSACTION '{name}'"
        ));
        case.publisher.sql(&format!("ROLLBACK PREPARED '{name}'"));
        // The server needs rows of pg_class to decode the transaction. VACUUM removes them.
        case.publisher.sql("VACUUM pg_class");
        case.publisher.sql("INSERT INTO m VALUES (1)");
        let mut run = case.start();
        let cannot =
            |log: &str| log.contains("could not map file") && log.contains("--two-phase=false");
        must(wait_until_log(&mut run, "the way out", PATIENCE, cannot));
        let copies = run.log().contains("pg_copy_logical_replication_slot");
        assert_eq!(copies, case.publisher.major() < 18, "{}", run.log());
        must(run.terminate());
        must(run.wait(PATIENCE));
        if copies {
            // As the hint says.
            for (from, to) in [(&name, &format!("{name}_copy")), (&format!("{name}_copy"), &name)] {
                case.publisher
                    .sql(&format!("SELECT pg_copy_logical_replication_slot('{from}', '{to}')"));
                case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{from}')"));
            }
        }
        case.tool.args.retain(|arg| arg != "--two-phase");
        case.tool.args.push("--two-phase=false".to_owned());
        let mut run = case.start();
        case.wait_until_applied(&mut run);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM m"), "1");
        case.stop(run);
    });
}
