//! `whatif`: forecasts say what limits a recording, and agree with what `replay` measures.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testbed::{Program, Proxy};

use super::{Recording, replay};
use crate::support::{Case, Finished, must};
use crate::verbs::json;

fn whatif(case: &Case, file: &Path, args: &[&str]) -> Finished {
    let program = Program::new(env!("CARGO_BIN_EXE_pgapace"))
        .arg("whatif")
        .arg(file)
        .args(["--subscriber", &case.tool.subscriber])
        .args(args);
    let output = must(program.output());
    Finished {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn answer(case: &Case, file: &Path, args: &[&str]) -> Value {
    let finished = whatif(case, file, &[args, &["--json"]].concat());
    finished.expect(0, &[]);
    json(&finished)
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// The throughput with each number of workers.
fn rates(answer: &Value) -> Vec<f64> {
    let workers = answer["workers"].as_array().expect("workers");
    workers.iter().map(|one| number(&one["transactions_per_second"])).collect()
}

/// A workload on a table `t` with 2000 rows and a table `hot` with one.
struct Workload {
    name: &'static str,
    /// The statements of transaction `n`.
    transaction: fn(u32) -> String,
}

const SPREAD: Workload = Workload {
    name: "updates of single rows",
    transaction: |n| {
        let (one, other) = (n * 7919 % 2000 + 1, n * 104_729 % 2000 + 1);
        format!(
            "UPDATE t SET v = v + 1 WHERE id = {one}; UPDATE t SET v = v + 1 WHERE id = {other}"
        )
    },
};
const INSERTS: Workload = Workload {
    name: "inserts of ten rows",
    transaction: |n| {
        format!(
            "INSERT INTO t SELECT i, 0, 'x' FROM generate_series({n} * 10 + 10000, {n} * 10 + 10009) i"
        )
    },
};
const HOT: Workload = Workload {
    name: "a hot row beside others",
    transaction: |n| {
        let id = n * 7919 % 2000 + 1;
        format!("UPDATE t SET v = v + 1 WHERE id = {id}; UPDATE hot SET n = n + 1 WHERE id = 1")
    },
};

fn record(case: &Case, workload: &Workload, transactions: u32) -> PathBuf {
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY, v int, t text); \
         CREATE TABLE hot (id int PRIMARY KEY, n int); \
         INSERT INTO t SELECT i, 0, 'x' FROM generate_series(1, 2000) i; INSERT INTO hot VALUES (1, 0)",
    );
    case.publish("FOR ALL TABLES");
    let recording = Recording::start(case, workload.name, &[]);
    let mut session = case.publisher.connect();
    must(session.batch_execute("SET synchronous_commit = off"));
    for n in 0..transactions {
        must(session.batch_execute(&format!("BEGIN; {}; COMMIT", (workload.transaction)(n))));
    }
    // The publisher sends what it has flushed. This commit flushes everything before it; a transaction that
    // wrote nothing would not.
    must(session.batch_execute("SET synchronous_commit = on; CREATE TEMPORARY TABLE flushed ()"));
    recording.end(case)
}

#[test]
fn independent_changes_gain_from_workers_and_a_hot_row_is_named() {
    let case = Case::new(18, 18);
    // A subscriber that reads from a slow disk.
    let slow = ["--group-transactions", "20", "--cost", "update=1ms", "--workers", "1,4,16"];
    let spread = answer(&case, &record(&case, &SPREAD, 3000), &slow);
    let rates_of = rates(&spread);
    assert!(rates_of[1] > 2.5 * rates_of[0], "{spread:#}");
    assert_eq!(spread["workers"][0]["limited_by"], "subscriber", "{spread:#}");
    assert_eq!(spread["recorded"]["transactions"], 3000);

    // The case's tables are there already.
    case.publisher.sql("DROP PUBLICATION pub");
    for side in [&case.publisher, &case.subscriber] {
        side.sql("DROP TABLE t, hot");
    }
    let file = record(&case, &HOT, 3000);
    let hot = answer(&case, &file, &slow);
    assert_eq!(hot["limiting_keys"][0]["table"], "public.hot", "{hot:#}");
    assert!(
        hot["limiting_keys"][0]["key"].as_str().is_some_and(|key| key.contains('1')),
        "{hot:#}"
    );
    assert_eq!(hot["limiting_tables"][0]["table"], "public.hot", "{hot:#}");
    assert!(number(&hot["longest_chain"]) >= 2.0, "{hot:#}");
    // What is given counts.
    let far = ["--workers", "1", "--cost", "update=10ms,commit=1ms", "--round-trip", "20ms"];
    let far = answer(&case, &file, &far);
    assert!(rates(&far)[0] < rates(&hot)[0], "{far:#}");
    assert_eq!(far["costs_us"]["update"], 10_000.0);
    assert_eq!(far["round_trip_ms"], 20.0);
    // Nothing was written.
    assert_eq!(case.subscriber.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");
    let text = whatif(&case, &file, &["--workers", "1,2"]);
    text.expect(0, &[]);
    assert!(text.stdout.contains("best: --workers"), "{}", text.stdout);
    whatif(&case, &file, &["--cost", "upsert=1ms"]).expect(2, &["upsert"]);
    whatif(&case, &file, &["--measured", "/nonexistent"]).expect(3, &["pgapace replay --json"]);
}

/// The median of an odd number of values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What takes time. Both are waits, which a machine with few processors can measure while it does other
/// things.
#[derive(Debug, Clone, Copy)]
enum Regime {
    /// A round trip takes so many milliseconds.
    Far(u64),
    /// A row takes so many milliseconds, as reads from a slow disk do.
    SlowRows(u64),
}

/// Gives the subscriber its rows back.
fn restore(case: &Case, regime: Regime) {
    case.subscriber.sql(
        "DROP SCHEMA IF EXISTS pgapace CASCADE; ALTER TABLE t DROP CONSTRAINT IF EXISTS slow; \
         ALTER TABLE hot DROP CONSTRAINT IF EXISTS slow; TRUNCATE t; INSERT INTO t TABLE kept; \
         UPDATE hot SET n = 0",
    );
    if let Regime::SlowRows(milliseconds) = regime {
        case.subscriber.sql(&format!(
            // A volatile function would be user code, which is applied by one worker.
            "CREATE OR REPLACE FUNCTION slow(int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS \
               $$ BEGIN PERFORM pg_sleep({milliseconds} / 1000.0); RETURN true; END $$; \
             ALTER TABLE t ADD CONSTRAINT slow CHECK (slow(id)) NOT VALID; \
             ALTER TABLE hot ADD CONSTRAINT slow CHECK (slow(id)) NOT VALID"
        ));
    }
}

const NUMBERS: [&str; 3] = ["1", "2", "4"];

/// The forecast and the replay of one workload, in transactions per second, by number of workers.
fn compare(
    workload: &Workload,
    transactions: u32,
    regime: Regime,
    rounds: usize,
) -> Vec<(f64, f64)> {
    let mut case = Case::new(18, 18);
    let file = record(&case, workload, transactions);
    case.subscriber.sql("CREATE TABLE kept AS TABLE t");
    let proxy = must(Proxy::in_front_of(case.subscriber.cluster));
    if let Regime::Far(milliseconds) = regime {
        proxy.set_delay(std::time::Duration::from_millis(milliseconds) / 2);
        case.tool.subscriber = proxy.conninfo(&case.subscriber.name);
    }
    let group = ["--group-transactions", "20"];
    let measure = |workers: &str| {
        restore(&case, regime);
        let done = replay(&case, &file, &[&["--json", "--workers", workers][..], &group].concat());
        done.expect(0, &[]);
        done
    };
    let seconds = |done: &Finished| number(&json(done)["seconds"]);
    let measured: Vec<Vec<_>> =
        NUMBERS.iter().map(|workers| (0..rounds).map(|_| measure(workers)).collect()).collect();
    let costs = case.log_file("costs.json");
    let typical = median(measured[0].iter().map(seconds).collect());
    let first = measured[0].iter().find(|done| seconds(done) <= typical).expect("a replay");
    std::fs::write(&costs, &first.stdout).expect("a file");
    let costs = costs.to_string_lossy().into_owned();
    // What a row takes is not what a statement and a COMMIT take.
    let pinned = ["--cost", "commit=0.2ms,statement=0.2ms"];
    let args = ["--workers", "1,2,4", "--measured", &costs];
    let forecast = rates(&answer(&case, &file, &[&args[..], &pinned, &group].concat()));
    let rate =
        |done: &Vec<Finished>| f64::from(transactions) / median(done.iter().map(seconds).collect());
    let found: Vec<_> = forecast.into_iter().zip(measured.iter().map(rate)).collect();
    for (workers, (forecast, measured)) in NUMBERS.iter().zip(&found) {
        let off = 100.0 * (forecast / measured - 1.0);
        println!(
            "{}, {regime:?}, {workers} workers: forecast {forecast:.0}, replay {measured:.0} \
             transactions/s, {off:+.0} %",
            workload.name
        );
    }
    found
}

/// Both are printed. How close they are is judged only in the long form, on a machine that does nothing else.
#[test]
fn forecasts_agree_with_replays() {
    let slow = Regime::SlowRows(5);
    if std::env::var_os("PGAPACE_TEST_LONG").is_none() {
        for (forecast, measured) in compare(&SPREAD, 300, slow, 1) {
            assert!(forecast > 0.0 && measured > 0.0, "{forecast}, {measured}");
        }
        return;
    }
    let far = Regime::Far(100);
    let (rounds, percent) = (3, 15.0);
    let compared = [
        (SPREAD, 1000, slow),
        (INSERTS, 400, slow),
        (HOT, 1000, slow),
        // Long enough that the first group and the end, some ten round trips, do not count.
        (SPREAD, 3000, far),
        (INSERTS, 3000, far),
        (HOT, 3000, far),
    ];
    let mut missed = Vec::new();
    for (workload, transactions, regime) in compared {
        let found = compare(&workload, transactions, regime, rounds);
        for (workers, (forecast, measured)) in NUMBERS.iter().zip(found) {
            if (forecast / measured - 1.0).abs() * 100.0 > percent {
                let name = workload.name;
                missed
                    .push(format!("{name}, {regime:?}, {workers} workers: {forecast}, {measured}"));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
