//! Two subscriptions of one process, of which one fails.

use testbed::program::{Process, Program, events};

use crate::support::{Case, PATIENCE, memory, must, on_versions, pgapace, wait_until_log};
use crate::verbs::json;

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Tables `good` and `bad`, each with its own subscription in one configuration file. A row of the
/// subscriber conflicts with the changes of `bad`.
struct Two {
    case: Case,
    directory: tempfile::TempDir,
}

impl Two {
    fn new(case: Case) -> Self {
        let tool = &case.tool;
        let mut config =
            format!("publisher = \"{}\"\ntarget = \"{}\"\n", tool.publisher, tool.subscriber);
        for name in ["good", "bad"] {
            case.both(&format!("CREATE TABLE {name} (id int PRIMARY KEY, v text)"));
            case.publisher.sql(&format!("CREATE PUBLICATION {name} FOR TABLE {name}"));
            config.push_str(&format!(
                "[[subscription]]\nname = \"{}_{name}\"\npublication = [\"{name}\"]\n",
                tool.name
            ));
        }
        let directory = must(tempfile::tempdir());
        must(std::fs::write(directory.path().join("two.toml"), config));
        let two = Self { case, directory };
        let mut first = two.start(&["--until", "current"]);
        assert!(must(first.wait(PATIENCE)).success(), "{}", first.log());
        two.case.subscriber.sql("INSERT INTO bad VALUES (1, 'in the way')");
        two
    }

    fn start(&self, args: &[&str]) -> Process {
        self.spawn(pgapace("run").args(args))
    }

    fn spawn(&self, program: Program) -> Process {
        let config = self.directory.path().join("two.toml").display().to_string();
        let program = program.args(["--config", &config]);
        let log = self.directory.path().join("log");
        let _ = std::fs::remove_file(&log);
        must(program.spawn_logged(log))
    }

    fn name(&self, which: &str) -> String {
        format!("{}_{which}", self.case.tool.name)
    }

    fn status(&self, which: &str) -> serde_json::Value {
        let mut tool = self.case.tool.clone();
        tool.name = self.name(which);
        tool.publications = which.to_owned();
        json(&tool.finish("status", &["--json"]))[0].clone()
    }

    fn wait_for(&self, process: &mut Process, what: &str, condition: impl Fn(&str) -> bool) {
        must(wait_until_log(process, what, PATIENCE, condition));
    }

    fn rows(&self, table: &str) -> String {
        self.case.subscriber.value(&format!("SELECT count(*) FROM {table} WHERE v = 'x'"))
    }
}

impl Drop for Two {
    fn drop(&mut self) {
        self.case.drop_slots_of_its_subscriptions();
    }
}

#[test]
fn a_failing_subscription_is_reported_and_retried() {
    on_versions(&VERSIONS, |case| {
        let two = Two::new(case);
        let mut process = two.start(&[]);
        two.case.publisher.sql("INSERT INTO bad VALUES (1, 'x'), (2, 'x')");
        let failed = format!("event=\"subscription_failed\" subscription=\"{}\"", two.name("bad"));
        two.wait_for(&mut process, "the failure to be reported", |log| log.contains(&failed));
        let status = two.status("bad");
        assert_eq!(status["state"], "retrying", "{status:#}");
        assert!(status["next_try_at"].is_string(), "{status:#}");
        assert!(status["last_error"].as_str().is_some_and(|error| error.contains("23505")));
        // The other subscription continues.
        two.case.publisher.sql("INSERT INTO good VALUES (1, 'x')");
        two.wait_for(&mut process, "the other one to continue", |_| two.rows("good") == "1");
        assert_eq!(two.status("good")["state"], "running");
        // A user removes the conflicting row.
        two.case.subscriber.sql("DELETE FROM bad");
        two.wait_for(&mut process, "it to be tried again", |_| two.rows("bad") == "2");
        two.wait_for(&mut process, "the error to be over", |_| {
            let status = two.status("bad");
            status["state"] == "running" && status["last_error"].is_null()
        });
        must(process.terminate());
        assert!(must(process.wait(PATIENCE)).success(), "{}", process.log());
    });
}

/// Limits the address space of a process to this much more than it has, in megabytes.
fn limit_memory(process: &Process, more: Option<u64>) {
    let limit = more.map_or("unlimited".to_owned(), |more| {
        let megabytes = must(memory::address_space(process)) + more;
        (megabytes << 20).to_string()
    });
    let prlimit = Program::new("prlimit").args(["--pid", &process.pid().to_string()]);
    let output = must(prlimit.arg(format!("--as={limit}:")).output());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A value of 80 MB is refused memory where it is received, where it is spooled, and where it is sent.
#[test]
fn a_value_without_memory_ends_the_run_of_one_subscription() {
    let refusals = [
        ("off", 40, "while receiving"),
        ("on", 120, "a change of a large transaction"),
        ("off", 120, "while sending"),
    ];
    on_versions(&VERSIONS, |case| {
        let two = Two::new(case);
        // Compressed, it would not be streamed.
        two.case.publisher.sql("ALTER TABLE bad ALTER v SET STORAGE EXTERNAL");
        for (id, (streaming, more, place)) in (2..).zip(refusals) {
            // Threads have no heaps of their own, which take address space.
            let program = pgapace("run").args(["--streaming", streaming]);
            let mut process = two.spawn(program.env("MALLOC_ARENA_MAX", "1"));
            two.wait_for(&mut process, "both to stream", |log| events(log, "streaming") == 2);
            limit_memory(&process, Some(more));
            let value =
                format!("INSERT INTO bad VALUES ({id}, repeat('0123456789abcdef', 5 << 20))");
            two.case.publisher.sql(&value);
            two.wait_for(&mut process, "the refusal to be named", |log| {
                log.lines().any(|line| line.contains("out of memory") && line.contains(place))
            });
            let status = two.status("bad");
            assert_eq!(status["state"], "retrying", "{status:#}");
            // The other subscription goes on.
            two.case.publisher.sql(&format!("INSERT INTO good VALUES ({id}, 'x')"));
            let good = format!("SELECT count(*) FROM good WHERE id = {id}");
            two.wait_for(&mut process, "the other one", |_| {
                two.case.subscriber.value(&good) == "1"
            });
            limit_memory(&process, None);
            let arrived =
                format!("SELECT count(*) FROM bad WHERE id = {id} AND length(v) = 80 << 20");
            two.wait_for(&mut process, "the value", |_| two.case.subscriber.value(&arrived) == "1");
            must(process.terminate());
            assert!(must(process.wait(PATIENCE)).success(), "{}", process.log());
        }
    });
}

#[test]
fn a_still_failing_subscription_determines_the_exit_code() {
    on_versions(&VERSIONS, |case| {
        let two = Two::new(case);
        let mut process = two.start(&[]);
        two.case.publisher.sql("INSERT INTO bad VALUES (1, 'x')");
        two.wait_for(&mut process, "the failure", |log| events(log, "subscription_failed") > 0);
        must(process.terminate());
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(9), "{}", process.log());
        assert_eq!(two.status("bad")["state"], "failed");
        assert_eq!(two.status("good")["state"], "stopped");
        // A run with `--until` ends instead of waiting for the failed subscription.
        two.case.publisher.sql("INSERT INTO good VALUES (1, 'x')");
        let mut process = two.start(&["--until", "current"]);
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(9), "{}", process.log());
        assert_eq!(two.rows("good"), "1");
    });
}

#[test]
fn fail_together_ends_all_subscriptions() {
    on_versions(&VERSIONS, |case| {
        let two = Two::new(case);
        two.case.publisher.sql("INSERT INTO bad VALUES (1, 'x')");
        let mut process = two.start(&["--fail-together"]);
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(9), "{}", process.log());
        assert_eq!(two.status("bad")["state"], "failed");
    });
}

/// A subscription is dropped because it fails. The process, which still runs the other one, does
/// not create it again.
#[test]
fn a_dropped_subscription_is_not_created_again() {
    on_versions(&VERSIONS, |case| {
        let two = Two::new(case);
        let mut process = two.start(&[]);
        two.case.publisher.sql("INSERT INTO bad VALUES (1, 'x')");
        two.wait_for(&mut process, "the failure", |log| events(log, "subscription_failed") > 0);
        let mut tool = two.case.tool.clone();
        (tool.name, tool.publications) = (two.name("bad"), "bad".to_owned());
        tool.finish("drop", &[]).expect(0, &[]);
        two.wait_for(&mut process, "it to end", |log| events(log, "subscription_ended") > 0);
        two.case.publisher.sql("INSERT INTO good VALUES (1, 'x')");
        two.wait_for(&mut process, "the other one to continue", |_| two.rows("good") == "1");
        must(process.terminate());
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(8), "{}", process.log());
        let left = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{}'",
            two.name("bad")
        );
        assert_eq!(two.case.publisher.value(&left), "0");
    });
}
