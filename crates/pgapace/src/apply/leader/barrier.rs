//! The leader's side of a barrier ([`crate::barrier`]): chunks that arrive are taken later, or not at
//! all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvError, never};
use engine::barrier::Barrier;
use pgoutput::Lsn;

use super::{Leader, TICK};
use crate::barrier::keeper::{HOLD_LIMIT, Keeper, KeeperAnswer, KeeperContext, KeeperOrder};
use crate::error::{Class, Failure, Result};

/// A barrier in the stream, and the chunks that have arrived and are not taken because of it.
pub(super) struct StreamBarrier {
    context: KeeperContext,
    keeper: Option<Keeper>,
    /// Stands in for the orders of a keeper.
    no_orders: Receiver<KeeperOrder>,
    state: Barrier,
    /// With the time of arrival.
    delayed: VecDeque<(Instant, Bytes)>,
    held: Option<HeldStream>,
}

/// Where the stream holds.
#[derive(Debug, Clone, Copy)]
struct HeldStream {
    lsn: Lsn,
    /// Since when a transaction waits, or all of them are committed.
    since: Option<Instant>,
    /// When everything before was committed.
    reached: Option<Instant>,
}

impl HeldStream {
    /// Whether nothing has been applied for too long because of it. It may not just go on: a verb may write by what
    /// the subscriber has there. The next run ends the verb's session, and its barrier, before it applies anything.
    fn is_overdue(&self, now: Instant) -> bool {
        self.reached.is_some_and(|reached| now.duration_since(reached) > HOLD_LIMIT)
    }
}

impl StreamBarrier {
    pub(super) fn new(context: KeeperContext) -> Self {
        Self {
            context,
            keeper: None,
            no_orders: never(),
            state: Barrier::default(),
            delayed: VecDeque::new(),
            held: None,
        }
    }

    pub(super) fn orders(&self) -> &Receiver<KeeperOrder> {
        self.keeper.as_ref().map_or(&self.no_orders, |keeper| &keeper.orders)
    }

    /// Whether a verb needs the barrier, now or in a moment.
    pub(super) fn is_asked_for(&self) -> bool {
        self.keeper.is_some()
    }

    /// Whether a transaction with this commit LSN is taken now.
    pub(super) fn admits(&mut self, commit_lsn: Lsn) -> bool {
        let admits = self.state.admits(commit_lsn);
        if !admits && let Some(held) = &mut self.held {
            held.since.get_or_insert_with(Instant::now);
        }
        admits
    }

    /// Keeps bytes that begin with a transaction that is not taken now.
    pub(super) fn keep(&mut self, bytes: Bytes) {
        self.delayed.push_front((Instant::now(), bytes));
    }

    /// Whether the receiver may be read. While transactions are delayed they wait here, where the time of
    /// their arrival is known.
    pub(super) fn may_receive(&self) -> bool {
        self.delayed.is_empty() || self.state.delayed().is_some()
    }

    /// The next chunk to take, or how long until there is one.
    fn next(&mut self) -> std::result::Result<Bytes, Duration> {
        let Some((arrived, _)) = self.delayed.front() else { return Err(TICK) };
        if self.state.has_stopped() {
            return Err(TICK);
        }
        let delay = self.state.delayed().unwrap_or_default();
        let left = delay.saturating_sub(arrived.elapsed());
        if !left.is_zero() {
            return Err(left);
        }
        self.delayed.pop_front().map(|(_, bytes)| bytes).ok_or(TICK)
    }
}

impl Leader<'_> {
    /// A verb has requested a barrier, or none has.
    pub(super) fn barrier_requested(&mut self, requested: bool) -> Result<()> {
        let barrier = &mut self.barrier;
        if requested && barrier.keeper.is_none() && self.intake.closing().is_none() {
            barrier.keeper = Some(Keeper::spawn(barrier.context.clone())?);
        }
        Ok(())
    }

    /// The keeper has ordered something, or has ended.
    pub(super) fn keeper_ordered(
        &mut self,
        order: std::result::Result<KeeperOrder, RecvError>,
    ) -> Result<()> {
        let barrier = &mut self.barrier;
        match order {
            Ok(KeeperOrder::Delay(delay)) => barrier.state.delay(delay),
            Ok(KeeperOrder::Hold(lsn)) => match barrier.state.hold(lsn) {
                Ok(()) => barrier.held = Some(HeldStream { lsn, since: None, reached: None }),
                Err(_) => self.answer_keeper(KeeperAnswer::Passed(lsn)),
            },
            Ok(KeeperOrder::Release) => self.release_barrier(),
            Err(RecvError) => {
                self.release_barrier();
                self.barrier.keeper = None;
            }
        }
        Ok(())
    }

    fn answer_keeper(&self, answer: KeeperAnswer) {
        if let Some(keeper) = &self.barrier.keeper {
            // If the keeper has ended, the next event says so.
            let _ = keeper.answers.send(answer);
        }
    }

    fn release_barrier(&mut self) {
        self.barrier.state.release();
        if let Some(HeldStream { lsn, since: Some(since), .. }) = self.barrier.held.take() {
            tracing::info!(
                event = "barrier_released",
                subscription = self.barrier.context.name,
                %lsn,
                held_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
                "stream was held at an LSN for snapshots of both servers"
            );
        }
    }

    /// Takes a chunk now, or when the delay of a barrier is over.
    pub(super) fn take_or_delay(&mut self, bytes: &Bytes) -> Result<()> {
        if self.barrier.state.delayed().is_some() {
            self.barrier.delayed.push_back((Instant::now(), bytes.clone()));
            return Ok(());
        }
        self.take_chunk(bytes)
    }

    /// Takes the chunks that were delayed long enough. Returns how long there are no more.
    pub(super) fn take_delayed(&mut self) -> Result<Duration> {
        if self.barrier.keeper.is_none() && self.barrier.delayed.is_empty() {
            return Ok(TICK);
        }
        // Before anything that lies behind the barrier is taken.
        while let Ok(order) = self.barrier.orders().try_recv() {
            self.keeper_ordered(Ok(order))?;
        }
        while self.intake.may_receive(self.pauses()) {
            match self.barrier.next() {
                Ok(bytes) => self.take_chunk(&bytes)?,
                Err(left) => return Ok(left),
            }
        }
        Ok(TICK)
    }

    /// Tells the keeper when everything before the barrier is committed.
    pub(super) fn look_at_barrier(&mut self) -> Result<()> {
        let received = self.intake.progress.positions().write;
        let (intake, around) = (&self.intake, &self.around);
        if self.barrier.state.reached(received, || intake.is_committed(around))
            && let Some(held) = &mut self.barrier.held
        {
            let now = Instant::now();
            held.since.get_or_insert(now);
            held.reached = Some(now);
            let reached = KeeperAnswer::Reached(held.lsn);
            self.answer_keeper(reached);
        }
        match &self.barrier.held {
            Some(held) if held.is_overdue(Instant::now()) => {
                let message = format!("the stream was held at {} for too long", held.lsn);
                let failure = Failure::new(Class::Busy, message).transient(true);
                Err(failure.hint("Run pgapace verify or repair again; the stream goes on."))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_not_held_without_limit_once_everything_before_is_committed() {
        let begun = Instant::now();
        let later = begun + HOLD_LIMIT + Duration::from_secs(1);
        let held = HeldStream { lsn: Lsn(16), since: Some(begun), reached: None };
        assert!(!held.is_overdue(later), "transactions before it may take long");
        let held = HeldStream { reached: Some(begun), ..held };
        assert!(!held.is_overdue(begun + HOLD_LIMIT) && held.is_overdue(later));
    }
}
