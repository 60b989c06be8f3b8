//! Two servers and a load that a test of faults switches over, there and back.

use std::path::PathBuf;
use std::time::Instant;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Cluster, Pair, Proxy, wait_until};

use super::expected::Fault;
use super::{DDL, LATE, value};
use crate::support::{Finished, PATIENCE, Tool, must};

pub(super) const DB: &str = "postgres";

/// The side that takes writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Old,
    New,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Old => Self::New,
            Self::New => Self::Old,
        }
    }
}

/// Two servers, clients that write to the side that is open, and the process that applies.
pub(super) struct Arena {
    pub(super) pair: Pair,
    pub(super) tool: Tool,
    pub(super) directory: tempfile::TempDir,
    pub(super) process: Process,
    /// In front of the old and of the new side.
    proxies: [Proxy; 2],
    pub(super) side: Side,
    pub(super) number: u32,
    pub(super) begun: Instant,
}

impl Arena {
    pub(super) fn start(publisher: u16, subscriber: u16) -> Self {
        let begun = Instant::now();
        let pair = must(Pair::start(publisher, subscriber));
        for cluster in [&pair.publisher, &pair.subscriber] {
            must(cluster.sql(DB, DDL));
        }
        must(pair.publisher.sql(DB, "CREATE PUBLICATION pub FOR TABLE orders"));
        must(pair.subscriber.sql(DB, "CREATE PUBLICATION pgapace_back FOR TABLE orders"));
        let (there, here) = (pair.publisher.conninfo(DB), pair.subscriber.conninfo(DB));
        let tool = Tool::new(there, here, "shop");
        let directory = must(tempfile::tempdir());
        let process = tool.start(directory.path().join("run-0.log"));
        let proxies =
            [&pair.publisher, &pair.subscriber].map(|side| must(Proxy::in_front_of(side)));
        let arena =
            Self { pair, tool, directory, process, proxies, side: Side::Old, number: 0, begun };
        must(wait_until(PATIENCE, "pgapace to stream", || {
            Ok(arena.process.events("streaming") > 0)
        }));
        arena
    }

    pub(super) fn cluster(&self, side: Side) -> &Cluster {
        match side {
            Side::Old => &self.pair.publisher,
            Side::New => &self.pair.subscriber,
        }
    }

    pub(super) fn proxy(&self, side: Side) -> &Proxy {
        match side {
            Side::Old => &self.proxies[0],
            Side::New => &self.proxies[1],
        }
    }

    /// The tool of a verb that meets this fault. The process that applies is connected directly.
    pub(super) fn verb_tool(&self, fault: Fault) -> Tool {
        let mut tool = self.tool.clone();
        if fault.is_silent() {
            tool.publisher = self.proxies[0].conninfo(DB);
            tool.subscriber = self.proxies[1].conninfo(DB);
        }
        tool
    }

    pub(super) fn cluster_mut(&mut self, side: Side) -> &mut Cluster {
        match side {
            Side::Old => &mut self.pair.publisher,
            Side::New => &mut self.pair.subscriber,
        }
    }

    /// The file that leads clients to the new side.
    pub(super) fn moved(&self) -> PathBuf {
        self.directory.path().join("moved")
    }

    pub(super) fn log(&mut self, name: &str) -> PathBuf {
        self.number += 1;
        self.directory.path().join(format!("{name}-{}.log", self.number))
    }

    /// The command that moves writes to the other side.
    pub(super) fn arguments(&self) -> Vec<String> {
        let moved = self.moved();
        let (action, open) = match self.side {
            Side::Old => ("--go", format!("touch {}", moved.display())),
            Side::New => ("--back", format!("rm -f {}", moved.display())),
        };
        [action, "--open", &open, "--verify", "all"].map(str::to_owned).to_vec()
    }

    pub(super) fn verb(&self, args: &[&str]) -> Finished {
        self.tool.finish("switchover", args)
    }

    /// The same, as soon as sessions of a killed verb have ended and the process applies again.
    pub(super) fn verb_when_free(&self, args: &[&str]) -> Finished {
        let mut last = None;
        let free = wait_until(PATIENCE, "the verb", || {
            let finished = self.verb(args);
            let busy = [
                "another process switches",
                "no process applies",
                "retries after an error",
                "has no subscription",
            ];
            let free = !busy.iter().any(|text| finished.log.contains(text));
            last = Some(finished);
            Ok(free)
        });
        let last = last.expect("it was run");
        free.unwrap_or_else(|error| panic!("{error}: {last:?}\n{}", self.process.log()));
        last
    }

    pub(super) fn switch(&self) -> Finished {
        let arguments = self.arguments();
        let arguments = arguments.iter().map(String::as_str);
        self.verb_when_free(&arguments.chain(["--deadline", LATE]).collect::<Vec<_>>())
    }

    /// The recorded step, or nothing.
    pub(super) fn recorded(&self, to: Side) -> String {
        let name = if to == Side::New { "shop" } else { "shop_back" };
        let sql = format!(
            "SELECT coalesce((SELECT w.step FROM pgapace.switchover w \
               JOIN pgapace.subscription s ON s.id = w.subscription WHERE s.name = '{name}'), '')"
        );
        value(self.cluster(to), DB, &sql)
    }

    pub(super) fn ensure_process(&mut self) {
        if !self.process.is_running() {
            let log = self.log("run");
            self.process = self.tool.start(log);
        }
    }

    /// Moves writes to this side, without a fault.
    pub(super) fn go_to(&mut self, side: Side) {
        if self.side != side {
            let done = self.switch();
            done.expect(0, &[]);
            self.side = side;
        }
    }

    /// Writes work on this side, and arrive at the other one.
    pub(super) fn expect_alive(&mut self, what: &str) {
        self.ensure_process();
        self.number += 1;
        let (here, there) = (self.cluster(self.side), self.cluster(self.side.other()));
        let read_only = "SELECT current_setting('default_transaction_read_only')";
        assert_eq!(value(here, DB, read_only), "off", "{what}");
        let mark = -i64::from(self.number);
        let insert = format!("INSERT INTO orders (client, n) VALUES (-1, {mark})");
        must(here.sql(DB, &insert));
        let arrived = format!("SELECT count(*) FROM orders WHERE client = -1 AND n = {mark}");
        let waited =
            wait_until(PATIENCE, "a row to arrive", || Ok(value(there, DB, &arrived) == "1"));
        waited.unwrap_or_else(|error| panic!("{what}: {error}\n{}", self.process.log()));
    }
}

/// Keeps a verb in the statement that records a step.
pub(super) struct Hold {
    pub(super) holder: Option<Client>,
}

impl Hold {
    pub(super) const INSTALL: &'static str = "CREATE OR REPLACE FUNCTION pgapace.hold() RETURNS trigger \
         LANGUAGE plpgsql AS $$ BEGIN \
             IF EXISTS (SELECT FROM public.held_step h WHERE h.step = NEW.step) \
           THEN PERFORM pg_catalog.pg_advisory_xact_lock(7, 7); END IF; RETURN NEW; END $$; \
         CREATE TABLE IF NOT EXISTS public.held_step (step text); TRUNCATE public.held_step; \
         DROP TRIGGER IF EXISTS hold ON pgapace.switchover; \
         CREATE TRIGGER hold BEFORE INSERT OR UPDATE ON pgapace.switchover \
           FOR EACH ROW EXECUTE FUNCTION pgapace.hold(); \
         ALTER TABLE pgapace.switchover ENABLE ALWAYS TRIGGER hold; \
         SELECT pg_advisory_lock(7, 7);";

    pub(super) fn install(cluster: &Cluster, step: &str) -> Self {
        let mut holder = must(cluster.connect(DB));
        must(holder.batch_execute("SET default_transaction_read_only = off"));
        must(holder.batch_execute(Self::INSTALL));
        must(holder.batch_execute(&format!("INSERT INTO public.held_step VALUES ('{step}')")));
        Self { holder: Some(holder) }
    }

    /// Waits until the verb is held. Returns whether it is, and has not ended before.
    pub(super) fn wait(cluster: &Cluster, verb: &mut Process) -> bool {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                   AND classid = 7 AND objid = 7";
        let held = || value(cluster, DB, sql) == "1";
        let waited =
            wait_until(PATIENCE, "the verb to be held", || Ok(!verb.is_running() || held()));
        waited.unwrap_or_else(|error| panic!("{error}\n{}", verb.log()));
        verb.is_running()
    }

    /// The verb goes on, and is held no more.
    pub(super) fn release(&mut self) {
        self.holder = None;
    }

    /// After the server has started again.
    pub(super) fn remove(cluster: &Cluster) {
        let mut client = must(cluster.connect(DB));
        must(client.batch_execute("SET default_transaction_read_only = off"));
        must(client.batch_execute("TRUNCATE public.held_step"));
    }
}
