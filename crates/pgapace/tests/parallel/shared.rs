//! Two subscriptions of one process that share its sessions.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Program, wait_until};

use crate::support::{Case, PATIENCE, holds_for, must, pgapace, wait_for_events};

/// The names of the subscriptions, their publications and their tables.
const NAMES: [&str; 2] = ["one", "two"];

/// Tables `one` and `two`, each with its own subscription in one configuration file.
struct Pair {
    case: Case,
    file: tempfile::NamedTempFile,
}

impl Pair {
    fn new(version: u16, workers: usize) -> Self {
        Self::of(Case::new(version, version), workers)
    }

    fn of(case: Case, workers: usize) -> Self {
        let Case { tool, .. } = &case;
        let mut config = format!(
            "publisher = \"{}\"\ntarget = \"{}\"\nworkers = {workers}\ngroup-transactions = 2\n",
            tool.publisher, tool.subscriber
        );
        for name in NAMES {
            case.both(&format!("CREATE TABLE {name} (id int PRIMARY KEY, v int)"));
            case.publisher.sql(&format!(
                "INSERT INTO {name} VALUES (0, 0); CREATE PUBLICATION {name} FOR TABLE {name}"
            ));
            config.push_str(&format!(
                "[[subscription]]\nname = \"{}_{name}\"\npublication = [\"{name}\"]\n",
                tool.name
            ));
        }
        let mut file = must(tempfile::NamedTempFile::new());
        must(std::io::Write::write_all(&mut file, config.as_bytes()));
        Self { case, file }
    }

    fn program(&self) -> Program {
        let config = self.file.path().display().to_string();
        pgapace("run").args(["--config", &config])
    }

    /// Starts the process and waits until both subscriptions stream.
    fn start(&self) -> Process {
        let log = self.file.path().with_extension("log");
        let _ = std::fs::remove_file(&log);
        let mut process = must(self.program().spawn_logged(log));
        must(wait_for_events(&mut process, "streaming", NAMES.len(), PATIENCE));
        process
    }

    /// Commits `rows` transactions, each of which inserts one row.
    fn load(&self, name: &str, rows: usize) {
        self.case.publisher.sql(&format!(
            "DO $$ BEGIN FOR i IN 1..{rows} LOOP \
             INSERT INTO {name} SELECT max(id) + 1, 0 FROM {name}; COMMIT; END LOOP; END $$"
        ));
    }

    /// Commits a transaction that waits for a user of the subscriber, and many transactions after
    /// it.
    fn brake(&self, name: &str) -> Client {
        let mut user = self.case.subscriber.connect();
        must(user.batch_execute(&format!("BEGIN; SELECT FROM {name} WHERE id = 0 FOR UPDATE")));
        self.case.publisher.sql(&format!("UPDATE {name} SET v = 1 WHERE id = 0"));
        self.load(name, 400);
        user
    }

    fn is_applied(&self, name: &str) -> bool {
        let count = format!("SELECT count(*), sum(v) FROM {name}");
        self.case.subscriber.value(&count) == self.case.publisher.value(&count)
    }

    /// Number of sessions that apply changes of a subscription.
    fn sessions(&self, name: &str) -> u32 {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace {}_{name} apply'",
            self.case.tool.name
        );
        must(self.case.subscriber.value(&sql).parse())
    }

    fn wait_for_sessions(&self, name: &str, count: u32) {
        let what = format!("{count} sessions of {name}");
        must(wait_until(PATIENCE, &what, || Ok(self.sessions(name) == count)));
    }

    fn end(self, process: Process) {
        let log = self.case.stop(process);
        assert!(!log.contains("retry_in_ms"), "{log}");
        self.case.expect_equal(&NAMES);
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE starts_with(slot_name, '{}_')",
            self.case.tool.name
        );
        self.case.publisher.rows(&sql);
    }
}

/// Samples the number of sessions continuously.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(i64, HashMap<String, i64>)>,
}

impl Watch {
    fn start(mut client: Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most = (0, HashMap::new());
            let sql = "SELECT application_name, count(*) FROM pg_stat_activity \
                       WHERE application_name LIKE 'pgapace % apply' \
                       AND datname = current_database() GROUP BY 1";
            while !stopped.load(Ordering::Relaxed) {
                let rows = must(client.query(sql, &[]));
                most.0 = most.0.max(rows.iter().map(|row| row.get::<_, i64>(1)).sum());
                for row in rows {
                    let seen: &mut i64 = most.1.entry(row.get(0)).or_default();
                    *seen = row.get::<_, i64>(1).max(*seen);
                }
                // The interval of the samples.
                sleep(Duration::from_millis(3));
            }
            most
        });
        Self { stop, thread }
    }

    /// The maximum numbers of sessions, in total and by name.
    fn stop(self) -> (i64, HashMap<String, i64>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the watch ends")
    }
}

#[test]
fn a_long_backlog_delays_no_other_subscription_15() {
    a_long_backlog_delays_no_other_subscription(15);
}

#[test]
fn a_long_backlog_delays_no_other_subscription_18() {
    a_long_backlog_delays_no_other_subscription(18);
}

fn a_long_backlog_delays_no_other_subscription(version: u16) {
    let pair = Pair::new(version, 3);
    let process = pair.start();
    pair.case.stop(process);
    pair.load("one", 20_000);

    let watch = Watch::start(pair.case.subscriber.connect());
    let process = pair.start();
    // Rows of the other one that arrive before the end of the backlog.
    let mut arrived = 0;
    while arrived < 30 {
        pair.case.publisher.sql(&format!("INSERT INTO two VALUES ({}, 0)", arrived + 1));
        must(wait_until(PATIENCE, "the light load", || Ok(pair.is_applied("two"))));
        if pair.is_applied("one") {
            break;
        }
        arrived += 1;
    }
    must(wait_until(2 * PATIENCE, "the backlog", || Ok(pair.is_applied("one"))));
    let (together, by_name) = watch.stop();
    assert!(
        arrived >= 5,
        "only {arrived} rows of the other one came before the end of the backlog"
    );
    assert!(together <= 3, "{together} sessions at a time: {by_name:?}");
    let backlog = format!("pgapace {}_one apply", pair.case.tool.name);
    assert_eq!(by_name.get(&backlog), Some(&2), "{by_name:?}");
    pair.end(process);
}

#[test]
fn sessions_move_to_the_subscription_with_work() {
    let pair = Pair::new(18, 4);
    let process = pair.start();
    let watch = Watch::start(pair.case.subscriber.connect());
    assert_eq!(NAMES.map(|name| pair.sessions(name)), [1, 1]);
    let mut first = pair.brake("one");
    pair.wait_for_sessions("one", 3);
    assert_eq!(pair.sessions("two"), 1, "its own one is not for others");
    let mut second = pair.brake("two");
    must(holds_for(Duration::from_millis(700), "ending what was begun", || {
        Ok(NAMES.map(|name| pair.sessions(name)) == [3, 1])
    }));
    must(first.batch_execute("COMMIT"));
    // The first subscription has no more work, so all its sessions except one move.
    pair.wait_for_sessions("two", 3);
    assert_eq!(pair.sessions("one"), 1);
    must(second.batch_execute("COMMIT"));
    for name in NAMES {
        must(wait_until(PATIENCE, name, || Ok(pair.is_applied(name))));
    }
    // The sessions move back without a pause.
    let mut first = pair.brake("one");
    pair.wait_for_sessions("one", 3);
    must(first.batch_execute("COMMIT"));
    must(wait_until(PATIENCE, "one", || Ok(pair.is_applied("one"))));
    let (together, by_name) = watch.stop();
    assert!(together <= 4, "{together} sessions at a time: {by_name:?}");
    pair.end(process);
}

/// The subscriptions continue with the sessions that they have, and retry later.
#[test]
fn subscriptions_continue_when_a_session_cannot_be_opened() {
    let mut case = Case::new(18, 18);
    let role = format!("{}_applier", case.tool.name);
    case.subscriber.change_setting_privileges(&format!(
        "CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {} TO {role}; \
         GRANT SET ON PARAMETER session_replication_role TO {role}",
        case.subscriber.name
    ));
    assert!(case.tool.subscriber.contains("user=postgres"), "{}", case.tool.subscriber);
    case.tool.subscriber = case.tool.subscriber.replace("user=postgres", &format!("user={role}"));
    let pair = Pair::of(case, 3);
    for name in NAMES {
        pair.case.subscriber.sql(&format!("ALTER TABLE {name} OWNER TO {role}"));
    }
    let process = pair.start();
    pair.case.subscriber.sql(&format!("ALTER ROLE {role} CONNECTION LIMIT 1"));
    let mut user = pair.brake("one");
    must(wait_until(PATIENCE, "a session to be refused", || {
        Ok(process.events("apply_worker_not_started") > 0)
    }));
    assert_eq!(pair.sessions("one"), 1);
    must(user.batch_execute("COMMIT"));
    must(wait_until(PATIENCE, "one", || Ok(pair.is_applied("one"))));

    pair.case.subscriber.sql(&format!("ALTER ROLE {role} CONNECTION LIMIT -1"));
    let mut user = pair.brake("one");
    pair.wait_for_sessions("one", 2);
    must(user.batch_execute("COMMIT"));
    must(wait_until(PATIENCE, "one", || Ok(pair.is_applied("one"))));
    pair.end(process);
}
