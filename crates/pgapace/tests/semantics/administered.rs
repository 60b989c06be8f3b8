//! Random changes, while an administrator works on both servers: changes tables, rewrites and locks
//! them, ends and cancels sessions, and kills the program.

use fastrand::Rng;
use testbed::TableName;
use testbed::compare::expect_equal;
use testbed::postgres::Client;
use testbed::program::Process;
use testbed::workload::random_dml::{Options, RandomSchema};

use crate::support::{Case, explain, must, random_load, random_pause, seeds};

const SESSIONS: u64 = 3;

/// A table, and the changes that the administrator has made to it.
struct Administered {
    table: String,
    /// Added columns that exist on both sides.
    added: Vec<String>,
    /// The subscriber's table has a trigger that fires for replicated changes.
    has_trigger: bool,
    /// The replica identity may be changed.
    has_primary_key: bool,
    /// Columns may be added. Under load, PostgreSQL (18.6) cannot decode changes to a partition that
    /// are published as changes of its parent, if this has a new column: "could not convert row type".
    is_plain: bool,
    publishes_updates: bool,
}

struct Administrator<'a> {
    case: &'a Case,
    publisher: Client,
    subscriber: Client,
    rng: Rng,
    tables: Vec<Administered>,
    numbers: u32,
    done: Vec<String>,
}

impl<'a> Administrator<'a> {
    fn new(case: &'a Case, schema: &RandomSchema, seed: u64) -> Self {
        let mut publisher = case.publisher.connect();
        let mut subscriber = case.subscriber.connect();
        // Locks that wait for a long time would stop all writers.
        must(publisher.batch_execute("SET lock_timeout = '2s'"));
        must(subscriber.batch_execute(
            "SET lock_timeout = '2s'; \
             CREATE FUNCTION same() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        ));
        let tables = schema
            .tables
            .iter()
            .map(|name| Administered {
                table: name.to_string(),
                added: Vec::new(),
                has_trigger: false,
                has_primary_key: has_primary_key(&mut publisher, name),
                is_plain: relation_is(&mut publisher, name, "relkind = 'r'"),
                publishes_updates: relation_is(
                    &mut publisher,
                    name,
                    "(relreplident <> 'd' OR EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary))",
                ),
            })
            .collect();
        let rng = Rng::with_seed(seed);
        Self { case, publisher, subscriber, rng, tables, numbers: 0, done: Vec::new() }
    }

    fn on_publisher(&mut self, sql: &str) -> bool {
        let done = tried(&mut self.publisher, sql);
        self.done.push(format!("publisher: {sql}: {done}"));
        done
    }

    fn on_subscriber(&mut self, sql: &str) -> bool {
        let done = tried(&mut self.subscriber, sql);
        self.done.push(format!("subscriber: {sql}: {done}"));
        done
    }

    /// Repeats a statement that locks or deadlocks may prevent.
    fn until_done(&mut self, on_publisher: bool, sql: &str) {
        for _ in 0..100 {
            let done = if on_publisher { self.on_publisher(sql) } else { self.on_subscriber(sql) };
            if done {
                return;
            }
        }
        panic!("{sql} was not possible; before: {:#?}", self.done);
    }

    /// One action. The process may be replaced by another one.
    fn act(&mut self, process: &mut Process) {
        let index = self.rng.usize(..self.tables.len());
        let table = self.tables[index].table.clone();
        self.numbers += 1;
        let number = self.numbers;
        match self.rng.u8(0..14) {
            0 | 1 if self.tables[index].is_plain => {
                // Without a default: the walsender of PostgreSQL 18.6 may end with "pfree called with
                // invalid pointer" where a change of a transaction that is open then follows.
                let kind = ["int", "text", "timestamptz"][self.rng.usize(..3)];
                let column = format!("added{number}");
                self.until_done(false, &format!("ALTER TABLE {table} ADD {column} {kind}"));
                self.until_done(true, &format!("ALTER TABLE {table} ADD {column} {kind}"));
                if kind.starts_with("int") && self.tables[index].publishes_updates {
                    self.on_publisher(&format!(
                        "UPDATE {table} SET {column} = {number} WHERE random() < 0.3"
                    ));
                }
                self.tables[index].added.push(column);
            }
            2 => {
                if let Some(column) = self.tables[index].added.pop() {
                    self.until_done(true, &format!("ALTER TABLE {table} DROP {column}"));
                    // Changes from before still name the column.
                    self.case.wait_until_applied(process);
                    self.until_done(false, &format!("ALTER TABLE {table} DROP {column}"));
                }
            }
            3 if self.tables[index].has_primary_key => {
                let identity = if self.rng.bool() { "FULL" } else { "DEFAULT" };
                self.on_publisher(&format!("ALTER TABLE {table} REPLICA IDENTITY {identity}"));
            }
            4 => {
                self.on_subscriber(&format!("VACUUM FULL {table}"));
            }
            5 => {
                self.on_subscriber(&format!("REINDEX TABLE {table}"));
            }
            6 => {
                self.on_subscriber(&format!("VACUUM (FREEZE, ANALYZE) {table}"));
            }
            7 => {
                let wait = self.rng.u32(10..400);
                self.on_subscriber(&format!(
                    "BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; \
                     SELECT pg_sleep({wait} / 1000.0); COMMIT"
                ));
            }
            8 | 9 => {
                let function =
                    if self.rng.bool() { "pg_terminate_backend" } else { "pg_cancel_backend" };
                self.on_subscriber(&format!(
                    "SELECT {function}(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname = \
                     current_database() AND application_name LIKE 'pgapace%' \
                     ORDER BY random() LIMIT 1) s"
                ));
            }
            10 => {
                self.on_publisher(
                    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                     WHERE database = current_database() AND active",
                );
            }
            11 => {
                must(process.kill9());
                *process = self.case.start();
            }
            12 => {
                let sql = if self.tables[index].has_trigger {
                    format!("DROP TRIGGER same ON {table}")
                } else {
                    format!(
                        "BEGIN; CREATE TRIGGER same BEFORE INSERT OR UPDATE ON {table} \
                         FOR EACH ROW EXECUTE FUNCTION same(); \
                         ALTER TABLE {table} ENABLE ALWAYS TRIGGER same; COMMIT"
                    )
                };
                let done = self.on_subscriber(&sql);
                self.tables[index].has_trigger ^= done;
            }
            _ => {
                must(process.freeze());
                random_pause(&mut self.rng, 10..700);
                must(process.thaw());
            }
        }
    }
}

fn has_primary_key(publisher: &mut Client, name: &TableName) -> bool {
    // A generated column that is not published must not be in a replica identity (since 18), and
    // json and point cannot be compared.
    let condition = "relkind = 'r' AND EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary) \
         AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND attnum > 0 \
         AND (attgenerated <> '' OR atttypid IN ('json'::regtype, 'point'::regtype)))";
    relation_is(publisher, name, condition)
}

fn relation_is(client: &mut Client, name: &TableName, condition: &str) -> bool {
    let name = name.to_string().replace('\'', "''");
    let sql = format!("SELECT {condition} FROM pg_class c WHERE oid = '{name}'::regclass");
    must(client.query_one(&sql, &[])).get(0)
}

/// Runs statements. They may fail because of locks.
fn tried(client: &mut Client, sql: &str) -> bool {
    let Err(error) = client.batch_execute(sql) else { return true };
    let code = error.code().map_or("", |code| code.code());
    // lock_not_available, deadlock_detected, query_canceled
    assert!(["55P03", "40P01", "57014"].contains(&code), "{sql}: {}", explain(&error));
    let _ = client.batch_execute("ROLLBACK");
    false
}

fn survives(publisher_major: u16, subscriber_major: u16, seed: u64, actions: u32) {
    let mut case = Case::new(publisher_major, subscriber_major);
    let streamed = seed.is_multiple_of(2);
    if streamed {
        case.tool.args.push("--two-phase".to_owned());
    }
    match seed % 5 {
        0 => case.tool.args.push("--apply-mode=row".to_owned()),
        1 => case.tool.args.push("--workers=1".to_owned()),
        2 => case.tool.args.push("--workers=8".to_owned()),
        _ => {}
    }
    if seed.is_multiple_of(3) && publisher_major >= 17 {
        // Every transaction is streamed from its first change on.
        let database = &case.publisher.name;
        case.publisher.sql(&format!(
            "ALTER DATABASE {database} SET debug_logical_replication_streaming = 'immediate'"
        ));
    }
    // TRUNCATE is not MVCC-safe: see `random.rs`.
    let options = Options { two_phase: streamed, truncate: false, ..Options::default() };
    let schema = RandomSchema::generate(seed, &options);
    case.publish_random(&schema);
    let mut process = case.start();
    let done = random_load::beside(&case, &schema, seed, SESSIONS, |is_written| {
        let mut administrator = Administrator::new(&case, &schema, seed);
        for _ in 0..actions {
            administrator.act(&mut process);
            if !process.is_running() || !is_written() {
                panic!("seed {seed}: {:#?}\n{}", administrator.done, process.log());
            }
        }
        administrator.done
    });
    case.wait_until_applied(&mut process);
    let log = case.stop(process);
    let equal =
        expect_equal(&mut case.publisher.connect(), &mut case.subscriber.connect(), &schema.tables);
    equal.unwrap_or_else(|error| panic!("seed {seed}: {error}\n{done:#?}\n{log}"));
    let missing = case.statistic("update_missing || '|' || delete_missing");
    assert_eq!(missing, "0|0", "seed {seed}:\n{done:#?}\n{log}");
}

#[test]
fn an_administrator_works_under_load_15_to_15() {
    seeds(1..2).for_each(|seed| survives(15, 15, seed, 25));
}

#[test]
fn an_administrator_works_under_load_18_to_18() {
    seeds(2..3).for_each(|seed| survives(18, 18, seed, 25));
}
