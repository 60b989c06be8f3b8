//! What a worker does with its groups, as the program's workers do (`worker/state.rs`).

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use engine::dispatch::Pacing;
use engine::group::GroupSeq;
use engine::net::{ChangeAt, Fold, Folder, Old, Row as NetRow, Segment, Step};
use engine::order::{CommitOrder, Ended, Waits};
use engine::progress::Range;
use engine::worker::{
    Accounted, Again, Awaited, Contended, Craft, Desk, Failed, Found, Further, Mode, Next, Start,
    Task, Verdict,
};
use pgoutput::{Column, Lsn, decode_change};

use crate::simulation::history::{
    Change, FULL, History, Kind, Row, TRIGGERED, Transaction, is_keyed,
};
use crate::simulation::target::{As, Command, Database, Fault, Find, Reply, RowOp, find};
use crate::simulation::{Sabotage, rng::Rng};

/// A part of a transaction, or idle progress.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) history: Rc<History>,
    /// Transaction and part; `None` for idle progress.
    pub(crate) part: Option<(usize, usize)>,
    pub(crate) commit_lsn: Lsn,
    pub(crate) end: Option<Lsn>,
    pub(crate) first: bool,
    pub(crate) predecessor: Lsn,
    pub(crate) after_applied: bool,
    pub(crate) length: usize,
    pub(crate) user_code: bool,
}

impl Work {
    /// Part `part` of transaction `number`.
    pub(crate) fn part(number: usize, part: usize, history: &Rc<History>) -> Self {
        let transaction = &history.transactions[number];
        let last = part + 1 == transaction.parts.len();
        let changes = &transaction.changes[transaction.parts[part].clone()];
        Self {
            history: Rc::clone(history),
            part: Some((number, part)),
            commit_lsn: transaction.commit_lsn,
            end: last.then_some(transaction.end_lsn),
            first: part == 0,
            predecessor: Lsn(0),
            after_applied: false,
            length: changes.len(),
            user_code: changes.iter().any(|c| c.table == TRIGGERED && !c.bytes.is_empty()),
        }
    }

    /// Nothing, up to here.
    pub(crate) fn idle(lsn: Lsn, history: &Rc<History>) -> Self {
        Self {
            history: Rc::clone(history),
            part: None,
            commit_lsn: lsn,
            end: Some(lsn),
            first: true,
            predecessor: Lsn(0),
            after_applied: false,
            length: 0,
            user_code: false,
        }
    }

    pub(crate) fn changes(&self) -> &[Change] {
        self.part.map_or(&[], |(number, part)| {
            let Transaction { changes, parts, .. } = &self.history.transactions[number];
            &changes[parts[part].clone()]
        })
    }
}

impl Task for Work {
    fn end(&self) -> Option<Lsn> {
        self.end
    }

    fn commit_lsn(&self) -> Lsn {
        self.commit_lsn
    }

    fn length(&self) -> usize {
        self.length
    }

    fn is_whole(&self) -> bool {
        self.first && self.end.is_some()
    }

    fn runs_user_code(&self) -> bool {
        self.user_code
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_step(&self) -> bool {
        false
    }

    fn is_prepared_at_once(&self) -> bool {
        false
    }
}

/// What a worker is handed.
pub(crate) type Group = engine::worker::Group<Work>;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Pending {
    Begin,
    Net(usize),
    Change,
    /// A truncate, a progress row, a COMMIT.
    Any,
    Sync(Option<Range>),
}

impl Awaited for Pending {
    fn sync() -> Self {
        Self::Sync(None)
    }

    fn is_sync(&self) -> bool {
        matches!(self, Self::Sync(_))
    }

    fn commits(&self) -> Option<Lsn> {
        match self {
            Self::Sync(Some(range)) => Some(range.through),
            _ => None,
        }
    }
}

/// Commands to the model of a target.
struct Simulated;

impl Craft for Simulated {
    type Task = Work;
    type Statements = Vec<Command>;
    type Awaited = Pending;
    type Ending = Range;
    type Mark = ();
}

type InFlight = engine::worker::InFlight<Simulated>;
type Statements = Vec<(Command, Pending)>;

#[derive(Debug)]
pub(crate) enum Mail {
    Group(Group),
    GiveWay(GroupSeq),
}

/// What the target has answered since the last report.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    pub(crate) committed: Vec<Range>,
    pub(crate) groups: usize,
    pub(crate) ended: Vec<GroupSeq>,
}

/// Why a worker gives up.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The run ends, and the next begins. What commits up to the LSN is applied by rows then.
    Run(Lsn),
    /// A promise is broken.
    Wrong(String),
}

type Result<T> = std::result::Result<T, Failure>;

/// What a worker has to do with.
pub(crate) struct Around<'w> {
    pub(crate) history: &'w History,
    pub(crate) target: &'w mut Database,
    pub(crate) order: &'w mut CommitOrder,
    /// Workers that were woken.
    pub(crate) woken: &'w mut BTreeSet<usize>,
    pub(crate) reports: &'w mut VecDeque<(usize, Answered)>,
    pub(crate) rng: &'w mut Rng,
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
    desk: Desk<Simulated>,
    /// Queued on the session, and not sent.
    unsent: Vec<Command>,
    ranges: Vec<Range>,
}

impl Worker {
    pub(crate) fn new(number: usize, ordered: bool, far: bool, pacing: &Pacing) -> Self {
        Self {
            number,
            ordered,
            mail: VecDeque::new(),
            desk: Desk::new(ordered, far, pacing),
            unsent: Vec::new(),
            ranges: Vec::new(),
        }
    }

    pub(crate) fn run(&mut self, around: &mut Around<'_>) -> Result<()> {
        let step = self.step(around);
        self.report(around);
        match step {
            Err(Failure::Run(_)) if around.target.sessions[self.number].broken => {
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
                Mail::Group(group) => self.desk.push(group),
                Mail::GiveWay(group) => self.give_way(group, around)?,
            }
        }
        self.advance(around);
        match self.desk.next(around.order) {
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

    /// Takes replies if there are some; asleep otherwise.
    fn sleep(&mut self, waits: &[Waits], around: &mut Around<'_>) -> Result<()> {
        if waits.iter().any(|waits| around.order.is_met(waits)) {
            around.woken.insert(self.number);
            return Ok(());
        }
        around.order.wait(self.number, waits.iter().cloned());
        let session = &around.target.sessions[self.number];
        if session.broken {
            return Err(Failure::Run(Lsn(0)));
        }
        if !session.replies.is_empty() {
            self.take_replies(around)?;
            around.woken.insert(self.number);
        }
        Ok(())
    }

    fn start(&mut self, start: Start<Work>, around: &mut Around<'_>) -> Result<()> {
        if (start.behind || start.early)
            && let Err(failure) = self.send(around)
        {
            // It must not be lost with the session.
            self.desk.put_back(start.group);
            return Err(failure);
        }
        let split = self.desk.is_split(&start, around.order);
        let split = split && around.sabotage != Sabotage::UnmetWait;
        let Start { group, early, behind, counted } = start;
        let (history, number, mode) = (around.history, self.number, group.mode);
        around.note(|| {
            let parts: Vec<_> = group.works.iter().map(|work| work.part).collect();
            let Contended { waits, changes } = &group.contended;
            format!(
                "worker {number} starts group {} {mode:?} early={early} split={split} counted={counted} \
                 attempts={} {parts:?} contended={changes:?} {waits:?}",
                group.seq.0, group.attempts
            )
        });
        let (mut statements, contended, ending) = if split {
            let (free, _) = net(&group, Some(false), false, history);
            let (mut contended, _) = net(&group, Some(true), false, history);
            if contended.is_empty() {
                contended.push((Command::Nothing, Pending::Net(0)));
            }
            (free, Some(contended.into_iter().unzip()), ending(&group))
        } else if mode == Mode::Net {
            let (mut statements, sure) = net(&group, None, counted, history);
            match ending(&group) {
                Some(range) if counted && sure => {
                    end(range, self.ordered, &mut statements);
                    (statements, None, None)
                }
                ending => (statements, None, ending),
            }
        } else {
            let mut statements = Vec::new();
            let mut ending = None;
            for work in &group.works {
                ending = rows(work, early, self.ordered, &mut statements);
            }
            (statements, None, ending)
        };
        if statements.is_empty() {
            statements.push((Command::Nothing, Pending::Net(0)));
        }
        let (commands, pending): (Vec<_>, VecDeque<_>) = statements.into_iter().unzip();
        let in_flight = InFlight::new(group, (), early, pending.len()).with_rest(contended, ending);
        if behind {
            self.desk.set_aside(in_flight, commands, pending);
            return Ok(());
        }
        self.unsent.extend(commands);
        self.desk.sent(in_flight, pending);
        self.advance(around);
        if around.rng.chance(1, 3) {
            self.send(around)?;
            self.take_replies(around)?;
        }
        Ok(())
    }

    fn advance(&mut self, around: &mut Around<'_>) {
        while let Some(further) = self.desk.further(around.order) {
            match further {
                Further::Statements(commands) => self.unsent.extend(commands),
                Further::Ending(range) => {
                    let mut statements = Vec::new();
                    end(range, self.ordered, &mut statements);
                    let (commands, pending): (Vec<_>, Vec<_>) = statements.into_iter().unzip();
                    self.unsent.extend(commands);
                    self.desk.await_ending(|awaited| awaited.extend(pending));
                }
            }
        }
    }

    fn give_way(&mut self, group: GroupSeq, around: &mut Around<'_>) -> Result<()> {
        if !self.desk.can_give_way(group) {
            return Ok(());
        }
        around.note(|| format!("group {} gives way", group.0));
        self.start_recovery(Again::GivenWay, around)
    }

    fn start_recovery(&mut self, again: Again, around: &mut Around<'_>) -> Result<()> {
        let Some(needs_sync) = self.desk.start_recovery(again) else { return Ok(()) };
        let (number, first) = (self.number, self.desk.first().map(|first| first.group.seq.0));
        around.note(|| format!("worker {number}: group {first:?} again: {again:?}"));
        if needs_sync {
            self.unsent.push(Command::Sync);
        }
        self.send(around)
    }

    fn recover(&mut self, around: &mut Around<'_>) -> Result<()> {
        // The answer is awaited; nothing else is on the session.
        let session = &mut around.target.sessions[self.number];
        if session.broken {
            return Err(Failure::Run(Lsn(0)));
        }
        session.commands.push_back(Command::Rollback);
        around.target.step(self.number, around.history).map_err(Failure::Wrong)?;
        around.target.sessions[self.number].replies.clear();
        self.desk.rolled_back();
        Ok(())
    }

    fn send(&mut self, around: &mut Around<'_>) -> Result<()> {
        let session = &mut around.target.sessions[self.number];
        if session.broken {
            return Err(Failure::Run(Lsn(0)));
        }
        session.commands.extend(self.unsent.drain(..));
        Ok(())
    }

    fn take_replies(&mut self, around: &mut Around<'_>) -> Result<()> {
        // As many as have come through.
        let there = around.target.sessions[self.number].replies.len();
        let some = if there == 0 { 0 } else { 1 + around.rng.below(there) };
        for _ in 0..some {
            let Some(reply) = around.target.sessions[self.number].replies.pop_front() else {
                break;
            };
            match reply {
                Reply::Completed(_) | Reply::RolledBack => {
                    let pending = self.desk.take_awaited();
                    if !self.desk.is_recovering() {
                        self.completed(pending, reply, around)?;
                    }
                }
                Reply::Error(fault) => self.failed(fault, around)?,
                Reply::Ready { idle } => {
                    let Some(Pending::Sync(commits)) = self.desk.take_awaited() else {
                        return Err(wrong("the target answered a Sync nobody sent"));
                    };
                    if self.desk.is_recovering() {
                        continue;
                    }
                    if let Some(range) = commits {
                        if !idle {
                            return Err(wrong("a transaction is open after its COMMIT"));
                        }
                        self.transaction_committed(range);
                        self.desk.committed(range.through);
                    }
                    self.account(around)?;
                }
            }
        }
        self.report(around);
        Ok(())
    }

    fn transaction_committed(&mut self, range: Range) {
        match self.ranges.last_mut() {
            Some(last) if last.through == range.after => last.through = range.through,
            _ => self.ranges.push(range),
        }
    }

    fn completed(
        &mut self,
        pending: Option<Pending>,
        reply: Reply,
        around: &mut Around<'_>,
    ) -> Result<()> {
        let Reply::Completed(affected) = reply else {
            return Err(wrong("the target rolled a transaction back at COMMIT"));
        };
        let found = match pending {
            Some(Pending::Net(rows)) if rows != affected => Found::OtherRows,
            Some(Pending::Change) if affected == 0 => Found::Missing,
            Some(Pending::Sync(_)) | None => {
                return Err(wrong("the target completed a statement nobody sent"));
            }
            _ => Found::AsExpected,
        };
        match self.desk.judge(found) {
            Verdict::Counts if found == Found::Missing => Err(wrong("P7: the oldest misses a row")),
            Verdict::Counts => self.account(around),
            verdict => self.follow(verdict, around),
        }
    }

    /// Does what a verdict says that is not [`Verdict::Counts`].
    fn follow(&mut self, verdict: Verdict, around: &mut Around<'_>) -> Result<()> {
        match verdict {
            Verdict::Again(again) => self.start_recovery(again, around),
            Verdict::After(_) => self.start_recovery(Again::Later, around),
            Verdict::SentAgain(through) => Err(Failure::Run(through)),
            Verdict::Stops | Verdict::Counts => Err(Failure::Run(Lsn(0))),
        }
    }

    fn account(&mut self, around: &mut Around<'_>) -> Result<()> {
        match self.desk.account() {
            Accounted::More | Accounted::Through(_) => Ok(()),
            Accounted::Open => {
                self.advance(around);
                self.send(around)
            }
        }
    }

    fn failed(&mut self, fault: Fault, around: &mut Around<'_>) -> Result<()> {
        self.desk.take_awaited();
        if !self.desk.is_recovering() {
            let Some(first) = self.desk.first() else {
                return Err(wrong("an error with nothing in flight"));
            };
            let group = first.group.seq.0;
            let passes = fault == Fault::Passing;
            let verdict =
                self.desk.judge_error(if passes { Failed::Soon } else { Failed::Lasting });
            if verdict == Verdict::Stops && !passes {
                return Err(Failure::Wrong(format!(
                    "P7: the oldest, group {group}, fails by rows: {fault:?}"
                )));
            }
            self.follow(verdict, around)?;
        }
        self.desk.skip_to_sync();
        Ok(())
    }

    fn report(&mut self, around: &mut Around<'_>) {
        let committed = std::mem::take(&mut self.ranges);
        let (groups, ended) = self.desk.take_answered();
        if committed.is_empty() && groups == 0 {
            return;
        }
        let answered = Answered { committed, groups, ended: ended.clone() };
        around.reports.push_back((self.number, answered));
        for group in ended {
            around.woken.extend(around.order.ended(group));
        }
        self.desk.look(around.order);
    }

    /// Goes on with a new session (`worker/lost.rs`).
    fn reconnect(&mut self, around: &mut Around<'_>) -> Result<()> {
        if !self.desk.is_repeatable() {
            return Err(Failure::Run(Lsn(0)));
        }
        let session = around.target.open_session();
        around.target.sessions[self.number] = session;
        let is_recorded = |end| match around.sabotage {
            Sabotage::ForgottenCommit => Ok::<_, Failure>(false),
            Sabotage::AssumedCommit => Ok(true),
            _ => Ok(around.target.is_recorded(end)),
        };
        let through = self.desk.committed_through(is_recorded)?;
        for pending in self.desk.lost(through) {
            if let Pending::Sync(Some(range)) = pending {
                self.transaction_committed(range);
            }
        }
        self.unsent.clear();
        Ok(())
    }
}

fn wrong(what: &str) -> Failure {
    Failure::Wrong(what.to_owned())
}

fn ending(group: &Group) -> Option<Range> {
    let through = group.works.last()?.end?;
    Some(Range { after: group.works.first()?.predecessor, through })
}

fn end(range: Range, ordered: bool, statements: &mut Statements) {
    statements.push((Command::Progress { range, ordered }, Pending::Any));
    statements.push((Command::Commit, Pending::Any));
    statements.push((Command::Sync, Pending::Sync(Some(range))));
}

/// A part by rows; what it leaves to be ended later.
fn rows(work: &Work, early: bool, ordered: bool, statements: &mut Statements) -> Option<Range> {
    if work.first {
        statements.push((Command::Begin, Pending::Begin));
    }
    for change in work.changes() {
        statements.push(alone(change));
    }
    let range = Range { after: work.predecessor, through: work.end? };
    if work.first && !early {
        end(range, ordered, statements);
        return None;
    }
    Some(range)
}

/// One change as the publisher sent it.
fn alone(change: &Change) -> (Command, Pending) {
    let table = change.table;
    let op = match change.kind {
        Kind::Truncate => return (Command::Truncate(change.truncated), Pending::Any),
        Kind::Insert => RowOp::Insert(change.new),
        Kind::Delete => RowOp::Delete(find(table, change.old)),
        Kind::Update => {
            let mut set = change.new.map(Some);
            for (column, value) in set.iter_mut().enumerate() {
                if change.left_out[column] {
                    *value = None;
                }
            }
            RowOp::Update(find(table, change.old), set)
        }
    };
    (Command::Rows(table, Rc::new([op]), As::Alone), Pending::Change)
}

/// Changes of a group as net changes: all, or only those that are (not) contended. And whether each
/// statement fails that does not do what it must.
fn net(
    group: &Group,
    contended: Option<bool>,
    counted: bool,
    history: &History,
) -> (Statements, bool) {
    let (mut statements, mut sure) = (Vec::new(), true);
    if contended != Some(true) && group.works.first().is_some_and(|work| work.first) {
        statements.push((Command::Begin, Pending::Begin));
    }
    let mut folder = Folder::new(&history.rules);
    let mut verdicts = group.contended.changes.iter();
    for (part, work) in (0..).zip(&group.works) {
        for (number, change) in (0..).zip(work.changes()) {
            let verdict = verdicts.next().copied().unwrap_or_default();
            if contended.is_some_and(|wanted| wanted != verdict) {
                continue;
            }
            let at = ChangeAt { part, change: number };
            if change.kind == Kind::Truncate {
                let tables: Vec<_> =
                    (0..history.rules.len()).filter(|t| change.truncated & 1 << t != 0).collect();
                folder.push_truncate(at, &tables);
            } else {
                let message = decode_change(&change.bytes, false).expect("it was encoded so");
                folder.push(at, change.table, &message);
            }
        }
    }
    for step in folder.finish() {
        match step {
            Step::Alone(at) => {
                let changes = group.works[at.part as usize].changes();
                let change = &changes[at.change as usize];
                sure &= change.kind == Kind::Truncate;
                statements.push(alone(change));
            }
            Step::Segment(segment) => sure &= set(&segment, counted, history, &mut statements),
        }
    }
    (statements, sure)
}

/// A segment as sets. Those of whole rows cannot count.
fn set(
    segment: &Segment<'_>,
    counted: bool,
    history: &History,
    statements: &mut Statements,
) -> bool {
    let table = segment.table;
    let keyed = matches!(history.rules[table].fold, Fold::Key(_));
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
    let mut values = [None; 4];
    for (value, column) in values.iter_mut().zip(row.columns()) {
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
