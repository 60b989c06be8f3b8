//! Transactions that are sent while they run.

use pgoutput::{
    Insert, Lsn, Message, Prepare, RelId, RelIdsBuilder, StreamAbort, StreamCommit, StreamStart,
    Timestamp, Truncate, TupleBuilder, Xid,
};

use super::{
    AssembleError, Assembled, Assembler, Committed, PartLimits, Spool, TransactionPart, announce,
    announced, assemble, begin, commit, commit_prepared, ids, insert, push,
};

pub(super) fn start(xid: u32, first_segment: bool) -> Message<'static> {
    Message::StreamStart(StreamStart { xid: Xid(xid), first_segment })
}

pub(super) fn abort(xid: u32, subxid: u32) -> Message<'static> {
    let abort = Some((Lsn(1), Timestamp(5))).filter(|_| xid.is_multiple_of(2));
    Message::StreamAbort(StreamAbort { xid: Xid(xid), subxid: Xid(subxid), abort })
}

pub(super) fn stream_commit(xid: u32, lsn: u64) -> Message<'static> {
    Message::StreamCommit(StreamCommit {
        xid: Xid(xid),
        flags: 0,
        commit_lsn: Lsn(lsn),
        end_lsn: Lsn(lsn + 8),
        commit_time: Timestamp(9),
    })
}

pub(super) fn stream_prepare(xid: u32, lsn: u64) -> Message<'static> {
    let (prepare_lsn, end_lsn, xid) = (Lsn(lsn), Lsn(lsn + 8), Xid(xid));
    let prepare_time = Timestamp(5);
    Message::StreamPrepare(Prepare {
        flags: 0,
        prepare_lsn,
        end_lsn,
        prepare_time,
        xid,
        gid: "g".into(),
    })
}

pub(super) fn streamed_insert(
    assembler: &mut Assembler,
    xid: u32,
    id: &str,
) -> Result<(), AssembleError> {
    let tuple = TupleBuilder::new().text(id);
    let (xid, relation) = (Some(Xid(xid)), RelId(7));
    let message = Message::Insert(Insert { xid, relation, new: tuple.tuple() });
    assert!(matches!(assemble(assembler, &message)?, Assembled::Nothing));
    Ok(())
}

/// A block of rows, each with its (sub)transaction.
fn block(assembler: &mut Assembler, xid: u32, first: bool, rows: &[(u32, &str)]) {
    assert!(push(assembler, &start(xid, first)).expect("fits").is_none());
    assert!(assembler.in_transaction());
    for (xid, id) in rows {
        streamed_insert(assembler, *xid, id).expect("fits");
    }
    assert!(push(assembler, &Message::StreamStop).expect("fits").is_none());
    assert!(!assembler.in_transaction());
}

fn committed(assembler: &mut Assembler, message: &Message<'_>) -> Committed {
    match assemble(assembler, message).expect("known") {
        Assembled::Committed(committed) => committed,
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_of_several_transactions_interleave() {
    let mut assembler = announced(PartLimits::default());
    block(&mut assembler, 10, true, &[(10, "a"), (10, "b")]);
    block(&mut assembler, 20, true, &[(20, "x")]);
    push(&mut assembler, &begin(100, 1)).expect("fits");
    insert(&mut assembler, "small").expect("fits");
    let small = push(&mut assembler, &commit(100)).expect("fits").expect("whole");
    assert_eq!(ids(&small), ["small"]);
    block(&mut assembler, 10, false, &[(10, "c")]);
    let part = push(&mut assembler, &stream_commit(20, 200)).expect("fits").expect("whole");
    assert_eq!(ids(&part), ["x"]);
    let part = push(&mut assembler, &stream_commit(10, 300)).expect("fits").expect("whole");
    assert_eq!(ids(&part), ["a", "b", "c"]);
    assert!(part.first && part.end_lsn == Some(Lsn(308)));
    assert_eq!((part.head.commit_lsn, part.head.xid), (Lsn(300), Xid(10)));
    assert_eq!(part.head.commit_time, Timestamp(9));
    assert_eq!(assembler.spooled_bytes(), 0);
}

#[test]
fn subtransactions_that_did_not_happen_are_cut_off() {
    let mut assembler = announced(PartLimits::default());
    // SAVEPOINT a; SAVEPOINT b; RELEASE b; ROLLBACK TO a: the inner one first, though it came last.
    block(&mut assembler, 10, true, &[(10, "top"), (11, "a"), (12, "b"), (11, "a again")]);
    for subxid in [12, 11] {
        push(&mut assembler, &abort(10, subxid)).expect("fits");
    }
    block(&mut assembler, 10, false, &[(13, "c"), (10, "top again")]);
    // One that changed nothing, one that is not known, and one of an unknown transaction.
    for (xid, subxid) in [(10, 14), (10, 11), (99, 98), (99, 99)] {
        push(&mut assembler, &abort(xid, subxid)).expect("tolerated");
    }
    let part = push(&mut assembler, &stream_commit(10, 300)).expect("fits").expect("whole");
    assert_eq!(ids(&part), ["top", "c", "top again"]);
}

/// A table that was renamed in a subtransaction which did not happen is not one that the transaction changes.
#[test]
fn relations_that_did_not_happen_are_cut_off() {
    let mut assembler = announced(PartLimits::default());
    block(&mut assembler, 10, true, &[(10, "top")]);
    let names = ["gone", "t", "gone too"];
    for (xid, name) in (11..).zip(names) {
        push(&mut assembler, &start(10, false)).expect("fits");
        announce(&mut assembler, Some(Xid(xid)), name);
        streamed_insert(&mut assembler, xid, name).expect("fits");
        push(&mut assembler, &Message::StreamStop).expect("fits");
        if name != "t" {
            push(&mut assembler, &abort(10, xid)).expect("fits");
        }
    }
    push(&mut assembler, &stream_prepare(10, 200)).expect("known");
    let (_, relations) = assembler.held(Xid(10)).expect("it is held");
    assert!(relations.iter().all(|relation| relation.name.name == "t"), "{relations:?}");
    let mut replay = committed(&mut assembler, &commit_prepared(300, 10)).replay;
    let part = replay.next_part(&mut Spool::default()).expect("readable").expect("whole");
    assert_eq!(ids(&part), ["top", "t"]);
}

#[test]
fn an_abort_forgets_the_transaction() {
    let mut assembler = announced(PartLimits { spooled_bytes: 0, ..PartLimits::default() });
    let mut spool = Spool::default();
    block(&mut assembler, 10, true, &[(10, "a")]);
    spool.obey(&mut assembler);
    assert!(!spool.is_empty());
    push(&mut assembler, &abort(10, 10)).expect("known");
    spool.obey(&mut assembler);
    assert!(spool.is_empty());
    let error = assemble(&mut assembler, &stream_commit(10, 300)).expect_err("forgotten");
    assert_eq!(error, AssembleError::UnknownStream { message: "the commit", xid: Xid(10) });
    // The number may come again.
    block(&mut assembler, 10, true, &[(10, "b")]);
}

#[test]
fn changes_that_do_not_fit_into_memory_are_spooled() {
    let limits = PartLimits { spooled_bytes: 4096, block_bytes: 256, changes: 7, bytes: 1 << 20 };
    let mut assembler = announced(limits);
    let mut spool = Spool::default();
    let rows: Vec<String> = (0..500).map(|n| format!("row {n}")).collect();
    for (number, row) in rows.iter().enumerate() {
        block(&mut assembler, 10, number == 0, &[(10, row)]);
        block(&mut assembler, 20, number == 0, &[(20, "other"), (21, row)]);
        push(&mut assembler, &abort(20, 21)).expect("known");
        spool.obey(&mut assembler);
        assert!(assembler.spooled_bytes() <= limits.spooled_bytes);
    }
    assert!(spool.appended > 10_000, "{}", spool.appended);
    let parts = spool.read(committed(&mut assembler, &stream_commit(10, 300)));
    assert!(parts.iter().all(|part| part.len() <= 7));
    let read: Vec<String> = parts.iter().flat_map(ids).collect();
    assert_eq!(read, rows);
    let ends: Vec<bool> = parts.iter().map(|part| part.end_lsn.is_some()).collect();
    assert!(ends[ends.len() - 1] && !ends[..ends.len() - 1].contains(&true));
    assert!(parts[0].first && parts[1..].iter().all(|part| !part.first));
    let parts = spool.read(committed(&mut assembler, &stream_commit(20, 400)));
    assert_eq!(parts.iter().map(TransactionPart::len).sum::<usize>(), 500);
    assert_eq!(assembler.spooled_bytes(), 0);
}

/// Their records alone take more memory than there is.
#[test]
fn changes_of_very_many_subtransactions_are_spooled_together() {
    let limits = PartLimits { spooled_bytes: 4096, block_bytes: 256, changes: 7, bytes: 1 << 20 };
    let mut assembler = announced(limits);
    let mut spool = Spool::default();
    let mut appends = 0;
    for number in 0..1000 {
        block(&mut assembler, 10, number == 0, &[(11 + number, "row")]);
        appends += assembler.spool_commands().len();
        spool.obey(&mut assembler);
    }
    assert!((1..200).contains(&appends), "{appends}");
    let parts = spool.read(committed(&mut assembler, &stream_commit(10, 300)));
    assert_eq!(parts.iter().map(TransactionPart::len).sum::<usize>(), 1000);
    assert_eq!(assembler.spooled_bytes(), 0);
}

#[test]
fn a_truncate_keeps_its_relations() {
    let mut assembler = announced(PartLimits::default());
    push(&mut assembler, &start(10, true)).expect("fits");
    let relations = RelIdsBuilder::new().id(RelId(7));
    let truncate = Truncate {
        xid: Some(Xid(10)),
        cascade: true,
        restart_identity: false,
        relations: relations.rel_ids(),
    };
    push(&mut assembler, &Message::Truncate(truncate)).expect("fits");
    push(&mut assembler, &Message::StreamStop).expect("fits");
    let part = push(&mut assembler, &stream_commit(10, 300)).expect("fits").expect("whole");
    match part.change(0).expect("decodes again") {
        (Message::Truncate(truncate), super::Touched::Many(&[0])) => {
            assert!(truncate.cascade && truncate.xid.is_none());
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(part.relations()[0].name.name, "t");
}

#[test]
fn a_streamed_transaction_may_be_prepared() {
    let mut assembler = announced(PartLimits::default());
    block(&mut assembler, 10, true, &[(10, "a")]);
    assert_eq!(assembler.oldest_held(), None, "an open one holds nothing back");
    push(&mut assembler, &stream_prepare(10, 200)).expect("known");
    assert_eq!(assembler.oldest_held(), Some(Lsn(200)));
    let Committed { mut replay, prepared_at } =
        committed(&mut assembler, &commit_prepared(300, 10));
    assert_eq!((prepared_at, assembler.oldest_held()), (Some(Lsn(200)), None));
    assert_eq!(replay.head().commit_lsn, Lsn(300));
    let part = replay.next_part(&mut Spool::default()).expect("readable").expect("whole");
    assert_eq!(ids(&part), ["a"]);
}

#[test]
fn streams_that_cannot_be_are_refused() {
    let mut assembler = announced(PartLimits::default());
    let unknown = |message| AssembleError::UnknownStream { message, xid: Xid(10) };
    let refused =
        |assembler: &mut Assembler, message| assemble(assembler, &message).expect_err("refused");
    assert_eq!(refused(&mut assembler, start(10, false)), unknown("a block"));
    assert_eq!(refused(&mut assembler, stream_commit(10, 100)), unknown("the commit"));
    assert_eq!(refused(&mut assembler, stream_prepare(10, 100)), unknown("the PREPARE"));
    block(&mut assembler, 10, true, &[]);
    assert_eq!(refused(&mut assembler, start(10, true)), AssembleError::SecondBeginning(Xid(10)));
    push(&mut assembler, &begin(100, 1)).expect("fits");
    push(&mut assembler, &commit(100)).expect("fits");
    assert!(matches!(
        refused(&mut assembler, stream_commit(10, 99)),
        AssembleError::CommitOrder { .. }
    ));
    for message in [start(10, false), stream_commit(10, 300), stream_prepare(10, 300)] {
        let mut inside = announced(PartLimits::default());
        push(&mut inside, &begin(100, 1)).expect("fits");
        assert!(matches!(refused(&mut inside, message), AssembleError::OutOfPlace { .. }));
        assert!(matches!(
            refused(&mut inside, Message::StreamStop),
            AssembleError::OutOfPlace { .. }
        ));
    }
}
