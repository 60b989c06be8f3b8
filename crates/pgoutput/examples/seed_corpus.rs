//! Writes the seeds of the fuzz target `decode`: connections in the format that
//! `tests/protocol/exercise.rs` describes. Every message and frame is in at least one of them.
//!
//! `cargo run -p pgoutput --example seed_corpus`

use std::path::Path;
use std::{fs, io};

use pgoutput::{
    Begin, BeginPrepare, ColumnsBuilder, Commit, CommitPrepared, Delete, Frame, Insert,
    LogicalMessage, Lsn, Message, OldTuple, Origin, Prepare, PrimaryStatusRequest, RawName, RelId,
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
    Prepare {
        flags: 0,
        prepare_lsn: LSN,
        end_lsn: END,
        prepare_time: TIME,
        xid: XID,
        gid: RawName(b"one"),
    }
}

fn commit_prepared() -> Message<'static> {
    Message::CommitPrepared(CommitPrepared {
        flags: 0,
        commit_lsn: LSN,
        end_lsn: END,
        commit_time: TIME,
        xid: XID,
        gid: RawName(b"one"),
    })
}

fn type_info(xid: Option<Xid>) -> Message<'static> {
    let type_oid = TypeOid(16389);
    Message::Type(TypeInfo { xid, type_oid, schema: "public", name: "mood" })
}

fn logical(xid: Option<Xid>, transactional: bool) -> Message<'static> {
    let (prefix, content) = (RawName(b"app"), b"\0hello".as_slice());
    Message::Logical(LogicalMessage { xid, transactional, lsn: LSN, prefix, content })
}

fn origin(lsn: Lsn) -> Message<'static> {
    Message::Origin(Origin { lsn, name: RawName(b"pg_16389") })
}

/// A table, and rows of it that messages show.
struct Table {
    columns: ColumnsBuilder,
    one: TupleBuilder,
    two: TupleBuilder,
    key: TupleBuilder,
    binary: TupleBuilder,
    truncated: RelIdsBuilder,
}

impl Table {
    fn new() -> Self {
        Self {
            columns: ColumnsBuilder::new().column(true, "id", TypeOid(23), -1).column(
                false,
                "größe",
                TypeOid(16389),
                54,
            ),
            one: TupleBuilder::new().text("1").text("x"),
            two: TupleBuilder::new().text("2").null(),
            key: TupleBuilder::new().text("1").null(),
            binary: TupleBuilder::new().binary([0, 0, 0, 1]).unchanged(),
            truncated: RelIdsBuilder::new().id(TABLE).id(RelId(16390)),
        }
    }

    fn relation<'a>(
        &'a self,
        xid: Option<Xid>,
        schema: &'a str,
        replica_identity: ReplicaIdentity,
    ) -> Message<'a> {
        let columns = self.columns.columns();
        Message::Relation(Relation { xid, id: TABLE, schema, name: "t", replica_identity, columns })
    }

    fn key(&self) -> OldTuple<'_> {
        OldTuple::Key(self.key.tuple())
    }

    fn full(&self) -> OldTuple<'_> {
        OldTuple::Full(self.one.tuple())
    }

    fn insert(&self, xid: Option<Xid>) -> Message<'_> {
        Message::Insert(Insert { xid, relation: TABLE, new: self.one.tuple() })
    }

    fn insert_binary(&self) -> Message<'_> {
        Message::Insert(Insert { xid: None, relation: TABLE, new: self.binary.tuple() })
    }

    fn update<'a>(&'a self, xid: Option<Xid>, old: Option<OldTuple<'a>>) -> Message<'a> {
        Message::Update(Update { xid, relation: TABLE, old, new: self.two.tuple() })
    }

    fn delete<'a>(&'a self, xid: Option<Xid>, old: OldTuple<'a>) -> Message<'a> {
        Message::Delete(Delete { xid, relation: TABLE, old })
    }

    fn truncate(&self, xid: Option<Xid>) -> Message<'_> {
        let relations = self.truncated.rel_ids();
        Message::Truncate(Truncate { xid, cascade: true, restart_identity: true, relations })
    }

    /// One message of each kind that a transaction has.
    fn block(&self, xid: Option<Xid>) -> [Message<'_>; 8] {
        [
            type_info(xid),
            self.relation(xid, "public", ReplicaIdentity::Default),
            self.insert(xid),
            self.update(xid, None),
            self.update(xid, Some(self.key())),
            self.delete(xid, self.key()),
            self.truncate(xid),
            logical(xid, true),
        ]
    }
}

fn seeds() -> Vec<Seed> {
    let table = Table::new();
    let mut seeds = transactions(&table);
    seeds.extend(streamed(&table));
    seeds.extend(two_phase(&table));
    seeds.extend(packets(&table));
    seeds
}

fn transactions(table: &Table) -> Vec<Seed> {
    vec![
        Seed::new("transaction", Streaming::Off)
            .messages([begin(), origin(LSN)])
            .messages(table.block(None))
            .message(commit()),
        Seed::new("replica_identity_full", Streaming::On).messages([
            begin(),
            table.relation(None, "pg_catalog", ReplicaIdentity::Full),
            table.update(None, Some(table.full())),
            table.delete(None, table.full()),
            commit(),
        ]),
        Seed::new("other_replica_identities", Streaming::Parallel).messages([
            table.relation(None, "public", ReplicaIdentity::Index),
            table.relation(None, "public", ReplicaIdentity::Nothing),
        ]),
        Seed::new("binary", Streaming::Off).message(table.insert_binary()),
        Seed::new("outside_of_transactions", Streaming::Off)
            .messages([logical(None, false), abort(None)]),
    ]
}

fn streamed(table: &Table) -> [Seed; 2] {
    [
        Seed::new("streamed", Streaming::On)
            .messages([start(true), origin(Lsn::INVALID)])
            .messages(table.block(Some(XID)))
            .messages([
                Message::StreamStop,
                abort(None),
                start(false),
                table.insert(Some(Xid(734))),
            ])
            .messages([Message::StreamStop, stream_commit()]),
        Seed::new("streamed_parallel", Streaming::Parallel).messages([
            start(true),
            table.insert(Some(XID)),
            Message::StreamStop,
            abort(Some((END, TIME))),
            stream_commit(),
        ]),
    ]
}

fn two_phase(table: &Table) -> [Seed; 2] {
    [
        Seed::new("two_phase", Streaming::Off).messages([
            Message::BeginPrepare(BeginPrepare {
                prepare_lsn: LSN,
                end_lsn: END,
                prepare_time: TIME,
                xid: XID,
                gid: RawName(b"one"),
            }),
            table.insert(None),
            Message::Prepare(prepare()),
            commit_prepared(),
            Message::RollbackPrepared(RollbackPrepared {
                flags: 0,
                prepare_end_lsn: LSN,
                rollback_end_lsn: END,
                prepare_time: TIME,
                rollback_time: TIME,
                xid: XID,
                gid: RawName(b"one"),
            }),
        ]),
        Seed::new("two_phase_streamed", Streaming::Parallel).messages([
            start(true),
            table.insert(Some(XID)),
            Message::StreamStop,
            Message::StreamPrepare(prepare()),
            commit_prepared(),
        ]),
    ]
}

/// Frames without messages, messages without frames, and what the decoder refuses.
fn packets(table: &Table) -> [Seed; 3] {
    let mut status = Vec::new();
    let (write, flush, apply) = (END, LSN, LSN);
    StatusUpdate { write, flush, apply, clock: TIME, reply_requested: true }.encode(&mut status);
    let mut request = Vec::new();
    PrimaryStatusRequest { clock: TIME }.encode(&mut request);
    [
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
            .packet(&builder::encoded(&table.update(None, Some(table.key()))))
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
