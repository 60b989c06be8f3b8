//! The simulated apply worker: the counterpart of `apply/worker` in the program.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use engine::dispatch::{Dispatchable, LockError, Locks, Pacing, RowVersions, TableId};
use engine::group::{GroupSeq, Size};
use engine::history::Memory;
use engine::net::{ChangeAt, Folder, Old, Row as NetRow, Segment, Step, TableFolding};
use engine::order::{CommitOrder, Ended, Waits};
use engine::progress::Range;
use engine::transaction::Touched;
use engine::work::TwoPhase;
use engine::worker::{
    AfterReply, Dependent, EncodedGroup, ErrorKind, ExpectedReply, Further, GroupMember, GroupMode,
    Next, Outcome, Rest, Retry, Start, Verdict, WorkerGroups, WorkerTypes,
};
use pgoutput::{Column, Lsn, Message, OldTuple, Tuple, Xid};

use crate::simulation::history::{FULL, History, Row, is_keyed};
use crate::simulation::run::{REFUSED, TableMap};
use crate::simulation::subscriber::{
    As, Command, Database, Fault, Find, PreparedHere, Reply, RowOp, find,
};
use crate::simulation::{Sabotage, Seen, rng::Rng};

/// The engine's own work, which a sabotage can make say something else.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) plain: PlainWork,
    pub(crate) sabotage: Sabotage,
}

/// A part of a transaction, or idle progress.
pub(crate) type PlainWork = engine::work::Work<TableMap, PreparedHere>;

impl Deref for Work {
    type Target = PlainWork;

    fn deref(&self) -> &PlainWork {
        &self.plain
    }
}

impl GroupMember for Work {
    fn end(&self) -> Option<Lsn> {
        self.plain.end()
    }

    fn begins(&self) -> bool {
        self.plain.begins()
    }

    fn length(&self) -> usize {
        self.plain.length()
    }

    fn is_whole(&self) -> bool {
        self.plain.is_whole()
    }

    fn runs_user_code(&self) -> bool {
        self.plain.runs_user_code()
    }

    fn is_under_rules(&self) -> bool {
        self.plain.is_under_rules()
    }

    fn is_step(&self) -> bool {
        self.plain.is_step()
    }

    fn follows_applied(&self) -> bool {
        self.plain.follows_applied()
    }

    fn is_prepared_at_once(&self) -> bool {
        self.plain.is_prepared_at_once()
    }
}

impl Dispatchable for Work {
    fn size(&self) -> Size {
        let size = self.plain.size();
        match self.sabotage {
            Sabotage::GroupedAlone => Size { by_rows: false, ..size },
            Sabotage::GapInGroup => Size { starts_group: false, ..size },
            _ => size,
        }
    }

    fn ends_prepared(&self) -> bool {
        self.plain.ends_prepared()
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        let unmoved = self.sabotage == Sabotage::UnbarredMove;
        let tables = self.plain.tables();
        tables.map(move |id| if unmoved { TableId { root: id.oid, ..id } } else { id })
    }

    fn count_versions(&self, versions: &mut RowVersions) {
        if self.sabotage != Sabotage::UncountedVersions {
            self.plain.count_versions(versions);
        }
    }

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        match self.sabotage {
            Sabotage::UnlockedChanges => Ok(()),
            _ => self.plain.lock(locks),
        }
    }
}

/// An apply group.
pub(crate) type Group = engine::worker::Group<Work>;

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
    range: Range,
    ordered: bool,
    memory: Option<Memory>,
    two_phase: Option<TwoPhase<PreparedHere>>,
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
struct Simulated;

impl WorkerTypes for Simulated {
    type Member = Work;
    type Statements = Vec<Command>;
    type Expected = Pending;
    type Ending = Ending;
    type EncoderPosition = ();
}

pub(crate) type Statements = Vec<(Command, Pending)>;

#[derive(Debug)]
pub(crate) enum Mail {
    Group(Group),
    GiveWay(GroupSeq),
}

/// The answers since the last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    pub(crate) committed: Vec<Range>,
    pub(crate) prepared: Vec<Xid>,
    pub(crate) groups: usize,
    pub(crate) ended: Vec<GroupSeq>,
}

/// Why a worker ends.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The run ends, and the next begins.
    Run,
    /// A promise is broken.
    Wrong(String),
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// The world around a worker.
pub(crate) struct Around<'w> {
    pub(crate) history: &'w History,
    pub(crate) subscriber: &'w mut Database,
    pub(crate) order: &'w mut CommitOrder,
    /// Workers that were woken.
    pub(crate) woken: &'w mut BTreeSet<usize>,
    pub(crate) reports: &'w mut VecDeque<(usize, Answered)>,
    pub(crate) rng: &'w mut Rng,
    /// The next session that is sent a COMMIT is lost; the value says whether it has committed.
    pub(crate) lose_at_commit: &'w mut Option<bool>,
    /// How many faults may still happen.
    pub(crate) faults: &'w mut usize,
    pub(crate) seen: &'w mut Seen,
    pub(crate) sabotage: Sabotage,
    pub(crate) trace: &'w mut Vec<String>,
    pub(crate) tracing: bool,
}

impl Around<'_> {
    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.tracing {
            self.trace.push(text());
        }
    }
}

pub(crate) struct Worker {
    number: usize,
    ordered: bool,
    pub(crate) mail: VecDeque<Mail>,
    groups: WorkerGroups<Simulated>,
    /// Queued on the session, and not sent.
    unsent: Vec<Command>,
    ranges: Vec<Range>,
    prepared: Vec<Xid>,
}

impl Worker {
    pub(crate) fn new(number: usize, ordered: bool, far: bool, pacing: &Pacing) -> Self {
        Self {
            number,
            ordered,
            mail: VecDeque::new(),
            groups: WorkerGroups::new(ordered, far, pacing),
            unsent: Vec::new(),
            ranges: Vec::new(),
            prepared: Vec::new(),
        }
    }

    pub(crate) fn run(&mut self, around: &mut Around<'_>) -> Result<()> {
        let step = self.step(around);
        self.report(around);
        match step {
            Err(Failure::Run) if around.subscriber.sessions[self.number].broken => {
                self.reconnect(around)?;
                self.report(around);
                around.woken.insert(self.number);
                Ok(())
            }
            step => step,
        }
    }

    fn step(&mut self, around: &mut Around<'_>) -> Result<()> {
        while let Some(mail) = self.mail.pop_front() {
            match mail {
                Mail::Group(group) => self.groups.push(group),
                Mail::GiveWay(group) => self.give_way(group, around)?,
            }
        }
        self.advance(around);
        match self.groups.next(around.order) {
            Next::RollBack => {
                self.recover(around)?;
                around.woken.insert(self.number);
                Ok(())
            }
            Next::Start(start) => {
                self.start(start, around)?;
                around.woken.insert(self.number);
                Ok(())
            }
            Next::Wait(waits) => {
                self.send(around)?;
                self.sleep(&waits, around)
            }
        }
    }

    /// Takes replies if there are any; sleeps otherwise.
    fn sleep(&mut self, waits: &[Waits], around: &mut Around<'_>) -> Result<()> {
        if waits.iter().any(|waits| around.order.is_met(waits)) {
            around.woken.insert(self.number);
            return Ok(());
        }
        around.order.wait(self.number, waits.iter().cloned());
        let session = &around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        if !session.replies.is_empty() {
            self.take_replies(around)?;
            around.woken.insert(self.number);
        }
        Ok(())
    }

    fn start(&mut self, start: Start<Work>, around: &mut Around<'_>) -> Result<()> {
        if let Err(failure) = self.resolve_prepared(&start.group, around) {
            self.groups.put_back(start.group);
            return Err(failure);
        }
        if (start.behind || start.ahead)
            && let Err(failure) = self.send(around)
        {
            // It must not be lost with the session.
            self.groups.put_back(start.group);
            return Err(failure);
        }
        let split = self.groups.is_split(&start, around.order);
        let split = split && around.sabotage != Sabotage::UnmetWait;
        let Start { group, ahead, behind, counted } = start;
        let (history, number, mode) = (around.history, self.number, group.mode);
        around.note(|| {
            let name = |work: &Work| (work.part.head.xid, work.part.len(), work.part.end_lsn);
            let parts: Vec<_> = group.works.iter().map(name).collect();
            let Dependent { waits, changes } = &group.dependent;
            format!(
                "worker {number} starts group {} {mode:?} ahead={ahead} split={split} counted={counted} \
                 attempts={} {parts:?} dependent={changes:?} {waits:?}",
                group.seq.0, group.attempts
            )
        });
        let (mut statements, rest) = if split {
            let (independent, _) = net(&group, Some(false), (false, true), history);
            let (mut dependent, _) = net(&group, Some(true), (false, true), history);
            if dependent.is_empty() {
                dependent.push((Command::Nothing, Pending::Net(0)));
            }
            let (commands, replies) = dependent.into_iter().unzip();
            let ending = ending(&group, self.ordered).expect("a split group is whole");
            (independent, Rest::Dependent(commands, replies, ending))
        } else if mode == GroupMode::Net {
            let (mut statements, sure) = net(&group, None, (counted, true), history);
            match ending(&group, self.ordered) {
                Some(ending) if counted && sure => {
                    end(ending, &mut statements);
                    (statements, Rest::Nothing)
                }
                ending => (statements, ending.map_or(Rest::Nothing, Rest::Ending)),
            }
        } else {
            let mut statements = Vec::new();
            let mut ending = None;
            for (index, work) in group.works.iter().enumerate() {
                let ordered = self.ordered || index > 0;
                let last = index + 1 == group.works.len();
                ending = rows(work, (ahead, true), (ordered, last), &mut statements);
            }
            (statements, ending.map_or(Rest::Nothing, Rest::Ending))
        };
        if statements.is_empty() {
            statements.push((Command::Nothing, Pending::Net(0)));
        }
        let (commands, replies): (Vec<_>, VecDeque<_>) = statements.into_iter().unzip();
        let encoded = EncodedGroup { group, position: (), ahead, replies, rest };
        if behind {
            self.groups.set_aside(encoded, commands);
            return Ok(());
        }
        self.unsent.extend(commands);
        self.groups.sent(encoded);
        self.advance(around);
        if around.rng.chance(1, 3) {
            self.send(around)?;
            self.take_replies(around)?;
        }
        Ok(())
    }

    /// COMMIT PREPARED and ROLLBACK PREPARED (`worker/two_phase.rs`). Nothing else is on the session.
    fn resolve_prepared(&mut self, group: &Group, around: &mut Around<'_>) -> Result<()> {
        let two_phase = group.works.first().and_then(|work| work.two_phase.as_ref());
        let (of, commit) = match two_phase {
            None | Some(TwoPhase::Prepare(_)) => return Ok(()),
            Some(TwoPhase::Commit(of)) => (**of, true),
            Some(TwoPhase::Rollback(of)) => (**of, false),
        };
        self.send(around)?;
        let number = self.number;
        around.note(|| format!("worker {number} ends {of:?}, commits: {commit}"));
        if around.subscriber.has_committed(of) {
            return if commit {
                Ok(())
            } else {
                Err(Failure::Wrong(format!("{REFUSED}: {of:?} was committed, and did not happen")))
            };
        }
        // A crash between this and its progress loses either.
        let now = *around.faults > 0 && around.rng.chance(1, 6);
        *around.faults -= usize::from(now);
        let random = now.then(|| around.rng.chance(2, 3));
        let lost = around.lose_at_commit.take().or(random);
        around.seen.resolved_here += 1;
        if lost != Some(false) && around.sabotage != Sabotage::UnresolvedStep {
            let was_prepared =
                around.subscriber.resolve(of, commit, around.history).map_err(Failure::Wrong)?;
            if commit && !was_prepared {
                return Err(Failure::Wrong(format!("P3: {of:?} is not prepared any more")));
            }
        }
        if lost.is_some() {
            around.subscriber.terminate(self.number);
            return Err(Failure::Run);
        }
        Ok(())
    }

    fn advance(&mut self, around: &mut Around<'_>) {
        while let Some(further) = self.groups.further(around.order) {
            match further {
                Further::Statements(commands) => self.unsent.extend(commands),
                Further::Ending(ending) => {
                    let mut statements = Vec::new();
                    end(ending, &mut statements);
                    let (commands, pending): (Vec<_>, Vec<_>) = statements.into_iter().unzip();
                    self.unsent.extend(commands);
                    self.groups.last_mut().expect("in flight").replies.extend(pending);
                }
            }
        }
    }

    fn give_way(&mut self, group: GroupSeq, around: &mut Around<'_>) -> Result<()> {
        if !self.groups.can_give_way(group) {
            return Ok(());
        }
        around.note(|| format!("group {} gives way", group.0));
        self.start_recovery(Retry::GivenWay, around)
    }

    fn start_recovery(&mut self, retry: Retry, around: &mut Around<'_>) -> Result<()> {
        let Some(needs_sync) = self.groups.start_recovery(retry) else { return Ok(()) };
        let (number, first) = (self.number, self.groups.first().map(|first| first.group.seq.0));
        around.note(|| format!("worker {number}: retries group {first:?}: {retry:?}"));
        if needs_sync {
            self.unsent.push(Command::Sync);
        }
        self.send(around)
    }

    fn recover(&mut self, around: &mut Around<'_>) -> Result<()> {
        // The session does nothing else, so the reply comes at once.
        let session = &mut around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        session.commands.push_back(
            if self.groups.rolls_back_to_savepoint() && around.sabotage != Sabotage::PartsRolledBack
            {
                Command::RollbackTo(0)
            } else {
                Command::Rollback
            },
        );
        around.subscriber.step(self.number, around.history).map_err(Failure::Wrong)?;
        around.subscriber.sessions[self.number].replies.clear();
        self.groups.rolled_back();
        Ok(())
    }

    fn send(&mut self, around: &mut Around<'_>) -> Result<()> {
        let session = &mut around.subscriber.sessions[self.number];
        if session.broken {
            return Err(Failure::Run);
        }
        session.commands.extend(self.unsent.drain(..));
        Ok(())
    }

    fn take_replies(&mut self, around: &mut Around<'_>) -> Result<()> {
        // A random number of them has arrived.
        let there = around.subscriber.sessions[self.number].replies.len();
        let some = if there == 0 { 0 } else { 1 + around.rng.below(there) };
        for _ in 0..some {
            let Some(reply) = around.subscriber.sessions[self.number].replies.pop_front() else {
                break;
            };
            match reply {
                Reply::Completed(_) | Reply::RolledBack => {
                    let pending = self.groups.take_expected();
                    if !self.groups.is_rolling_back() {
                        self.completed(pending, reply, around)?;
                    }
                }
                Reply::Error(fault) => self.failed(fault, around)?,
                Reply::Ready { idle } => {
                    let Some(Pending::Sync(commits)) = self.groups.take_expected() else {
                        return Err(wrong("the subscriber answered a Sync nobody sent"));
                    };
                    if self.groups.is_rolling_back() {
                        continue;
                    }
                    if let Some(commits) = commits {
                        if !idle {
                            return Err(wrong("a transaction is open after its COMMIT"));
                        }
                        self.transaction_committed(commits);
                        self.groups.committed(commits.range.through);
                    }
                    self.answered(around)?;
                }
            }
        }
        self.report(around);
        Ok(())
    }

    fn transaction_committed(&mut self, Commits { range, prepared }: Commits) {
        if prepared.is_some() {
            self.prepared.extend(prepared);
            return;
        }
        match self.ranges.last_mut() {
            Some(last) if last.through == range.after => last.through = range.through,
            _ => self.ranges.push(range),
        }
    }

    /// Whether the replies of a part of a transaction come next, whose end is still to come.
    fn has_part(&self) -> bool {
        let last = self.groups.first().and_then(|first| first.group.works.last());
        last.is_some_and(|work| work.part.end_lsn.is_none())
    }

    fn completed(
        &mut self,
        pending: Option<Pending>,
        reply: Reply,
        around: &mut Around<'_>,
    ) -> Result<()> {
        let Reply::Completed(affected) = reply else {
            return Err(wrong("the subscriber rolled a transaction back at COMMIT"));
        };
        let found = match pending {
            Some(Pending::Net(rows)) if rows != affected => Outcome::OtherRows,
            // As if rows were missing: the part is executed again.
            Some(Pending::Net(_)) if self.has_part() && around.rng.chance(1, 50) => Outcome::Anew,
            Some(Pending::Change) if affected == 0 => Outcome::Missing,
            Some(Pending::Sync(_)) | None => {
                return Err(wrong("the subscriber completed a statement nobody sent"));
            }
            _ => Outcome::AsExpected,
        };
        match self.groups.judge(found) {
            Verdict::Counts if found == Outcome::Missing => {
                Err(wrong("P7: the oldest misses a row"))
            }
            Verdict::Counts => {
                if let Some(Pending::Commit(commits)) = pending {
                    self.transaction_committed(commits);
                    self.groups.committed(commits.range.through);
                }
                self.answered(around)
            }
            verdict => self.follow(verdict, around),
        }
    }

    /// Follows a verdict other than [`Verdict::Counts`].
    fn follow(&mut self, verdict: Verdict, around: &mut Around<'_>) -> Result<()> {
        match verdict {
            Verdict::Retry(retry) => self.start_recovery(retry, around),
            Verdict::After(_) => self.start_recovery(Retry::Later, around),
            Verdict::Stops | Verdict::Counts => Err(Failure::Run),
        }
    }

    fn answered(&mut self, around: &mut Around<'_>) -> Result<()> {
        match self.groups.answered() {
            AfterReply::More | AfterReply::Through(_) => Ok(()),
            AfterReply::Open => {
                self.advance(around);
                self.send(around)
            }
        }
    }

    fn failed(&mut self, fault: Fault, around: &mut Around<'_>) -> Result<()> {
        self.groups.take_expected();
        if !self.groups.is_rolling_back() {
            let Some(first) = self.groups.first() else {
                return Err(wrong("an error with nothing in flight"));
            };
            let group = first.group.seq.0;
            let passes = fault == Fault::Passing;
            let verdict =
                self.groups.judge_error(if passes { ErrorKind::Soon } else { ErrorKind::Lasting });
            if verdict == Verdict::Stops && !passes {
                return Err(Failure::Wrong(format!(
                    "P7: the oldest, group {group}, fails by rows: {fault:?}"
                )));
            }
            self.follow(verdict, around)?;
        }
        self.groups.skip_to_sync();
        Ok(())
    }

    fn report(&mut self, around: &mut Around<'_>) {
        let committed = std::mem::take(&mut self.ranges);
        let prepared = std::mem::take(&mut self.prepared);
        let (groups, ended) = self.groups.take_answered();
        if committed.is_empty() && prepared.is_empty() && groups == 0 {
            return;
        }
        let answered = Answered { committed, prepared, groups, ended: ended.clone() };
        around.reports.push_back((self.number, answered));
        for group in ended {
            around.woken.extend(around.order.ended(group));
        }
        self.groups.look(around.order);
    }

    /// Goes on with a new session (`worker/lost_session.rs`).
    fn reconnect(&mut self, around: &mut Around<'_>) -> Result<()> {
        if !self.groups.is_repeatable() {
            return Err(Failure::Run);
        }
        let session = around.subscriber.open_session();
        around.subscriber.sessions[self.number] = session;
        let is_recorded = |end| match around.sabotage {
            Sabotage::ForgottenCommit => Ok::<_, Failure>(false),
            Sabotage::AssumedCommit => Ok(true),
            _ => Ok(around.subscriber.is_recorded(end)),
        };
        let through = self.groups.committed_through(is_recorded)?;
        for pending in self.groups.lost(through) {
            if let Pending::Sync(Some(commits)) | Pending::Commit(commits) = pending {
                self.transaction_committed(commits);
            }
        }
        self.unsent.clear();
        Ok(())
    }
}

fn wrong(what: &str) -> Failure {
    Failure::Wrong(what.to_owned())
}

pub(crate) fn ending(group: &Group, ordered: bool) -> Option<Ending> {
    let last = group.works.last()?;
    let after = group.works.first()?.predecessor;
    Some(Ending {
        range: Range { after, through: last.part.end_lsn? },
        ordered,
        memory: last.memory,
        two_phase: last.two_phase.clone(),
    })
}

pub(crate) fn end(ending: Ending, statements: &mut Statements) {
    let Ending { range, ordered, memory, two_phase } = ending;
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
            push(Command::Progress { range, ordered, memory });
            push(Command::Commit);
        }
    }
    statements.push((Command::Sync, Pending::Sync(Some(Commits { range, prepared }))));
}

/// A transaction of several parts has a savepoint before each of them that is executed as sets.
fn begin(work: &Work, savepoints: bool, statements: &mut Statements) {
    statements.push((Command::Begin, Pending::Begin));
    if savepoints && work.part.end_lsn.is_none() {
        statements.push((Command::Savepoint(0), Pending::Any));
    }
}

/// Encodes a part by rows; returns the end that is sent later.
pub(crate) fn rows(
    work: &Work,
    (ahead, savepoints): (bool, bool),
    (ordered, last): (bool, bool),
    statements: &mut Statements,
) -> Option<Ending> {
    if work.part.first {
        begin(work, savepoints, statements);
    }
    for change in 0..work.part.len() {
        statements.extend(alone(work, change));
    }
    let range = Range { after: work.predecessor, through: work.part.end_lsn? };
    let (memory, two_phase) = (work.memory, work.two_phase.clone());
    let ending = Ending { range, ordered, memory, two_phase };
    if work.part.first && !ahead {
        end(ending, statements);
        if !last && let Some((_, Pending::Sync(Some(commits)))) = statements.pop_if(is_sync) {
            // The next transaction follows in the same pipeline.
            statements.last_mut().expect("COMMIT").1 = Pending::Commit(commits);
        }
        return None;
    }
    Some(ending)
}

fn is_sync((_, pending): &mut (Command, Pending)) -> bool {
    pending.is_sync()
}

/// One change as the publisher sent it; `None` if it is not applied.
pub(crate) fn alone(work: &Work, change: usize) -> Option<(Command, Pending)> {
    let (message, touched) = work.part.change(change).expect("it was decoded before");
    let table = match touched {
        Touched::One(relation, _) => work.tables[relation].as_ref()?.table,
        Touched::Many(relations) => {
            let tables = relations.iter().filter_map(|one| work.tables[*one as usize].as_ref());
            let truncated = tables.fold(0, |all, map| all | 1 << map.table);
            return (truncated != 0).then_some((Command::Truncate(truncated), Pending::Any));
        }
    };
    let found =
        |tuple: Tuple<'_>| find(table, sent(tuple.columns()).map(Option::unwrap_or_default));
    let old = |old: OldTuple<'_>| match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => found(tuple),
    };
    let op = match message {
        Message::Insert(insert) => {
            RowOp::Insert(sent(insert.new.columns()).map(Option::unwrap_or_default))
        }
        Message::Delete(delete) => RowOp::Delete(old(delete.old)),
        Message::Update(update) => RowOp::Update(
            update.old.map_or_else(|| found(update.new), old),
            sent(update.new.columns()),
        ),
        _ => return None,
    };
    Some((Command::Rows(table, Rc::new([op]), As::Alone), Pending::Change))
}

/// Encodes changes of a group as net changes: all of them, or only the dependent or independent ones.
/// Also returns whether each statement fails by itself if it finds other rows than it must.
pub(crate) fn net(
    group: &Group,
    dependent: Option<bool>,
    (counted, savepoints): (bool, bool),
    history: &History,
) -> (Statements, bool) {
    let (mut statements, mut sure) = (Vec::new(), true);
    let first = group.works.first().filter(|_| dependent != Some(true));
    match first.map(|work| (work, work.part.first)) {
        Some((work, true)) => begin(work, savepoints, &mut statements),
        Some((_, false)) if savepoints => {
            statements.push((Command::Release(0), Pending::Any));
            statements.push((Command::Savepoint(0), Pending::Any));
        }
        _ => {}
    }
    let mut folder = Folder::new(&history.rules);
    let mut verdicts = group.dependent.changes.iter();
    let slot = |map: &Option<Arc<TableMap>>| map.as_ref().map(|map| map.table);
    for (part, work) in (0..).zip(&group.works) {
        for index in 0..work.part.len() {
            let verdict = verdicts.next().copied().unwrap_or_default();
            if dependent.is_some_and(|wanted| wanted != verdict) {
                continue;
            }
            let change = u32::try_from(index).expect("a short part");
            let at = ChangeAt { part, change };
            let (message, touched) = work.part.change(index).expect("it was decoded before");
            match touched {
                Touched::One(relation, _) => {
                    if let Some(table) = slot(&work.tables[relation]) {
                        folder.push(at, table, &message);
                    }
                }
                Touched::Many(relations) => {
                    let tables =
                        relations.iter().filter_map(|one| slot(&work.tables[*one as usize]));
                    let tables: Vec<_> = tables.collect();
                    if !tables.is_empty() {
                        folder.push_truncate(at, &tables, &message);
                    }
                }
            }
        }
    }
    for step in folder.finish() {
        match step {
            Step::Alone(at) => {
                let one = alone(&group.works[at.part as usize], at.change as usize);
                sure &= matches!(one, Some((Command::Truncate(_), _)));
                statements.extend(one);
            }
            Step::Segment(segment) => sure &= set(&segment, counted, history, &mut statements),
        }
    }
    (statements, sure)
}

/// Encodes a segment as sets. Sets of whole rows cannot count their rows.
fn set(
    segment: &Segment<'_>,
    counted: bool,
    history: &History,
    statements: &mut Statements,
) -> bool {
    let table = segment.table;
    let keyed = matches!(history.rules[table].fold, TableFolding::Key(_));
    debug_assert!(keyed == is_keyed(table), "tables are what they are");
    let mut sure = true;
    let mut push = |ops: Vec<RowOp>, found: bool, inserts: bool| {
        if !ops.is_empty() {
            let rows = if found { ops.len() } else { 0 };
            let counts = counted && keyed && !inserts;
            sure &= counts || inserts;
            let sort = if counts { As::Counted(rows) } else { As::Set };
            statements.push((Command::Rows(table, ops.into(), sort), Pending::Net(rows)));
        }
    };
    let find_old = |old: &Old<'_>| find_row(table, &old.row);
    push(
        segment.absent.iter().map(|row| RowOp::Delete(find_row(table, row))).collect(),
        false,
        false,
    );
    push(segment.deletes.iter().map(|old| RowOp::Delete(find_old(old))).collect(), true, false);
    let updates = segment.updates.iter().map(|update| {
        let found = update.old.as_ref().map_or_else(|| find_row(table, &update.new), find_old);
        RowOp::Update(found, values(&update.new))
    });
    push(updates.collect(), true, false);
    let inserts = segment.inserts.iter().map(|row| RowOp::Insert(row_of(row)));
    push(inserts.collect(), true, true);
    sure
}

fn values(row: &NetRow<'_>) -> [Option<u16>; 4] {
    sent(row.columns())
}

/// The values of columns; none for one that is left out.
fn sent<'a>(columns: impl Iterator<Item = Column<'a>>) -> [Option<u16>; 4] {
    let mut values = [None; 4];
    for (value, column) in values.iter_mut().zip(columns) {
        *value = match column {
            Column::Null => Some(0),
            Column::Unchanged => None,
            Column::Text(text) | Column::Binary(text) => {
                str::from_utf8(text).ok().and_then(|text| text.parse().ok())
            }
        };
    }
    values
}

fn row_of(row: &NetRow<'_>) -> Row {
    values(row).map(Option::unwrap_or_default)
}

fn find_row(table: usize, row: &NetRow<'_>) -> Find {
    let row = row_of(row);
    if table == FULL { Find::Row(row) } else { Find::Key(row[0]) }
}
