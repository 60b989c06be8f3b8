//! Several verbs at the same moment, beside a process that applies a random load.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;
use testbed::compare::expect_equal;
use testbed::workload::random_dml::{Options, RandomSchema};

use crate::support::{Case, Finished, Tool, long, random_load, seeds};

const USERS: u64 = 3;
/// No verb has a reason to take longer beside others on a small database.
const LONG: Duration = Duration::from_secs(100);

/// A verb with its arguments.
fn random_verb(rng: &mut Rng, tables: &[String]) -> (&'static str, Vec<String>) {
    let table = tables[rng.usize(..tables.len())].clone();
    let texts = |args: &[&str]| args.iter().map(|&arg| arg.to_owned()).collect();
    match rng.u8(0..16) {
        0 | 1 => ("verify", Vec::new()),
        2 => ("verify", vec!["--table".to_owned(), table]),
        3 => ("verify", texts(&["--resume"])),
        4 => ("verify", texts(&["--sample", "20%", "--jobs", "1"])),
        5 => ("repair", texts(&["--delete-extra"])),
        6 => ("repair", texts(&["--dry-run"])),
        7 | 8 => ("resync", vec![table]),
        9 => ("refresh", Vec::new()),
        10 => ("sequences", Vec::new()),
        11 => ("status", texts(&["--json"])),
        12 => ("check", Vec::new()),
        13 => ("switchover", texts(&["--plan"])),
        // By default it waits for more than a minute for the process that runs.
        14 => ("run", texts(&["--until", "current", "--busy-timeout", "2"])),
        _ => ("rebase", Vec::new()),
    }
}

/// Runs random verbs one after the other. Returns how often each ended with which exit code.
fn user(tool: &Tool, tables: &[String], seed: u64, verbs: u32) -> BTreeMap<(String, i32), u32> {
    let mut rng = Rng::with_seed(seed);
    let mut ended = BTreeMap::new();
    for _ in 0..verbs {
        let (verb, args) = random_verb(&mut rng, tables);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let begun = Instant::now();
        let Finished { code, stdout, log } = tool.finish(verb, &args);
        let told = format!("{verb} {args:?}, exit code {code:?}:\n{stdout}\n{log}");
        assert!(begun.elapsed() < LONG, "{:?} for {told}", begun.elapsed());
        let code = code.unwrap_or_else(|| panic!("a signal ended {told}"));
        // 1 and 101 would be bugs; without local writes nothing differs (18).
        assert!(![1, 2, 18, 101].contains(&code), "{told}");
        assert!(!log.contains("panicked"), "{told}");
        *ended.entry((verb.to_owned(), code)).or_insert(0) += 1;
        if std::env::var_os("PGAPACE_TEST_SEEDS").is_some() && code != 0 {
            eprintln!("{told}");
        }
    }
    ended
}

fn survives(publisher_major: u16, subscriber_major: u16, seed: u64, verbs: u32) {
    let case = Case::new(publisher_major, subscriber_major);
    // TRUNCATE is not MVCC-safe: see `semantics/random.rs`.
    let options = Options { truncate: false, odd_names: false, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publish_random(&schema);
    let tables: Vec<String> =
        schema.tables.iter().map(|table| format!("{}.{}", table.schema, table.name)).collect();
    let mut process = case.start();
    let ended = random_load::beside(&case, &schema, seed, 2, |_| {
        thread::scope(|scope| {
            let (tool, tables) = (&case.tool, &tables);
            let users: Vec<_> = (0..USERS)
                .map(|number| scope.spawn(move || user(tool, tables, seed * 10 + number, verbs)))
                .collect();
            users.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
        })
    });
    let log = process.log();
    let ended: Vec<_> = ended
        .into_iter()
        .map(|one| one.unwrap_or_else(|_| panic!("seed {seed}: a verb failed\n{log}")))
        .collect();
    case.wait_until_applied(&mut process);
    let log = case.stop(process);
    // Copies the tables that the last resync asked for.
    case.run_until_current();
    let equal =
        expect_equal(&mut case.publisher.connect(), &mut case.subscriber.connect(), &schema.tables);
    equal.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{ended:#?}\n{log}"));
}

#[test]
fn verbs_at_once_beside_a_load_15_to_18() {
    seeds(1..2).for_each(|seed| survives(15, 18, seed, 4));
}

/// With `PGAPACE_TEST_LONG=1`: it takes a minute.
#[test]
fn verbs_at_once_beside_a_load_18_to_15() {
    if long() {
        seeds(2..3).for_each(|seed| survives(18, 15, seed, 8));
    }
}
