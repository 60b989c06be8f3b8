//! The keeper: the thread of the running process that fulfils requests for barriers.
//!
//! It has the sessions, the leader has the stream. The leader never waits for it: an order of the keeper
//! is one event among others.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use pgoutput::Lsn;
use wire::Session;

use super::row::{self, BarrierId, BarrierRequest};
use crate::apply::thread;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::scoped_thread;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::tablesync::Snapshot;

/// By how much the first attempt delays chunks that arrive. It has to last from the moment in which the
/// publisher fixes the LSN until the leader knows it.
const FIRST_DELAY: Duration = Duration::from_millis(15);
/// Between its attempts to get a session. Each one that is refused is logged, and the verb waits for half a minute.
const CONNECT_PAUSES: [Duration; 6] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(16),
];
/// How often the keeper looks for the next request, and whether the present one is still wanted.
const POLL: Duration = Duration::from_millis(20);
/// How often it looks whether a slot that is being created is still wanted.
const SLOW_POLL: Duration = Duration::from_millis(300);
/// How long the keeper waits for another request before it ends. A verb may need many barriers.
const LINGER: Duration = Duration::from_secs(5);
/// How long snapshots wait to be imported.
const IMPORT_TERM: Duration = Duration::from_secs(60);
/// How long a request may hold the stream. Usually that takes milliseconds. A table without a key is read
/// meanwhile, on both sides.
const HOLD_TERM: Duration = Duration::from_secs(60);
/// How long the leader holds the stream if the keeper does not order it to go on, as when the publisher does not
/// answer it.
pub(crate) const HOLD_LIMIT: Duration = Duration::from_secs(120);
/// How long the stream waits for the end of the verb's transaction, after that.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// An order of the keeper to the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeeperOrder {
    /// Take transactions this much later than they arrive.
    Delay(Duration),
    /// Take nothing that commits at or behind this LSN.
    Hold(Lsn),
    /// Go on.
    Release,
}

/// The answer of the leader to [`KeeperOrder::Hold`] at this LSN. A keeper that no longer waits for an answer
/// may find it when it waits for the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeeperAnswer {
    /// Everything before the LSN is committed, and nothing else.
    Reached(Lsn),
    /// Something behind the LSN was taken before the order came.
    Passed(Lsn),
}

impl KeeperAnswer {
    /// Whether the stream holds there, if this is the answer about `lsn`.
    fn about(self, lsn: Lsn) -> Option<bool> {
        match self {
            Self::Reached(at) => (at == lsn).then_some(true),
            Self::Passed(at) => (at == lsn).then_some(false),
        }
    }
}

/// The servers and the subscription of a keeper.
#[derive(Debug, Clone)]
pub(crate) struct KeeperContext {
    pub(crate) publisher: Publisher,
    pub(crate) subscriber: Subscriber,
    pub(crate) id: SubscriptionId,
    /// The subscription's name.
    pub(crate) name: String,
}

/// A running keeper. Dropping it ends its thread and its sessions.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) orders: Receiver<KeeperOrder>,
    pub(crate) answers: Sender<KeeperAnswer>,
    ended: Shutdown,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    pub(crate) fn spawn(context: KeeperContext) -> Result<Self> {
        let (sender, orders) = unbounded();
        let (answers, inbox) = unbounded();
        let ended = Shutdown::default();
        let mut keeping = Keeping { context, orders: sender, answers: inbox, ended: ended.clone() };
        let thread = thread::spawn("barrier".to_owned(), move || {
            if let Err(failure) = keeping.run() {
                warn(&failure);
            }
        })?;
        Ok(Self { orders, answers, ended, thread: Some(thread) })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.ended.request();
        if let Some(thread) = self.thread.take().filter(JoinHandle::is_finished) {
            drop(thread.join());
        }
        // One that still connects is left behind: it finds out that it must end before it has done
        // anything.
    }
}

struct Keeping {
    context: KeeperContext,
    orders: Sender<KeeperOrder>,
    answers: Receiver<KeeperAnswer>,
    ended: Shutdown,
}

impl Keeping {
    fn run(&mut self) -> Result<()> {
        let Some(mut control) = self.connect() else { return Ok(()) };
        let mut idle_since = Instant::now();
        while !self.ended.requested() && idle_since.elapsed() < LINGER {
            let Some(request) = row::find_request(&mut control, self.context.id)? else {
                self.ended.sleep(POLL);
                continue;
            };
            let served = self.serve(&mut control, request);
            // The stream goes on in any case.
            self.order(KeeperOrder::Release);
            if let Err(failure) = served {
                if self.ended.requested() {
                    return Ok(());
                }
                row::failed(&mut control, request.id, &failure)?;
                warn(&failure);
            }
            idle_since = Instant::now();
        }
        Ok(())
    }

    /// A session for the row. `None` if the keeper must end, or was refused again and again. It pauses after the last
    /// attempt, too, because the leader starts another keeper a moment after this one has ended.
    fn connect(&self) -> Option<Session> {
        for pause in CONNECT_PAUSES {
            match row::connect(&self.context.subscriber) {
                Ok(session) => return Some(session),
                Err(failure) => warn(&failure),
            }
            self.ended.sleep(pause);
            if self.ended.requested() {
                return None;
            }
        }
        None
    }

    /// The leader may have ended.
    fn order(&self, order: KeeperOrder) {
        let _ = self.orders.send(order);
    }

    fn serve(&self, control: &mut Session, request: BarrierRequest) -> Result<()> {
        let mut exporter = self.context.subscriber.connect(Purpose::Look)?;
        for attempt in 0..request.attempts {
            let delay = FIRST_DELAY * 2_u32.pow(attempt);
            self.order(KeeperOrder::Delay(delay));
            let Some((snapshot, mut holder)) = self.create_slot(control, request.id)? else {
                return Ok(());
            };
            row::created(control, request.id, snapshot.lsn)?;
            let is_wanted = || self.is_wanted(control, request.id);
            match holds_at(&self.answers, snapshot.lsn, is_wanted)? {
                None => return Ok(()),
                Some(false) => {
                    tracing::debug!(?delay, lsn = %snapshot.lsn, "barrier was passed");
                    continue;
                }
                Some(true) => {}
            }
            let exported = export(&mut exporter)?;
            if !request.holds {
                self.order(KeeperOrder::Release);
            }
            let (lsn, name) = (snapshot.lsn, snapshot.name());
            // A session that is lost meanwhile may have told the verb.
            let ended = row::ready(control, request.id, lsn, name, &exported)
                .and_then(|()| self.wait_for_import(control, request));
            self.end(control, request.id)?;
            self.order(KeeperOrder::Release);
            ended?;
            return snapshot.release(&mut holder);
        }
        Err(Failure::new(
            Class::Busy,
            "the stream passed the LSN of each new slot before the slot was ready",
        )
        .hint("Run the verb again when the machine of pgapace is less busy."))
    }

    /// Deletes the row of a barrier that is ready, after the verb's transaction has ended. The stream must
    /// not go on before: a keeper whose session is lost tries again with another one, until the run ends.
    /// The next run deletes the row before it applies anything.
    fn end(&self, control: &mut Session, id: BarrierId) -> Result<()> {
        loop {
            let failure = match row::delete(control, id, END_PATIENCE) {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            tracing::debug!(%failure, "the end of a barrier was not recorded");
            if self.ended.requested() {
                return Err(failure);
            }
            self.ended.sleep(SLOW_POLL);
            match row::connect(&self.context.subscriber) {
                Ok(another) => *control = another,
                Err(failure) => tracing::debug!(%failure, "another session was refused"),
            }
        }
    }

    /// Creates a temporary slot, and has the stream hold at its LSN. `None` if that is not wanted any
    /// more.
    fn create_slot(
        &self,
        control: &mut Session,
        id: BarrierId,
    ) -> Result<Option<(Snapshot, Session)>> {
        let mut holder = self.context.publisher.connect()?;
        row::creating(control, id, holder.backend_pid())?;
        let name = slot::temporary_name(&mut holder, self.context.id)?;
        let abort = Shutdown::default();
        let (done, created) = crossbeam_channel::bounded::<()>(0);
        let slot = std::thread::scope(|scope| {
            scoped_thread::spawn(scope, "barrier watch", || {
                while created.recv_timeout(SLOW_POLL) == Err(RecvTimeoutError::Timeout) {
                    if !self.is_wanted(control, id).unwrap_or(true) {
                        abort.request();
                    }
                }
            })?;
            let sessions = [holder.cancel_handle()];
            let created = interruptible(&abort, &sessions, "creating a slot", || {
                slot::create_then(&mut holder, &name, slot::Kind::Temporary, &mut |lsn| {
                    self.order(KeeperOrder::Hold(lsn));
                })
            });
            drop(done);
            created
        });
        match slot {
            Ok(slot) => Ok(Some((Snapshot::of_slot(&slot), holder))),
            Err(failure) if failure.class == Class::Stopped => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    fn is_wanted(&self, control: &mut Session, id: BarrierId) -> Result<bool> {
        Ok(!self.ended.requested() && row::is_wanted(control, id)?)
    }

    /// Waits until the verb has deleted the row.
    fn wait_for_import(&self, control: &mut Session, request: BarrierRequest) -> Result<()> {
        let since = Instant::now();
        let term = if request.holds { HOLD_TERM } else { IMPORT_TERM };
        while self.is_wanted(control, request.id)? {
            if since.elapsed() > term {
                let message = format!("the verb did not use the barrier within {term:?}");
                return Err(Failure::new(Class::Busy, message)
                    .hint("Run the verb again; the stream goes on."));
            }
            self.ended.sleep(POLL);
        }
        Ok(())
    }
}

fn warn(failure: &Failure) {
    tracing::warn!(
        event = "barrier_failed",
        error = %failure,
        "barrier for pgapace verify or repair failed"
    );
}

/// Waits for the leader's answer about an LSN: whether the stream holds there. `None` if the barrier is not
/// wanted any more.
fn holds_at(
    answers: &Receiver<KeeperAnswer>,
    lsn: Lsn,
    mut is_wanted: impl FnMut() -> Result<bool>,
) -> Result<Option<bool>> {
    loop {
        match answers.recv_timeout(SLOW_POLL) {
            Ok(answer) => {
                if let Some(holds) = answer.about(lsn) {
                    return Ok(Some(holds));
                }
            }
            Err(RecvTimeoutError::Timeout) if is_wanted()? => {}
            Err(_) => return Ok(None),
        }
    }
}

/// Exports a snapshot, which can be imported while the session's transaction is open.
fn export(session: &mut Session) -> Result<String> {
    let results = session
        .simple_each([slot::BEGIN_READING, "SELECT pg_catalog.pg_export_snapshot()"])
        .map_err(|e| Failure::subscriber(&e, "exporting a snapshot"))?;
    field(&first_row(&results[1], "pg_export_snapshot")?, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer to a barrier that was given up must not serve the next one: its stream is not held there.
    #[test]
    fn an_answer_about_an_earlier_barrier_is_ignored() {
        let (leader, answers) = unbounded();
        for answer in [KeeperAnswer::Reached(Lsn(16)), KeeperAnswer::Passed(Lsn(32))] {
            leader.send(answer).unwrap();
        }
        assert_eq!(holds_at(&answers, Lsn(32), || Ok(true)).unwrap(), Some(false));
        for answer in [KeeperAnswer::Passed(Lsn(32)), KeeperAnswer::Reached(Lsn(48))] {
            leader.send(answer).unwrap();
        }
        assert_eq!(holds_at(&answers, Lsn(48), || Ok(true)).unwrap(), Some(true));
        leader.send(KeeperAnswer::Reached(Lsn(48))).unwrap();
        assert_eq!(holds_at(&answers, Lsn(64), || Ok(false)).unwrap(), None);
    }
}
