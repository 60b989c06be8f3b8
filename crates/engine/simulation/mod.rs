//! A seeded simulation of parallel apply. The engine's own code runs between a model of a publisher, which
//! sends messages, and a model of a subscriber database. The files here hold the models and choose what
//! happens next; every decision is the engine's.
//!
//! A seed decides the publisher's history, with open transactions, subtransactions that are rolled back,
//! and prepared transactions. It decides what is sent when, how many workers there are and how fast
//! each is, and how far away the subscriber is. It decides which statements fail, which parts of
//! transactions are executed again as if they had found other rows, when a session is lost
//! (before or after its COMMIT took effect), when the program or the subscriber crashes, and how the next
//! run is set up. One thing happens at a time. Checked all along:
//!
//! * P1, P2, P5: after each commit the subscriber has exactly the rows that the committed transactions
//!   left on the publisher; in order, these are everything up to a transaction; out of order, what
//!   a transaction depends on is committed before it.
//! * P3: no transaction is committed twice, and none is missing in the end; nothing stays prepared that
//!   the publisher has ended.
//! * P4: what is acknowledged is durable, with nothing missing before it, and was sent in this run; of a
//!   transaction whose PREPARE is, that it is prepared, committed or known to be rolled back.
//! * P6: the number of things that are remembered (locks, groups, held transactions, streams, files) is
//!   no more than what is outstanding, and nothing when nothing is.
//! * An open transaction that is applied finds the rows that it must: all before it is committed.
//! * The oldest group never fails for good, and there is always something that goes on.
//! * A publisher that goes back to before what was applied is refused; one that lost nothing is followed.
//! * A table that was not published all the time is found to lack changes ([`publications`]).
//! * A snapshot of the subscriber that is taken at a barrier shows exactly what commits before its LSN
//!   ([`barrier`]).
//! * A table that is copied beside the stream has exactly the rows of its copy and of what it has applied
//!   since ([`deferred`]).
//!
//! Each rule is broken once on purpose ([`Sabotage`]), and each time one of these checks must notice. Two rules have a
//! unit test instead. A sabotage lies to the engine or changes what it says; the engine has no switches for them.
//!
//! | rule of [`engine::dispatch`] | broken by |
//! |---|---|
//! | 1. the parts of a transaction go to one worker | [`Sabotage::SplitTransaction`] |
//! | 2. a full writeset takes nothing new | [`Sabotage::UnboundedWriteset`] |
//! | 3. a worker has a bounded number of groups | [`Sabotage::UnboundedQueue`] |
//! | 4. a worker that leaves gets no more | [`Sabotage::LeavingWorker`] |
//! | 5. the end of a prepared transaction is isolated | a unit test: `the_end_of_a_prepared_transaction_is_isolated` |
//! | 6. so is a table under another topmost relation | [`Sabotage::UnbarredMove`] |
//! | 7. what is prepared at once waits for what came before | [`Sabotage::HastyPrepare`] |
//! | 8. some transactions are committed alone | [`Sabotage::GroupedAlone`], [`Sabotage::SharedCommit`] |
//! | 9. what waits is assigned in bounded time | [`Sabotage::LatePickup`] |
//! | 10. a table is serialized only after several victims | [`Sabotage::HastySerialization`] |
//! | 11. only its worker gets more beside a group without locks | a unit test: `only_their_worker_gets_groups_while_some_have_no_locks` |
//! | 12. where updates are executed one by one, a group has few of one row | [`Sabotage::UncountedVersions`] |
//!
//! | rule of [`engine::intake`] | broken by |
//! |---|---|
//! | what is applied is skipped | [`Sabotage::AppliedAgain`] |
//! | so is what is applied beyond a gap | [`Sabotage::ForgottenGap`] |
//! | no group reaches over that | [`Sabotage::GapInGroup`] |
//! | a spooled transaction that a table lacks is read back | [`Sabotage::NotReadBack`] |
//! | what is skipped is compared with what was applied | [`Sabotage::UnwatchedHistory`], [`Sabotage::UnwatchedPrepare`] |
//! | and the stream begins with what is compared | [`Sabotage::LateStart`] |
//! | nothing is acknowledged from a PREPARE on that must be sent again | [`Sabotage::UnheldHeld`], [`Sabotage::UnheldPrepare`], [`Sabotage::EarlyResolution`] |
//! | the end of a held transaction ends its time | [`Sabotage::StillHeld`] |
//! | what is prepared on the subscriber ends there | [`Sabotage::ForgottenPrepared`] |
//! | a stream is executed behind what it builds on | [`Sabotage::HastyStream`] |
//! | and committed behind everything before it | [`Sabotage::HastyStreamCommit`] |
//!
//! | rule of [`engine::deferred`] | broken by |
//! |---|---|
//! | changes are deferred from the beginning of the copy | [`Sabotage::LateDeferring`] |
//! | and not acknowledged | [`Sabotage::UnheldDeferred`] |
//! | they are applied from the sync LSN on | [`Sabotage::NoSyncLsn`] |
//! | a table has caught up when all of them are applied | [`Sabotage::HastyReady`] |
//! | and when it has what others applied before this run | [`Sabotage::HastyResume`] |
//! | and when transactions have ended that left its changes out | [`Sabotage::ReadyBeforeLeftOut`] |
//! | before that, another run copies it again | [`Sabotage::UnnotedLeftOut`] |
//! | under a snapshot that has these transactions | [`Sabotage::EarlySnapshot`] |
//! | and everything that was discarded before | [`Sabotage::EarlyDiscard`] |
//!
//! | rule of [`engine::barrier`] | broken by |
//! |---|---|
//! | what was taken behind the LSN makes an attempt void | [`Sabotage::PassedBarrier`] |
//! | all before the LSN is received | [`Sabotage::UnreceivedBarrier`] |
//! | and committed | [`Sabotage::HastyBarrier`] |
//! | nothing behind it is taken, whatever ends a transaction | [`Sabotage::StreamOverBarrier`], [`Sabotage::PreparedOverBarrier`] |

mod barrier;
mod deferred;
mod history;
mod publications;
mod rng;
mod run;
mod sabotage;
mod seen;
mod spool;
mod stream;
mod streams;
mod subscriber;
mod worker;
mod world;

use std::panic::catch_unwind;
use std::rc::Rc;

use history::History;
use rng::Rng;

use crate::simulation::world::World;

pub(crate) use sabotage::Sabotage;
pub(crate) use seen::Seen;

/// The rule that was broken, and the events before it.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) what: String,
    pub(crate) trace: Vec<String>,
}

/// Runs a seed. A broken assertion of the engine is a broken promise too.
pub(crate) fn attempt(seed: u64, sabotage: Sabotage, tracing: bool) -> Result<Seen, Broken> {
    catch_unwind(|| run(seed, sabotage, tracing)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
        let what = format!("an assertion failed: {}", said.unwrap_or_default());
        Err(Broken { what, trace: vec!["nothing is traced before an assertion".to_owned()] })
    })
}

fn run(seed: u64, sabotage: Sabotage, tracing: bool) -> Result<Seen, Broken> {
    let gap = if let Sabotage::Gap(sabotage) = sabotage { Some(sabotage) } else { None };
    if let Err(what) = publications::run(seed, gap) {
        return Err(Broken { what, trace: vec![format!("publications of seed {seed}")] });
    }
    let mut rng = Rng(seed.wrapping_mul(0x2545_F491_4F6C_DD1D));
    let history = Rc::new(History::random(&mut rng));
    let mut world = World::new(&history, rng, sabotage, tracing);
    if tracing {
        for (number, transaction) in history.transactions.iter().enumerate() {
            let history::Transaction { xid, commit_lsn, end_lsn, depends_on, .. } = transaction;
            world.trace.push(format!(
                "transaction {number} is {xid}, at {commit_lsn}..{end_lsn}, depends on {depends_on:#x}"
            ));
        }
        world.trace.extend(history.wal.iter().map(|record| format!("{record:?}")));
    }
    let chance = world.rng.fork();
    let result = world.run();
    let joins = |seen| deferred::run(&history, chance, sabotage, seen);
    match result.and_then(|()| joins(&mut world.seen)) {
        Ok(()) => Ok(world.seen),
        Err(what) => Err(Broken { what, trace: world.trace }),
    }
}
