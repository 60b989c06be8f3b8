//! Prepared transactions that change a table which is still catching up.

use super::{expect_nothing_left, prepare, prepared, prepared_count, resolve, wait_until_prepared};
use crate::support::{VERSIONS, on_versions};
use crate::tablesync::catching_up::{expect_all, start_behind};
use crate::tablesync::while_streaming::{late_tables, wait_for};

/// The transaction deletes a row that only a deferred change inserts. If it were prepared before
/// that change, it would find no row, and the row would remain.
#[test]
fn transactions_of_a_table_that_catches_up_are_held() {
    on_versions(&VERSIONS, |mut case| {
        prepared(&mut case);
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        late_tables(&case);
        let (applying, mut process) = start_behind(&case);
        // The slot of a later copy would wait for prepared transactions.
        let copied = "SELECT count(*) = 0 FROM pgapace.relation WHERE sync_lsn IS NULL";
        wait_for(&case, &mut process, "both copies", copied);
        case.publisher.sql("INSERT INTO late VALUES (2000, 0)");
        prepare(&case, "late", "DELETE FROM late WHERE id = 2000");
        prepare(&case, "other", "DELETE FROM other WHERE id = 0");
        wait_until_prepared(&case, 1);
        let names = "SELECT string_agg(gid, ' ') FROM pgapace.prepared";
        assert_eq!(case.subscriber.value(names), format!("{}_other", case.tool.name));

        drop(applying);
        let joined = "SELECT count(*) = 0 FROM pgapace.relation WHERE catch_up IS NOT NULL";
        wait_for(&case, &mut process, "the tables to be ready", joined);
        // With its trigger, the transaction would be held until it ends. A change of any table lets pgapace look
        // at the catalogue again.
        case.subscriber.sql("DROP TRIGGER wait ON late");
        case.publisher.sql("INSERT INTO other VALUES (5000, 0)");
        wait_until_prepared(&case, 2);
        resolve(&case, "COMMIT", "late");
        resolve(&case, "COMMIT", "other");
        case.wait_until_applied(&mut process);
        assert_eq!(prepared_count(&case), "0");
        expect_all(&case, &["other", "late", "late_log"]);
        expect_nothing_left(&case);
        case.stop(process);
    });
}

/// With --copy-data=false, a request waits for the end of a transaction that is prepared on the subscriber. The first
/// change of its table arrives meanwhile.
#[test]
fn a_request_that_waits_for_prepared_transactions_is_not_forgotten() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        prepared(&mut case);
        case.tool.args.push("--copy-data=false".to_owned());
        case.replicate(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)",
        );
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let process = case.start();
        prepare(&case, "other", "INSERT INTO other VALUES (1)");
        wait_until_prepared(&case, 1);
        case.stop(process);
        case.subscriber.sql("DELETE FROM t");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        case.publisher.sql("INSERT INTO t VALUES (2)");
        let mut process = case.start();
        let begun = "SELECT count(*) = 1 FROM pgapace.relation \
                     WHERE table_name = 't' AND state <> 'ready' AND catch_up IS NOT NULL";
        wait_for(&case, &mut process, "the copy to begin", begun);
        resolve(&case, "COMMIT", "other");
        case.publisher.sql("INSERT INTO t VALUES (3)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "other"]);
        expect_nothing_left(&case);
        case.stop(process);
    });
}
