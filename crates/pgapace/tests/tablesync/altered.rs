//! Tables of the subscriber that are altered or replaced while they are copied. COPY names a table, and sends no types.

use testbed::program::Process;

use crate::support::{Case, PATIENCE, expect_exit, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Starts a copy in several parts of table `split`, with `meanwhile` before the first part and `between` after it.
fn copy_in_parts(case: &mut Case, meanwhile: &str, between: &str) -> Process {
    let args = ["--copy-workers=1", "--copy-split-size=1", "--indexes-after=false"];
    case.tool.args = args.map(str::to_owned).into();
    case.publish("FOR ALL TABLES");
    let mut locked = holder(case, "BEGIN; LOCK TABLE split IN SHARE MODE");
    let mut process = case.tool.start(case.log_file("run"));
    wait_for_a_waiter(case, &mut process, "relation");
    case.subscriber.sql(meanwhile);
    std::thread::scope(|scope| {
        // In the queue of the lock, it comes after the first part and before the second.
        let mut other = case.subscriber.connect();
        let queued = scope.spawn(move || other.batch_execute(between));
        let waiting = "SELECT count(*) = 2 FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                       WHERE NOT l.granted AND l.locktype = 'relation' AND a.datname = current_database()";
        wait_for(case, &mut process, "both sessions to wait for the lock", waiting);
        must(locked.batch_execute("COMMIT"));
        must(queued.join().unwrap_or_else(|_| panic!("the session panicked")));
    });
    process
}

/// The types of equal width are binary compatible for COPY, and each value would be another one.
#[test]
fn a_column_whose_type_changes_before_or_during_its_copy_keeps_its_values() {
    altered_while_copied(|table| {
        format!("ALTER TABLE {table} ALTER v TYPE float8, ALTER w TYPE float4")
    });
}

#[test]
fn a_column_of_another_type_that_takes_the_name_before_or_during_its_copy_gets_its_values() {
    altered_while_copied(|table| {
        format!(
            "ALTER TABLE {table} ADD new float8; ALTER TABLE {table} RENAME v TO old; \
             ALTER TABLE {table} RENAME new TO v"
        )
    });
}

fn altered_while_copied(alter: impl Fn(&str) -> String) {
    on_versions(&BOTH, |mut case| {
        let tables = [("split", 60_000), ("whole", 5_000), ("small", 10)];
        for (table, rows) in tables {
            case.both(&format!("CREATE TABLE {table} (id int PRIMARY KEY, v bigint, w int)"));
            let fill =
                format!("INSERT INTO {table} SELECT i, i, i FROM generate_series(1, {rows}) i");
            case.publisher.sql(&fill);
        }
        let meanwhile = format!("{}; {}", alter("whole"), alter("small"));
        let mut process = copy_in_parts(&mut case, &meanwhile, &alter("split"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        assert_eq!(process.events("table_copy_repeated"), 3, "{}", process.log());
        for (table, _) in tables {
            let rows = format!("SELECT id, v, w FROM {table} ORDER BY id");
            assert_eq!(case.subscriber.rows(&rows), case.publisher.rows(&rows), "{table}");
        }
        case.stop(process);
    });
}

/// The first part went into another table than the second would. Rows that pgapace has not copied stay.
#[test]
fn a_table_that_is_replaced_between_parts_of_its_copy_is_copied_again() {
    on_versions(&BOTH, |mut case| {
        case.both("CREATE TABLE split (id int PRIMARY KEY, v text)");
        let fill = "INSERT INTO split SELECT i, md5(i::text) FROM generate_series(1, 60000) i";
        case.publisher.sql(fill);
        case.subscriber.sql(
            "CREATE TABLE fresh (LIKE split INCLUDING ALL); INSERT INTO fresh VALUES (0, 'mine')",
        );
        let swap =
            "BEGIN; ALTER TABLE split RENAME TO old; ALTER TABLE fresh RENAME TO split; COMMIT";
        let mut process = copy_in_parts(&mut case, "", swap);
        let hint = "subscriber tables are not empty: public.split";
        must(expect_exit(&mut process, 6, &["table_copy_repeated", hint]));
        case.run().expect(6, &[hint]);
        assert_eq!(case.subscriber.rows("SELECT v FROM split"), ["mine"]);
        assert_ne!(case.subscriber.value("SELECT count(*) FROM old"), "0");
        case.subscriber.sql("TRUNCATE split");
        case.run_until_current();
        case.expect_equal(&["split"]);
    });
}
