//! Observes a run of a subscriber over a backlog, through SQL and /proc.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pgoutput::Lsn;
use testbed::postgres::Client;

use crate::environment::{Environment, MARKER};
use crate::measure::{Meter, Role, Usage};
use crate::round::Replay;

/// Interval of queries for the marker on the subscriber.
const POLL: Duration = Duration::from_millis(10);
/// Interval of progress samples and checks for new processes.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// A run without any applied transaction at its limit gets this multiple of the limit.
const PATIENCE: u32 = 3;
/// A run without progress for this time has failed, regardless of its limit.
const STALLED: Duration = Duration::from_secs(1200);

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Time to the end in seconds, or to the last progress of a stopped run.
    pub(crate) seconds: f64,
    /// Set if the limit was reached: the share of the backlog that had been applied.
    pub(crate) stopped_at: Option<f64>,
    pub(crate) usage: Usage,
    /// The applied share over time.
    pub(crate) curve: Vec<(f64, f64)>,
}

/// Observes a run through SQL.
pub(crate) struct Watch<'a> {
    publisher: Client,
    subscriber: Client,
    slot: &'static str,
    /// Query for the subscriber's processes that apply changes.
    appliers: &'static str,
    start: Lsn,
    end: Lsn,
    limit: Duration,
    environment: &'a Environment,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(
        replay: &Replay<'a>,
        slot: &'static str,
        appliers: &'static str,
    ) -> Result<Self> {
        Ok(Self {
            publisher: replay.environment.publisher.connect(replay.database)?,
            subscriber: replay.environment.subscriber.connect(replay.subscriber)?,
            slot,
            appliers,
            start: replay.start,
            end: replay.end,
            limit: replay.limit,
            environment: replay.environment,
        })
    }

    /// Follows a run until the marker arrives or the limit is reached. `check` returns an error
    /// when the run has failed.
    pub(crate) fn follow(
        &mut self,
        started: Instant,
        meter: &mut Meter,
        mut check: impl FnMut() -> Result<()>,
    ) -> Result<Finished> {
        let marker = self.subscriber.prepare(&format!("SELECT count(*) FROM {MARKER}"))?;
        let mut curve = vec![(0.0, 0.0)];
        let mut sampled_at = started;
        let mut progressed = Duration::ZERO;
        loop {
            let arrived = self.subscriber.query_one(&marker, &[])?.get::<_, i64>(0) > 0;
            let elapsed = started.elapsed();
            meter.sample();
            if arrived {
                self.sample_processes(meter)?;
                meter.sample();
                curve.push((elapsed.as_secs_f64(), 1.0));
                return Ok(self.finished(elapsed, None, meter, curve));
            }
            if sampled_at.elapsed() >= SAMPLE_INTERVAL {
                sampled_at = Instant::now();
                check()?;
                self.sample_processes(meter)?;
                let share = self.share()?;
                if curve.last().is_none_or(|(_, last)| share > *last) {
                    progressed = elapsed;
                }
                curve.push((elapsed.as_secs_f64(), share));
                // Transactions and apply groups become visible as a whole, so only the time of the
                // latest one is meaningful. If none is visible, the run gets more time.
                if elapsed >= self.limit && (share > 0.0 || elapsed >= self.limit * PATIENCE) {
                    return Ok(self.finished(progressed, Some(share), meter, curve));
                }
                ensure!(
                    elapsed - progressed < STALLED.max(self.limit * PATIENCE),
                    "nothing was applied for {:?}:\n{}",
                    elapsed - progressed,
                    self.environment.subscriber.log_tail()
                );
            }
            std::thread::sleep(POLL);
        }
    }

    fn finished(
        &self,
        elapsed: Duration,
        stopped_at: Option<f64>,
        meter: &Meter,
        curve: Vec<(f64, f64)>,
    ) -> Finished {
        Finished { seconds: elapsed.as_secs_f64(), stopped_at, usage: meter.usage(), curve }
    }

    fn sample_processes(&mut self, meter: &mut Meter) -> Result<()> {
        let clients = [&mut self.publisher, &mut self.subscriber];
        watch_processes(meter, clients, self.slot, self.appliers)
    }

    /// The share of the backlog's WAL that is applied. All transactions of a backlog are of the
    /// same kind, so this is also the share of transactions.
    fn share(&mut self) -> Result<f64> {
        let recorded = "SELECT to_regclass('pgapace.progress') IS NOT NULL";
        let sql = if self.subscriber.query_one(recorded, &[])?.get(0) {
            "SELECT coalesce((SELECT lsn FROM pgapace.progress \
                              ORDER BY subscription DESC, lsn DESC LIMIT 1), '0/0')::text"
        } else {
            "SELECT coalesce(max(remote_lsn), '0/0')::text FROM pg_replication_origin_status"
        };
        let applied = crate::environment::lsn(&mut self.subscriber, sql)?;
        let length = self.end.0.saturating_sub(self.start.0).max(1);
        Ok((applied.0.saturating_sub(self.start.0) as f64 / length as f64).min(1.0))
    }
}

/// Watches the walsender of a slot and the subscriber processes that a query returns.
pub(crate) fn watch_processes(
    meter: &mut Meter,
    [publisher, subscriber]: [&mut Client; 2],
    slot: &str,
    appliers: &str,
) -> Result<()> {
    let senders = "SELECT active_pid FROM pg_replication_slots \
                   WHERE slot_name::text = $1 AND active_pid IS NOT NULL";
    for row in publisher.query(senders, &[&slot])? {
        watch_row(meter, Role::Walsender, row.get(0));
    }
    for row in subscriber.query(appliers, &[])? {
        watch_row(meter, Role::Apply, row.get(0));
    }
    Ok(())
}

pub(crate) fn watch_row(meter: &mut Meter, role: Role, pid: i32) {
    if let Ok(pid) = u32::try_from(pid) {
        meter.watch(role, pid);
    }
}
