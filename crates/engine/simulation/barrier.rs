//! The keeper of a barrier: it creates a slot, has the stream held at its LSN, and exports a snapshot.
//!
//! The LSN is fixed at some moment: the publisher has committed all that was sent, and perhaps more. The leader
//! hears of it later, when it may have taken what lies behind. A snapshot of the subscriber must have exactly
//! the transactions that commit before the LSN, whatever happened to runs, sessions and servers before, and
//! nothing may be added until the stream goes on.

use engine::barrier::Barrier;
use pgoutput::Lsn;

use crate::simulation::history::{History, Set};
use crate::simulation::rng::Rng;
use crate::simulation::run::Run;
use crate::simulation::subscriber::Database;
use crate::simulation::{Sabotage, Seen};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeeperState {
    Idle,
    /// The stream is delayed while the slot is created.
    Delaying,
    /// The LSN is fixed, and the leader does not know it.
    Created(Lsn),
    Holding(Lsn),
    /// The snapshot shows these transactions.
    Held(Set),
}

/// A keeper, and for how many barriers it is asked.
#[derive(Debug)]
pub(crate) struct Keeper {
    state: KeeperState,
    left: usize,
}

impl Keeper {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        Self { state: KeeperState::Idle, left: rng.one_of(&[0, 0, 1, 6]) }
    }

    /// The run has ended: no verb holds the stream.
    pub(crate) fn restart(&mut self) {
        self.state = KeeperState::Idle;
    }

    /// Whether the keeper can do something, and how eagerly.
    pub(crate) fn eagerness(&self) -> usize {
        match self.state {
            KeeperState::Idle => usize::from(self.left > 0),
            KeeperState::Holding(_) => 0,
            KeeperState::Delaying | KeeperState::Created(_) | KeeperState::Held(_) => 2,
        }
    }

    /// The next step. `farthest`: what any run has received, which the publisher has committed.
    pub(crate) fn step(
        &mut self,
        run: &mut Run,
        history: &History,
        farthest: Lsn,
        rng: &mut Rng,
        sabotage: Sabotage,
        seen: &mut Seen,
    ) {
        self.state = match self.state {
            KeeperState::Idle => {
                self.left -= 1;
                run.barrier.delay(std::time::Duration::ZERO);
                KeeperState::Delaying
            }
            KeeperState::Delaying => {
                let (first, end) = (farthest.max(run.sent), history.end());
                let places: Vec<Lsn> = history
                    .wal
                    .iter()
                    .flat_map(|record| [record.at, record.end])
                    .filter(|at| *at >= first && *at <= end)
                    .chain([first.max(end)])
                    .collect();
                KeeperState::Created(rng.one_of(&places))
            }
            KeeperState::Created(lsn) => {
                if sabotage == Sabotage::PassedBarrier {
                    run.barrier = Barrier::default();
                }
                match run.barrier.hold(lsn) {
                    Ok(()) => KeeperState::Holding(lsn),
                    Err(_) => {
                        seen.passed += 1;
                        // Another attempt, until one succeeds.
                        run.barrier.delay(std::time::Duration::ZERO);
                        KeeperState::Delaying
                    }
                }
            }
            KeeperState::Holding(_) => self.state,
            KeeperState::Held(_) => {
                run.barrier.release();
                KeeperState::Idle
            }
        };
    }

    /// After each event: whether the stream has come to the barrier, and stays there.
    pub(crate) fn look(
        &mut self,
        run: &mut Run,
        history: &History,
        subscriber: &Database,
        sabotage: Sabotage,
        seen: &mut Seen,
    ) -> Result<(), String> {
        match self.state {
            KeeperState::Holding(lsn) => {
                let received = match sabotage {
                    Sabotage::UnreceivedBarrier => Lsn(u64::MAX),
                    _ => run.intake.progress.positions().write,
                };
                let (intake, outside) = (&run.intake, &run.outside);
                let committed =
                    || sabotage == Sabotage::HastyBarrier || intake.is_committed(outside);
                if !run.barrier.reached(received, committed) {
                    return Ok(());
                }
                seen.barriers += 1;
                let shown = subscriber.committed;
                let transactions = history.transactions.iter().enumerate();
                let before = transactions.filter(|(_, one)| one.commit_lsn < lsn);
                let expected = before.fold(0, |set: Set, (number, _)| set | 1 << number);
                self.state = KeeperState::Held(shown);
                if shown == expected {
                    return Ok(());
                }
                let (more, less) = (shown & !expected, expected & !shown);
                Err(format!("barrier at {lsn}: {more:#x} is shown, and {less:#x} is not"))
            }
            KeeperState::Held(shown) if shown != subscriber.committed => {
                let more = subscriber.committed & !shown;
                Err(format!("barrier: {more:#x} is committed while the stream is held"))
            }
            _ => Ok(()),
        }
    }
}
