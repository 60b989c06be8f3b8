//! Interrupted copies: `status` shows the progress, and completed tables are not copied again.

use serde_json::Value;
use testbed::wait_until;

use crate::support::{PATIENCE, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for_a_waiter};

/// Number of the advisory lock that the trigger on the subscriber waits for.
const LOCK: u32 = 4712;

#[test]
fn copied_tables_stay_when_the_process_is_killed() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let mut names = Vec::new();
        for number in 0..10 {
            let name = format!("t{number}");
            case.both(&format!("CREATE TABLE {name} (id int PRIMARY KEY, v text)"));
            // The largest tables are copied first. The second half waits, one of its tables in the
            // middle of the copy.
            let rows = if number < 5 { 3000 } else { 2900 - number * 10 };
            case.publisher.sql(&format!(
                "INSERT INTO {name} SELECT i, repeat('x', 800) FROM generate_series(1, {rows}) i"
            ));
            names.push(name);
        }
        case.subscriber.sql(&format!(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN NEW; END $$; \
             CREATE TRIGGER wait BEFORE INSERT ON t5 FOR EACH ROW WHEN (NEW.id = 2000) EXECUTE FUNCTION wait(); \
             ALTER TABLE t5 ENABLE ALWAYS TRIGGER wait"
        ));
        case.publish("FOR ALL TABLES");
        case.tool.args = vec!["--copy-workers=1".to_owned()];
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute(&format!("SELECT pg_advisory_lock({LOCK})")));
        let log = tempfile::NamedTempFile::new().unwrap_or_else(|error| panic!("{error}"));
        let mut process = case.tool.start(log.path().to_owned());
        let status = |process: &mut testbed::program::Process| -> Value {
            assert!(process.is_running(), "pgapace ended:\n{}", process.log());
            let finished = case.tool.finish("status", &["--json"]);
            serde_json::from_str::<Value>(&finished.stdout).unwrap_or_default()[0]["copy"].clone()
        };
        must(wait_until(PATIENCE, "half of the tables to be copied", || {
            let copy = status(&mut process);
            Ok(copy["tables_done"] == 5
                && copy["running"][0]["bytes_done"].as_i64().is_some_and(|bytes| bytes > 0))
        }));
        let copy = status(&mut process);
        let number = |name: &str| copy[name].as_f64().unwrap_or(-1.0);
        assert_eq!(copy["tables"], 10, "{copy:#}");
        let share = number("bytes_done") / number("bytes");
        assert!((0.45..0.7).contains(&share), "{copy:#}");
        assert!(number("bytes_per_second") > 0.0 && number("seconds_left") > 0.0, "{copy:#}");
        let running = &copy["running"][0];
        assert_eq!(running["name"], "t5", "{copy:#}");
        assert!(running["seconds_left"].as_f64().is_some_and(|left| left > 0.0), "{copy:#}");
        let human = case.tool.finish("status", &[]).stdout;
        assert!(human.contains("5 of 10 tables, ") && human.contains("public.t5: "), "{human}");
        let copied = "SELECT string_agg(table_name || copied_at, ' ' ORDER BY table_name) FROM pgapace.relation WHERE table_name < 't5'";
        let before = case.subscriber.value(copied);
        must(process.kill9());
        drop(holder);
        case.run_until_current();
        assert_eq!(case.subscriber.value(copied), before, "the first half was copied again");
        case.expect_equal(&names.iter().map(String::as_str).collect::<Vec<_>>());
    });
}

/// The TRUNCATE before it waits for a session that reads the rows of the earlier copy.
#[test]
fn of_a_table_that_is_copied_again_no_progress_is_shown_at_first() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO t SELECT generate_series(1, 1000)");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let reading = holder(&case, "BEGIN; SELECT FROM t");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        wait_for_a_waiter(&case, &mut process, "relation");
        let status = case.tool.finish("status", &["--json"]).stdout;
        let copy = serde_json::from_str::<Value>(&status).unwrap_or_default()[0]["copy"].clone();
        assert_eq!(copy, Value::Null, "{copy:#}");
        drop(reading);
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&["t"]);
    });
}
