//! Strategies that generate any message, for property tests.
//!
//! A message borrows its contents. The generated contents are leaked: a few kilobytes per test
//! process.

use pgoutput::{
    Begin, BeginPrepare, Column, Columns, ColumnsBuilder, Commit, CommitPrepared, Decoder, Delete,
    Frame, Insert, LogicalMessage, Lsn, Message, OldTuple, Origin, Prepare, RawName, RelId, RelIds,
    RelIdsBuilder, Relation, RelationColumn, ReplicaIdentity, RollbackPrepared, StreamAbort,
    StreamCommit, StreamStart, Streaming, Timestamp, Truncate, Tuple, TupleBuilder, TypeInfo,
    TypeOid, Update, Xid,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::strategy::Union;

/// A message and a state of the connection in which it is allowed.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) streaming: Streaming,
    pub(crate) in_stream: bool,
    pub(crate) message: Message<'static>,
}

impl Case {
    /// A decoder in that state.
    pub(crate) fn decoder(&self) -> Decoder {
        let mut decoder = Decoder::new(self.streaming);
        if self.in_stream {
            decoder.decode(b"S\0\0\0\x01\x01").unwrap();
        }
        decoder
    }
}

pub(crate) fn cases() -> impl Strategy<Value = Case> {
    let surroundings = prop_oneof![
        Just((Streaming::Off, false)),
        Just((Streaming::On, false)),
        Just((Streaming::Parallel, false)),
        Just((Streaming::On, true)),
        Just((Streaming::Parallel, true)),
    ];
    surroundings.prop_flat_map(|(streaming, in_stream)| {
        let messages = if in_stream {
            prop_oneof![9 => changes(true), 1 => Just(Message::StreamStop)].boxed()
        } else {
            prop_oneof![changes(false), outside_of_blocks(streaming)].boxed()
        };
        messages.prop_map(move |message| Case { streaming, in_stream, message })
    })
}

fn changes(in_stream: bool) -> impl Strategy<Value = Message<'static>> {
    let xid =
        move || (1..=u32::MAX).prop_map(move |number| in_stream.then_some(Xid(number))).boxed();
    prop_oneof![
        (lsns(), raw_names()).prop_map(|(lsn, name)| Message::Origin(Origin { lsn, name })),
        (xid(), rel_ids(), schemas(), names(), replica_identities(), columns()).prop_map(
            |(xid, id, schema, name, replica_identity, columns)| {
                Message::Relation(Relation { xid, id, schema, name, replica_identity, columns })
            }
        ),
        (xid(), any::<u32>(), schemas(), names()).prop_map(|(xid, oid, schema, name)| {
            Message::Type(TypeInfo { xid, type_oid: TypeOid(oid), schema, name })
        }),
        (xid(), rel_ids(), tuples()).prop_map(|(xid, relation, new)| Message::Insert(Insert {
            xid,
            relation,
            new
        })),
        (xid(), rel_ids(), option::of(old_tuples()), tuples()).prop_map(
            |(xid, relation, old, new)| Message::Update(Update { xid, relation, old, new })
        ),
        (xid(), rel_ids(), old_tuples()).prop_map(|(xid, relation, old)| Message::Delete(Delete {
            xid,
            relation,
            old
        })),
        (xid(), any::<bool>(), any::<bool>(), rel_id_lists()).prop_map(
            |(xid, cascade, restart_identity, relations)| {
                Message::Truncate(Truncate { xid, cascade, restart_identity, relations })
            }
        ),
        (xid(), any::<bool>(), lsns(), raw_names(), byte_strings()).prop_map(
            |(xid, transactional, lsn, prefix, content)| {
                Message::Logical(LogicalMessage { xid, transactional, lsn, prefix, content })
            }
        ),
    ]
}

fn outside_of_blocks(streaming: Streaming) -> impl Strategy<Value = Message<'static>> {
    let prepares = || {
        (set_lsns(), set_lsns(), times(), xids(), raw_names()).prop_map(
            |(prepare_lsn, end_lsn, prepare_time, xid, gid)| Prepare {
                flags: 0,
                prepare_lsn,
                end_lsn,
                prepare_time,
                xid,
                gid,
            },
        )
    };
    let mut messages = vec![
        (set_lsns(), times(), xids())
            .prop_map(|(final_lsn, commit_time, xid)| {
                Message::Begin(Begin { final_lsn, commit_time, xid })
            })
            .boxed(),
        (lsns(), lsns(), times())
            .prop_map(|(commit_lsn, end_lsn, commit_time)| {
                Message::Commit(Commit { flags: 0, commit_lsn, end_lsn, commit_time })
            })
            .boxed(),
        (xids(), lsns(), lsns(), times())
            .prop_map(|(xid, commit_lsn, end_lsn, commit_time)| {
                Message::StreamCommit(StreamCommit {
                    xid,
                    flags: 0,
                    commit_lsn,
                    end_lsn,
                    commit_time,
                })
            })
            .boxed(),
        (xids(), xids(), lsns(), times())
            .prop_map(move |(xid, subxid, lsn, time)| {
                let abort = (streaming == Streaming::Parallel).then_some((lsn, time));
                Message::StreamAbort(StreamAbort { xid, subxid, abort })
            })
            .boxed(),
        (set_lsns(), set_lsns(), times(), xids(), raw_names())
            .prop_map(|(prepare_lsn, end_lsn, prepare_time, xid, gid)| {
                Message::BeginPrepare(BeginPrepare { prepare_lsn, end_lsn, prepare_time, xid, gid })
            })
            .boxed(),
        prepares().prop_map(Message::Prepare).boxed(),
        prepares().prop_map(Message::StreamPrepare).boxed(),
        (set_lsns(), set_lsns(), times(), xids(), raw_names())
            .prop_map(|(commit_lsn, end_lsn, commit_time, xid, gid)| {
                Message::CommitPrepared(CommitPrepared {
                    flags: 0,
                    commit_lsn,
                    end_lsn,
                    commit_time,
                    xid,
                    gid,
                })
            })
            .boxed(),
        (set_lsns(), set_lsns(), times(), times(), xids(), raw_names())
            .prop_map(
                |(prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid, gid)| {
                    Message::RollbackPrepared(RollbackPrepared {
                        flags: 0,
                        prepare_end_lsn,
                        rollback_end_lsn,
                        prepare_time,
                        rollback_time,
                        xid,
                        gid,
                    })
                },
            )
            .boxed(),
    ];
    if streaming != Streaming::Off {
        let starts = (1..=u32::MAX, any::<bool>()).prop_map(|(number, first_segment)| {
            Message::StreamStart(StreamStart { xid: Xid(number), first_segment })
        });
        messages.push(starts.boxed());
    }
    Union::new(messages)
}

pub(crate) fn frames() -> impl Strategy<Value = Frame<'static>> {
    prop_oneof![
        (lsns(), lsns(), times(), byte_strings())
            .prop_map(|(start, end, sent, payload)| Frame::XLogData { start, end, sent, payload }),
        (lsns(), times(), any::<bool>()).prop_map(|(wal_end, sent, reply_requested)| {
            Frame::Keepalive { wal_end, sent, reply_requested }
        }),
        (lsns(), any::<u64>(), any::<u64>(), times()).prop_map(
            |(lsn, oldest_commit_xid, next_xid, sent)| {
                Frame::PrimaryStatus { lsn, oldest_commit_xid, next_xid, sent }
            }
        ),
    ]
}

pub(crate) fn lsns() -> impl Strategy<Value = Lsn> {
    any::<u64>().prop_map(Lsn)
}

fn set_lsns() -> impl Strategy<Value = Lsn> {
    (1..=u64::MAX).prop_map(Lsn)
}

pub(crate) fn times() -> impl Strategy<Value = Timestamp> {
    any::<i64>().prop_map(Timestamp)
}

fn xids() -> impl Strategy<Value = Xid> {
    any::<u32>().prop_map(Xid)
}

fn rel_ids() -> impl Strategy<Value = RelId> {
    any::<u32>().prop_map(RelId)
}

/// Of an unknown encoding.
fn raw_names() -> impl Strategy<Value = RawName<'static>> {
    vec(1..=u8::MAX, 0..20).prop_map(|name| RawName(name.leak()))
}

fn names() -> impl Strategy<Value = &'static str> {
    "[^\0]{0,20}".prop_map(|name| &*name.leak())
}

/// Never empty: see `Relation::schema`.
fn schemas() -> impl Strategy<Value = &'static str> {
    prop_oneof![1 => Just("pg_catalog"), 4 => "[^\0]{1,20}".prop_map(|name| &*name.leak())]
}

fn byte_strings() -> impl Strategy<Value = &'static [u8]> {
    vec(any::<u8>(), 0..40).prop_map(|bytes| &*bytes.leak())
}

fn replica_identities() -> impl Strategy<Value = ReplicaIdentity> {
    prop_oneof![
        Just(ReplicaIdentity::Default),
        Just(ReplicaIdentity::Nothing),
        Just(ReplicaIdentity::Full),
        Just(ReplicaIdentity::Index),
    ]
}

fn columns() -> impl Strategy<Value = Columns<'static>> {
    let column = (any::<bool>(), names(), any::<u32>(), any::<i32>()).prop_map(
        |(key, name, oid, type_modifier)| RelationColumn {
            key,
            name,
            type_oid: TypeOid(oid),
            type_modifier,
        },
    );
    vec(column, 0..8)
        .prop_map(|columns| Box::leak(Box::new(ColumnsBuilder::from_iter(columns))).columns())
}

fn rel_id_lists() -> impl Strategy<Value = RelIds<'static>> {
    vec(rel_ids(), 0..8)
        .prop_map(|ids| Box::leak(Box::new(RelIdsBuilder::from_iter(ids))).rel_ids())
}

fn tuples() -> impl Strategy<Value = Tuple<'static>> {
    let column = prop_oneof![
        Just(Column::Null),
        Just(Column::Unchanged),
        byte_strings().prop_map(Column::Text),
        byte_strings().prop_map(Column::Binary),
    ];
    vec(column, 0..8)
        .prop_map(|columns| Box::leak(Box::new(TupleBuilder::from_iter(columns))).tuple())
}

fn old_tuples() -> impl Strategy<Value = OldTuple<'static>> {
    prop_oneof![tuples().prop_map(OldTuple::Key), tuples().prop_map(OldTuple::Full)]
}
