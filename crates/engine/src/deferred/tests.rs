//! Changes go to the tables that they touch, whatever the number of tables.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use pgoutput::{
    ColumnsBuilder, Insert, Message, RelId, Relation, ReplicaIdentity, Timestamp, TupleBuilder,
    TypeOid, Xid, builder,
};

use super::*;
use crate::assemble::{BlockSource, SpoolId};
use crate::relation::RelationCache;
use crate::transaction::{Location, TransactionHead};

/// Nothing is written to it here.
struct NoSpool;

impl BlockSource for NoSpool {
    type Error = Infallible;

    fn spooled(&mut self, _: SpoolId) -> Result<Bytes, Infallible> {
        panic!("all blocks are in memory");
    }

    fn spooled_from(&mut self, _: SpoolId, _: u64) -> Result<Bytes, Infallible> {
        panic!("all blocks are in memory");
    }

    fn out_of_memory(bytes: usize) -> Self::Error {
        panic!("no memory for {bytes} bytes");
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}

impl Spool for NoSpool {
    fn carry_out(&mut self, command: SpoolCommand) -> Result<(), Infallible> {
        panic!("all blocks are in memory, but {command:?}");
    }
}

fn name(table: usize) -> TableName {
    TableName { schema: "public".to_owned(), name: format!("t{table}") }
}

fn relations(count: usize) -> Vec<Arc<RemoteRelation>> {
    let mut cache = RelationCache::default();
    let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1);
    let mut relation = |table: usize| {
        cache.update(&Relation {
            xid: None,
            id: RelId(u32::try_from(table).unwrap() + 1),
            schema: "public",
            name: &name(table).name,
            replica_identity: ReplicaIdentity::Default,
            columns: columns.columns(),
        })
    };
    (0..count).map(&mut relation).collect()
}

/// A part of the transaction that commits at this LSN, with an insert into each of these tables.
fn part(lsn: u64, inserts: &[&Arc<RemoteRelation>], ends: bool) -> TransactionPart {
    let (commit_lsn, commit_time, xid) = (Lsn(lsn), Timestamp(7), Xid(1));
    let mut part = TransactionPart::new(TransactionHead { commit_lsn, commit_time, xid }, true);
    for relation in inserts {
        let tuple = TupleBuilder::new().text("1");
        let insert = Insert { xid: None, relation: relation.id, new: tuple.tuple() };
        let chunk = Bytes::from(builder::encoded(&Message::Insert(insert)));
        part.push(Location { chunk: &chunk, offset: 0, length: chunk.len() }, relation);
    }
    part.end_lsn = ends.then_some(Lsn(lsn + 8));
    part
}

/// The tables have everything up to 100.
fn deferred(count: usize) -> DeferredTables<()> {
    let mut deferred = DeferredTables::new(Lsn(50), true, BlockLimits::default());
    (0..count).for_each(|table| deferred.resume(name(table), (), Lsn(100), Lsn(90)));
    deferred
}

/// The number of changes in the next part of each table.
fn next_parts(deferred: &mut DeferredTables<()>) -> Vec<Option<usize>> {
    let mut next = |table| {
        let limits = PartLimits::default();
        let part = deferred.next_part(table, SyncLsn(Lsn(100)), limits, &mut NoSpool);
        part.unwrap_or_else(|_| panic!("readable")).map(|part| part.len())
    };
    (0..3).map(&mut next).collect()
}

#[test]
fn each_table_gets_its_changes_although_another_one_is_removed_meanwhile() {
    let r = relations(5);
    let mut deferred = deferred(4);
    assert!(deferred.has(&r[3]) && !deferred.has(&r[4]));
    let defer = |deferred: &mut DeferredTables<()>, part| {
        deferred.defer(&part, &mut NoSpool).unwrap();
    };
    // The copies have it.
    defer(&mut deferred, part(99, &[&r[0], &r[1]], true));
    defer(&mut deferred, part(100, &[&r[1], &r[3], &r[4]], false));
    deferred.remove(|table| table.name == name(0), &mut NoSpool).unwrap();
    assert!(!deferred.has(&r[0]) && deferred.has(&r[1]));
    defer(&mut deferred, part(100, &[&r[4], &r[3], &r[0], &r[3]], true));
    defer(&mut deferred, part(200, &[&r[4]], true));
    // The tables are now 1, 2 and 3.
    assert_eq!(next_parts(&mut deferred), [Some(1), None, Some(3)]);
    assert_eq!(next_parts(&mut deferred), [None; 3]);
}

/// What a prepared transaction left out comes in its place, when it commits. Until it ends, its tables do not catch up.
#[test]
fn what_a_prepared_transaction_left_out_is_deferred_when_it_commits() {
    let r = relations(4);
    let mut deferred = deferred(3);
    deferred.received(Lsn(100));
    for (xid, left_out) in [(Xid(7), vec![name(0), name(1)]), (Xid(8), vec![name(1)])] {
        deferred.leave_out(xid, left_out);
        assert!(deferred.leaves_out(xid, &r[1]) && !deferred.leaves_out(xid, &r[2]));
        let parts = [part(110, &[&r[3], &r[0], &r[1]], false), part(110, &[&r[1], &r[3]], true)];
        for part in parts {
            deferred.keep_left_out(xid, &part, &mut NoSpool).unwrap();
        }
    }
    let may_catch_up = |deferred: &DeferredTables<()>| -> Vec<bool> {
        deferred.tables().iter().map(|table| deferred.may_catch_up(table)).collect()
    };
    assert_eq!(may_catch_up(&deferred), [false, false, true]);
    deferred.defer(&part(120, &[&r[1]], true), &mut NoSpool).unwrap();
    deferred.forget_left_out(Xid(8), &mut NoSpool).unwrap();
    let head = part(130, &[], true).head;
    let limits = PartLimits::default();
    let done = deferred.defer_left_out(Xid(7), (head, Lsn(138)), limits, &mut NoSpool);
    assert!(done.is_ok());
    assert_eq!(may_catch_up(&deferred), [true; 3]);
    assert_eq!(next_parts(&mut deferred), [Some(1), Some(1), None]);
    assert_eq!(next_parts(&mut deferred), [None, Some(2), None]);
    assert_eq!(next_parts(&mut deferred), [None; 3]);
}

/// The slot of the copy waits at 250. Behind that, changes are kept.
#[test]
fn what_the_snapshot_will_have_is_discarded() {
    let r = relations(3);
    let mut deferred = DeferredTables::<()>::new(Lsn(50), true, BlockLimits::default());
    let defer = |deferred: &mut DeferredTables<()>, lsn, tables: &[usize], ends| {
        let inserts: Vec<_> = tables.iter().map(|table| &r[*table]).collect();
        deferred.defer(&part(lsn, &inserts, ends), &mut NoSpool).unwrap();
    };
    let progress = Progress::resume(Lsn(90), Lsn(90), Lsn(90));
    (0..2).for_each(|table| deferred.begin(name(table), &progress));
    // Their slot is created later.
    defer(&mut deferred, 100, &[0, 1], false);
    assert_eq!(deferred.take_copies(), [name(0), name(1)]);
    defer(&mut deferred, 100, &[0, 1], true);
    assert!(deferred.tables().iter().all(|table| table.changes.unread() == 0));
    deferred.begin(name(2), &progress);
    defer(&mut deferred, 200, &[0, 1, 2], true);
    defer(&mut deferred, 210, &[0], false);
    defer(&mut deferred, 260, &[1, 2], true);
    let fills = |deferred: &DeferredTables<()>| {
        let tables = deferred.tables().iter();
        tables.map(DeferredTable::fills_before_copy).collect::<Vec<_>>()
    };
    assert_eq!(fills(&deferred), [true, true, false]);
    assert!(deferred.discard_before(Lsn(250), &mut NoSpool).unwrap() > 0);
    assert_eq!(fills(&deferred), [false, true, false]);
    // The rest of a transaction whose first part was discarded is discarded, too.
    defer(&mut deferred, 210, &[0], true);
    defer(&mut deferred, 249, &[0], true);
    assert_eq!(fills(&deferred), [false, true, false]);
    defer(&mut deferred, 250, &[0, 0], true);
    let [first, second, third] = deferred.tables_mut() else { panic!("three tables") };
    let lost = DiscardedTooMuch { discarded: Lsn(250), snapshot: SyncLsn(Lsn(249)) };
    assert_eq!(first.complete((), SyncLsn(Lsn(249))), Err(lost));
    assert!(first.copied().is_none());
    assert_eq!(first.complete((), SyncLsn(Lsn(250))), Ok(()));
    assert_eq!(second.complete((), SyncLsn(Lsn(101))), Ok(()));
    assert!(third.complete((), SyncLsn(Lsn(260))).is_err());
    assert_eq!(next_parts(&mut deferred), [Some(2), Some(1), None]);
    assert_eq!(next_parts(&mut deferred), [None, Some(1), None]);
    assert_eq!(next_parts(&mut deferred), [None; 3]);
    // The table is not in a copy any more.
    defer(&mut deferred, 300, &[0], true);
    assert_eq!(deferred.discard_before(Lsn(400), &mut NoSpool), Ok(0));
    assert_eq!(next_parts(&mut deferred), [Some(1), None, None]);
}

#[test]
fn the_limits_are_those_of_the_tables_that_are_left() {
    let mut deferred = DeferredTables::new(Lsn(50), true, BlockLimits::default());
    let positions = Positions { write: Lsn(500), flush: Lsn(500), apply: Lsn(500) };
    assert_eq!((deferred.hold(), deferred.limit(positions)), (None, positions));
    deferred.resume(name(0), (), Lsn(100), Lsn(90));
    deferred.resume(name(1), (), Lsn(80), Lsn(90));
    let limited = |write, apply| Positions { write: Lsn(write), apply: Lsn(apply), ..positions };
    assert_eq!((deferred.hold(), deferred.limit(positions)), (Some(Lsn(80)), limited(50, 80)));
    deferred.received(Lsn(95));
    assert_eq!(deferred.limit(positions), limited(95, 80));
    deferred.remove(|table| table.name == name(1), &mut NoSpool).unwrap();
    assert_eq!((deferred.hold(), deferred.take_released()), (Some(Lsn(100)), Some(Lsn(80))));
    deferred.received(Lsn(100));
    assert_eq!(deferred.limit(positions), limited(500, 100));
}

/// Tables that are copied beside the stream must not slow down the transactions of the others.
#[test]
fn a_transaction_of_other_tables_costs_the_same_beside_few_and_many() {
    let r = relations(1);
    let fastest = |count: usize| {
        let mut deferred = deferred(0);
        (1..=count).for_each(|table| deferred.resume(name(table), (), Lsn(100), Lsn(90)));
        let part = part(200, &[&r[0]], true);
        let mut run = |_| {
            let begun = Instant::now();
            for _ in 0..200 {
                assert!(!deferred.has(&r[0]));
                deferred.defer(&part, &mut NoSpool).unwrap();
                std::hint::black_box((deferred.hold(), deferred.limit(Positions::default())));
            }
            begun.elapsed()
        };
        (0..5).map(&mut run).min().unwrap()
    };
    let (few, many) = (fastest(10), fastest(5000));
    assert!(many < few * 10, "{few:?} beside 10 tables, {many:?} beside 5000");
}
