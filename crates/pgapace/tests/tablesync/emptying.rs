//! `--truncate` removes only rows that existed when the user decided, and only at one start.

use testbed::program::events;
use testbed::{Result, wait_until};

use crate::support::{Case, DB, Finished, PATIENCE, Site, VERSIONS, finish, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// The `--truncate` values that the error about non-empty tables suggests.
pub(super) fn decisions(refused: &Finished) -> Vec<String> {
    let parts = refused.log.split("--truncate '").skip(1);
    parts
        .filter_map(|part| part.split_once('\''))
        .flat_map(|(value, _)| ["--truncate".to_owned(), value.to_owned()])
        .collect()
}

fn filled_tables(case: &Case) -> Vec<String> {
    case.both("CREATE TABLE a (id int PRIMARY KEY, v text); CREATE TABLE b (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO a VALUES (1, 'new'); INSERT INTO b VALUES (1)");
    case.subscriber.sql("INSERT INTO a VALUES (7, 'old'); INSERT INTO b VALUES (7)");
    case.publish("FOR ALL TABLES");
    let refused = case.run();
    refused.expect(6, &["public.a, public.b", "--truncate 'public.a@", "--truncate 'public.b@"]);
    decisions(&refused)
}

fn rows(case: &Case) -> String {
    case.subscriber.value("SELECT string_agg(id::text, ' ' ORDER BY id) FROM a")
}

#[test]
fn rows_written_since_the_decision_stay() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = filled_tables(&case);
        // A decision for one table only.
        let one = case.tool.args[..2].to_vec();
        let both = std::mem::replace(&mut case.tool.args, one);
        case.run().expect(6, &["not empty: public.b"]);
        case.tool.args = both;
        case.subscriber.sql("UPDATE a SET v = 'changed'");
        case.run().expect(6, &["rows of public.a were written after the decision"]);
        assert_eq!(rows(&case), "7");
        let state = "SELECT count(*) FROM pgapace.subscription";
        assert_eq!(case.subscriber.value(state), "0", "refused before anything was recorded");
        case.tool.args = Vec::new();
        case.tool.args = decisions(&case.run());
        case.run_until_current();
        case.expect_equal(&["a", "b"]);
    });
}

/// A decision about one table is stronger than one about its schema.
#[test]
fn a_table_beside_its_schema() {
    on_versions(&VERSIONS, |mut case| {
        let decisions = filled_tables(&case);
        let whole = decisions[1].replace("public.a@", "public.*@");
        case.tool.args = ["--truncate", &whole].map(str::to_owned).to_vec();
        case.tool.args.extend(decisions);
        case.run_until_current();
        case.expect_equal(&["a", "b"]);
    });
}

#[test]
fn truncate_names_its_tables() {
    on_versions(&VERSIONS, |case| {
        let decisions = filled_tables(&case);
        let run = |action: &str, decisions: &[String]| {
            let program = case.tool.program("run").args(["--until", "current"]);
            finish(&program.args(["--if-not-empty", action]).args(decisions))
        };
        run("truncate", &[]).expect(6, &["--truncate 'public.a@"]);
        run("keep", &decisions).expect(3, &["exclude each other"]);
        assert_eq!(rows(&case), "7");
        run("truncate", &decisions).expect(0, &[]);
        case.expect_equal(&["a", "b"]);
    });
}

/// The subscriber has lost pgapace's state, but the service still has the option: no table is
/// truncated again.
#[test]
fn truncate_applies_to_one_start_only() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = filled_tables(&case);
        case.run_until_current();
        case.expect_equal(&["a", "b"]);
        case.publisher.sql("INSERT INTO a VALUES (2, 'new')");
        case.run().expect(0, &["event=\"truncate_ignored\""]);
        let mut dropping = case.tool.clone();
        dropping.args.clear();
        dropping.finish("drop", &[]).expect(0, &[]);
        case.subscriber.sql("DROP SCHEMA pgapace CASCADE");
        case.run().expect(6, &["were written after"]);
        assert_eq!(rows(&case), "1 2");
    });
}

/// Another session writes to the table after the decision and before its copy begins.
#[test]
fn rows_written_before_the_copy_begins_stay() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = filled_tables(&case);
        let mut writer = holder(&case, "BEGIN; LOCK TABLE a IN ROW EXCLUSIVE MODE");
        let mut process = case.tool.start(case.log_file("emptying"));
        let waits = "SELECT count(*) > 0 FROM pg_locks l WHERE NOT l.granted \
                     AND l.relation = 'a'::regclass AND l.database = \
                       (SELECT oid FROM pg_database WHERE datname = current_database())";
        wait_for(&case, &mut process, "the emptying to wait", waits);
        must(writer.batch_execute("INSERT INTO a VALUES (8, 'local'); COMMIT"));
        let status = must(process.wait(PATIENCE));
        assert_eq!(status.code(), Some(6), "{}", process.log());
        assert_eq!(rows(&case), "7 8");
        // The user decides again and truncates the table.
        case.subscriber.sql("TRUNCATE a");
        case.tool.args = Vec::new();
        case.run_until_current();
        case.expect_equal(&["a", "b"]);
    });
}

/// A process is suspended while its TRUNCATE waits for a lock, and another one has begun meanwhile.
#[test]
fn an_earlier_run_empties_no_table() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.subscriber.sql("INSERT INTO t VALUES (7)");
        let mut process = case.start();
        let mut reader = holder(&case, "BEGIN; LOCK TABLE t IN ACCESS SHARE MODE");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        wait_for_a_waiter(&case, &mut process, "relation");
        must(process.freeze());
        case.subscriber.sql("UPDATE pgapace.subscription SET epoch = epoch + 1");
        must(reader.batch_execute("COMMIT"));
        let active = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                      AND application_name LIKE 'pgapace%' AND state = 'active'";
        must(wait_until(PATIENCE, "the statement to end", || {
            Ok(case.subscriber.value(active) == "0")
        }));
        assert_eq!(case.subscriber.value("SELECT string_agg(id::text, ' ') FROM t"), "7");
        must(process.kill9());
    });
}

#[test]
fn truncate_is_rejected_in_a_configuration_file() {
    let case = Case::new(18, 18);
    let directory = must(tempfile::tempdir());
    let file = directory.path().join("pgapace.toml");
    must(std::fs::write(&file, "truncate = true\n"));
    let named = case.tool.program("run").arg("--config").arg(&file);
    let new = directory.path().join("new.toml");
    must(std::fs::write(&new, "if-not-empty = 'truncate'\n"));
    let new = case.tool.program("run").arg("--config").arg(&new);
    let set = case.tool.program("run").env("PGAPACE_TRUNCATE", "true");
    let variable = case.tool.program("run").env("PGAPACE_IF_NOT_EMPTY", "truncate");
    for program in [named, new, set, variable] {
        finish(&program).expect(3, &["a decision for one start"]);
    }
}

/// TRUNCATE of all tables needs more locks than the subscriber has room for.
#[test]
fn tables_are_emptied_in_several_transactions_if_locks_are_short() -> Result<()> {
    let limits = [
        ("max_locks_per_transaction", "10"),
        ("max_connections", "20"),
        ("max_prepared_transactions", "0"),
        ("max_wal_senders", "2"),
    ];
    let site = Site::start(&[], &limits)?;
    let (tables, rows): (Vec<_>, Vec<_>) = (0..1000)
        .map(|number| {
            let table = format!("CREATE TABLE t{number} (id int PRIMARY KEY, v text)");
            (table, format!("INSERT INTO t{number} VALUES (1, 'new')"))
        })
        .unzip();
    for some in tables.chunks(50) {
        site.subscriber.sql(DB, &some.join("; "))?;
        site.publisher.sql(DB, &some.join("; "))?;
    }
    for some in rows.chunks(50) {
        site.publisher.sql(DB, &some.join("; "))?;
        site.subscriber.sql(DB, &some.join("; ").replace("new", "old"))?;
    }
    site.publisher.sql(DB, "CREATE PUBLICATION pub FOR ALL TABLES")?;
    let program = site.program().args(["--until", "current", "--copy-workers", "1"]);
    let mut decisions = decisions(finish(&program).expect(6, &["not empty"]));
    decisions.truncate(2);
    let emptied = finish(&program.args(decisions));
    let times = events(&emptied.expect(0, &[]).log, "tables_emptied");
    assert!(times > 1, "{}", emptied.log);
    let left = "SELECT count(*) FROM t0, t500, t999 WHERE t0.v || t500.v || t999.v = 'newnewnew'";
    assert_eq!(site.subscriber.query_one_text(DB, left)?, "1");
    Ok(())
}

/// The values that the error suggests are words of a shell, and name their tables whatever their names are.
#[test]
fn suggested_values_name_tables_with_dots_and_apostrophes() {
    let mut case = Case::new(18, 18);
    case.both(
        "CREATE SCHEMA \"we.ird\"; CREATE TABLE \"we.ird\".\"t.x\" (id int); \
         CREATE SCHEMA \"it's\"; CREATE TABLE \"it's\".\"o'clock\" (id int)",
    );
    case.subscriber.sql("INSERT INTO \"we.ird\".\"t.x\" VALUES (7)");
    case.subscriber.sql("INSERT INTO \"it's\".\"o'clock\" VALUES (7)");
    case.publish("FOR ALL TABLES");
    let refused = case.run();
    let values = refused.log.split_once("once, if nothing writes to them before, with ");
    let values = values.and_then(|(_, rest)| rest.split_once("; or pass"));
    let (values, _) = values.unwrap_or_else(|| panic!("{}", refused.log));
    let words = std::process::Command::new("sh")
        .args(["-c", &format!("printf '%s\\n' {values}")])
        .output()
        .expect("a shell");
    let words = String::from_utf8(words.stdout).expect("text");
    case.tool.args = words.lines().map(str::to_owned).collect();
    case.run_until_current();
    let left = "SELECT (SELECT count(*) FROM \"we.ird\".\"t.x\") + (SELECT count(*) FROM \"it's\".\"o'clock\")";
    assert_eq!(case.subscriber.value(left), "0");
}
