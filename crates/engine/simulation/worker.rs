//! What a worker does with its groups, as the program's workers do (`worker/state.rs`).

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use engine::group::{GroupSeq, Size};
use engine::net::{ChangeAt, Fold, Folder, Old, Row as NetRow, Segment, Step};
use engine::order::{CommitOrder, Waits};
use engine::progress::Range;
use engine::worker::{Contended, Mode, Task};
use pgoutput::{Column, Lsn, decode_change};

use crate::simulation::history::{
    Change, FULL, History, Kind, Row, TRIGGERED, Transaction, is_keyed,
};
use crate::simulation::target::{Command, Database, Fault, Find, Reply, RowOp, find};
use crate::simulation::{Sabotage, rng::Rng};

const ATTEMPTS: u32 = 8;
const READY: usize = 2;

/// A part of a transaction, or idle progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
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
    pub(crate) fn part(number: usize, part: usize, history: &History) -> Self {
        let transaction = &history.transactions[number];
        let last = part + 1 == transaction.parts.len();
        let changes = &transaction.changes[transaction.parts[part].clone()];
        Self {
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
    pub(crate) fn idle(lsn: Lsn) -> Self {
        Self {
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

    pub(crate) fn changes<'h>(&self, history: &'h History) -> &'h [Change] {
        self.part.map_or(&[], |(number, part)| {
            let Transaction { changes, parts, .. } = &history.transactions[number];
            &changes[parts[part].clone()]
        })
    }

    pub(crate) fn size(&self) -> Size {
        Size {
            changes: self.length,
            bytes: 10 * self.length,
            whole: self.is_whole(),
            by_rows: self.user_code,
            starts_group: self.after_applied,
        }
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
enum Pending {
    Begin,
    Net(usize),
    Change,
    /// A truncate, a progress row, a COMMIT.
    Any,
    Sync(Option<Range>),
}

type Statements = Vec<(Command, Pending)>;

#[derive(Debug)]
struct InFlight {
    group: Group,
    awaited: usize,
    contended: Option<Statements>,
    ending: Option<Range>,
    early: bool,
    committed: usize,
}

impl InFlight {
    fn is_open(&self) -> bool {
        self.contended.is_some() || self.ending.is_some()
    }

    fn count_committed(&mut self, through: Option<Lsn>) {
        let is_committed = |work: &Work| work.end.is_some() && work.end <= through;
        self.committed = self.committed.max(self.group.works.partition_point(is_committed));
    }

    fn is_committed(&self) -> bool {
        self.committed == self.group.works.len()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    Later,
    ByRows,
}

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

#[derive(Debug)]
pub(crate) struct Worker {
    number: usize,
    ordered: bool,
    /// A lone transaction up to so many changes is sent as it is.
    lone: usize,
    ended_through: GroupSeq,
    pub(crate) mail: VecDeque<Mail>,
    queue: VecDeque<Group>,
    pending: VecDeque<Pending>,
    in_flight: VecDeque<InFlight>,
    ready: VecDeque<(InFlight, Statements)>,
    recovering: Option<Again>,
    /// Queued on the session, and not sent.
    unsent: Vec<Command>,
    ranges: Vec<Range>,
    answered: usize,
    ended: Vec<GroupSeq>,
    /// The first parts of a transaction are carried out, and the rest is still to come.
    partly: bool,
}

impl Worker {
    pub(crate) fn new(number: usize, ordered: bool, lone: usize) -> Self {
        Self {
            number,
            ordered,
            lone,
            ended_through: GroupSeq::NONE,
            mail: VecDeque::new(),
            queue: VecDeque::new(),
            pending: VecDeque::new(),
            in_flight: VecDeque::new(),
            ready: VecDeque::new(),
            recovering: None,
            unsent: Vec::new(),
            ranges: Vec::new(),
            answered: 0,
            ended: Vec::new(),
            partly: false,
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
                Mail::Group(group) => self.queue.push_back(group),
                Mail::GiveWay(group) => self.give_way(group, around)?,
            }
        }
        if let Some(again) = self.recovering {
            if self.pending.is_empty() {
                self.recover(again, around)?;
                around.woken.insert(self.number);
                return Ok(());
            }
            return self.sleep(&[], around);
        }
        self.advance(around);
        let mut waits = Vec::new();
        if self.has_room()
            && let Some(next) = self.queue.front()
        {
            let to_start = next.waits_to_start();
            if self.is_met(&to_start, around) {
                if let Some(group) = self.queue.pop_front() {
                    self.start(group, around)?;
                }
                around.woken.insert(self.number);
                return Ok(());
            }
            waits.push(to_start);
        }
        waits.extend(self.waits_to_advance());
        self.send(around)?;
        self.sleep(&waits, around)
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

    fn has_room(&self) -> bool {
        match self.queue.front() {
            Some(next) if next.attempts > 0 => self.in_flight.is_empty() && self.ready.is_empty(),
            _ => self.ready.len() < READY,
        }
    }

    fn is_met(&mut self, waits: &Waits, around: &Around<'_>) -> bool {
        let sent = self.in_flight.iter().take_while(|group| !group.is_open());
        let through = follow(self.ended_through, sent);
        if waits.through <= through && waits.groups.is_empty() {
            return true;
        }
        self.ended_through = around.order.ended_through();
        waits.through <= self.ended_through && waits.groups.is_empty() || around.order.is_met(waits)
    }

    fn is_next(&self, group: GroupSeq) -> bool {
        let before = self.in_flight.iter().chain(self.ready.iter().map(|(ready, _)| ready));
        group.previous() <= follow(self.ended_through, before)
    }

    fn waits_to_advance(&self) -> Option<Waits> {
        let last = self.in_flight.back()?;
        if last.contended.is_some() {
            return Some(last.group.contended.waits.clone());
        }
        (last.ending.is_some() && last.awaited == 0 && self.in_flight.len() == 1).then(|| {
            if self.ordered { Waits::all_before(last.group.seq) } else { Waits::default() }
        })
    }

    fn start(&mut self, group: Group, around: &mut Around<'_>) -> Result<()> {
        self.ended_through = self.ended_through.max(around.order.ended_through());
        let early = !self.is_next(group.seq);
        let history = around.history;
        let lone = group.works.len() == 1 && group.is_whole() && group.changes() <= self.lone;
        let mode = if lone && !early { Mode::Rows } else { group.mode };
        let group = Group { mode, ..group };
        let wait = self.in_flight.back().is_some_and(InFlight::is_open) || !self.ready.is_empty();
        if (wait || early)
            && let Err(failure) = self.send(around)
        {
            // It must not be lost with the session.
            self.queue.push_front(group);
            return Err(failure);
        }
        let split = early && mode == Mode::Net && !group.contended.changes.is_empty() && {
            let waits = group.contended.waits.clone();
            !self.is_met(&waits, around) && around.sabotage != Sabotage::UnmetWait
        };
        let number = self.number;
        around.note(|| {
            let parts: Vec<_> = group.works.iter().map(|work| work.part).collect();
            let Contended { waits, changes } = &group.contended;
            format!(
                "worker {number} starts group {} {mode:?} early={early} split={split} \
                 attempts={} {parts:?} contended={changes:?} {waits:?}",
                group.seq.0, group.attempts
            )
        });
        let (mut statements, contended, ending) = if split {
            let free = net(&group, Some(false), history);
            let mut contended = net(&group, Some(true), history);
            if contended.is_empty() {
                contended.push((Command::Nothing, Pending::Net(0)));
            }
            (free, Some(contended), ending(&group))
        } else if mode == Mode::Net {
            (net(&group, None, history), None, ending(&group))
        } else {
            let mut statements = Vec::new();
            let mut ending = None;
            for work in &group.works {
                ending = rows(work, early, self.ordered, history, &mut statements);
            }
            (statements, None, ending)
        };
        if statements.is_empty() {
            statements.push((Command::Nothing, Pending::Net(0)));
        }
        let awaited = statements.len();
        let in_flight = InFlight { group, awaited, contended, ending, early, committed: 0 };
        if wait {
            self.ready.push_back((in_flight, statements));
            return Ok(());
        }
        self.queue_all(statements);
        self.in_flight.push_back(in_flight);
        self.advance(around);
        if around.rng.chance(1, 3) {
            self.send(around)?;
            self.take_replies(around)?;
        }
        Ok(())
    }

    fn queue_all(&mut self, statements: Statements) {
        for (command, pending) in statements {
            self.unsent.push(command);
            self.pending.push_back(pending);
        }
    }

    fn advance(&mut self, around: &mut Around<'_>) {
        loop {
            let Some(waits) = self.waits_to_advance() else {
                if self.in_flight.back().is_some_and(InFlight::is_open) {
                    return;
                }
                let Some((group, statements)) = self.ready.pop_front() else { return };
                self.queue_all(statements);
                self.in_flight.push_back(group);
                continue;
            };
            if !self.is_met(&waits, around) {
                return;
            }
            let Some(last) = self.in_flight.back_mut() else { return };
            if let Some(statements) = last.contended.take() {
                last.awaited += statements.len();
                self.queue_all(statements);
            } else if let Some(ending) = last.ending.take() {
                let mut statements = Vec::new();
                end(ending, self.ordered, &mut statements);
                last.awaited = statements.len();
                self.queue_all(statements);
            }
        }
    }

    fn give_way(&mut self, group: GroupSeq, around: &mut Around<'_>) -> Result<()> {
        match self.in_flight.front() {
            Some(first) if first.group.seq == group && first.early && first.is_open() => {
                around.note(|| format!("group {} gives way", group.0));
                self.start_recovery(Again::Later, around)
            }
            _ => Ok(()),
        }
    }

    fn start_recovery(&mut self, again: Again, around: &mut Around<'_>) -> Result<()> {
        if self.recovering.is_some() {
            return Ok(());
        }
        let (number, first) = (self.number, self.in_flight.front().map(|first| first.group.seq.0));
        around.note(|| format!("worker {number}: group {first:?} again: {again:?}"));
        self.recovering = Some(again);
        if !matches!(self.pending.back(), Some(Pending::Sync(_))) {
            self.unsent.push(Command::Sync);
            self.pending.push_back(Pending::Sync(None));
        }
        self.send(around)
    }

    fn recover(&mut self, again: Again, around: &mut Around<'_>) -> Result<()> {
        self.recovering = None;
        // The answer is awaited; nothing else is on the session.
        let session = &mut around.target.sessions[self.number];
        if session.broken {
            return Err(Failure::Run(Lsn(0)));
        }
        session.commands.push_back(Command::Rollback);
        around.target.step(self.number, around.history).map_err(Failure::Wrong)?;
        around.target.sessions[self.number].replies.clear();
        self.requeue(again);
        Ok(())
    }

    fn requeue(&mut self, again: Again) {
        let ready = self.ready.drain(..).map(|(ready, _)| ready);
        let mut groups: VecDeque<_> = self
            .in_flight
            .drain(..)
            .chain(ready)
            .map(|in_flight| {
                let mut group = in_flight.group;
                if in_flight.committed > 0 {
                    group.works.drain(..in_flight.committed);
                    group.contended = Contended::default();
                }
                group
            })
            .collect();
        if let Some(first) = groups.front_mut() {
            first.attempts += 1;
            if again == Again::ByRows {
                first.mode = Mode::Rows;
            }
        }
        groups.append(&mut self.queue);
        self.queue = groups;
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
                    let pending = self.pending.pop_front();
                    if self.recovering.is_none() {
                        self.completed(pending, reply, around)?;
                    }
                }
                Reply::Error(fault) => self.failed(fault, around)?,
                Reply::Ready { idle } => {
                    let Some(Pending::Sync(commits)) = self.pending.pop_front() else {
                        return Err(wrong("the target answered a Sync nobody sent"));
                    };
                    if self.recovering.is_some() {
                        continue;
                    }
                    if let Some(range) = commits {
                        if !idle {
                            return Err(wrong("a transaction is open after its COMMIT"));
                        }
                        self.transaction_committed(range);
                        if let Some(first) = self.in_flight.front_mut() {
                            first.count_committed(Some(range.through));
                        }
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
        let early = self.in_flight.front().is_some_and(|first| first.early);
        let Reply::Completed(affected) = reply else {
            return Err(wrong("the target rolled a transaction back at COMMIT"));
        };
        match pending {
            Some(Pending::Net(rows)) if rows != affected => {
                return if early {
                    self.start_recovery(Again::Later, around)
                } else {
                    self.by_rows(around)
                };
            }
            Some(Pending::Change) if affected == 0 => {
                if early {
                    return self.start_recovery(Again::Later, around);
                }
                return Err(wrong("P7: the oldest misses a row"));
            }
            Some(Pending::Sync(_)) | None => {
                return Err(wrong("the target completed a statement nobody sent"));
            }
            _ => {}
        }
        self.account(around)
    }

    fn account(&mut self, around: &mut Around<'_>) -> Result<()> {
        let Some(first) = self.in_flight.front_mut() else { return Ok(()) };
        first.awaited -= 1;
        if first.awaited > 0 {
            return Ok(());
        }
        if first.is_open() {
            self.advance(around);
            return self.send(around);
        }
        if first.is_committed() {
            self.ended.push(first.group.seq);
        }
        self.partly = first.group.works.last().is_some_and(|work| work.end.is_none());
        self.in_flight.pop_front();
        self.answered += 1;
        Ok(())
    }

    fn failed(&mut self, fault: Fault, around: &mut Around<'_>) -> Result<()> {
        self.pending.pop_front();
        if self.recovering.is_none() {
            let Some(first) = self.in_flight.front() else {
                return Err(wrong("an error with nothing in flight"));
            };
            let group = &first.group;
            let soon = fault == Fault::Passing && group.is_whole() && group.attempts < ATTEMPTS;
            if first.early || soon {
                self.start_recovery(Again::Later, around)?;
            } else if fault == Fault::Passing {
                return Err(Failure::Run(Lsn(0)));
            } else if group.mode == Mode::Rows {
                return Err(Failure::Wrong(format!(
                    "P7: the oldest, group {}, fails by rows: {fault:?}",
                    group.seq.0
                )));
            } else {
                self.by_rows(around)?;
            }
        }
        while self.pending.front().is_some_and(|next| !matches!(next, Pending::Sync(_))) {
            self.pending.pop_front();
        }
        Ok(())
    }

    fn by_rows(&mut self, around: &mut Around<'_>) -> Result<()> {
        let Some(InFlight { group, .. }) = self.in_flight.front() else { return Ok(()) };
        if group.is_whole() {
            return self.start_recovery(Again::ByRows, around);
        }
        Err(Failure::Run(group.last_commit()))
    }

    fn report(&mut self, around: &mut Around<'_>) {
        let committed = std::mem::take(&mut self.ranges);
        let groups = std::mem::take(&mut self.answered);
        if committed.is_empty() && groups == 0 {
            return;
        }
        let ended = std::mem::take(&mut self.ended);
        let answered = Answered { committed, groups, ended: ended.clone() };
        around.reports.push_back((self.number, answered));
        for group in ended {
            around.woken.extend(around.order.ended(group));
        }
        self.ended_through = around.order.ended_through();
    }

    /// Goes on with a new session (`worker/lost.rs`).
    fn reconnect(&mut self, around: &mut Around<'_>) -> Result<()> {
        let whole = !self.partly
            && self.in_flight.iter().all(|in_flight| in_flight.group.is_whole())
            && self.ready.iter().all(|(ready, _)| ready.group.is_whole())
            && self.queue.iter().all(Group::is_whole);
        if !whole {
            return Err(Failure::Run(Lsn(0)));
        }
        let session = around.target.open_session();
        around.target.sessions[self.number] = session;
        let mut through = None;
        let sent: Vec<_> = self
            .pending
            .iter()
            .filter_map(
                |pending| if let Pending::Sync(commits) = pending { *commits } else { None },
            )
            .collect();
        for range in sent {
            let took_effect = match around.sabotage {
                Sabotage::ForgottenCommit => false,
                Sabotage::AssumedCommit => true,
                _ => around.target.is_recorded(range.through),
            };
            if !took_effect {
                break;
            }
            self.transaction_committed(range);
            through = Some(range.through);
        }
        while let Some(first) = self.in_flight.front_mut() {
            first.count_committed(through);
            if !first.is_committed() {
                break;
            }
            self.ended.push(first.group.seq);
            self.answered += 1;
            self.in_flight.pop_front();
        }
        self.unsent.clear();
        self.recovering = None;
        self.pending.clear();
        self.requeue(Again::Later);
        Ok(())
    }
}

fn wrong(what: &str) -> Failure {
    Failure::Wrong(what.to_owned())
}

fn follow<'g>(through: GroupSeq, groups: impl Iterator<Item = &'g InFlight>) -> GroupSeq {
    groups.fold(
        through,
        |through, group| {
            if group.group.seq == through.next() { group.group.seq } else { through }
        },
    )
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
fn rows(
    work: &Work,
    early: bool,
    ordered: bool,
    history: &History,
    statements: &mut Statements,
) -> Option<Range> {
    if work.first {
        statements.push((Command::Begin, Pending::Begin));
    }
    for change in work.changes(history) {
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
    (Command::Rows(table, Rc::new([op])), Pending::Change)
}

/// Changes of a group as net changes: all, or only those that are (not) contended.
fn net(group: &Group, contended: Option<bool>, history: &History) -> Statements {
    let mut statements = Vec::new();
    if contended != Some(true) && group.works.first().is_some_and(|work| work.first) {
        statements.push((Command::Begin, Pending::Begin));
    }
    let mut folder = Folder::new(&history.rules);
    let mut verdicts = group.contended.changes.iter();
    for (part, work) in (0..).zip(&group.works) {
        for (number, change) in (0..).zip(work.changes(history)) {
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
                let changes = group.works[at.part as usize].changes(history);
                statements.push(alone(&changes[at.change as usize]));
            }
            Step::Segment(segment) => set(&segment, history, &mut statements),
        }
    }
    statements
}

/// A segment as sets.
fn set(segment: &Segment<'_>, history: &History, statements: &mut Statements) {
    let table = segment.table;
    let keyed = matches!(history.rules[table].fold, Fold::Key(_));
    debug_assert!(keyed == is_keyed(table), "tables are what they are");
    let mut push = |ops: Vec<RowOp>, found: bool| {
        if !ops.is_empty() {
            let rows = if found { ops.len() } else { 0 };
            statements.push((Command::Rows(table, ops.into()), Pending::Net(rows)));
        }
    };
    let find_old = |old: &Old<'_>| find_row(table, &old.row);
    push(segment.absent.iter().map(|row| RowOp::Delete(find_row(table, row))).collect(), false);
    push(segment.deletes.iter().map(|old| RowOp::Delete(find_old(old))).collect(), true);
    let updates = segment.updates.iter().map(|update| {
        let found = update.old.as_ref().map_or_else(|| find_row(table, &update.new), find_old);
        RowOp::Update(found, values(&update.new))
    });
    push(updates.collect(), true);
    let inserts = segment.inserts.iter().map(|row| RowOp::Insert(row_of(row)));
    push(inserts.collect(), true);
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
