//! Writes the seeds of the fuzz target `decode`: connections in the format that
//! `tests/protocol/exercise.rs` describes. Every message and frame is in at least one of them.
//!
//! `cargo run -p pgoutput --example seed_corpus`

use std::path::Path;
use std::{fs, io};

use pgoutput::{
    Begin, BeginPrepare, ColumnsBuilder, Commit, CommitPrepared, Delete, Frame, Insert,
    LogicalMessage, Lsn, Message, OldTuple, Origin, Prepare, PrimaryStatusRequest, RelId,
    RelIdsBuilder, Relation, ReplicaIdentity, RollbackPrepared, StatusUpdate, StreamAbort,
    StreamCommit, StreamStart, Streaming, Timestamp, Truncate, TupleBuilder, TypeInfo, TypeOid,
    Update, Xid, builder,
};

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/decode");
    fs::create_dir_all(&corpus)?;
    for seed in seeds() {
        fs::write(corpus.join(seed.name), seed.connection)?;
    }
    Ok(())
}

struct Seed {
    name: &'static str,
    connection: Vec<u8>,
}

impl Seed {
    fn new(name: &'static str, streaming: Streaming) -> Self {
        let mode = match streaming {
            Streaming::Off => 0,
            Streaming::On => 1,
            Streaming::Parallel => 2,
        };
        Self { name, connection: vec![mode] }
    }

    fn packet(mut self, packet: &[u8]) -> Self {
        let length = u16::try_from(packet.len()).expect("seeds are small");
        self.connection.extend(length.to_be_bytes());
        self.connection.extend_from_slice(packet);
        self
    }

    fn frame(self, frame: Frame<'_>) -> Self {
        let mut packet = Vec::new();
        frame.encode(&mut packet);
        self.packet(&packet)
    }

    fn message(self, message: Message<'_>) -> Self {
        self.packet(&builder::in_frame(LSN, TIME, &message))
    }

    fn messages<'a>(self, messages: impl IntoIterator<Item = Message<'a>>) -> Self {
        messages.into_iter().fold(self, Self::message)
    }
}

const LSN: Lsn = Lsn(0x16B_3748);
const END: Lsn = Lsn(0x16B_3778);
const TIME: Timestamp = Timestamp(800_000_000_000_000);
const XID: Xid = Xid(732);
const TABLE: RelId = RelId(16385);

fn begin() -> Message<'static> {
    Message::Begin(Begin { final_lsn: LSN, commit_time: TIME, xid: XID })
}

fn commit() -> Message<'static> {
    Message::Commit(Commit { flags: 0, commit_lsn: LSN, end_lsn: END, commit_time: TIME })
}

fn start(first_segment: bool) -> Message<'static> {
    Message::StreamStart(StreamStart { xid: XID, first_segment })
}

fn abort(abort: Option<(Lsn, Timestamp)>) -> Message<'static> {
    Message::StreamAbort(StreamAbort { xid: XID, subxid: Xid(733), abort })
}

fn stream_commit() -> Message<'static> {
    Message::StreamCommit(StreamCommit {
        xid: XID,
        flags: 0,
        commit_lsn: LSN,
        end_lsn: END,
        commit_time: TIME,
    })
}

fn prepare() -> Prepare<'static> {
    Prepare { flags: 0, prepare_lsn: LSN, end_lsn: END, prepare_time: TIME, xid: XID, gid: "one" }
}

fn commit_prepared() -> Message<'static> {
    Message::CommitPrepared(CommitPrepared {
        flags: 0,
        commit_lsn: LSN,
        end_lsn: END,
        commit_time: TIME,
        xid: XID,
        gid: "one",
    })
}

fn seeds() -> Vec<Seed> {
    let columns = ColumnsBuilder::new().column(true, "id", TypeOid(23), -1).column(
        false,
        "größe",
        TypeOid(16389),
        54,
    );
    let (one, two) =
        (TupleBuilder::new().text("1").text("x"), TupleBuilder::new().text("2").null());
    let key = TupleBuilder::new().text("1").null();
    let binary = TupleBuilder::new().binary([0, 0, 0, 1]).unchanged();
    let tables = RelIdsBuilder::new().id(TABLE).id(RelId(16390));

    let relation = |xid, schema, replica_identity| {
        let columns = columns.columns();
        Message::Relation(Relation { xid, id: TABLE, schema, name: "t", replica_identity, columns })
    };
    let type_info = |xid| {
        let type_oid = TypeOid(16389);
        Message::Type(TypeInfo { xid, type_oid, schema: "public", name: "mood" })
    };
    let insert = |xid| Message::Insert(Insert { xid, relation: TABLE, new: one.tuple() });
    let update = |xid, old| Message::Update(Update { xid, relation: TABLE, old, new: two.tuple() });
    let delete = |xid, old| Message::Delete(Delete { xid, relation: TABLE, old });
    let truncate = |xid| {
        let relations = tables.rel_ids();
        Message::Truncate(Truncate { xid, cascade: true, restart_identity: true, relations })
    };
    let logical = |xid, transactional| {
        let (prefix, content) = ("app", b"\0hello".as_slice());
        Message::Logical(LogicalMessage { xid, transactional, lsn: LSN, prefix, content })
    };
    let origin = |lsn| Message::Origin(Origin { lsn, name: "pg_16389" });
    let (key, full) = (OldTuple::Key(key.tuple()), OldTuple::Full(one.tuple()));
    let block = |xid| {
        [
            type_info(xid),
            relation(xid, "public", ReplicaIdentity::Default),
            insert(xid),
            update(xid, None),
            update(xid, Some(key)),
            delete(xid, key),
            truncate(xid),
            logical(xid, true),
        ]
    };

    let mut status = Vec::new();
    let (write, flush, apply) = (END, LSN, LSN);
    StatusUpdate { write, flush, apply, clock: TIME, reply_requested: true }.encode(&mut status);
    let mut request = Vec::new();
    PrimaryStatusRequest { clock: TIME }.encode(&mut request);

    vec![
        Seed::new("transaction", Streaming::Off)
            .messages([begin(), origin(LSN)])
            .messages(block(None))
            .message(commit()),
        Seed::new("replica_identity_full", Streaming::On).messages([
            begin(),
            relation(None, "pg_catalog", ReplicaIdentity::Full),
            update(None, Some(full)),
            delete(None, full),
            commit(),
        ]),
        Seed::new("other_replica_identities", Streaming::Parallel).messages([
            relation(None, "public", ReplicaIdentity::Index),
            relation(None, "public", ReplicaIdentity::Nothing),
        ]),
        Seed::new("binary", Streaming::Off).message(Message::Insert(Insert {
            xid: None,
            relation: TABLE,
            new: binary.tuple(),
        })),
        Seed::new("outside_of_transactions", Streaming::Off)
            .messages([logical(None, false), abort(None)]),
        Seed::new("streamed", Streaming::On)
            .messages([start(true), origin(Lsn::INVALID)])
            .messages(block(Some(XID)))
            .messages([Message::StreamStop, abort(None), start(false), insert(Some(Xid(734)))])
            .messages([Message::StreamStop, stream_commit()]),
        Seed::new("streamed_parallel", Streaming::Parallel).messages([
            start(true),
            insert(Some(XID)),
            Message::StreamStop,
            abort(Some((END, TIME))),
            stream_commit(),
        ]),
        Seed::new("two_phase", Streaming::Off).messages([
            Message::BeginPrepare(BeginPrepare {
                prepare_lsn: LSN,
                end_lsn: END,
                prepare_time: TIME,
                xid: XID,
                gid: "one",
            }),
            insert(None),
            Message::Prepare(prepare()),
            commit_prepared(),
            Message::RollbackPrepared(RollbackPrepared {
                flags: 0,
                prepare_end_lsn: LSN,
                rollback_end_lsn: END,
                prepare_time: TIME,
                rollback_time: TIME,
                xid: XID,
                gid: "one",
            }),
        ]),
        Seed::new("two_phase_streamed", Streaming::Parallel).messages([
            start(true),
            insert(Some(XID)),
            Message::StreamStop,
            Message::StreamPrepare(prepare()),
            commit_prepared(),
        ]),
        Seed::new("frames", Streaming::Off)
            .frame(Frame::Keepalive { wal_end: END, sent: TIME, reply_requested: true })
            .frame(Frame::PrimaryStatus {
                lsn: END,
                oldest_commit_xid: 731,
                next_xid: 1 << 32,
                sent: TIME,
            })
            .packet(&status)
            .packet(&request),
        Seed::new("bare_messages", Streaming::On)
            .packet(&builder::encoded(&begin()))
            .packet(&builder::encoded(&update(None, Some(key))))
            .packet(&builder::encoded(&commit())),
        Seed::new("refused", Streaming::Off)
            .packet(b"")
            .packet(b"?")
            .packet(b"I\0\0\x40\x01N\xFF\xFF")
            .packet(b"I\0\0\x40\x01N\0\x01t\xFF\xFF\xFF\xFF")
            .packet(b"T\x7F\xFF\xFF\xFF\0")
            .packet(b"R\0\0\0\x07s\xFF\0t\0d\0\0"),
    ]
}
