//! Recordings: `record` touches nothing, `replay` gives a clone what the publisher has.

mod refused;
mod whatif;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use testbed::program::Process;
use testbed::{Program, wait_until};

use crate::support::small_disk::SmallDisk;
use crate::support::{
    Case, Finished, PATIENCE, expect_exit, finish, must, on_versions, pgapace, wait_for_event,
    wait_while_running,
};
use crate::verbs::json;

/// A recording of a case's publication.
struct Recording {
    file: PathBuf,
    process: Process,
}

impl Recording {
    /// Starts `record` and waits until nothing that commits is missed.
    #[track_caller]
    fn start(case: &Case, name: &str, args: &[&str]) -> Self {
        let file = case.log_file(&format!("{name}.recording"));
        let log = case.log_file(name);
        let program = pgapace("record")
            .arg(&file)
            .args(["--publisher", &case.tool.publisher, "--publication", "pub", "--minutes", "30"])
            .args(args);
        let mut process = must(program.spawn_logged(log));
        must(wait_for_event(&mut process, "recording_started", PATIENCE));
        Self { file, process }
    }

    /// Waits until everything that was committed is in the file, and ends it. Returns the file.
    #[track_caller]
    fn end(mut self, case: &Case) -> PathBuf {
        let end = case.publisher.value("SELECT pg_current_wal_flush_lsn()");
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication s JOIN pg_replication_slots r \
               ON r.active_pid = s.pid AND r.database = current_database() \
             WHERE s.application_name = 'pgapace_record' AND s.flush_lsn >= '{end}'"
        );
        must(wait_while_running(&mut self.process, "changes to be recorded", PATIENCE, || {
            Ok(case.publisher.value(&sql) == "1")
        }));
        must(self.process.terminate());
        let status = must(self.process.wait(PATIENCE));
        assert!(status.success(), "{status}:\n{}", self.process.log());
        self.file
    }
}

fn replay_program(case: &Case, file: &Path, args: &[&str]) -> Program {
    pgapace("replay").arg(file).args(["--subscriber", &case.tool.subscriber]).args(args)
}

fn replay(case: &Case, file: &Path, args: &[&str]) -> Finished {
    finish(&replay_program(case, file, args))
}

/// Drops the subscription of a replay, so that another one may have its tables.
#[track_caller]
fn drop_replayed(case: &Case, name: &str) {
    let program = pgapace("drop")
        .args(["--keep-slot", "--subscriber", &case.tool.subscriber])
        .args(["--name", name]);
    finish(&program).expect(0, &[]);
}

/// Tables with the same rows on both sides, as a clone has.
fn prepare(case: &Case) {
    case.both(
        "CREATE TABLE a (id int PRIMARY KEY, v int, t text); \
         CREATE TABLE b (id bigint PRIMARY KEY, d numeric, at timestamptz); \
         INSERT INTO a SELECT i, 0, 'x' FROM generate_series(1, 200) i; \
         INSERT INTO b SELECT i, i / 7.0, '2026-01-01' FROM generate_series(1, 50) i",
    );
    case.publish("FOR TABLE a, b");
}

#[test]
fn a_clone_gets_what_was_recorded_and_the_publisher_keeps_nothing() {
    on_versions(&[(14, 18), (15, 15), (18, 18)], |case| {
        prepare(&case);
        let recording = Recording::start(&case, "first", &[]);
        case.publisher.sql("UPDATE a SET v = id WHERE id <= 100");
        case.publisher.sql("DELETE FROM a WHERE id BETWEEN 10 AND 20; INSERT INTO b VALUES (77)");
        case.publisher.sql("UPDATE a SET id = id + 1000 WHERE id > 150");
        // Streamed, with a subtransaction that is rolled back.
        let mut large = case.publisher.connect();
        must(large.batch_execute(
            "SET logical_decoding_work_mem = '64kB'; BEGIN; \
             INSERT INTO a SELECT i, i, repeat('y', 100) FROM generate_series(10000, 14000) i; \
             SAVEPOINT s; DELETE FROM b; ROLLBACK TO s",
        ));
        case.publisher.sql("UPDATE b SET d = d + 1 WHERE id < 10");
        must(large.batch_execute("COMMIT; BEGIN; DELETE FROM a WHERE id > 12000"));
        case.publisher.sql("TRUNCATE b; INSERT INTO b VALUES (1, 1.50, now())");
        let file = recording.end(&case);
        // A transaction that did not commit is not replayed.
        must(large.batch_execute("ROLLBACK"));
        let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
        assert_eq!(case.publisher.value(slots), "0");

        let first = replay(&case, &file, &["--json", "--workers", "4"]);
        first.expect(0, &[]);
        let first = json(&first);
        assert_eq!(
            (&first["transactions"], &first["conflicts"]),
            (&6.into(), &0.into()),
            "{first}"
        );
        case.expect_equal(&["a", "b"]);
        let sql = "SELECT name || ' ' || phase || ' ' || (slot_name LIKE 'recording\\_%') \
                   FROM pgapace.subscription";
        assert_eq!(case.subscriber.value(sql), "replay streaming true");
        // It is a subscription like others, which has everything.
        let again = replay(&case, &file, &[]);
        again.expect(0, &[]);
        assert!(again.stdout.contains("nothing was applied"), "{}", again.stdout);
        let mut tool = case.tool.clone();
        tool.name = "replay".to_owned();
        tool.run().expect(3, &["subscription replay uses slot \"recording_"]);
    });
}

#[test]
fn a_replay_that_is_killed_resumes_at_the_recorded_pace_too() {
    let case = Case::new(18, 18);
    prepare(&case);
    let recording = Recording::start(&case, "long", &["--subscriber", &case.tool.subscriber]);
    let mut session = case.publisher.connect();
    for round in 0..2000 {
        let (id, other) = (round % 200 + 1, (round * 7) % 200 + 1);
        must(session.batch_execute(&format!(
            "BEGIN; UPDATE a SET v = v + 1 WHERE id = {id}; UPDATE a SET v = v - 1, t = t || 'z' \
             WHERE id = {other}; INSERT INTO b VALUES ({round} + 100, {round}, now()); COMMIT"
        )));
    }
    let file = recording.end(&case);
    let applied = "SELECT count(*) FROM b WHERE id >= 100";
    let small = ["--group-transactions", "10", "--pace", "recorded"];
    for kill_at in [1, 500, 1000] {
        let log = case.log_file("killed");
        let mut process = must(replay_program(&case, &file, &small).spawn_logged(log));
        must(wait_while_running(&mut process, "rows to be applied", PATIENCE, || {
            Ok(case.subscriber.value(applied).parse::<u32>().is_ok_and(|rows| rows >= kill_at))
        }));
        must(process.kill9());
    }
    replay(&case, &file, &[]).expect(0, &["format=\"binary\""]);
    case.expect_equal(&["a", "b"]);
}

/// The second one waits for the first, and has nothing left to apply.
#[test]
fn of_two_replays_at_once_the_second_does_not_count_what_the_first_applied() {
    let case = Case::new(18, 18);
    prepare(&case);
    let recording = Recording::start(&case, "once", &["--subscriber", &case.tool.subscriber]);
    let partial = replay(&case, &recording.file, &[]);
    partial.expect(20, &[".partial is there"]);
    for id in 1..=100 {
        case.publisher.sql(&format!("UPDATE a SET v = v + 1 WHERE id = {id}"));
    }
    let file = recording.end(&case);
    let mut locked = case.subscriber.connect();
    must(locked.batch_execute("BEGIN; SELECT FROM a WHERE id = 1 FOR UPDATE"));
    let mut first = must(replay_program(&case, &file, &[]).spawn_logged(case.log_file("first")));
    let waits = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                 AND application_name = 'pgapace replay apply' AND datname = current_database()";
    must(wait_while_running(&mut first, "the lock", PATIENCE, || {
        Ok(case.subscriber.value(waits) == "t")
    }));
    let program = replay_program(&case, &file, &["--json"]);
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| finish(&program));
        let waits = "SELECT count(*) = 2 FROM pg_stat_activity \
                     WHERE application_name = 'pgapace replay control' AND datname = current_database()";
        must(wait_until(PATIENCE, "the second replay", || Ok(case.subscriber.value(waits) == "t")));
        must(locked.batch_execute("COMMIT"));
        second.join().expect("the second replay")
    });
    must(expect_exit(&mut first, 0, &[]));
    second.expect(0, &[]);
    assert_eq!(json(&second)["transactions"], 0, "{}", second.stdout);
    case.expect_equal(&["a", "b"]);
}

#[test]
fn the_recorded_pace_keeps_the_times_between_transactions() {
    let case = Case::new(18, 18);
    prepare(&case);
    let recording = Recording::start(&case, "paced", &[]);
    case.publisher.sql("UPDATE a SET v = 1 WHERE id = 1");
    let sent = format!(
        "SELECT count(*) FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid \
         WHERE s.database = current_database() AND r.sent_lsn >= '{}'",
        case.publisher.value("SELECT pg_current_wal_lsn()")
    );
    must(wait_until(PATIENCE, "the change to be sent", || Ok(case.publisher.value(&sent) == "1")));
    // The time that a replay at the recorded pace keeps.
    std::thread::sleep(Duration::from_secs(4));
    case.publisher.sql("UPDATE a SET v = 2 WHERE id = 1");
    let file = recording.end(&case);
    // Of the whole process: on a busy machine, the recorded time runs for long before the first change is applied.
    let begun = Instant::now();
    replay(&case, &file, &["--pace", "recorded"]).expect(0, &[]);
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[test]
fn the_snapshot_of_the_start_can_be_held_for_a_copy() {
    let case = Case::new(15, 15);
    prepare(&case);
    let recording = Recording::start(&case, "held", &["--hold-snapshot"]);
    case.publisher.sql("DELETE FROM a");
    let log = recording.process.log();
    let name = log.split("snapshot=\"").nth(1).and_then(|rest| rest.split('"').next());
    let name = name.unwrap_or_else(|| panic!("no snapshot in the log:\n{log}"));
    let mut session = case.publisher.connect();
    must(session.batch_execute(&format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT '{name}'"
    )));
    let row = must(session.query_one("SELECT count(*) FROM a", &[]));
    assert_eq!(row.get::<_, i64>(0), 200);
    recording.end(&case);
}

#[test]
fn a_recording_on_a_full_disk_has_what_was_written_before() {
    let case = Case::new(18, 18);
    prepare(&case);
    let owner = case.log_file("owner");
    must(std::fs::write(&owner, ""));
    let Some(disk) = SmallDisk::mount(&owner.to_string_lossy(), 1) else { return };
    let file = disk.path().join("full.recording");
    let program = pgapace("record").arg(&file).args([
        "--publisher",
        &case.tool.publisher,
        "--publication",
        "pub",
        "--minutes",
        "30",
    ]);
    let mut process = must(program.spawn_logged(case.log_file("full")));
    must(wait_for_event(&mut process, "recording_started", PATIENCE));
    // Four times as much as fits.
    for _ in 0..60 {
        case.publisher.sql(
            "UPDATE a SET v = v + 1, t = (SELECT string_agg(md5(random()::text || a.id || i), '') \
             FROM generate_series(1, 20) i)",
        );
    }
    must(expect_exit(&mut process, 20, &["cannot write recording", "can be replayed"]));
    replay(&case, &file, &[]).expect(0, &[]);
    // Whole transactions, and several of them.
    let rounds = case.subscriber.value("SELECT max(v) FROM a");
    assert!(rounds.parse::<u32>().is_ok_and(|rounds| (5..60).contains(&rounds)), "{rounds}");
    assert_eq!(case.subscriber.value("SELECT count(DISTINCT v) FROM a"), "1");
}
