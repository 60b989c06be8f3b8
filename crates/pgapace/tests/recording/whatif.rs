//! `whatif`: forecasts say what limits a recording, and agree with what `replay` measures.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testbed::Proxy;

use super::{Recording, replay};
use crate::support::{Case, Finished, finish, must, pgapace};
use crate::verbs::json;

fn whatif(case: &Case, file: &Path, args: &[&str]) -> Finished {
    let program = pgapace("whatif").arg(file).args(["--subscriber", &case.tool.subscriber]);
    finish(&program.args(args))
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
    /// The statements of transaction `i`.
    transaction: &'static str,
}

const SPREAD: Workload = Workload {
    name: "updates of two rows",
    transaction: "UPDATE t SET v = v + 1 WHERE id = i * 7919 % 2000 + 1; \
                  UPDATE t SET v = v + 1 WHERE id = i * 104729 % 2000 + 1",
};
const HOT: Workload = Workload {
    name: "a hot row beside others",
    transaction: "UPDATE t SET v = v + 1 WHERE id = i * 7919 % 2000 + 1; \
                  UPDATE hot SET n = n + 1 WHERE id = 1",
};
/// Those of the bench, in small.
const BENCH: [Workload; 3] = [
    Workload {
        name: "random-update",
        transaction: "UPDATE t SET v = i WHERE id = 1 + (hashint4(i) & 1048575) % 2000",
    },
    Workload {
        name: "bulk-insert",
        transaction: "INSERT INTO t SELECT i * 1000 + j, 0, 'x' FROM generate_series(10001, 11000) j",
    },
    Workload {
        name: "hot",
        transaction: "UPDATE t SET v = v + i WHERE \
                      id = 1 + (hashint4(i) & 1048575) % CASE WHEN i % 2 = 0 THEN 10 ELSE 2000 END",
    },
];

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
    must(session.batch_execute(&format!(
        "DO $$ BEGIN FOR i IN 1..{transactions} LOOP \
           {}; COMMIT; END LOOP; END $$",
        workload.transaction
    )));
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
    // The given costs count.
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

/// The resource that bounds a workload.
#[derive(Debug, Clone, Copy)]
enum Regime {
    /// Processors, which both servers and pgapace share.
    Local,
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
/// How many of them are given to the forecast, which predicts the others.
const GIVEN: usize = 2;

fn seconds(done: &Finished) -> f64 {
    number(&json(done)["seconds"])
}

/// Replays with each number of workers, an odd number of rounds. Rounds take turns, so that other work on
/// the machine meets all numbers of workers. Each replay is that with the median time.
fn replays(case: &Case, file: &Path, regime: Regime, rounds: usize) -> Vec<Finished> {
    let mut measured: Vec<Vec<Finished>> = NUMBERS.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (workers, measured) in NUMBERS.iter().zip(&mut measured) {
            restore(case, regime);
            let args = [&["--json", "--workers", workers][..], &GROUP].concat();
            let done = replay(case, file, &args);
            done.expect(0, &[]);
            measured.push(done);
        }
    }
    let median = |mut rounds: Vec<Finished>| {
        rounds.sort_by(|one, other| seconds(one).total_cmp(&seconds(other)));
        rounds.swap_remove(rounds.len() / 2)
    };
    measured.into_iter().map(median).collect()
}

const GROUP: [&str; 2] = ["--group-transactions", "20"];

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
    let replays = replays(&case, &file, regime, rounds);
    let mut args: Vec<String> = ["--workers", "1,2,4"].map(str::to_owned).into();
    for (workers, replay) in NUMBERS.iter().zip(&replays).take(GIVEN) {
        let path = case.log_file(&format!("{workers}.json"));
        std::fs::write(&path, &replay.stdout).expect("a file");
        args.extend(["--measured".to_owned(), path.to_string_lossy().into_owned()]);
    }
    let processors = std::thread::available_parallelism().map_or(2, usize::from).to_string();
    let of_regime = match regime {
        // The subscriber shares this machine, however long a round trip to it takes.
        Regime::Local | Regime::Far(_) => vec!["--shared", "--processors", &processors],
        // The measured time is that of rows, and says nothing of statements and COMMITs.
        Regime::SlowRows(_) => vec!["--cost", "commit=0.2ms,statement=0.2ms"],
    };
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let answer = answer(&case, &file, &[&args[..], &of_regime, &GROUP].concat());
    println!("{}, {regime:?}: contention {}", workload.name, answer["contention"]);
    let rate = |replay: &Finished| {
        assert_eq!(json(replay)["transactions"], transactions);
        f64::from(transactions) / seconds(replay)
    };
    let found: Vec<_> = rates(&answer).into_iter().zip(replays.iter().map(rate)).collect();
    for ((workers, replay), (forecast, measured)) in NUMBERS.iter().zip(&replays).zip(&found) {
        let off = 100.0 * (forecast / measured - 1.0);
        println!(
            "  {workers} workers: forecast {forecast:.0}, replay {measured:.0} transactions/s \
             ({:.2} s), {off:+.0} %",
            seconds(replay)
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
    let [update, insert, hot] = &BENCH;
    let far = Regime::Far(20);
    let compared = [
        (update, 200_000, Regime::Local),
        (insert, 2000, Regime::Local),
        (hot, 200_000, Regime::Local),
        (update, 5000, far),
        (insert, 1000, far),
        (hot, 5000, far),
        (update, 2000, slow),
        (hot, 2000, slow),
    ];
    let mut missed = Vec::new();
    for (workload, transactions, regime) in compared {
        let found = compare(workload, transactions, regime, 5);
        for (workers, (forecast, measured)) in NUMBERS.iter().zip(found) {
            if (forecast / measured - 1.0).abs() > 0.15 {
                let name = workload.name;
                missed
                    .push(format!("{name}, {regime:?}, {workers} workers: {forecast}, {measured}"));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
