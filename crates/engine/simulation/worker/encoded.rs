//! Statements with the replies that they must get, and the end of a group.

use engine::history::HistoryMark;
use engine::progress::Range;
use engine::work::TwoPhase;
use engine::worker::{ExpectedReply, WorkerTypes};
use pgoutput::{Lsn, Xid};

use crate::simulation::subscriber::{Command, PreparedHere};
use crate::simulation::worker::work::Work;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Pending {
    Begin,
    Net(usize),
    Change,
    /// A truncate, a progress row, a COMMIT.
    Any,
    /// A COMMIT without a Sync behind it.
    Commit(Commits),
    Sync(Option<Commits>),
}

/// The transactions that a subscriber transaction commits, or the one that it prepares.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Commits {
    pub(crate) range: Range,
    pub(crate) prepared: Option<Xid>,
}

/// The end of a group.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    pub(super) range: Range,
    pub(super) ordered: bool,
    pub(super) mark: Option<HistoryMark>,
    pub(super) two_phase: Option<TwoPhase<PreparedHere>>,
}

impl ExpectedReply for Pending {
    fn sync() -> Self {
        Self::Sync(None)
    }

    fn is_sync(&self) -> bool {
        matches!(self, Self::Sync(_))
    }

    fn commits(&self) -> Option<Lsn> {
        match self {
            Self::Sync(Some(commits)) | Self::Commit(commits) => Some(commits.range.through),
            _ => None,
        }
    }
}

/// Groups are encoded to commands for the model of a subscriber.
pub(super) struct Simulated;

impl WorkerTypes for Simulated {
    type Member = Work;
    type Statements = Vec<Command>;
    type Expected = Pending;
    type Ending = Ending;
    type EncoderPosition = ();
}

pub(crate) type Statements = Vec<(Command, Pending)>;

pub(crate) fn ending(works: &[Work], ordered: bool) -> Option<Ending> {
    let last = works.last()?;
    let after = works.first()?.predecessor;
    Some(Ending {
        range: Range { after, through: last.part.end_lsn? },
        ordered,
        mark: last.history,
        two_phase: last.two_phase.clone(),
    })
}

pub(crate) fn end(ending: Ending, statements: &mut Statements) {
    let Ending { range, ordered, mark, two_phase } = ending;
    let mut push = |command| statements.push((command, Pending::Any));
    let mut prepared = None;
    match two_phase {
        Some(TwoPhase::Prepare(of)) => {
            push(Command::NotePrepared(*of));
            push(Command::Prepare(*of));
            prepared = Some(of.xid);
        }
        two_phase => {
            if let Some(TwoPhase::Commit(of) | TwoPhase::Rollback(of)) = two_phase {
                push(Command::ForgetPrepared(*of));
            }
            push(Command::Progress { range, ordered, mark });
            push(Command::Commit);
        }
    }
    statements.push((Command::Sync, Pending::Sync(Some(Commits { range, prepared }))));
}

/// A transaction of several parts has a savepoint before each of them that is executed as sets.
pub(super) fn begin(work: &Work, savepoints: bool, statements: &mut Statements) {
    statements.push((Command::Begin, Pending::Begin));
    if savepoints && work.part.end_lsn.is_none() {
        statements.push((Command::Savepoint(0), Pending::Any));
    }
}
