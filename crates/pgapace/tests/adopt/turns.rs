//! A subscription that goes back and forth between the native worker and pgapace, while a party is killed.

use std::process::Command;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Pair, Program, Result, wait_until};

use super::steps::{Party, Round, Step};
use crate::support::{DB, NAME, PATIENCE, Site, lsn, pgapace};

pub(super) const RATE: f64 = 60.0;

/// Whether a verb failed because of sessions of a process that has just ended, or of transactions that are
/// prepared just now.
fn passes(code: i32, log: &str) -> bool {
    code == 8 || code == 3 && log.contains("prepared")
}

pub(super) struct Turns {
    pub(super) site: Site,
    /// Adoptions whose origin was ahead of the slot's confirmed position, and behind it.
    pub(super) ahead: u32,
    pub(super) behind: u32,
}

impl Turns {
    pub(super) fn start(publisher: u16, subscriber: u16, options: &str) -> Result<Self> {
        let pair = Pair::start_with(
            publisher,
            subscriber,
            |builder| {
                builder
                    .setting("max_prepared_transactions", "20")
                    .setting("logical_decoding_work_mem", "64kB")
            },
            |builder| {
                builder
                    .setting("max_prepared_transactions", "20")
                    .setting("wal_retrieve_retry_interval", "100ms")
            },
        )?;
        let site = Site::of(pair)?;
        site.load_tables()?;
        let conninfo = site.publisher.conninfo(DB).replace('\'', "''");
        let sql = format!(
            "CREATE SUBSCRIPTION {NAME} CONNECTION '{conninfo}' PUBLICATION pub WITH ({options})"
        );
        site.subscriber.sql(DB, &sql)?;
        let ready = "SELECT count(*) FILTER (WHERE srsubstate <> 'r') = 0 FROM pg_subscription_rel";
        let turns = Self { site, ahead: 0, behind: 0 };
        turns.wait("all tables to be ready", ready)?;
        Ok(turns)
    }

    /// Waits until a query on the subscriber, which may start, says true.
    pub(super) fn wait(&self, what: &str, sql: &str) -> Result<()> {
        wait_until(PATIENCE, what, || {
            Ok(self.site.subscriber.query_one_text(DB, sql).is_ok_and(|value| value == "t"))
        })
    }

    pub(super) fn verb(&self, verb: &str) -> Program {
        let program = pgapace(verb)
            .args(["--publisher", &self.site.publisher.conninfo(DB)])
            .args(["--subscriber", &self.site.subscriber.conninfo(DB)])
            .args(["--name", NAME]);
        if verb == "adopt" { program.args(["--subscription", NAME]) } else { program }
    }

    /// Runs a verb to its end: exit code and output.
    pub(super) fn finish(&self, program: &Program) -> Result<(i32, String)> {
        let mut process = self.site.spawn(program)?;
        process.wait(PATIENCE)?;
        Ok((process.exit_code().unwrap_or(-1), process.log()))
    }

    /// Runs a verb until it does not fail for a reason that passes.
    pub(super) fn finish_when_free(&self, program: &Program) -> Result<(i32, String)> {
        let mut last = None;
        wait_until(PATIENCE, "the verb", || {
            let (code, log) = self.finish(program)?;
            let done = !passes(code, &log);
            last = Some((code, log));
            Ok(done)
        })
        .map_err(|error| testbed::Error::other(format!("{error}: {last:?}")))?;
        Ok(last.unwrap_or_default())
    }

    /// `t|sub` for a native subscription that runs, `f|` for one that was adopted.
    pub(super) fn native(&self) -> Result<String> {
        let sql = "SELECT CASE WHEN subenabled THEN 't' ELSE 'f' END || '|' || coalesce(subslotname, '') FROM pg_subscription";
        self.site.subscriber.query_one_text(DB, sql)
    }

    pub(super) fn rows(&self) -> u64 {
        let count = self.site.subscriber.query_one_text(DB, "SELECT count(*) FROM pgbench_history");
        count.ok().and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Waits until some of the load more is applied.
    pub(super) fn wait_for_more(&self) -> Result<()> {
        let enough = self.rows() + 30;
        wait_until(PATIENCE, "more rows", || Ok(self.rows() >= enough))
    }

    pub(super) fn kill(&mut self, party: Party, process: &mut Process) -> Result<()> {
        match party {
            Party::Pgapace => process.kill9(),
            Party::Publisher => {
                self.site.publisher.kill9()?;
                self.site.publisher.start()
            }
            Party::Subscriber => {
                self.site.subscriber.kill9()?;
                self.site.subscriber.start()
            }
            Party::NativeWorker => {
                let sql = "SELECT pid FROM pg_stat_subscription \
                           WHERE pid IS NOT NULL AND relid IS NULL ORDER BY pid LIMIT 1";
                let pid = self.site.subscriber.query_one_text(DB, sql)?;
                Command::new("kill").args(["-9", &pid]).status()?;
                let gone =
                    format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})");
                self.wait("the worker's end", &gone)
            }
        }
    }

    /// Takes the lock that holds a verb in this step.
    pub(super) fn block(&self, step: Step) -> Result<Client> {
        let mut blocker: Client = self.site.subscriber.connect(DB)?;
        let lock = format!("BEGIN; {}", step.lock());
        if step != Step::Ending {
            blocker.batch_execute(&lock)?;
            return Ok(blocker);
        }
        // A worker that is idle when the subscription is disabled ends at once. If one waits while a
        // transaction is prepared, the checks refuse the adoption for as long as it waits.
        let waits = "SELECT count(*) > 0 FROM pg_stat_activity \
                     WHERE wait_event_type = 'Lock' AND backend_type LIKE 'logical replication%'";
        let prepared = "SELECT count(*) FROM pg_prepared_xacts";
        wait_until(PATIENCE, "a worker that waits, and nothing prepared", || {
            blocker.batch_execute(&lock)?;
            self.wait("a worker to wait for the lock", waits)?;
            let usable = self.site.subscriber.query_one_text(DB, prepared)? == "0";
            if !usable {
                blocker.batch_execute("ROLLBACK")?;
            }
            Ok(usable)
        })?;
        Ok(blocker)
    }

    /// Runs a verb, and kills a party in a step of it. Returns its log, and its exit code unless it was
    /// killed.
    pub(super) fn interrupted(
        &mut self,
        program: &Program,
        step: Step,
        party: Party,
    ) -> Result<(Option<i32>, String)> {
        let mut blocker = self.block(step)?;
        let mut verb = self.site.spawn(program)?;
        wait_until(PATIENCE, "the step", || {
            if !verb.is_running() {
                let (code, log) = (verb.exit_code().unwrap_or(-1), verb.log());
                assert!(passes(code, &log), "{step:?}: {code}: {log}");
                verb = self.site.spawn(program)?;
            }
            Ok(self.site.subscriber.query_one_text(DB, step.reached())? == "t")
        })?;
        self.kill(party, &mut verb)?;
        // The server may have ended it.
        let _ = blocker.batch_execute("ROLLBACK");
        if party == Party::Pgapace {
            return Ok((None, verb.log()));
        }
        verb.wait(PATIENCE)?;
        Ok((verb.exit_code(), verb.log()))
    }

    pub(super) fn adopt(&mut self, (step, party): Round, number: usize) -> Result<()> {
        let (code, log) = self.interrupted(&self.verb("adopt"), step, party)?;
        let what = format!("{step:?}, {party:?}: {log}");
        match code {
            None => {}
            Some(0) => assert_eq!(self.native()?, "f|", "{what}"),
            // It says either that all is as before, or what is to be run.
            Some(_) if log.contains("is as before") => {
                assert_eq!(self.native()?, format!("t|{NAME}"), "{what}");
                let begun = "SELECT count(*) FROM pgapace.adoption";
                assert_eq!(self.site.subscriber.query_one_text(DB, begun)?, "0", "{what}");
            }
            Some(code) => {
                // A failure of the checks before the first step changes nothing.
                let untouched = step == Step::Disabling && self.native()? == format!("t|{NAME}");
                assert!(untouched || log.contains("pgapace adopt"), "{code}: {what}");
            }
        }
        if number.is_multiple_of(2) {
            let (code, log) = self.finish_when_free(&self.verb("adopt").arg("--abort"))?;
            let expected = if code == 0 { "is enabled" } else { "no adoption" };
            assert!(log.contains(expected) && [0, 3].contains(&code), "{what}\n{code}: {log}");
        }
        let (code, log) = self.finish_when_free(&self.verb("adopt"))?;
        assert!(code == 0 || log.contains("is adopted already"), "{what}\n{code}: {log}");
        assert_eq!(self.native()?, "f|", "{what}");
        self.count_positions(&log)
    }

    /// Counts by the positions that `adopt` has printed.
    pub(super) fn count_positions(&mut self, log: &str) -> Result<()> {
        let position = |before: &str| {
            log.lines().find_map(|line| line.trim().strip_prefix(before)).map(lsn).transpose()
        };
        let origin = position("applied by the native subscription: up to ")?;
        let confirmed = position(&format!("confirmed by slot {NAME}: "))?;
        self.ahead += u32::from(confirmed.is_some() && origin > confirmed);
        self.behind += u32::from(origin.is_some() && origin < confirmed);
        Ok(())
    }

    /// pgapace applies for a while, in which a party is killed.
    pub(super) fn run(&mut self, party: Party) -> Result<()> {
        let program = self.site.program();
        let mut process = self.site.spawn_streaming(&program)?;
        self.wait_for_more()?;
        self.kill(party, &mut process)?;
        if party == Party::Pgapace {
            process = self.site.spawn_streaming(&program)?;
        }
        self.wait_for_more()?;
        process.terminate()?;
        process.wait(PATIENCE)?;
        Ok(())
    }

    pub(super) fn release(&mut self, party: Party) -> Result<()> {
        // A transaction may be held as prepared.
        for _ in 0..20 {
            let (code, log) = self.finish(&self.verb("release").arg("--dry-run"))?;
            if code == 0 {
                break;
            }
            assert!(code == 8 || log.contains("prepared"), "{code}: {log}");
            let current = self.site.program().args(["--until", "current"]);
            self.finish(&current)?;
        }
        let (code, log) = self.interrupted(&self.verb("release"), Step::Releasing, party)?;
        if code != Some(0) {
            let (code, again) = self.finish_when_free(&self.verb("release"))?;
            assert!(code == 0 || again.contains("has no subscription"), "{log}\n{code}: {again}");
        }
        assert_eq!(self.native()?, format!("t|{NAME}"), "{log}");
        Ok(())
    }

    /// The slot's position is ahead of the origin where nothing published was written.
    pub(super) fn adopt_idle(&mut self) -> Result<()> {
        self.site.publisher.sql(DB, "UPDATE pgbench_branches SET filler = 'idle'")?;
        let origin = "SELECT pg_replication_origin_progress('pg_' || oid, false) > '0/0' \
                      FROM pg_subscription";
        self.wait("the origin", origin)?;
        self.site
            .publisher
            .sql(DB, "CREATE TABLE unpublished AS SELECT generate_series(1, 1000)")?;
        let end = lsn(&self.site.publisher_lsn()?)?;
        wait_until(PATIENCE, "the slot", || Ok(self.site.confirmed()? >= end))?;
        let (code, log) = self.finish(&self.verb("adopt"))?;
        assert_eq!(code, 0, "{log}");
        self.count_positions(&log)?;
        assert_eq!(self.behind, 1, "{log}");
        Ok(())
    }
}
