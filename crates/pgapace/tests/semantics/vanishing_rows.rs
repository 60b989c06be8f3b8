//! Rows that a user of the subscriber deletes while random changes of them are applied.

use std::collections::HashMap;

use fastrand::Rng;
use testbed::TableName;
use testbed::workload::random_dml::{Options, RandomDml, RandomSchema};

use super::missing_rows::{SESSIONS, SETTINGS, deletion};
use crate::support::{Case, Database, explain, long, must, random_load, random_pause, seeds};

/// A user deletes rows while changes of them are applied. Every row that is left is one of the publisher's.
fn rows_vanish(publisher_major: u16, subscriber_major: u16, seed: u64, deletions: u32) {
    let mut case = Case::new(publisher_major, subscriber_major);
    let mut rng = Rng::with_seed(seed);
    let settings = SETTINGS[usize::try_from(seed).unwrap_or_default() % SETTINGS.len()];
    case.tool.args = settings.iter().map(|setting| (*setting).to_owned()).collect();
    let options = Options { two_phase: rng.bool(), truncate: false, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publish_random(&schema);
    must(RandomDml::new(&schema, seed).run(&mut case.publisher.connect(), 60));
    let mut process = case.start();
    random_load::beside(&case, &schema, seed, SESSIONS, |_| {
        let mut user = case.subscriber.connect();
        must(user.batch_execute("SET session_replication_role = replica"));
        for _ in 0..deletions {
            random_pause(&mut rng, 0..100);
            let table = &schema.tables[rng.usize(..schema.tables.len())];
            // It may deadlock with the changes.
            if let Err(error) = user.batch_execute(&deletion(table, &mut rng)) {
                let code = error.code().map_or("", |code| code.code());
                assert_eq!(code, "40P01", "{}", explain(&error));
            }
            if rng.u8(0..10) == 0 {
                must(process.kill9());
                process = case.start();
            }
        }
    });
    case.wait_until_applied(&mut process);
    let log = case.stop(process);
    for table in &schema.tables {
        let [mut left, all] =
            [&case.subscriber, &case.publisher].map(|side| rows(&case, side, table));
        for (row, count) in all {
            left.entry(row).and_modify(|left| *left -= count);
        }
        left.retain(|_, count| *count > 0);
        assert!(left.is_empty(), "seed {seed}, {settings:?}: {table}: {left:?}\n{log}");
    }
    if long() {
        let missing = case.statistic("update_missing + delete_missing");
        eprintln!("seed {seed}, {settings:?}: {missing} rows were missing");
    }
}

/// The rows of a table, in the publisher's columns, and how often each is there.
fn rows(case: &Case, side: &Database<'_>, table: &TableName) -> HashMap<String, i64> {
    let name = table.to_string().replace('\'', "''");
    let columns = case.publisher.value(&format!(
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute \
         WHERE attrelid = '{name}'::regclass AND attnum > 0 AND NOT attisdropped"
    ));
    let mut counts = HashMap::new();
    for row in side.rows(&format!("SELECT ROW({columns})::text FROM {table}")) {
        *counts.entry(row).or_default() += 1;
    }
    counts
}

#[test]
fn rows_vanish_15_to_15() {
    seeds(2..3).for_each(|seed| rows_vanish(15, 15, seed, 30));
}

#[test]
fn rows_vanish_18_to_18() {
    seeds(5..6).for_each(|seed| rows_vanish(18, 18, seed, 30));
}
