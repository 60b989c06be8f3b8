//! A streamed transaction that brings rows into a row filter.

use testbed::program::events;

use super::{TRIGGERS, Trigger, expect_streamed, streaming_case};

/// The commit of the stream marks the table; so does the one of its spool.
#[test]
fn a_stream_without_unchanged_values_marks_its_table() {
    let table = "CREATE TABLE t (k int PRIMARY KEY, big text)";
    for (publisher, subscriber, trigger) in TRIGGERS {
        for streaming in ["parallel", "on"] {
            if streaming == "on" && trigger == Trigger::Immediate {
                continue;
            }
            let mut case = streaming_case(publisher, subscriber, trigger);
            case.tool.args.extend(["--streaming", streaming].map(str::to_owned));
            case.publisher.sql(&format!(
                "{table}; ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
                 INSERT INTO t SELECT 2 * i + 1, repeat('x', 4000) FROM generate_series(1, 2000) i"
            ));
            case.subscriber.sql(table);
            case.publish("FOR TABLE t WHERE (k % 2 = 0)");
            case.run_until_current();
            let mut process = case.start();
            case.publisher.sql("UPDATE t SET k = k + 1");
            case.wait_until_applied(&mut process);
            let log = case.stop(process);
            expect_streamed(&case);
            assert_eq!(events(&log, "unchanged_value_not_sent"), 1, "{log}");
            let count = "SELECT count(*) FROM t WHERE big IS NULL";
            assert_eq!(case.subscriber.value(count), "2000");
            let marked = "SELECT stale_lsn IS NOT NULL FROM pgapace.relation";
            assert_eq!(case.subscriber.value(marked), "t");
            case.tool.finish("verify", &[]).expect(18, &[]);
            case.tool.finish("repair", &[]).expect(0, &[]);
            case.tool.finish("verify", &[]).expect(0, &["stale_mark_ended"]);
        }
    }
}
