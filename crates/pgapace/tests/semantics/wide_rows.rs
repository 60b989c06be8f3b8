//! Updates of tables with many columns, which send whole rows of the subscriber's row type.

use crate::support::on_versions;

const UPDATES: &str = "DO $$ BEGIN FOR i IN 1..2000 LOOP \
    UPDATE t SET c1 = c1 + 1, c5 = i WHERE id = 1 + i % 500; COMMIT; END LOOP; END $$";

/// A row value has a field for each column. Until the description of the table is read again, the subscriber refuses
/// those of the earlier columns.
#[test]
fn columns_that_come_and_go_on_the_subscriber_stop_nothing() {
    on_versions(&[(14, 14), (18, 18)], |mut case| {
        // The transactions that change all rows are streamed.
        case.tool.publisher += " options='-c logical_decoding_work_mem=64kB'";
        case.tool.args.extend(["--workers".to_owned(), "2".to_owned()]);
        let columns: Vec<_> = (0..10).map(|number| format!("c{number} int DEFAULT 1")).collect();
        case.replicate(&format!("CREATE TABLE t (id int PRIMARY KEY, {})", columns.join(", ")));
        case.publisher.sql("INSERT INTO t SELECT g FROM generate_series(1, 5000) g");
        let mut process = case.start();
        let mut user = case.publisher.connect();
        // The last two leave as many columns of the same types, at other places: each value must reach its column.
        let actions = [
            "ADD own int",
            "ADD other text DEFAULT 'o'",
            "DROP own",
            "ADD third int",
            "DROP third, ADD fourth int",
            "DROP c3, ADD c3 int DEFAULT 1",
        ];
        for action in actions {
            user.batch_execute(UPDATES).expect("updates");
            case.subscriber.sql(&format!("ALTER TABLE t {action}"));
            user.batch_execute("UPDATE t SET c2 = c2 + 1").expect("a large transaction");
            user.batch_execute(UPDATES).expect("updates");
        }
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE t DROP other, DROP fourth");
        case.expect_equal(&["t"]);
        // Once for each new set of columns and worker, and halves of groups; not each group for a second.
        let retries =
            case.subscriber.value("SELECT coalesce(sum(retries), 0) FROM pgapace.stat_retry");
        assert!(retries.parse::<u32>().expect("a number") <= 16, "{retries}");
        let log = case.stop(process);
        assert!(!log.contains("WARN"), "{log}");
    });
}
