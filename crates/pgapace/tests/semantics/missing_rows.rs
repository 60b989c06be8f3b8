//! Random changes of rows of which a user has deleted some on the subscriber. Whatever the settings, the
//! rows are those of a native subscription that misses the same rows, and the conflicts are counted.

use std::path::PathBuf;

use fastrand::Rng;
use testbed::TableName;
use testbed::compare::expect_equal;
use testbed::program::Process;
use testbed::wait_until;
use testbed::workload::random_dml::{Options, RandomDml, RandomSchema, run_sessions};

use crate::support::native::Native;
use crate::support::{
    Case, Database, PATIENCE, Tool, long, must, random_pause, seeds, wait_for_event,
    wait_while_running,
};

pub(super) const SESSIONS: u64 = 2;
const PHASES: u64 = 3;

/// The settings that apply changes in different ways. The first is the simplest.
pub(super) const SETTINGS: [&[&str]; 10] = [
    &["--workers=1", "--apply-mode=row"],
    &["--workers=1"],
    &["--workers=2"],
    &["--workers=4"],
    &["--workers=4", "--preserve-commit-order=false"],
    &["--workers=4", "--group-transactions=1"],
    &["--workers=4", "--apply-mode=row"],
    &["--workers=auto", "--two-phase=true", "--two-phase-hold=0s"],
    &["--workers=3", "--memory-limit=16MB", "--streaming=on"],
    &["--workers=3", "--on-conflict=update_missing=skip", "--group-transactions=7"],
];

/// A subscription with settings of its own.
struct Subscription<'c> {
    case: &'c Case,
    database: Database<'static>,
    tool: Tool,
    log: PathBuf,
    process: Option<Process>,
    /// A process was killed: what it had counted lately is lost.
    killed: bool,
}

impl<'c> Subscription<'c> {
    fn new(case: &'c Case, schema: &RandomSchema, number: usize, settings: &[&str]) -> Self {
        let name = format!("{}_{number}", case.tool.name);
        let database = Database::create(case.subscriber.cluster, &name, "");
        database.sql(&schema.subscriber_ddl);
        let mut tool = Tool::new(case.publisher.conninfo(), database.conninfo(), &name);
        tool.args = settings.iter().map(|setting| (*setting).to_owned()).collect();
        // A rule for one of the tables.
        let is_plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if number == 2
            && let Some(table) = schema.tables.iter().find(|table| is_plain(&table.name))
        {
            let TableName { schema, name } = table;
            tool.args.push(format!("--on-conflict={schema}.{name}:delete_missing=skip"));
        }
        let log = case.log_file(&name);
        Self { case, database, tool, log, process: None, killed: false }
    }

    fn start(&mut self) {
        let _ = std::fs::remove_file(&self.log);
        let mut process = self.tool.start(self.log.clone());
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        self.process = Some(process);
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            must(process.kill9());
            self.killed = true;
        }
    }

    /// Applies everything, and ends.
    fn complete(&mut self) {
        if self.process.is_none() {
            self.start();
        }
        let Some(mut process) = self.process.take() else { return };
        let end = self.case.publisher.value("SELECT pg_current_wal_lsn()");
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{}' AND replay_lsn >= '{end}'",
            self.tool.name
        );
        let applied = || Ok(self.case.publisher.value(&sql) == "1");
        must(wait_while_running(&mut process, &format!("apply to reach {end}"), PATIENCE, applied));
        self.case.stop(process);
    }

    /// Missing rows of updates and deletes.
    fn counted(&self) -> [u64; 2] {
        ["update_missing", "delete_missing"].map(|kind| {
            let sql = format!(
                "SELECT (SELECT {kind} FROM pgapace.stat_subscription) || '|' || \
                 (SELECT coalesce(sum(conflicts), 0) FROM pgapace.stat_conflict \
                  WHERE conflict = '{kind}')"
            );
            let counts = self.database.value(&sql);
            let (all, by_table) = counts.split_once('|').expect("two numbers");
            assert!(self.killed || all == by_table, "{:?}: {counts}", self.tool.args);
            all.parse().expect("a number")
        })
    }
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill9();
        }
        let name = &self.tool.name;
        let drop_slot = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name = '{name}' AND NOT active"
        );
        let _ = self.case.publisher.cluster.sql("postgres", &drop_slot);
        let _ =
            self.database.cluster.sql("postgres", &format!("DROP DATABASE {name} WITH (FORCE)"));
    }
}

/// Deletes some rows of a table, the same in each database that has the same rows.
pub(super) fn deletion(table: &TableName, rng: &mut Rng) -> String {
    let (part, salt) = (rng.u32(2..12), rng.u32(..));
    format!(
        "DELETE FROM {table} WHERE (tableoid, ctid) IN (SELECT id, address FROM (\
           SELECT tableoid AS id, ctid AS address, r::text AS row, \
             row_number() OVER (PARTITION BY r::text) AS nth FROM {table} AS r) AS s \
         WHERE abs(hashtext(row || nth || '{salt}')::bigint) % {part} = 0); "
    )
}

/// The same for all tables.
fn deletions(schema: &RandomSchema, rng: &mut Rng) -> String {
    let deletions: String = schema.tables.iter().map(|table| deletion(table, rng)).collect();
    format!("SET session_replication_role = replica; {deletions} RESET session_replication_role")
}

/// The condition that selects one row in `part`.
fn some(rng: &mut Rng, part: u32) -> String {
    format!("abs(hashtext(r::text || '{}')::bigint) % {part} = 0", rng.u32(..))
}

/// Changes many rows of each table, in a few transactions.
fn change_many(case: &Case, schema: &RandomSchema, rng: &mut Rng) {
    for table in &schema.tables {
        let name = table.to_string().replace('\'', "''");
        let columns = case.publisher.value(&format!(
            "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute \
             WHERE attrelid = '{name}'::regclass AND attnum > 0 AND NOT attisdropped \
               AND attgenerated = '' AND EXISTS (SELECT FROM pg_class c WHERE c.oid = attrelid \
                 AND (relreplident <> 'd' OR EXISTS (SELECT FROM pg_index \
                   WHERE indrelid = c.oid AND indisprimary)))"
        ));
        if columns == "∅" {
            // It publishes inserts only.
            continue;
        }
        let last = columns.rsplit(", ").next().unwrap_or_default();
        for _ in 0..rng.u32(1..4) {
            let (few, many) = (some(rng, 6), some(rng, 2));
            case.publisher.sql(&match rng.u8(0..5) {
                0 => format!("DELETE FROM {table} AS r WHERE {few}"),
                1 => format!(
                    "BEGIN; CREATE TEMP TABLE again ON COMMIT DROP AS \
                       SELECT {columns} FROM {table} AS r WHERE {few}; \
                     DELETE FROM {table} AS r WHERE {few}; \
                     INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT * FROM again; \
                     COMMIT"
                ),
                _ => format!("UPDATE {table} AS r SET {last} = {last} WHERE {many}"),
            });
        }
    }
}

/// Which settings a seed tries: the simplest, and some others.
fn tried(seed: u64) -> Vec<&'static [&'static str]> {
    let others = SETTINGS.len() - 1;
    let first = usize::try_from(seed).unwrap_or_default() % others;
    [0, 1, 4].iter().map(|step| SETTINGS[1 + (first + step) % others]).collect()
}

fn misses_rows(publisher_major: u16, subscriber_major: u16, seed: u64) {
    let transactions = if long() { 40 } else { 20 };
    let case = Case::new(publisher_major, subscriber_major);
    let mut rng = Rng::with_seed(seed);
    let two_phase = rng.bool();
    let options = Options { two_phase, truncate: rng.bool(), ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publisher.sql(&schema.publisher_ddl);
    case.publisher.sql(&schema.publication_ddl("pub"));
    if publisher_major >= 17 && rng.u8(0..3) == 0 {
        // Every transaction is streamed from its first change on.
        let database = &case.publisher.name;
        case.publisher.sql(&format!(
            "ALTER DATABASE {database} SET debug_logical_replication_streaming = 'immediate'"
        ));
    }
    must(RandomDml::new(&schema, seed).run(&mut case.publisher.connect(), 200));
    let native = Native::subscribe(&case, &schema.subscriber_ddl, "pub").expect("accepted");
    // Its copy of a table fails now and then (twice in 400 seeds), and the server repeats it.
    let reset = format!(
        "SELECT pg_stat_reset_subscription_stats(oid) FROM pg_subscription WHERE subname = '{}'",
        native.database.name
    );
    must(wait_until(PATIENCE, "the native subscription to copy the tables", || {
        native.database.rows(&reset);
        Ok(native.wait().is_ok())
    }));
    // Its parallel apply workers do not wait for each other where transactions share unique values.
    let name = &native.database.name;
    native.database.sql(&format!("ALTER SUBSCRIPTION {name} SET (streaming = off)"));
    let mut subscriptions = vec![Subscription::new(&case, &schema, 0, SETTINGS[0])];
    for (number, settings) in (1..).zip(tried(seed)) {
        subscriptions.push(Subscription::new(&case, &schema, number, settings));
    }
    subscriptions.iter_mut().for_each(Subscription::complete);
    let conninfo = case.publisher.conninfo();
    for phase in 0..PHASES {
        let deletions = deletions(&schema, &mut rng);
        native.database.sql(&deletions);
        subscriptions.iter().for_each(|one| one.database.sql(&deletions));
        // Some apply a backlog, and others transactions as they come.
        for one in &mut subscriptions {
            if rng.bool() {
                one.start();
            }
        }
        for part in 0..3 {
            let first = seed * 1000 + phase * 100 + part * 10;
            must(run_sessions(&conninfo, &schema, first, SESSIONS, transactions));
            change_many(&case, &schema, &mut rng);
            for one in subscriptions.iter_mut().skip(1) {
                if one.process.is_some() && rng.u8(0..8) == 0 {
                    random_pause(&mut rng, 0..50);
                    one.kill();
                    one.start();
                }
            }
        }
        assert_eq!(native.wait(), Ok(()), "seed {seed}");
        for one in &mut subscriptions {
            one.complete();
            let equal = expect_equal(
                &mut native.database.connect(),
                &mut one.database.connect(),
                &schema.tables,
            );
            equal.unwrap_or_else(|error| {
                panic!(
                    "seed {seed}, {publisher_major} to {subscriber_major}, phase {phase}, native and \
                     {:?}: {error}",
                    one.tool.args
                )
            });
        }
        let expected = subscriptions[0].counted();
        if long() {
            eprintln!("seed {seed}, phase {phase}: {expected:?} rows missing");
        }
        // A prepared transaction that was rolled back counts as well, if it was prepared here.
        let prepares = |one: &Subscription<'_>| {
            two_phase && one.tool.args.iter().any(|setting| setting == "--two-phase=true")
        };
        for one in subscriptions.iter().filter(|one| !prepares(one)) {
            let counted = one.counted();
            let fewer = one.killed && counted.iter().zip(expected).all(|(one, all)| *one <= all);
            assert!(
                counted == expected || fewer,
                "seed {seed}, {publisher_major} to {subscriber_major}, phase {phase}, {:?}: counted {counted:?}, expected \
                 {expected:?}",
                one.tool.args
            );
        }
    }
}

#[test]
fn rows_are_missing_15_to_15() {
    seeds(1..2).for_each(|seed| misses_rows(15, 15, seed));
}

#[test]
fn rows_are_missing_18_to_18() {
    seeds(2..3).for_each(|seed| misses_rows(18, 18, seed));
}

#[test]
fn rows_are_missing_15_to_18() {
    seeds(3..4).for_each(|seed| misses_rows(15, 18, seed));
}
