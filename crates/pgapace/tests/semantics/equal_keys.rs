//! Keys whose equal values have different bytes, of types that pgapace cannot compare: they are compared by
//! bytes, and what that misses is noticed.

use std::fmt::Write as _;

use super::equal_rows::{Numbers, offered};
use crate::support::random_load::while_writing;
use crate::support::{Case, PATIENCE, must, on_versions, random_pause, wait_for_event};

/// Types with values that are equal, and another one.
const TYPES: &[(&str, &[&str])] = &[
    ("interval", &["1 mon", "30 days", "720:00:00", "2 mons"]),
    ("numeric[]", &["{1,2}", "{1.0,2}", "{1.00,2}", "{3}"]),
    ("numrange", &["[1,2)", "[1.0,2)", "[1,2.0)", "[3,4)"]),
    ("jsonb", &["{\"a\": 1}", "{\"a\": 1.0}", "{\"a\": 1.00}", "{\"a\": 2}"]),
    ("pair", &["(1,a)", "(1.0,a)", "(1.00,a)", "(2,a)"]),
    ("citext", &["abc", "ABC", "aBc", "d"]),
    ("text COLLATE folded", &["abc", "ABC", "aBc", "d"]),
];

const SETUP: &str = "CREATE TYPE pair AS (n numeric, t text)";

/// Transactions whose statements insert and delete a row, change its value, and change only the bytes of
/// its key.
fn changes(
    numbers: &mut Numbers,
    tables: &[(String, &str, &[&str])],
    transactions: usize,
) -> String {
    let mut sql = String::new();
    for _ in 0..transactions {
        sql.push_str("BEGIN;");
        for _ in 0..=numbers.below(6) {
            let (table, cast, keys) = &tables[numbers.below(tables.len())];
            let k = format!("'{}'{cast}", keys[numbers.below(keys.len())]);
            let _ = match numbers.below(5) {
                0 | 1 => write!(sql, "INSERT INTO {table} VALUES ({k}, 0) ON CONFLICT DO NOTHING;"),
                2 => write!(sql, "DELETE FROM {table} WHERE k = {k};"),
                3 => write!(sql, "UPDATE {table} SET n = n + 1 WHERE k = {k};"),
                _ => write!(sql, "UPDATE {table} SET k = {k} WHERE k = {k};"),
            };
        }
        sql.push_str("COMMIT;");
    }
    sql
}

#[test]
fn equal_keys_of_other_bytes_are_one_row_in_every_group() {
    on_versions(&[(15, 15), (18, 18)], random_changes);
}

/// Creates the types and the tables t0, t1 … that both servers can have. Returns the names, casts and keys.
fn create_tables(case: &Case) -> Vec<(String, &'static str, &'static [&'static str])> {
    case.both(SETUP);
    let mut tables = Vec::new();
    for (number, (type_name, keys)) in TYPES.iter().enumerate() {
        if !offered(case, type_name) {
            continue;
        }
        if *type_name == "citext" {
            case.both("CREATE EXTENSION citext SCHEMA public");
        }
        if type_name.contains("folded") {
            case.both(
                "CREATE COLLATION folded (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
            );
        }
        let table = format!("t{number}");
        case.both(&format!("CREATE TABLE {table} (k {type_name} PRIMARY KEY, n int)"));
        // `=` does not say which composite type it compares.
        let cast = if *type_name == "pair" { "::pair" } else { "" };
        tables.push((table, cast, *keys));
    }
    tables
}

fn random_changes(mut case: Case) {
    let tables = create_tables(&case);
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    let names: Vec<_> = tables.iter().map(|(name, ..)| name.as_str()).collect();
    let mut numbers = Numbers(11);
    for args in [
        &["--workers=1"][..],
        &["--workers=4", "--group-transactions=3"],
        &["--workers=4", "--group-transactions=3", "--preserve-commit-order=false"],
        &["--workers=4", "--group-transactions=1"],
        &["--workers=4", "--group-transactions=3", "--apply-mode=row"],
        &["--binary=off"],
    ] {
        case.tool.args = args.iter().map(ToString::to_string).collect();
        case.publisher.sql(&changes(&mut numbers, &tables, 300));
        case.run_until_current();
        case.expect_equal(&names);
        let missing = case.statistic("update_missing || '|' || delete_missing");
        assert_eq!(missing, "0|0", "{args:?}");
    }
    let fallbacks = case.statistic("fallbacks");
    assert_ne!(fallbacks, "0", "no group met two spellings of one row");
}

/// Such tables are applied as sets.
#[test]
fn they_are_applied_as_sets() {
    on_versions(&[(15, 18)], |case| {
        case.replicate("CREATE TABLE t (k interval PRIMARY KEY, n int)");
        case.publisher
            .sql("INSERT INTO t SELECT make_interval(secs => g), 0 FROM generate_series(1, 500) g");
        case.run_until_current();
        case.publisher.sql("DO $$ BEGIN FOR i IN 1..500 LOOP UPDATE t SET n = i WHERE k = make_interval(secs => i); COMMIT; END LOOP; END $$");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let mode = "SELECT apply_mode FROM pgapace.relation WHERE table_name = 't'";
        assert_eq!(case.subscriber.value(mode), "set");
        assert_eq!(case.statistic("fallbacks"), "0");
    });
}

/// Tables with thousands of such keys.
fn create_many_keys(case: &Case) {
    case.both(
        "CREATE TABLE months (k interval PRIMARY KEY, n int, w text); \
         CREATE TABLE numbers (k numeric[] PRIMARY KEY, n int, w text)",
    );
    case.publisher.sql(
        "INSERT INTO months SELECT make_interval(months => g), 0, md5(g::text) FROM generate_series(1, 20000) g; \
         INSERT INTO numbers SELECT ARRAY[g], 0, md5(g::text) FROM generate_series(1, 20000) g",
    );
}

/// Changes the spelling of keys, deletes rows, and inserts them with another spelling.
const MANY_KEYS: &str = "DO $$ DECLARE g int; h int; BEGIN FOR i IN 1..100 LOOP \
      g := 1 + random() * 19999; h := 1 + random() * 19999; \
      UPDATE months SET n = n + 1, k = CASE i % 3 WHEN 0 THEN make_interval(months => g) \
        WHEN 1 THEN make_interval(days => 30 * g) ELSE make_interval(hours => 720 * g) END \
        WHERE k = make_interval(months => g); \
      DELETE FROM months WHERE k = make_interval(months => h); \
      INSERT INTO months VALUES (make_interval(days => 30 * h), i, 'new'); \
      UPDATE numbers SET n = n + 1, k = ARRAY[round(g, i % 4)] WHERE k = ARRAY[g::numeric]; \
      DELETE FROM numbers WHERE k = ARRAY[h::numeric]; \
      INSERT INTO numbers VALUES (ARRAY[round(h, i % 3)], i, 'new'); COMMIT; END LOOP; END $$";

/// Spellings change while the tables are copied in parts, while they catch up and while they stream, and the
/// program is killed.
#[test]
fn spellings_change_while_tables_are_copied_and_the_program_is_killed() {
    on_versions(&[(15, 15)], |case| copied_and_killed(case, false));
    on_versions(&[(18, 18)], |case| copied_and_killed(case, true));
}

/// `late`: the tables are added while others stream, so their changes are deferred.
fn copied_and_killed(mut case: Case, late: bool) {
    let tables = create_tables(&case);
    case.publish("FOR ALL TABLES");
    if late {
        case.run_until_current();
    }
    create_many_keys(&case);
    let args = ["--copy-split-size=1", "--copy-workers=3", "--workers=4", "--group-transactions=5"];
    case.tool.args = args.map(str::to_owned).into();
    let names: Vec<_> = tables.iter().map(|(name, ..)| name.as_str()).collect();
    let names = [names, vec!["months", "numbers"]].concat();
    let mut random = fastrand::Rng::with_seed(7);
    let mut writer = case.publisher.connect();
    let mut numbers = Numbers(5);
    let write = || {
        must(writer.batch_execute(MANY_KEYS));
        must(writer.batch_execute(&changes(&mut numbers, &tables, 20)));
    };
    while_writing(write, |_| {
        for _ in 0..6 {
            let mut process = case.tool.start(case.log_file("killed"));
            random_pause(&mut random, 50..900);
            must(process.kill9());
        }
        let mut process = case.tool.start(case.log_file("killed"));
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        for _ in 0..4 {
            random_pause(&mut random, 50..600);
            must(process.kill9());
            process = case.tool.start(case.log_file("killed"));
        }
        must(process.kill9());
    });
    case.run_until_current();
    case.expect_equal(&names);
    assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
}
