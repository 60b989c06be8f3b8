//! Tables of the publisher that are altered after their copy was planned, without new files. COPY reads columns by their
//! names.

use testbed::program::Process;

use crate::support::{Case, PATIENCE, must, on_versions, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

const VERSIONS: [(u16, u16); 3] = [(14, 14), (15, 15), (18, 18)];

/// Starts a copy that begins with several parts of table `split`, with changes of the publisher before the first part and
/// after it.
fn copy_while_altered(case: &mut Case, before: &str, between: &str) -> Process {
    let args = ["--copy-workers=1", "--copy-split-size=1", "--indexes-after=false"];
    case.tool.args = args.map(str::to_owned).into();
    let lock = "BEGIN; LOCK TABLE split IN SHARE MODE";
    let mut locked = holder(case, lock);
    let mut process = case.tool.start(case.log_file("run"));
    wait_for_a_waiter(case, &mut process, "relation");
    case.publisher.sql(before);
    std::thread::scope(|scope| {
        // In the queue of the lock, it comes after the first part and before the second.
        let mut other = case.subscriber.connect();
        let queued = scope.spawn(move || {
            must(other.batch_execute(lock));
            other
        });
        let waiting = "SELECT count(*) = 2 FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                       WHERE NOT l.granted AND l.locktype = 'relation' AND a.datname = current_database()";
        wait_for(case, &mut process, "both sessions to wait for the lock", waiting);
        must(locked.batch_execute("COMMIT"));
        let mut other = queued.join().unwrap_or_else(|_| panic!("the session panicked"));
        case.publisher.sql(between);
        must(other.batch_execute("COMMIT"));
    });
    must(wait_for_event(&mut process, "streaming", PATIENCE));
    process
}

/// Both types have the same width.
fn exchange(table: &str) -> String {
    format!(
        "ALTER TABLE {table} RENAME v TO x; ALTER TABLE {table} RENAME w TO v; ALTER TABLE {table} RENAME x TO w;"
    )
}

fn create_and_fill(case: &Case, tables: &[(&str, u32)]) {
    for (table, rows) in tables {
        case.both(&format!(
            "CREATE TABLE {table} (id int PRIMARY KEY, v bigint, w float8, u varchar(20))"
        ));
        fill(case, table, *rows);
    }
}

fn fill(case: &Case, table: &str, rows: u32) {
    case.publisher.sql(&format!(
        "INSERT INTO {table} (id, v, w, u) SELECT i, i, -i, i FROM generate_series(1, {rows}) i"
    ));
}

fn expect_the_same(case: &Case, table: &str) {
    let rows = format!("SELECT id, v, w, u FROM {table} ORDER BY id");
    assert_eq!(case.subscriber.rows(&rows), case.publisher.rows(&rows), "{table}");
}

#[test]
fn columns_of_the_publisher_that_exchange_their_names_before_the_copy_keep_their_values() {
    on_versions(&VERSIONS, |mut case| {
        let tables = [("split", 60_000), ("whole", 5_000), ("small", 10), ("tiny", 1), ("same", 9)];
        create_and_fill(&case, &tables);
        // The columns of the partition have other numbers.
        let columns = "(gone int, w float8, u varchar(20), id int NOT NULL, v bigint)";
        for table in ["root", "still"] {
            case.both(&format!(
                "CREATE TABLE {table} (id int PRIMARY KEY, v bigint, w float8, u varchar(20)) PARTITION BY RANGE (id); \
                 CREATE TABLE {table}_part {columns}; ALTER TABLE {table}_part DROP gone; \
                 ALTER TABLE {table} ATTACH PARTITION {table}_part DEFAULT"
            ));
            fill(&case, table, 60_000);
        }
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root)");
        let exchanged = ["split", "small", "tiny", "root"].map(exchange).join(" ");
        let alter = format!("{exchanged} ALTER TABLE whole ALTER u TYPE text");
        let process = copy_while_altered(&mut case, &alter, "");
        assert_eq!(process.events("table_copy_repeated"), 5, "{}", process.log());
        let tables = tables.map(|(table, _)| table);
        for table in tables.into_iter().chain(["root", "still"]) {
            expect_the_same(&case, table);
        }
        case.stop(process);
    });
}

#[test]
fn columns_of_the_publisher_that_exchange_their_names_between_parts_keep_their_values() {
    on_versions(&VERSIONS, |mut case| {
        create_and_fill(&case, &[("split", 60_000)]);
        case.publish("FOR ALL TABLES");
        let process = copy_while_altered(&mut case, "", &exchange("split"));
        assert_eq!(process.events("table_copy_repeated"), 1, "{}", process.log());
        expect_the_same(&case, "split");
        case.stop(process);
    });
}

/// The row filter is planned as text, too, and may name columns that are not copied.
#[test]
fn columns_of_a_row_filter_that_exchange_their_names_before_the_copy_select_the_same_rows() {
    on_versions(&VERSIONS[1..], |mut case| {
        create_and_fill(&case, &[("split", 60_000)]);
        case.publisher.sql(
            "CREATE TABLE filtered (id int PRIMARY KEY, v int, f int, g int, other int); \
             INSERT INTO filtered SELECT i, i, i % 2, 1 - i % 2 FROM generate_series(1, 100) i",
        );
        case.subscriber.sql("CREATE TABLE filtered (id int PRIMARY KEY, v int)");
        case.publish("FOR TABLE split, filtered (id, v) WHERE (f > 0) WITH (publish = 'insert')");
        let alter = "ALTER TABLE filtered RENAME f TO x; ALTER TABLE filtered RENAME g TO f; \
                     ALTER TABLE filtered RENAME x TO g";
        let process = copy_while_altered(&mut case, alter, "");
        let published = case.publisher.rows("SELECT id, v FROM filtered WHERE g > 0 ORDER BY id");
        assert_eq!(case.subscriber.rows("SELECT id, v FROM filtered ORDER BY id"), published);
        case.stop(process);
    });
}
