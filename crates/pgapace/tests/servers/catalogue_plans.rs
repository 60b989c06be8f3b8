//! Queries of the catalogues take time in proportion to the number of tables, whatever the planner knows of them.
//!
//! Without statistics the planner takes catalogues for small, and with them it may take the tables of a query for
//! many. In both cases it could read a whole catalogue for each table.

use testbed::Cluster;

use crate::support::{Case, VERSIONS, on_versions};

const TABLES: usize = 200;

/// Rows that one node of a plan reads at most, in all of its loops: several whole catalogues, but not one for each table.
const ROWS: f64 = 50_000.0;

/// Tables with foreign keys (four triggers each), views (a rule each), defaults and check constraints.
fn ddl() -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..{TABLES} LOOP \
           EXECUTE format('CREATE TABLE t%s (id int PRIMARY KEY, parent int REFERENCES t%s, \
             v text DEFAULT ''new'' CHECK (v <> ''''))', i, i); \
           EXECUTE format('CREATE VIEW v%s AS SELECT * FROM t%s', i, i); \
         END LOOP; END $$"
    )
}

fn insert(id: usize) -> String {
    format!(
        "DO $$ BEGIN FOR i IN 1..{TABLES} LOOP \
           EXECUTE format('INSERT INTO t%s (id) VALUES ({id})', i); COMMIT; END LOOP; END $$"
    )
}

/// The server's log since its first `from` bytes.
fn log(cluster: &Cluster, from: usize) -> String {
    let log = std::fs::read(cluster.log_file()).expect("the server's log");
    String::from_utf8_lossy(&log[from..]).into_owned()
}

/// The nodes of the plans in a log that read too many rows, with their queries.
fn too_many_rows(log: &str) -> (usize, Vec<String>) {
    let number = |text: &str| -> Option<f64> {
        let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
        text[..end].parse().ok()
    };
    let after = |line: &str, label: &str| line.split_once(label).and_then(|(_, text)| number(text));
    let (mut plans, mut found) = (0, Vec::new());
    let (mut query, mut node, mut loops) = ("", "", 0.0);
    for line in log.lines() {
        if let Some((_, text)) = line.split_once("Query Text: ") {
            (plans, query) = (plans + 1, text);
        }
        let rows = if let Some(rows) = after(line, "(actual rows=") {
            (node, loops) = (line.trim(), after(line, " loops=").unwrap_or(1.0));
            rows
        } else if line.contains("Rows Removed by ") {
            after(line, "Filter: ").unwrap_or_default()
        } else {
            continue;
        };
        if rows * loops > ROWS {
            found.push(format!("{} rows: {node} of {query}", rows * loops));
        }
    }
    (plans, found)
}

#[test]
fn catalogues_are_not_read_whole_for_each_table() {
    on_versions(&VERSIONS, |case: Case| {
        case.both(&ddl());
        case.publish("FOR ALL TABLES");
        let sides = [&case.publisher, &case.subscriber];
        let from = sides.map(|side| {
            side.sql("ANALYZE");
            for setting in [
                "session_preload_libraries = auto_explain",
                "auto_explain.log_min_duration = 0",
                "auto_explain.log_analyze = on",
                "auto_explain.log_timing = off",
            ] {
                side.sql(&format!("ALTER DATABASE {} SET {setting}", side.name));
            }
            log(side.cluster, 0).len()
        });
        case.tool.finish("check", &[]).expect(0, &[]);
        case.run_until_current();
        case.publisher.sql(&insert(1));
        case.run_until_current();
        case.tool.finish("status", &[]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &[]);
        for (side, from) in sides.into_iter().zip(from) {
            let (plans, found) = too_many_rows(&log(side.cluster, from));
            assert!(plans > 20, "auto_explain logs plans");
            assert_eq!(found, [""; 0], "{}", side.cluster.name());
        }
    });
}
