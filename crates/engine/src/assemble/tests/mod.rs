//! Streams built from messages, as the publisher would send them.

mod model;
mod random;
mod spool;
mod streams;

use bytes::Bytes;
use pgoutput::{
    Begin, BeginPrepare, Column, ColumnsBuilder, Commit, CommitPrepared, Insert, Lsn, Message,
    Prepare, RelId, Relation, ReplicaIdentity, RollbackPrepared, Timestamp, TupleBuilder, TypeOid,
    Xid, builder,
};

use self::spool::Spool;
use super::{AssembleError, Assembled, Assembler, Committed, PartLimits};
use crate::transaction::{Location, Touched, TransactionPart};

fn assemble(assembler: &mut Assembler, message: &Message<'_>) -> Result<Assembled, AssembleError> {
    let chunk = Bytes::from(builder::encoded(message));
    let at = Location { chunk: &chunk, offset: 0, length: chunk.len() };
    assembler.push(at, message)
}

/// For what stays in memory: a kept transaction that has committed must be one part.
fn push(
    assembler: &mut Assembler,
    message: &Message<'_>,
) -> Result<Option<TransactionPart>, AssembleError> {
    Ok(match assemble(assembler, message)? {
        Assembled::Nothing => None,
        Assembled::Part(part) => Some(part),
        Assembled::Committed(committed) => {
            let mut parts = Spool::default().read(committed);
            assert_eq!(parts.len(), 1);
            parts.pop()
        }
    })
}

fn announced(limits: PartLimits) -> Assembler {
    let mut assembler = Assembler::new(limits);
    announce(&mut assembler, None, "t");
    assembler
}

/// Relation 7 has this name from now on.
fn announce(assembler: &mut Assembler, xid: Option<Xid>, name: &str) {
    let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1);
    let relation = Relation {
        xid,
        id: RelId(7),
        schema: "public",
        name,
        replica_identity: ReplicaIdentity::Default,
        columns: columns.columns(),
    };
    assert!(push(assembler, &Message::Relation(relation)).expect("fits").is_none());
}

fn insert(assembler: &mut Assembler, id: &str) -> Result<Option<TransactionPart>, AssembleError> {
    let tuple = TupleBuilder::new().text(id);
    push(assembler, &Message::Insert(Insert { xid: None, relation: RelId(7), new: tuple.tuple() }))
}

fn begin(lsn: u64, xid: u32) -> Message<'static> {
    Message::Begin(Begin { final_lsn: Lsn(lsn), commit_time: Timestamp(5), xid: Xid(xid) })
}

fn commit(lsn: u64) -> Message<'static> {
    Message::Commit(Commit {
        flags: 0,
        commit_lsn: Lsn(lsn),
        end_lsn: Lsn(lsn + 8),
        commit_time: Timestamp(5),
    })
}

fn ids(part: &TransactionPart) -> Vec<String> {
    (0..part.len())
        .map(|index| match part.change(index).expect("decodes again") {
            (Message::Insert(insert), Touched::One(_, relation)) => {
                assert_eq!(relation.name.name, "t");
                match insert.new.columns().next() {
                    Some(Column::Text(text)) => String::from_utf8_lossy(text).into_owned(),
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_transaction_is_one_part() {
    let mut assembler = announced(PartLimits::default());
    assert!(push(&mut assembler, &begin(100, 1)).expect("fits").is_none());
    assert!(assembler.in_transaction());
    for id in ["1", "2"] {
        assert!(insert(&mut assembler, id).expect("fits").is_none());
    }
    let part = push(&mut assembler, &commit(100)).expect("fits").expect("complete");
    assert!(part.first && part.end_lsn == Some(Lsn(108)));
    assert_eq!(ids(&part), ["1", "2"]);
    assert!(!assembler.in_transaction());
}

#[test]
fn a_large_transaction_leaves_in_parts() {
    let mut assembler = announced(PartLimits { changes: 2, ..PartLimits::default() });
    push(&mut assembler, &begin(100, 1)).expect("fits");
    assert!(insert(&mut assembler, "1").expect("fits").is_none());
    let first = insert(&mut assembler, "2").expect("fits").expect("full");
    assert!(first.first && first.end_lsn.is_none());
    insert(&mut assembler, "3").expect("fits");
    let last = push(&mut assembler, &commit(100)).expect("fits").expect("complete");
    assert!(!last.first && last.end_lsn == Some(Lsn(108)));
    assert_eq!((ids(&first), ids(&last)), (vec!["1".into(), "2".into()], vec!["3".into()]));
}

#[test]
fn a_relation_that_did_not_change_keeps_its_version() {
    let mut assembler = announced(PartLimits::default());
    push(&mut assembler, &begin(100, 1)).expect("fits");
    insert(&mut assembler, "1").expect("fits");
    let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1);
    let wider = ColumnsBuilder::new().column(true, "id", TypeOid(20), -1);
    let relation = |columns| {
        Message::Relation(Relation {
            xid: None,
            id: RelId(7),
            schema: "public",
            name: "t",
            replica_identity: ReplicaIdentity::Default,
            columns,
        })
    };
    push(&mut assembler, &relation(columns.columns())).expect("fits");
    insert(&mut assembler, "2").expect("fits");
    push(&mut assembler, &relation(wider.columns())).expect("fits");
    insert(&mut assembler, "3").expect("fits");
    let part = push(&mut assembler, &commit(100)).expect("fits").expect("complete");
    assert_eq!(part.relations().len(), 2, "only the changed one is a new version");
    assert_eq!(ids(&part), ["1", "2", "3"]);
}

#[test]
fn impossible_sequences_of_messages_are_refused() {
    let fresh = || announced(PartLimits::default());
    let mut outside = fresh();
    assert!(matches!(insert(&mut outside, "1"), Err(AssembleError::OutOfPlace { .. })));
    assert!(matches!(push(&mut outside, &commit(1)), Err(AssembleError::OutOfPlace { .. })));
    let mut unknown = Assembler::new(PartLimits::default());
    push(&mut unknown, &begin(100, 1)).expect("fits");
    assert_eq!(
        insert(&mut unknown, "1").expect_err("refused"),
        AssembleError::UnknownRelation(RelId(7))
    );
    let mut twice = fresh();
    push(&mut twice, &begin(100, 1)).expect("fits");
    assert!(matches!(push(&mut twice, &begin(200, 2)), Err(AssembleError::OutOfPlace { .. })));
    let mut other_commit = fresh();
    push(&mut other_commit, &begin(100, 1)).expect("fits");
    assert!(matches!(
        push(&mut other_commit, &commit(101)),
        Err(AssembleError::CommitMismatch { .. })
    ));
    let mut backwards = fresh();
    push(&mut backwards, &begin(100, 1)).expect("fits");
    push(&mut backwards, &commit(100)).expect("fits");
    assert!(matches!(push(&mut backwards, &begin(99, 2)), Err(AssembleError::CommitOrder { .. })));
}

fn prepare(assembler: &mut Assembler, lsn: u64, xid: u32, id: &str) -> Result<(), AssembleError> {
    let (prepare_lsn, end_lsn) = (Lsn(lsn), Lsn(lsn + 8));
    let (prepare_time, xid, gid) = (Timestamp(5), Xid(xid), "g".into());
    push(
        assembler,
        &Message::BeginPrepare(BeginPrepare { prepare_lsn, end_lsn, prepare_time, xid, gid }),
    )?;
    insert(assembler, id)?;
    let message = Prepare { flags: 0, prepare_lsn, end_lsn, prepare_time, xid, gid };
    assert!(push(assembler, &Message::Prepare(message))?.is_none(), "held");
    Ok(())
}

fn commit_prepared(lsn: u64, xid: u32) -> Message<'static> {
    Message::CommitPrepared(CommitPrepared {
        flags: 0,
        commit_lsn: Lsn(lsn),
        end_lsn: Lsn(lsn + 8),
        commit_time: Timestamp(9),
        xid: Xid(xid),
        gid: "g".into(),
    })
}

#[test]
fn a_prepare_without_its_begin_changed_nothing() {
    let mut assembler = announced(PartLimits::default());
    let (prepare_lsn, end_lsn) = (Lsn(100), Lsn(108));
    let (prepare_time, xid, gid) = (Timestamp(5), Xid(1), "g".into());
    let message = Prepare { flags: 0, prepare_lsn, end_lsn, prepare_time, xid, gid };
    assert!(push(&mut assembler, &Message::Prepare(message)).expect("tolerated").is_none());
    assert_eq!(assembler.oldest_held(), Some(Lsn(100)));
    let part = push(&mut assembler, &commit_prepared(300, 1)).expect("known").expect("whole");
    assert!(part.is_empty() && part.end_lsn == Some(Lsn(308)));
    push(&mut assembler, &begin(400, 2)).expect("fits");
    assert!(matches!(
        push(&mut assembler, &Message::Prepare(message)),
        Err(AssembleError::OutOfPlace { .. })
    ));
}

#[test]
fn a_prepared_transaction_is_held_until_it_is_resolved() {
    let mut assembler = announced(PartLimits::default());
    prepare(&mut assembler, 100, 1, "one").expect("held");
    prepare(&mut assembler, 200, 2, "two").expect("held");
    assert_eq!(assembler.oldest_held(), Some(Lsn(100)));
    let part = push(&mut assembler, &commit_prepared(300, 1)).expect("known").expect("whole");
    assert_eq!(ids(&part), ["one"]);
    assert_eq!((part.head.commit_lsn, part.end_lsn), (Lsn(300), Some(Lsn(308))));
    assert_eq!(part.head.commit_time, Timestamp(9));
    assert_eq!(assembler.oldest_held(), Some(Lsn(200)));
    let rollback = RollbackPrepared {
        flags: 0,
        prepare_end_lsn: Lsn(208),
        rollback_end_lsn: Lsn(408),
        prepare_time: Timestamp(5),
        rollback_time: Timestamp(6),
        xid: Xid(2),
        gid: "g".into(),
    };
    assert!(push(&mut assembler, &Message::RollbackPrepared(rollback)).expect("known").is_none());
    assert_eq!(assembler.oldest_held(), None);
    assert!(matches!(
        push(&mut assembler, &commit_prepared(500, 2)),
        Err(AssembleError::UnknownPrepared { .. })
    ));
}

#[test]
fn a_prepared_transaction_can_be_given_away() {
    let mut assembler = announced(PartLimits::default());
    prepare(&mut assembler, 100, 1, "one").expect("held");
    prepare(&mut assembler, 200, 2, "two").expect("held");
    let (held, relations) = assembler.held(Xid(1)).expect("held");
    assert_eq!((held.gid.as_str(), held.prepare_lsn, held.end_lsn), ("g", Lsn(100), Lsn(108)));
    assert_eq!(relations.len(), 1);
    let replay = assembler.take_prepared(Xid(1)).expect("held");
    let parts = Spool::default().read(Committed { replay, prepared_at: None });
    assert_eq!(ids(&parts[0]), ["one"]);
    assert_eq!((parts[0].head.commit_lsn, parts[0].end_lsn), (Lsn(100), Some(Lsn(108))));
    assert_eq!(assembler.oldest_held(), Some(Lsn(200)));
    // Sent again, and known to be prepared on the subscriber.
    prepare(&mut assembler, 100, 1, "one").expect("held");
    assembler.forget_prepared(Xid(1));
    assert_eq!((assembler.oldest_held(), assembler.held(Xid(1))), (Some(Lsn(200)), None));
    let Message::CommitPrepared(commit) = commit_prepared(300, 1) else { panic!() };
    let part = assembler.commit_elsewhere(&commit).expect("in order");
    assert!(part.is_empty() && part.first && !part.is_idle());
    assert_eq!((part.head.commit_lsn, part.end_lsn), (Lsn(300), Some(Lsn(308))));
    // It has its place among the commits.
    assert!(matches!(push(&mut assembler, &begin(299, 3)), Err(AssembleError::CommitOrder { .. })));
}
