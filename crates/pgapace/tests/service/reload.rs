//! SIGHUP reads the configuration again, as a PostgreSQL server does.

use std::fs;
use std::path::PathBuf;

use testbed::program::{Process, events};
use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, pgapace, wait_for_events, wait_until_log};

/// A subscription with a configuration file.
struct Reloaded {
    case: Case,
    file: PathBuf,
}

impl Reloaded {
    fn new() -> Self {
        let case = Case::new(18, 18);
        case.both("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)");
        case.publisher.sql("CREATE PUBLICATION pub FOR TABLE a");
        let file = case.log_file("configuration");
        Self { case, file }
    }

    /// Writes the file: these settings, and where the servers are.
    fn write(&self, settings: &str) {
        let tool = &self.case.tool;
        let text = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n{settings}\n",
            tool.publisher, tool.subscriber
        );
        must(fs::write(&self.file, text));
    }

    /// `publication` and further settings of the subscription.
    fn write_one(&self, settings: &str) {
        let name = &self.case.tool.name;
        self.write(&format!("name = \"{name}\"\npublication = \"pub\"\n{settings}"));
    }

    fn start(&self) -> Process {
        self.start_with("run", &[])
    }

    fn start_with(&self, log: &str, args: &[&str]) -> Process {
        let program = pgapace("run").arg("--config").arg(&self.file).args(args);
        must(program.spawn_logged(self.case.log_file(log)))
    }
}

/// Waits until the log has the event so many times.
#[track_caller]
pub(super) fn wait_for(run: &mut Process, event: &str, count: usize) {
    must(wait_for_events(run, event, count, PATIENCE));
}

#[track_caller]
pub(super) fn reload(run: &mut Process) {
    let reloads =
        |log: &str| events(log, "configuration_reloaded") + events(log, "configuration_invalid");
    let before = reloads(&run.log());
    must(run.hang_up());
    must(wait_until_log(run, "the reload", PATIENCE, |log| reloads(log) > before));
}

/// The publications of before would take the table out, and its rows would keep it from being added again.
#[test]
fn a_standby_takes_over_with_the_settings_that_it_was_given_while_it_waited() {
    let reloaded = Reloaded::new();
    let case = &reloaded.case;
    reloaded.write_one("");
    let mut first = reloaded.start_with("first", &["--standby"]);
    wait_for(&mut first, "streaming", 1);
    let mut second = reloaded.start_with("second", &["--standby"]);
    wait_for(&mut second, "standby_waiting", 1);
    case.publisher.sql("CREATE PUBLICATION other FOR TABLE b; INSERT INTO b VALUES (1)");
    let name = &case.tool.name;
    reloaded.write(&format!("name = \"{name}\"\npublication = [\"pub\", \"other\"]"));
    for process in [&mut first, &mut second] {
        must(process.hang_up());
        wait_for(process, "settings_changed", 1);
    }
    must(wait_until(PATIENCE, "the added table", || {
        Ok(case.subscriber.value("SELECT count(*) FROM b") == "1")
    }));
    must(first.kill9());
    wait_for(&mut second, "streaming", 1);
    case.publisher.sql("INSERT INTO b VALUES (2); INSERT INTO a VALUES (1)");
    case.wait_until_applied(&mut second);
    case.expect_equal(&["a", "b"]);
    let log = case.stop(second);
    assert_eq!((events(&log, "table_unpublished"), events(&log, "streaming")), (0, 1), "{log}");
}

#[test]
fn settings_that_can_change_change_and_the_others_are_named() {
    let reloaded = Reloaded::new();
    let case = &reloaded.case;
    reloaded.write_one("workers = 1\nmemory-limit = \"64MB\"");
    let mut run = reloaded.start();
    wait_for(&mut run, "streaming", 1);
    case.publisher.sql("INSERT INTO a VALUES (1)");
    case.wait_until_applied(&mut run);

    // Nothing has changed: the run goes on.
    reload(&mut run);
    assert_eq!((run.events("settings_changed"), run.events("streaming")), (0, 1));

    // Twice at once, while changes are applied.
    case.publisher.sql("CREATE PUBLICATION other FOR TABLE b; INSERT INTO b VALUES (1)");
    reloaded.write(&format!(
        "name = \"{}\"\npublication = [\"pub\", \"other\"]\nworkers = 3\nslot = \"another\"\nlog-level = \"debug\"",
        case.tool.name
    ));
    case.publisher.sql("INSERT INTO a SELECT generate_series(2, 5000)");
    must(run.hang_up());
    must(run.hang_up());
    wait_for(&mut run, "settings_taken_over", 1);
    wait_for(&mut run, "streaming", 2);
    let log = run.log();
    assert!(log.contains("workers = 3") && log.contains("publication = pub,other"), "{log}");
    assert!(run.events("restart_needed") >= 1 && log.contains("slot = another"), "{log}");
    assert!(log.contains("DEBUG"), "the level of the log changes at once:\n{log}");
    must(wait_until(PATIENCE, "the added table", || {
        Ok(case.subscriber.value("SELECT count(*) FROM b") == "1")
    }));
    case.publisher.sql("INSERT INTO b VALUES (2)");
    case.wait_until_applied(&mut run);
    case.expect_equal(&["a", "b"]);
    let log = case.stop(run);
    assert_eq!(testbed::program::events(&log, "settings_changed"), 1, "{log}");
}

#[test]
fn invalid_settings_change_nothing() {
    let reloaded = Reloaded::new();
    let case = &reloaded.case;
    reloaded.write_one("workers = 1");
    let mut run = reloaded.start();
    wait_for(&mut run, "streaming", 1);

    for wrong in
        ["workers = 1000", "workers = 2\nlog-level = \"verbose\"", "workers = ", "unknown = 1"]
    {
        reloaded.write_one(wrong);
        reload(&mut run);
    }
    assert_eq!((run.events("configuration_invalid"), run.events("settings_changed")), (4, 0));

    // That the publication is missing is found by the run that follows. The one before goes on.
    reloaded.write(&format!("name = \"{}\"\npublication = \"missing\"", case.tool.name));
    reload(&mut run);
    wait_for(&mut run, "settings_rejected", 1);
    wait_for(&mut run, "streaming", 2);
    case.publisher.sql("INSERT INTO a VALUES (1)");
    case.wait_until_applied(&mut run);
    let log = run.log().replace('\\', "");
    assert!(log.contains("has no publication \"missing\""), "{log}");

    // The same file is right when there is such a publication.
    case.publisher.sql("CREATE PUBLICATION missing FOR TABLE a, b");
    reload(&mut run);
    wait_for(&mut run, "settings_taken_over", 2);
    wait_for(&mut run, "streaming", 3);
    case.publisher.sql("INSERT INTO b VALUES (1)");
    case.wait_until_applied(&mut run);
    case.expect_equal(&["a"]);
    case.stop(run);
}

#[test]
fn a_copy_is_completed_first_and_runs_that_fail_are_mended() {
    let reloaded = Reloaded::new();
    let case = &reloaded.case;
    case.publisher.sql("INSERT INTO a VALUES (1)");
    reloaded.write_one("workers = 1");
    // The first copy waits for this lock.
    let mut locker = case.subscriber.connect();
    must(locker.batch_execute("BEGIN; LOCK TABLE a IN ACCESS EXCLUSIVE MODE"));
    let mut run = reloaded.start();
    must(wait_until(PATIENCE, "the copy", || {
        let sql = "SELECT count(*) FROM pg_locks WHERE relation = 'a'::regclass AND NOT granted";
        Ok(case.subscriber.value(sql) != "0")
    }));
    reloaded.write_one("workers = 2");
    reload(&mut run);
    assert_eq!(run.events("settings_taken_over"), 0);
    must(locker.batch_execute("COMMIT"));
    wait_for(&mut run, "settings_taken_over", 1);
    wait_for(&mut run, "streaming", 1);
    case.wait_until_applied(&mut run);
    case.expect_equal(&["a"]);

    // While runs fail: nothing listens where the publisher is said to be.
    let text = must(fs::read_to_string(&reloaded.file));
    must(fs::write(
        &reloaded.file,
        text.replacen(&case.tool.publisher, "host=127.0.0.1 port=1", 1),
    ));
    reload(&mut run);
    wait_for(&mut run, "waiting_for_server", 1);
    must(fs::write(&reloaded.file, text));
    reload(&mut run);
    wait_for(&mut run, "settings_taken_over", 3);
    wait_for(&mut run, "streaming", 2);
    case.publisher.sql("INSERT INTO a VALUES (2)");
    case.wait_until_applied(&mut run);
    case.expect_equal(&["a"]);
    case.stop(run);
}

#[test]
fn added_and_removed_subscriptions_need_a_restart() {
    let reloaded = Reloaded::new();
    let case = &reloaded.case;
    let name = &case.tool.name;
    let entry = |name: &str, settings: &str| {
        format!("[[subscription]]\nname = \"{name}\"\npublication = \"pub\"\n{settings}\n")
    };
    reloaded.write(&entry(name, "workers = 1"));
    let mut run = reloaded.start();
    wait_for(&mut run, "streaming", 1);
    reloaded.write(&(entry(name, "workers = 2") + &entry("added", "")));
    reload(&mut run);
    wait_for(&mut run, "settings_taken_over", 1);
    assert_eq!(run.events("restart_needed"), 1);
    assert!(run.log().contains("subscription=\"added\""), "{}", run.log());
    reloaded.write(&entry("added", ""));
    reload(&mut run);
    assert_eq!(run.events("restart_needed"), 3, "one is added, and one is removed");
    wait_for(&mut run, "streaming", 2);
    case.publisher.sql("INSERT INTO a VALUES (1)");
    case.wait_until_applied(&mut run);
    case.stop(run);
}
