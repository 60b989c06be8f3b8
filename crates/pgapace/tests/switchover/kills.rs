//! A switchover whose verb is killed in any step.

use std::time::Duration;

use testbed::postgres::{Client, Transaction};
use testbed::wait_until;

use super::failures::{Held, breakable_case, expect_before, when_free};
use super::{LATE, Slots, switchover, value};
use crate::support::{Case, PATIENCE, must, one_or_all};

/// A transaction of the subscriber that keeps a switchover in a step.
pub(super) struct Blockade {
    pub(super) step: &'static str,
    args: &'static [&'static str],
    sql: &'static str,
}

impl Blockade {
    /// Starts a switchover, and lets it reach the step, which then waits for the transaction of `client`.
    pub(super) fn reach<'c>(&self, case: &Case, client: &'c mut Client) -> (Held, Transaction<'c>) {
        let mut held = Held::start(case, self.step, self.args);
        let mut blocker = must(client.transaction());
        must(blocker.batch_execute(self.sql));
        if self.step == "draining" {
            case.publisher.sql("INSERT INTO orders (client, n) VALUES (-1, -1)");
        }
        if self.step != "stopping" {
            held.go_on();
        }
        let reached = wait_until(PATIENCE, "the step", || {
            assert!(held.process.is_running(), "{}: {}", self.step, held.process.log());
            Ok(value(case.subscriber.cluster, &case.publisher.name, STEP) == self.step)
        });
        reached.unwrap_or_else(|error| panic!("{}: {error}", self.step));
        // The step is recorded before it waits; nothing tells when it does.
        std::thread::sleep(Duration::from_millis(100));
        (held, blocker)
    }
}

/// The step that is recorded.
pub(super) const STEP: &str = "SELECT coalesce(max(step), '') FROM pgapace.switchover";

pub(super) const BLOCKADES: &[Blockade] = &[
    Blockade { step: "stopping", args: &[], sql: "SELECT 1" },
    Blockade { step: "draining", args: &[], sql: "LOCK TABLE orders IN SHARE MODE" },
    Blockade {
        step: "aside",
        args: &[],
        sql: "LOCK TABLE pgapace.hand_over IN SHARE ROW EXCLUSIVE MODE",
    },
    Blockade {
        step: "verifying",
        args: &["--verify", "orders"],
        sql: "LOCK TABLE orders IN ACCESS EXCLUSIVE MODE",
    },
    Blockade {
        step: "sequences",
        args: &[],
        sql: "ALTER SEQUENCE orders_id_seq OWNED BY orders.id",
    },
    Blockade { step: "slot", args: &[], sql: "INSERT INTO other VALUES (1)" },
];

/// The verb is killed in each step. Then it is undone, or begun again.
#[test]
fn a_kill_in_any_step_is_undone_or_resumed() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = breakable_case(publisher, subscriber);
        let _slots = Slots(&case);
        let mut process = case.start();
        let database = case.publisher.name.clone();
        for (number, blockade) in BLOCKADES.iter().enumerate() {
            let mut client = case.subscriber.connect();
            let (mut held, blocker) = blockade.reach(&case, &mut client);
            must(held.process.kill9());
            held.go_on();
            must(blocker.rollback());
            drop(client);
            if number % 2 == 0 {
                let undone = when_free(&case, &["--abort"]);
                undone.expect(0, &["event=\"switchover_undone\""]);
                expect_before(&case, &mut process);
                switchover(&case.tool, &["--abort"]).expect(0, &[]);
            } else {
                // It begins again, and fails in the end.
                let args = ["--go", "--stop-writes", "exit 7", "--resume-writes", "true"];
                let failed = when_free(&case, &args);
                failed.expect(3, &["event=\"switchover_undone\"", "Everything was undone"]);
                expect_before(&case, &mut process);
            }
        }
        // Killed after the subscription has ended.
        let program = case.tool.program("switchover").args([
            "--go",
            "--deadline",
            LATE,
            "--open",
            "sleep 600",
        ]);
        let mut ended = must(program.spawn_logged(case.log_file("ended")));
        must(wait_until(PATIENCE, "the end of the subscription", || {
            assert!(ended.is_running(), "{}", ended.log());
            Ok(value(case.subscriber.cluster, &database, STEP) == "ended")
        }));
        must(ended.kill9());
        when_free(&case, &["--abort"]).expect(3, &["nothing can be undone"]);
        when_free(&case, &["--go", "--open", "true"]).expect(0, &[]);
        must(wait_until(PATIENCE, "the way back", || Ok(process.events("applies_way_back") == 1)));
        case.stop(process);
    }
}
