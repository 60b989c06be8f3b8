//! `verify`: equal tables give no difference, and each difference is found with its key.

mod background;
mod bad_input;
mod enum_keys;
mod equal;
mod failing_run;
mod found;
mod meanwhile;
mod not_valid;
mod nulls;
mod other_types;
mod progress;
mod running;
mod stale;

use serde_json::Value;

use crate::support::{Case, Finished};
use crate::verbs::json;

/// The versions that differ most, alone and combined in both directions.
const VERSIONS: [(u16, u16); 4] = [(15, 15), (18, 18), (15, 18), (18, 15)];

/// Every version on either side.
const BOTH_WAYS: [(u16, u16); 2] = [(15, 18), (18, 15)];

/// Runs `verify --json`, and returns the result for the only subscription.
#[track_caller]
fn verify(case: &Case, code: i32, args: &[&str]) -> Value {
    let args: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
    let finished = case.tool.finish("verify", &args);
    finished.expect(code, &[]);
    json(&finished)[0].clone()
}

/// Expects that nothing differs, and that these tables were compared.
#[track_caller]
fn expect_equal(case: &Case, tables: &[&str], args: &[&str]) -> Value {
    let result = verify(case, 0, args);
    let of = |table: &Value| table["name"].as_str().unwrap_or_default().to_owned();
    let mut names: Vec<_> = result["tables"].as_array().into_iter().flatten().map(of).collect();
    names.sort();
    let mut wanted: Vec<_> = tables.iter().map(|name| (*name).to_owned()).collect();
    wanted.sort();
    assert_eq!(names, wanted, "{result:#}");
    assert_eq!(differences(case), Vec::<String>::new());
    result
}

/// Runs `verify` with bad input.
#[track_caller]
fn refused(case: &Case, code: i32, args: &[&str], named: &[&str]) -> Finished {
    let finished = case.tool.finish("verify", args);
    finished.expect(code, named);
    finished
}

/// The recorded differences: table, kind, key or row, columns, copies.
#[track_caller]
fn differences(case: &Case) -> Vec<String> {
    case.subscriber.rows(
        "SELECT table_name, kind, coalesce(key, row_values), columns, copies \
         FROM pgapace.difference ORDER BY 1, 2, 3",
    )
}
