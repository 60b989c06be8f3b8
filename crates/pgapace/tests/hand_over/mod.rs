//! `pgapace hand-over`: a process gives a subscription up in order, and another one goes on at once.

use testbed::program::Process;
use testbed::workload::tpcb;
use testbed::{Program, wait_until};

use crate::support::{
    Case, Finished, PATIENCE, VERSIONS, must, on_versions, one_or_all, pgapace, wait_for_event,
    wait_for_events,
};

const TABLES: [&str; 4] =
    ["pgbench_accounts", "pgbench_branches", "pgbench_history", "pgbench_tellers"];

fn hand_over(case: &Case, args: &[&str]) -> Finished {
    case.tool.finish("hand-over", args)
}

/// A process that waits until another one gives the subscription up.
fn waiting(case: &Case, name: &str) -> Process {
    must(case.tool.program("run").spawn_logged(case.log_file(name)))
}

/// Whether a session asks for the owner's lock, or has it.
fn expect_streaming(process: &mut Process) {
    must(wait_until(PATIENCE, "the next process to stream", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(process.events("streaming") > 0)
    }));
}

fn wait_until_connected(case: &Case, sessions: usize) {
    let sql = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgapace {} control'",
        case.tool.name
    );
    let connected = wait_until(PATIENCE, "the waiting process to connect", || {
        Ok(case.subscriber.value(&sql).parse::<usize>().unwrap_or(0) >= sessions)
    });
    let names = "SELECT application_name FROM pg_stat_activity";
    connected.unwrap_or_else(|error| panic!("{error}: {:?}", case.subscriber.rows(names)));
}

/// Under load, from process to process: each ends in order, and nothing is lost or applied twice.
#[test]
fn processes_take_turns_under_load() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let case = Case::new(publisher, subscriber);
        must(tpcb::create_tables(&mut case.publisher.connect(), 1));
        must(tpcb::create_schema(&mut case.subscriber.connect()));
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let options = tpcb::TpcbOptions { rate: Some(200.0), ..Default::default() };
        let load = must(tpcb::Load::start(&case.publisher.conninfo(), 2, options));
        for turn in 0..3 {
            let mut next = waiting(&case, &format!("turn{turn}"));
            wait_until_connected(&case, 2);
            let done = hand_over(&case, &[]);
            done.expect(0, &[]);
            for part in ["was given up at", "runs it since"] {
                assert!(done.stdout.contains(part), "{part}: {}", done.stdout);
            }
            must(process.wait(PATIENCE));
            assert_eq!(process.exit_code(), Some(19), "{}", process.log());
            for event in ["hand_over_requested", "stopped", "handed_over"] {
                assert_eq!(process.events(event), 1, "{event}: {}", process.log());
            }
            for event in ["run_failed", "run_ended"] {
                assert_eq!(process.events(event), 0, "{event}: {}", process.log());
            }
            expect_streaming(&mut next);
            assert_eq!(next.events("run_failed"), 0, "{}", next.log());
            process = next;
        }
        must(load.stop());
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&TABLES);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM pgapace.hand_over"), "0");
    }
}

#[test]
fn without_a_waiting_or_a_running_process() {
    on_versions(&[(18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        hand_over(&case, &[]).expect(3, &["no subscription"]);
        let mut process = case.start();
        hand_over(&case, &["--wait", "1"]).expect(16, &["no other process runs"]);
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(19), "{}", process.log());
        // A request to the first process does not concern the next one.
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        case.stop(process);
        for timeout in ["60s", "1s"] {
            let asked = hand_over(&case, &["--timeout", timeout]);
            asked.expect(16, &["no process runs subscription"]);
        }
        case.run_until_current();
    });
}

/// A transaction on the subscriber blocks the process, so it cannot answer.
#[test]
fn two_requests_exclude_each_other_and_a_dead_one_is_replaced() {
    on_versions(&[(15, 15)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
        case.publish("FOR TABLE t");
        case.publisher.sql("INSERT INTO t VALUES (1, 0)");
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        let mut client = case.subscriber.connect();
        let mut blocker = must(client.transaction());
        must(blocker.batch_execute("SELECT FROM t FOR UPDATE"));
        case.publisher.sql("UPDATE t SET v = 1");
        // Other tests wait for locks on this server, too.
        let blocked = format!(
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
             AND datname = current_database() AND application_name = 'pgapace {} apply'",
            case.tool.name
        );
        must(wait_until(PATIENCE, "the update to wait", || {
            Ok(case.subscriber.value(&blocked) == "t")
        }));
        let program: Program = case.tool.program("hand-over");
        let mut first = must(program.spawn_logged(case.log_file("first")));
        let asked = "SELECT count(*) FROM pgapace.hand_over";
        must(wait_until(PATIENCE, "a request", || Ok(case.subscriber.value(asked) == "1")));
        hand_over(&case, &[]).expect(8, &["asks for subscription"]);
        must(first.kill9());
        let gone = "SELECT count(*) FROM pgapace.hand_over h \
                    JOIN pg_stat_activity a ON a.pid = h.requester";
        must(wait_until(PATIENCE, "its session to end", || Ok(case.subscriber.value(gone) == "0")));
        hand_over(&case, &["--timeout", "1"]).expect(8, &["does not answer"]);
        let program = case.tool.program("hand-over").args(["--wait", "0"]);
        let mut last = must(program.spawn_logged(case.log_file("last")));
        must(wait_until(PATIENCE, "a request", || Ok(case.subscriber.value(asked) == "1")));
        must(blocker.rollback());
        must(last.wait(PATIENCE));
        assert_eq!(last.exit_code(), Some(0), "{}", last.log());
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(19), "{}", process.log());
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// After a restart of the server another session may have the process id of the one that asked.
#[test]
fn a_request_left_behind_is_not_obeyed_because_a_process_id_is_in_use_again() {
    on_versions(&[(18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        case.run_until_current();
        let mut other = case.subscriber.connect();
        must(other.batch_execute(
            "INSERT INTO pgapace.hand_over (subscription, epoch, stands_aside, requester) \
             SELECT id, epoch, true, pg_backend_pid() FROM pgapace.subscription",
        ));
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let mut process = case.start();
        // The process has looked for requests.
        must(wait_for_event(&mut process, "streaming", PATIENCE));
        case.publisher.sql("INSERT INTO t VALUES (2)");
        case.wait_until_applied(&mut process);
        assert_eq!(process.events("hand_over_requested"), 0, "{}", process.log());
        hand_over(&case, &["--wait", "0"]).expect(0, &[]);
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(19), "{}", process.log());
    });
}

/// A request to a process that is starting, and has its epoch already, is not one to its predecessor.
#[test]
fn a_process_obeys_what_it_is_asked_while_it_starts() {
    on_versions(&[(15, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        case.run_until_current();
        let mut asking = case.subscriber.connect();
        must(asking.batch_execute(
            "SELECT pg_advisory_lock_shared(hashtext('pgapace.hand_over'), id) \
               FROM pgapace.subscription; \
             INSERT INTO pgapace.hand_over (subscription, epoch, stands_aside) \
               SELECT id, epoch + 1, false FROM pgapace.subscription",
        ));
        let mut process = waiting(&case, "asked");
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(19), "{}", process.log());
    });
}

/// One of two subscriptions of a process leaves it; the other one goes on.
#[test]
fn only_the_named_subscription_leaves_a_process() {
    on_versions(&[(15, 18)], |case| {
        let names = ["left", "kept"].map(|name| format!("{}_{name}", case.tool.name));
        let mut config = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n",
            case.tool.publisher, case.tool.subscriber
        );
        for (table, name) in ["left_one", "kept_one"].iter().zip(&names) {
            case.both(&format!("CREATE TABLE {table} (id int PRIMARY KEY)"));
            case.publisher.sql(&format!("CREATE PUBLICATION {table} FOR TABLE {table}"));
            config.push_str(&format!(
                "[[subscription]]\nname = \"{name}\"\npublication = [\"{table}\"]\n"
            ));
        }
        let file = case.log_file("config");
        must(std::fs::write(&file, config));
        let program = pgapace("run").arg("--config").arg(&file);
        let mut process = must(program.spawn_logged(case.log_file("both")));
        must(wait_for_events(&mut process, "streaming", 2, PATIENCE));
        let mut tool = case.tool.clone();
        tool.name.clone_from(&names[0]);
        tool.finish("hand-over", &["--wait", "0"]).expect(0, &[]);
        must(wait_for_event(&mut process, "handed_over", PATIENCE));
        case.publisher.sql("INSERT INTO left_one VALUES (1); INSERT INTO kept_one VALUES (1)");
        let kept = "SELECT count(*) FROM kept_one";
        must(wait_until(PATIENCE, "the other one", || Ok(case.subscriber.value(kept) == "1")));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM left_one"), "0");
        assert_eq!(process.events("subscription_ended"), 0, "{}", process.log());
        must(process.terminate());
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(19), "{}", process.log());
        for (name, table) in names.iter().zip(["left_one", "kept_one"]) {
            (tool.name, tool.publications) = (name.clone(), table.to_owned());
            tool.run_until_current();
            tool.finish("drop", &[]).expect(0, &[]);
        }
        case.expect_equal(&["left_one", "kept_one"]);
    });
}
