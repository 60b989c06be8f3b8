//! The messages that a walsender makes of the publisher's WAL from a position on, as its documentation and
//! its source say.
//!
//! * A transaction that commits before the position is not sent, nor a PREPARE before it.
//! * A transaction that is open may be sent in blocks, from the position on; otherwise all of it comes
//!   with its end.

use std::collections::HashMap;

use bytes::Bytes;
use pgoutput::{
    Begin, BeginPrepare, ColumnsBuilder, Commit, CommitPrepared, Delete, Insert, Lsn, Message,
    OldTuple, Prepare, RelId, RelIdsBuilder, Relation, ReplicaIdentity, RollbackPrepared,
    StreamAbort, StreamCommit, StreamStart, Truncate, TupleBuilder, TypeOid, Update, Xid, builder,
};

use crate::simulation::history::{
    APPEND, Change, History, Kind, PUBLISHED, Record, RecordKind, Row,
};
use crate::simulation::rng::Rng;

/// A message of the connection.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    /// Where it stands in the WAL.
    pub(crate) at: Lsn,
    /// `None` for a keepalive: everything before it was sent.
    pub(crate) message: Option<Bytes>,
}

/// The relation of a table.
pub(crate) fn relation(table: usize) -> RelId {
    RelId(u32::try_from(table).expect("few tables") + 1)
}

/// The table of a relation.
pub(crate) fn table(relation: RelId) -> usize {
    relation.0 as usize - 1
}

/// The changes of a transaction that were decoded and not sent.
#[derive(Default)]
struct Decoded<'h> {
    changes: Vec<(Lsn, Option<Xid>, &'h Change)>,
    /// Some of it was sent.
    streamed: bool,
}

struct Walsender<'h> {
    history: &'h History,
    slot: Lsn,
    /// One change out of so many is followed by a block of its transaction; 0 for never.
    eager: usize,
    rng: Rng,
    open: HashMap<Xid, Decoded<'h>>,
    sent: Vec<Sent>,
}

/// All that is sent from `slot` on, up to the end of the WAL.
pub(crate) fn stream(history: &History, slot: Lsn, eager: usize, rng: Rng) -> Vec<Sent> {
    let (open, sent) = (HashMap::new(), Vec::new());
    let mut walsender = Walsender { history, slot, eager, rng, open, sent };
    for table in 0..PUBLISHED {
        walsender.relation(table);
    }
    for record in &history.wal {
        walsender.decode(record);
    }
    walsender.keepalive(history.end().max(slot));
    walsender.sent
}

impl<'h> Walsender<'h> {
    fn send(&mut self, at: Lsn, message: &Message<'_>) {
        let message = Some(Bytes::from(builder::encoded(message)));
        self.sent.push(Sent { at, message });
    }

    fn keepalive(&mut self, at: Lsn) {
        self.sent.push(Sent { at, message: None });
    }

    fn relation(&mut self, table: usize) {
        let full = self.history.is_full(table);
        let columns = (0..4).fold(ColumnsBuilder::new(), |columns, column| {
            columns.column(full || column == 0 && table != APPEND, "abcd", TypeOid(21), -1)
        });
        let replica_identity = if full { ReplicaIdentity::Full } else { ReplicaIdentity::Default };
        let name = format!("t{table}");
        let id = relation(table);
        let (xid, schema, columns) = (None, "public", columns.columns());
        let message = Relation { xid, id, schema, name: &name, replica_identity, columns };
        self.send(self.slot, &Message::Relation(message));
    }

    fn decode(&mut self, record: &'h Record) {
        let Record { at, end, xid, kind } = record;
        let (at, end, xid) = (*at, *end, *xid);
        let wanted = at >= self.slot;
        match kind {
            RecordKind::Change(change, sub) => {
                self.open.entry(xid).or_default().changes.push((at, *sub, change));
                if wanted && self.eager > 0 && self.rng.chance(1, self.eager) {
                    self.block(xid, at);
                }
            }
            RecordKind::Undo(subs) => {
                let open = self.open.entry(xid).or_default();
                open.changes.retain(|(_, sub, _)| sub.is_none_or(|sub| !subs.contains(&sub)));
                if open.streamed {
                    for sub in subs.iter().rev() {
                        self.abort(xid, *sub, end);
                    }
                }
            }
            RecordKind::Prepare if !self.history.two_phase => {}
            RecordKind::Prepare if wanted => self.prepare(at, end, xid),
            RecordKind::Prepare => drop(self.open.remove(&xid)),
            RecordKind::Commit | RecordKind::Rollback if !wanted => drop(self.open.remove(&xid)),
            RecordKind::Commit | RecordKind::Rollback => self.end(record),
            RecordKind::Other if end >= self.slot => self.keepalive(end),
            RecordKind::Other => {}
        }
    }

    fn change(&mut self, at: Lsn, change: &Change, xid: Option<Xid>) {
        let bytes = encoded(change, self.history.is_full(change.table), xid);
        self.sent.push(Sent { at, message: Some(Bytes::from(bytes)) });
    }

    /// All that was decoded of a transaction, before it has ended.
    fn block(&mut self, xid: Xid, at: Lsn) {
        let open = self.open.entry(xid).or_default();
        let changes = std::mem::take(&mut open.changes);
        let first_segment = !std::mem::replace(&mut open.streamed, true);
        self.send(at, &Message::StreamStart(StreamStart { xid, first_segment }));
        for (at, sub, change) in changes {
            self.change(at, change, Some(sub.unwrap_or(xid)));
        }
        self.send(at, &Message::StreamStop);
    }

    fn abort(&mut self, xid: Xid, subxid: Xid, end: Lsn) {
        let abort = Some((end, self.history.time(end)));
        self.send(end, &Message::StreamAbort(StreamAbort { xid, subxid, abort }));
    }

    fn prepare(&mut self, prepare_lsn: Lsn, end_lsn: Lsn, xid: Xid) {
        let (prepare_time, gid, flags) = (self.history.time(prepare_lsn), gid(xid), 0);
        let gid = gid.as_str().into();
        let prepare = Prepare { flags, prepare_lsn, end_lsn, prepare_time, xid, gid };
        if self.open.entry(xid).or_default().streamed {
            self.block(xid, prepare_lsn);
            self.send(end_lsn, &Message::StreamPrepare(prepare));
        } else {
            let begin = BeginPrepare { prepare_lsn, end_lsn, prepare_time, xid, gid };
            self.send(prepare_lsn, &Message::BeginPrepare(begin));
            self.all(xid);
            self.send(end_lsn, &Message::Prepare(prepare));
        }
        self.open.remove(&xid);
    }

    fn all(&mut self, xid: Xid) {
        for (at, _, change) in self.open.remove(&xid).unwrap_or_default().changes {
            self.change(at, change, None);
        }
    }

    fn end(&mut self, record: &Record) {
        let Record { at, end, xid, .. } = *record;
        let commits = matches!(record.kind, RecordKind::Commit);
        let (flags, commit_lsn, end_lsn, commit_time) = (0, at, end, self.history.time(at));
        let prepared = self.history.preparations.iter().find(|one| one.xid == xid);
        if let Some(prepared) = prepared.filter(|_| self.history.two_phase) {
            let name = gid(xid);
            let gid = name.as_str().into();
            let message = if commits {
                Message::CommitPrepared(CommitPrepared {
                    flags,
                    commit_lsn,
                    end_lsn,
                    commit_time,
                    xid,
                    gid,
                })
            } else {
                Message::RollbackPrepared(RollbackPrepared {
                    flags,
                    prepare_end_lsn: prepared.prepare_lsn,
                    rollback_end_lsn: end,
                    prepare_time: self.history.time(prepared.prepare_lsn),
                    rollback_time: self.history.time(end),
                    xid,
                    gid,
                })
            };
            self.send(end, &message);
        } else if self.open.entry(xid).or_default().streamed {
            if commits {
                self.block(xid, at);
                let commit = StreamCommit { xid, flags, commit_lsn, end_lsn, commit_time };
                self.send(end, &Message::StreamCommit(commit));
            } else {
                self.abort(xid, xid, end);
            }
        } else if commits {
            self.send(at, &Message::Begin(Begin { final_lsn: at, commit_time, xid }));
            self.all(xid);
            let commit = Commit { flags, commit_lsn, end_lsn, commit_time };
            self.send(end, &Message::Commit(commit));
        } else if self.eager > 0 && self.rng.chance(1, 8) {
            // As PostgreSQL 18 did, of a transaction of which nothing was sent.
            self.abort(xid, xid, end);
        }
        self.open.remove(&xid);
    }
}

/// The publisher's name of a prepared transaction.
fn gid(xid: Xid) -> String {
    format!("p{}", xid.0)
}

/// A row as the publisher sends it.
fn tuple(row: Row, left_out: [bool; 4]) -> TupleBuilder {
    (0..4).fold(TupleBuilder::new(), |tuple, column| match (row[column], left_out[column]) {
        (_, true) => tuple.unchanged(),
        (0, _) => tuple.null(),
        (value, _) => tuple.text(value.to_string()),
    })
}

fn encoded(change: &Change, full: bool, xid: Option<Xid>) -> Vec<u8> {
    let relation_of = relation;
    let relation = relation_of(change.table);
    let new = tuple(change.new, change.left_out);
    let old = if full {
        tuple(change.old, [false; 4])
    } else {
        tuple([change.old[0], 0, 0, 0], [false; 4])
    };
    let old = if full { OldTuple::Full(old.tuple()) } else { OldTuple::Key(old.tuple()) };
    let tables = (0..PUBLISHED).filter(|table| change.truncated & 1 << table != 0);
    let truncated = tables.map(relation_of).collect::<RelIdsBuilder>();
    builder::encoded(&match change.kind {
        Kind::Insert => Message::Insert(Insert { xid, relation, new: new.tuple() }),
        Kind::Update => {
            let sent = full || change.old[0] != change.new[0];
            let old = sent.then_some(old);
            Message::Update(Update { xid, relation, old, new: new.tuple() })
        }
        Kind::Delete => Message::Delete(Delete { xid, relation, old }),
        Kind::Truncate => {
            let (cascade, restart_identity) = (false, false);
            let relations = truncated.rel_ids();
            Message::Truncate(Truncate { xid, cascade, restart_identity, relations })
        }
    })
}
