use std::time::Duration;

use pgoutput::{Insert, Lsn, Message, RelId, TupleBuilder};

use super::{
    Dispatch, DispatchSettings, Dispatchable, LockError, Locks, Pacing, RowVersions, Step, TableId,
    Want,
};
use crate::group::{GroupLimits, GroupSeq, Size};
use crate::key::KeyForm;
use crate::order::Prerequisites;
use crate::worker::{Group, GroupMember, GroupMode};
use crate::writeset::{LockColumn, LockRules, RowLock, WritesetLimits};

/// A transaction that inserts one row.
#[derive(Debug, Clone)]
pub(crate) struct Insertion {
    commit: u64,
    key: u64,
    table: TableId,
    /// Which parts of the transaction it is: its beginning, and its end.
    first: bool,
    last: bool,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ordinary,
    UserCode,
    /// Is prepared.
    Prepare,
    /// Ends one that is prepared.
    End,
}

const TABLE: TableId = TableId { published: RelId(1), oid: 1, root: 1 };

pub(crate) fn row(key: u64) -> Insertion {
    let (first, last) = (true, true);
    Insertion { commit: key * 10, key, table: TABLE, first, last, kind: Kind::Ordinary }
}

fn of_kind(key: u64, kind: Kind) -> Insertion {
    Insertion { kind, ..row(key) }
}

impl Insertion {
    /// A row of this table.
    pub(crate) fn into_table(oid: u32) -> Self {
        Self { table: TableId { published: RelId(oid), oid, root: oid }, ..row(1) }
    }

    /// The same as a part of a larger transaction.
    pub(crate) fn into_part(self, first: bool, last: bool) -> Self {
        Self { first, last, ..self }
    }

    /// The same with another commit LSN.
    pub(crate) fn committed_at(self, commit: u64) -> Self {
        Self { commit, ..self }
    }
}

impl GroupMember for Insertion {
    fn end(&self) -> Option<Lsn> {
        self.last.then_some(Lsn(self.commit + 1))
    }

    fn begins(&self) -> bool {
        self.first
    }

    fn length(&self) -> usize {
        1
    }

    fn is_whole(&self) -> bool {
        self.first && self.last && !self.is_step()
    }

    fn runs_user_code(&self) -> bool {
        self.kind == Kind::UserCode
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_step(&self) -> bool {
        matches!(self.kind, Kind::Prepare | Kind::End)
    }

    fn follows_applied(&self) -> bool {
        false
    }

    fn is_prepared_at_once(&self) -> bool {
        self.kind == Kind::Prepare && self.first && self.last
    }
}

impl Dispatchable for Insertion {
    fn size(&self) -> Size {
        Size {
            changes: 1,
            bytes: 10,
            whole: self.is_whole(),
            by_rows: self.runs_user_code(),
            small: false,
            starts_group: false,
            scans: false,
        }
    }

    fn ends_prepared(&self) -> bool {
        self.kind == Kind::End
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        [self.table].into_iter()
    }

    /// Nothing is updated.
    fn count_versions(&self, _versions: &mut RowVersions) {}

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        let key = LockColumn { column: 0, form: KeyForm::Integer, in_identity: true };
        let rules = LockRules {
            root: self.table.root,
            identity: 1,
            row: RowLock::Key(vec![key]),
            unique: Vec::new(),
            foreign: Vec::new(),
            referenced: Vec::new(),
            whole_table: false,
            user_code: false,
        };
        let tuple = TupleBuilder::new().text(self.key.to_string());
        let (xid, relation) = (None, RelId(1));
        locks.change(Some(&rules), &Message::Insert(Insert { xid, relation, new: tuple.tuple() }));
        Ok(())
    }
}

const fn at(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn settings(workers: usize) -> DispatchSettings {
    DispatchSettings {
        workers,
        vary: false,
        scaled: false,
        ordered: true,
        round_trip: Duration::ZERO,
        group: GroupLimits {
            transactions: 128,
            thin_transactions: 128,
            changes: 1000,
            bytes: 10_000,
        },
        writeset: WritesetLimits::default(),
        deadlock_timeout: at(50),
        pacing: Pacing::MEASURED,
    }
}

fn dispatch(settings: DispatchSettings) -> Dispatch<Insertion> {
    Dispatch::new(settings)
}

/// The group that is assigned now, and to whom.
fn handed(dispatch: &mut Dispatch<Insertion>, now: Duration) -> Option<(usize, Group<Insertion>)> {
    match dispatch.next(now, true).expect("locks are known") {
        Step::Assign { worker, group, .. } => Some((worker, group)),
        _ => None,
    }
}

/// The next step of the dispatcher, in a state in which it hands no group over.
fn kept(dispatch: &mut Dispatch<Insertion>, now: Duration) -> Step<Insertion> {
    dispatch.next(now, true).expect("locks are known")
}

#[test]
fn a_lone_transaction_goes_to_the_first_idle_worker_at_once() {
    let mut dispatch = dispatch(settings(4));
    for key in 1..5 {
        dispatch.push(row(key));
        let (worker, group) = handed(&mut dispatch, at(key)).expect("nobody is busy");
        assert_eq!((worker, group.seq, group.mode), (0, GroupSeq(key), GroupMode::Net));
        assert!(matches!(kept(&mut dispatch, at(key)), Step::Nothing));
        dispatch.answered(worker, 1, &[group.seq], at(key));
    }
    assert_eq!(dispatch.ended_through(), GroupSeq(4));
}

#[test]
fn small_groups_keep_a_distance_while_others_are_busy() {
    let mut dispatch = dispatch(settings(2));
    dispatch.push(row(1));
    handed(&mut dispatch, at(10)).expect("nobody is busy");
    dispatch.push(row(2));
    let step = kept(&mut dispatch, at(11));
    assert!(matches!(step, Step::Wait(time) if time == at(1)), "{step:?}");
    assert_eq!(handed(&mut dispatch, at(12)).expect("two milliseconds later").0, 1);
    dispatch.push(row(3));
    let step = kept(&mut dispatch, at(90));
    assert!(matches!(step, Step::Busy { short: true }), "both are busy, and it is small: {step:?}");
}

#[test]
fn a_group_that_is_worth_it_is_queued_behind_others_up_to_the_depth() {
    let mut dispatch = dispatch(settings(2));
    let mut handed_to = [0; 2];
    for key in 1..1000 {
        dispatch.push(row(key));
        if let Some((worker, group)) = handed(&mut dispatch, at(1)) {
            assert!(key == 1 || group.works.len() == 32, "a quarter of the limit");
            handed_to[worker] += 1;
        }
    }
    assert_eq!(handed_to, [2, 2]);
    assert_eq!(dispatch.remembered().queued, 4);
    // The one that has least is next.
    dispatch.answered(1, 1, &[GroupSeq(2)], at(2));
    let (worker, group) = handed(&mut dispatch, at(2)).expect("it has room");
    assert_eq!((worker, group.works.len()), (1, 128));
}

#[test]
fn parts_of_one_transaction_go_to_one_worker_as_one_group() {
    let mut dispatch = dispatch(settings(3));
    dispatch.push(row(1));
    handed(&mut dispatch, at(1)).expect("nobody is busy");
    for (first, last) in [(true, false), (false, false), (false, true)] {
        dispatch.push(Insertion { first, last, commit: 20, ..row(2) });
    }
    dispatch.push(row(3));
    let parts: Vec<_> = (0..2).filter_map(|_| handed(&mut dispatch, at(5))).collect();
    assert!(parts.iter().all(|(worker, part)| (*worker, part.seq) == (1, GroupSeq(2))));
    let step = kept(&mut dispatch, at(90));
    assert!(matches!(step, Step::Busy { short: false }), "only that worker can take it: {step:?}");
    dispatch.answered(1, 1, &[], at(6));
    let (worker, part) = handed(&mut dispatch, at(6)).expect("there is room");
    assert_eq!((worker, part.seq), (1, GroupSeq(2)));
    let (worker, next) = handed(&mut dispatch, at(8)).expect("the third is free");
    assert_eq!((worker, next.seq), (2, GroupSeq(3)));
}

#[test]
fn what_conflicts_with_groups_in_flight_waits_for_them() {
    let mut dispatch = dispatch(settings(3));
    for (time, key) in [(0, 1), (2, 2), (4, 1)] {
        dispatch.push(row(key));
        let (_, group) = handed(&mut dispatch, at(time)).expect("one is free");
        let prerequisites =
            if time == 4 { Prerequisites::through(GroupSeq(1)) } else { Prerequisites::default() };
        assert_eq!(
            (group.dependent.prerequisites, group.dependent.changes.len()),
            (prerequisites, (time / 4) as usize)
        );
    }
}

#[test]
fn a_full_writeset_waits_for_the_oldest_group() {
    let writeset = WritesetLimits { keys: 2, ..WritesetLimits::default() };
    let mut dispatch = dispatch(DispatchSettings { writeset, ..settings(4) });
    for key in 1..4 {
        dispatch.push(row(key));
    }
    handed(&mut dispatch, at(1)).expect("nobody is busy");
    dispatch.push(row(4));
    assert!(matches!(kept(&mut dispatch, at(90)), Step::Busy { short: false }));
    dispatch.answered(0, 1, &[GroupSeq(1)], at(91));
    handed(&mut dispatch, at(91)).expect("its locks are gone");
}

#[test]
fn the_end_of_a_prepared_transaction_is_isolated() {
    let mut dispatch = dispatch(settings(4));
    let kinds = [Kind::Ordinary, Kind::End, Kind::Ordinary];
    let prerequisites = (1..).zip(kinds).map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (_, group) = handed(&mut dispatch, at(key * 2)).expect("one is free");
        assert_eq!(group.mode, if kind == Kind::End { GroupMode::Rows } else { GroupMode::Net });
        group.dependent.prerequisites.through.0
    });
    assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn transactions_prepared_at_once_wait_only_for_what_came_before_all_of_them() {
    let mut dispatch = dispatch(settings(4));
    let kinds = [Kind::Ordinary, Kind::Prepare, Kind::Prepare, Kind::Ordinary, Kind::Prepare];
    let prerequisites = (1..).zip(kinds).map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (worker, group) = handed(&mut dispatch, at(key * 2)).expect("one is free");
        dispatch.answered(worker, 1, &[], at(key * 2));
        group.dependent.prerequisites.through.0
    });
    assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 1, 0, 4]);
}

#[test]
fn another_table_of_that_name_or_another_topmost_relation_is_a_barrier() {
    for moved in [TableId { root: 7, ..TABLE }, TableId { oid: 7, root: 7, ..TABLE }] {
        let mut dispatch = dispatch(settings(4));
        let prerequisites = (1..).zip([TABLE, moved, moved]).map(|(key, table)| {
            dispatch.push(Insertion { table, ..row(key) });
            handed(&mut dispatch, at(key * 2))
                .expect("one is free")
                .1
                .dependent
                .prerequisites
                .through
                .0
        });
        assert_eq!(prerequisites.collect::<Vec<_>>(), [0, 1, 2]);
    }
}

#[test]
fn a_group_ends_before_the_name_of_a_table_leads_to_another_one() {
    let mut dispatch = dispatch(settings(1));
    let moved = TableId { oid: 7, root: 7, ..TABLE };
    for (key, table) in (1..).zip([TABLE, TABLE, moved, moved]) {
        dispatch.push(Insertion { table, ..row(key) });
    }
    let lengths = [1, 2].map(|now| {
        let (worker, group) = handed(&mut dispatch, at(now)).expect("nobody is busy");
        dispatch.answered(worker, 1, &[group.seq], at(now));
        group.works.len()
    });
    assert_eq!(lengths, [2, 2]);
}

#[test]
fn user_code_is_applied_change_by_change() {
    let mut dispatch = dispatch(settings(1));
    let modes = [(1, Kind::Ordinary), (2, Kind::UserCode)].map(|(key, kind)| {
        dispatch.push(of_kind(key, kind));
        let (worker, group) = handed(&mut dispatch, at(1)).expect("nobody is busy");
        dispatch.answered(worker, 1, &[group.seq], at(1));
        group.mode
    });
    assert_eq!(modes, [GroupMode::Net, GroupMode::Rows]);
}

/// Short transactions that are committed one by one share the pipeline of one worker. Slow ones go side
/// by side.
#[test]
fn transactions_that_are_committed_one_by_one_go_through_one_pipeline_while_they_are_short() {
    let group = GroupLimits { transactions: 1, thin_transactions: 1, ..settings(4).group };
    for slow in [false, true] {
        let mut dispatch = dispatch(DispatchSettings { group, ..settings(4) });
        let (mut largest, mut workers, mut assigned) = (0, [0; 4], Vec::new());
        for round in 0..400 {
            let now = at(round * 10);
            for key in 0..200 {
                dispatch.push(row(1000 * round + key));
            }
            while let Some((worker, group)) = handed(&mut dispatch, now) {
                assert_eq!(group.mode, GroupMode::Rows);
                largest = largest.max(group.works.len());
                workers[worker] += 1;
                assigned.push((worker, group.seq));
            }
            assert!(dispatch.remembered().queued <= 64 * 4);
            let through = if slow { 1 } else { assigned.len() };
            for (worker, seq) in assigned.drain(..through.min(assigned.len())) {
                dispatch.answered(worker, 1, &[seq], now + at(9));
            }
        }
        let spread = workers[1..].iter().all(|groups| *groups > 100);
        assert_eq!(spread, slow, "{workers:?}");
        assert!(largest > 1 && largest <= Pacing::MEASURED.run, "{largest}");
    }
}

#[test]
fn a_backlog_is_gathered_for_a_bounded_time() {
    let mut dispatch = dispatch(settings(2));
    dispatch.sent_after(Duration::from_secs(9));
    dispatch.push(row(1));
    let step = kept(&mut dispatch, at(0));
    assert!(matches!(step, Step::Wait(time) if time == at(20)), "{step:?}");
    assert!(matches!(dispatch.next(at(0), false), Ok(Step::Assign { .. })), "nothing more comes");
    dispatch.answered(0, 1, &[GroupSeq(1)], at(1));
    dispatch.push(row(2));
    handed(&mut dispatch, at(21)).expect("that was long enough");
}

/// The reader must not delay commits that wait, unless their sessions wait for processors even longer.
#[test]
fn the_reader_gathers_as_much_as_waiting_commits_allow() {
    use super::ReaderGathering::*;
    let mut dispatch = dispatch(settings(2));
    let mut second = 0;
    let mut gathering = |in_flight, sessions, rate: u64, short, synchronous| {
        for key in 0..rate {
            dispatch.push(row(key));
        }
        second += 1;
        let now = at(second * 1000);
        while let Some((worker, group)) = handed(&mut dispatch, now) {
            dispatch.answered(worker, 1, &[group.seq], now);
        }
        dispatch.on_their_way(in_flight);
        dispatch.observed(short, sessions, now);
        dispatch.gathering(synchronous)
    };
    for (in_flight, sessions, rate, short, waiting, otherwise) in [
        (1, 1, 500, false, Nothing, Little),
        (1, 1, 500, true, Nothing, Little),
        (4, 4, 2000, true, Nothing, ScarceProcessors),
        (4, 40, 2000, true, ScarceProcessors, ScarceProcessors),
        (4, 40, 2000, false, Nothing, Little),
        (9, 10, 2000, false, Little, ConcurrentCommitters),
        (9, 0, 2000, true, Little, ScarceProcessors),
    ] {
        let case = (in_flight, sessions, rate, short);
        for (synchronous, expected) in [(true, waiting), (false, otherwise)] {
            // Estimates of the case before decay.
            gathering(0, sessions, rate, short, synchronous);
            let found = gathering(in_flight, sessions, rate, short, synchronous);
            assert_eq!(found, expected, "{case:?} {synchronous}");
        }
    }
    dispatch.sent_after(at(5000));
    assert_eq!(dispatch.gathering(true), Backlog);
}

/// Workers of a load that is no backlog cost wake-ups.
#[test]
fn one_worker_gets_a_light_load_where_processors_are_short() {
    let mut dispatch = dispatch(DispatchSettings { scaled: true, ..settings(4) });
    for (short, workers) in [(false, 4), (true, 1), (false, 4)] {
        dispatch.observed(short, 0, at(0));
        kept(&mut dispatch, at(0));
        assert_eq!(dispatch.workers().limited_to(), workers);
    }
}

#[test]
fn far_away_small_groups_follow_each_other_on_one_session() {
    let mut dispatch = dispatch(DispatchSettings { round_trip: at(8), ..settings(4) });
    for key in 1..=64 {
        dispatch.push(row(key));
        let (worker, _) = handed(&mut dispatch, at(key)).expect("an eighth of a round trip later");
        assert_eq!(worker, 0);
        dispatch.push(row(key + 100));
        assert!(matches!(kept(&mut dispatch, at(key)), Step::Wait(_) | Step::Busy { .. }));
        // The remaining transactions go with the next.
    }
    assert!(matches!(kept(&mut dispatch, at(900)), Step::Busy { short: true }));
    assert_eq!(dispatch.remembered().queued, 64);
}

#[test]
fn a_worker_that_leaves_gets_no_more() {
    let mut dispatch = dispatch(DispatchSettings { vary: true, ..settings(2) });
    dispatch.want(true, at(0), || true);
    assert_eq!(dispatch.want(true, at(60), || true), Want::Open(1));
    dispatch.came(1, at(60));
    for key in 1..3 {
        dispatch.push(row(key));
        handed(&mut dispatch, at(key * 2)).expect("one is free");
    }
    assert!(dispatch.give_back(at(700), |_| true).is_some_and(|leaves| leaves.worker == 1));
    for key in 3..200 {
        dispatch.push(row(key));
    }
    assert_eq!(handed(&mut dispatch, at(700)).map(|(worker, _)| worker), Some(0));
    assert!(matches!(kept(&mut dispatch, at(700)), Step::Busy { short: true }));
    assert!(dispatch.answered(1, 1, &[], at(701)), "now it goes");
}

/// Otherwise a change on another worker could overtake one of the same row that is in no writeset.
#[test]
fn only_their_worker_gets_groups_while_some_have_no_locks() {
    let mut dispatch = dispatch(settings(3));
    let next = |dispatch: &mut Dispatch<Insertion>, key| {
        (0..64).for_each(|_| dispatch.push(row(key)));
        handed(dispatch, at(key))
            .map(|(worker, group)| (worker, group.dependent.prerequisites.through.0))
    };
    dispatch.limit(1, true);
    assert_eq!(next(&mut dispatch, 1), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 0, "nothing else is in flight");
    dispatch.limit(3, true);
    assert_eq!(next(&mut dispatch, 2), Some((0, 0)), "the session keeps their order");
    assert_eq!(dispatch.remembered().locks, 1);
    dispatch.answered(0, 1, &[GroupSeq(1)], at(3));
    assert_eq!(next(&mut dispatch, 2), Some((1, 2)), "both have locks");
    dispatch.limit(1, true);
    assert_eq!(next(&mut dispatch, 3), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 3, "another worker is still busy");
    dispatch.answered(0, 1, &[GroupSeq(2)], at(4));
    dispatch.answered(1, 1, &[GroupSeq(3)], at(4));
    assert_eq!(next(&mut dispatch, 4), Some((0, 0)));
    assert_eq!(dispatch.remembered().locks, 1);
}

#[test]
fn a_backlog_is_applied_by_as_many_workers_as_gain_something() {
    let mut dispatch = dispatch(DispatchSettings { scaled: true, ..settings(16) });
    dispatch.sent_after(at(5000));
    // Each worker applies ten groups per second.
    let (mut busy, mut used) = (Vec::new(), 0);
    for now in 0..20_000 {
        (0..100).for_each(|key| dispatch.push(row(key)));
        while let Want::Open(worker) = dispatch.want(true, at(now), || true) {
            dispatch.came(worker, at(now));
        }
        busy.retain(|(worker, seq, ends)| {
            let ended = *ends <= now;
            if ended {
                dispatch.answered(*worker, 1, &[*seq], at(now));
            }
            !ended
        });
        while let Some((worker, group)) = handed(&mut dispatch, at(now)) {
            let queued = busy.iter().filter(|(other, ..)| *other == worker).map(|(.., ends)| *ends);
            busy.push((worker, group.seq, queued.max().unwrap_or(now) + 100));
            used = used.max(worker + 1);
        }
    }
    assert_eq!((used, dispatch.decision().workers), (16, 16), "{:?}", dispatch.decision());
    // Without a backlog, sessions that have had no group for a while are closed.
    dispatch.sent_after(at(0));
    for (worker, seq, _) in busy {
        dispatch.answered(worker, 1, &[seq], at(21_000));
    }
    let mut closed = 0;
    while let Some(leaves) = dispatch.retire(at(90_000)) {
        dispatch.left(leaves.worker);
        closed += 1;
    }
    assert_eq!(closed, 15);
}

#[test]
fn tables_of_groups_that_give_way_often_are_serialized_for_a_while() {
    let mut dispatch = dispatch(settings(2));
    let mut serialized = Vec::new();
    for round in 0..4_u64 {
        for key in [round * 2 + 1, round * 2 + 2] {
            dispatch.push(row(key));
            handed(&mut dispatch, at(round * 100 + key * 10)).expect("one is free");
        }
        let (oldest, victim) = (GroupSeq(round * 2 + 1), GroupSeq(round * 2 + 2));
        let now = at(round * 100 + 90);
        dispatch.look_at_stalls(None, now);
        let found = (true, &[victim][..]);
        let (rolled_back, change) = dispatch.resolve_deadlock(oldest, found, now);
        assert_eq!(rolled_back, [(1, victim)]);
        serialized.extend(change.roots);
        // However often it is found.
        assert!(dispatch.resolve_deadlock(oldest, found, now).1.roots.is_empty());
        dispatch.answered(0, 1, &[oldest], now);
        dispatch.answered(1, 1, &[victim], now);
    }
    assert_eq!(serialized, [TABLE.root]);
    for (key, prerequisites) in [(101, 0), (102, 9)] {
        dispatch.push(row(key));
        let (_, group) = handed(&mut dispatch, at(key * 10)).expect("one is free");
        assert_eq!(group.dependent.prerequisites.through.0, prerequisites);
    }
    assert_eq!(dispatch.release(at(60_000)).roots, [TABLE.root]);
}
