//! Progress rows in `pgapace.progress`, with which the subscriber itself enforces that each
//! transaction is applied once and in its turn to commit.
//!
//! Each subscriber transaction inserts its row in the same packet as its COMMIT. The row's epoch
//! and predecessor are NOT NULL columns, filled by subselects. So the INSERT fails, instead of
//! affecting no row, unless the predecessor's row is committed and the epoch is current. The
//! subscriber thereby refuses sessions of an earlier epoch, a second commit of the same
//! transaction, and a commit out of turn.
//!
//! A transaction that follows its predecessor on the same session needs less: its row is
//! [`RecordCheck::Following`]. Either both are in one pipeline, without a Sync between them: PostgreSQL
//! skips everything after an error up to the Sync, so such a transaction cannot commit unless its
//! predecessor did. Or the session is known to have committed the predecessor. In both cases the
//! session has committed, or commits before, a transaction that found its epoch current while the session
//! held the session lock. A new owner has terminated such a session before it reads the progress
//! ([`ownership`](super::ownership)). And whoever appends to the chain does so in order, because only one
//! row can have a predecessor. Without the two look-ups the row costs the subscriber about half.
//!
//! The look-up of the predecessor is a range of one value, in order. Both unique indexes begin with
//! the subscription, and for a table with few rows the planner sees no difference between them. Of
//! these, only the primary key gives the order. The other one would read every row of the
//! subscription for each look-up, and the plan is kept while the table grows.
//!
//! The table is append-only because a single row that every commit updates degrades while any
//! session holds an old snapshot. The durability session deletes old rows; that DELETE is its
//! synchronous commit.
//!
//! The slot may pass the PREPARE of a transaction while the progress stays where it is, because it was
//! beyond already: the transaction was held. If the subscriber then goes back (a failover, a restored
//! backup), its progress alone does not tell that the transaction is lost. So a row names the
//! PREPAREs of which the subscriber may have nothing (`held`), and the next start compares them with the slot
//! and `pgapace.prepared`.
//!
//! With `--preserve-commit-order=false`, a row need not find its predecessor, unless the transactions
//! were sent in one pipeline. The rows that follow the oldest one without a gap are the low watermark.
//! Ranges beyond it are skipped after a restart, and the gap ends exactly where the next row begins.

use engine::history::{self, HistoryMark, Identity};
use engine::progress::Range;
use pgoutput::{Lsn, Timestamp, Xid};
use wire::{PreparedStatement, Row, Rows, Session};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;

/// The conditions of a progress row. In any case, no two rows have the same predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordCheck {
    /// The predecessor is committed and the epoch is current: this enforces the commit order.
    Ordered,
    /// The epoch is current. The row only records the range of source transactions that its
    /// transaction applied. pgapace makes a commit wait only for the transactions that it depends on.
    Unordered,
    /// Nothing: the same session has committed the predecessor, or was sent it right before in one pipeline.
    Following,
}

/// The statement that a transaction executes immediately before its COMMIT.
///
/// Parameters: subscription, LSN, predecessor, epoch, the commit time on the publisher (NULL for
/// idle progress), the mark of the publisher's history (four columns), and where the prepared
/// transactions begin that were held (NULL if there were none).
///
/// With `tagged`, the session has a replication origin, and the commit carries the publisher's
/// commit time. The origin's LSN stays '0/0': since PostgreSQL 16 it also advances when a
/// transaction aborts, so it cannot hold progress.
///
/// `of` is the owner of the progress: the subscription, or a table that is catching up.
pub(crate) fn record_sql(of: SubscriptionId, tagged: bool, check: RecordCheck) -> String {
    let of = of.0;
    let predecessor = match check {
        RecordCheck::Ordered => format!(
            "(SELECT p.lsn FROM pgapace.progress p \
                WHERE p.subscription OPERATOR(pg_catalog.=) ({of}) \
                  AND p.lsn OPERATOR(pg_catalog.>=) $3 AND p.lsn OPERATOR(pg_catalog.<=) $3 \
                ORDER BY p.lsn)"
        ),
        RecordCheck::Unordered | RecordCheck::Following => "$3".to_owned(),
    };
    let epoch = match check {
        RecordCheck::Ordered | RecordCheck::Unordered => {
            "(SELECT s.epoch FROM pgapace.subscription s \
                WHERE s.id OPERATOR(pg_catalog.=) $1 AND s.epoch OPERATOR(pg_catalog.=) $4)"
        }
        RecordCheck::Following => "$4",
    };
    let tag = if tagged {
        // The function is strict, and the time of idle progress is NULL.
        " WHERE pg_catalog.pg_replication_origin_xact_setup('0/0', coalesce($5, \
           pg_catalog.now())) IS NOT NULL"
    } else {
        ""
    };
    format!(
        "INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch, source_time, \
           quiet_from, last_lsn, last_xid, last_time, held) \
         SELECT {of}, $2, \
           {predecessor}, \
           {epoch}, \
           $5, $6, $7, $8, $9, $10{tag}"
    )
}

/// Types of the parameters of [`record_sql`]: int4, pg_lsn, pg_lsn, int8, timestamptz, pg_lsn,
/// pg_lsn, int8, timestamptz, pg_lsn[].
pub(crate) const RECORD_TYPES: [u32; 10] = [23, 3220, 3220, 20, 1184, 3220, 3220, 20, 1184, 3221];

/// The binary parameters of [`record_sql`].
#[derive(Debug)]
pub(crate) struct RecordParams {
    subscription: [u8; 4],
    lsn: [u8; 8],
    predecessor: [u8; 8],
    epoch: [u8; 8],
    time: Option<[u8; 8]>,
    quiet_from: Option<[u8; 8]>,
    last: Option<[[u8; 8]; 3]>,
    held: Option<Vec<u8>>,
}

impl RecordParams {
    pub(crate) fn new(
        id: SubscriptionId,
        (lsn, predecessor): (Lsn, Lsn),
        epoch: i64,
        time: Option<Timestamp>,
        history: Option<HistoryMark>,
    ) -> Self {
        let last = history.and_then(|history| history.last);
        Self {
            subscription: id.0.to_be_bytes(),
            lsn: lsn.as_u64().to_be_bytes(),
            predecessor: predecessor.as_u64().to_be_bytes(),
            epoch: epoch.to_be_bytes(),
            time: time.map(|time| time.0.to_be_bytes()),
            quiet_from: history.map(|history| history.quiet_from.as_u64().to_be_bytes()),
            last: last.map(|last| {
                [
                    last.commit_lsn.as_u64().to_be_bytes(),
                    i64::from(last.xid.0).to_be_bytes(),
                    last.commit_time.0.to_be_bytes(),
                ]
            }),
            held: None,
        }
    }

    /// With the prepared transactions that are held.
    pub(crate) fn holding(self, held: Option<&[Lsn]>) -> Self {
        Self { held: held.map(lsn_array), ..self }
    }

    pub(crate) fn params(&self) -> [wire::Param<'_>; 10] {
        let last = |index: usize| param(self.last.as_ref().map(|last| &last[index]));
        [
            wire::Param::Binary(&self.subscription),
            wire::Param::Binary(&self.lsn),
            wire::Param::Binary(&self.predecessor),
            wire::Param::Binary(&self.epoch),
            param(self.time.as_ref()),
            param(self.quiet_from.as_ref()),
            last(0),
            last(1),
            last(2),
            self.held.as_deref().map_or(wire::Param::Null, wire::Param::Binary),
        ]
    }
}

fn param(value: Option<&[u8; 8]>) -> wire::Param<'_> {
    value.map_or(wire::Param::Null, |value| wire::Param::Binary(value))
}

/// A value of type `pg_lsn[]` in binary form.
fn lsn_array(lsns: &[Lsn]) -> Vec<u8> {
    let length = u32::try_from(lsns.len()).unwrap_or(u32::MAX);
    // One dimension without NULLs, the type of its values, their number, and the first subscript.
    let mut bytes: Vec<u8> =
        [1, 0, RECORD_TYPES[1], length, 1].into_iter().flat_map(u32::to_be_bytes).collect();
    for lsn in lsns {
        bytes.extend(8_u32.to_be_bytes());
        bytes.extend(lsn.as_u64().to_be_bytes());
    }
    bytes
}

/// SQL for the first row of a subscription: changes that commit before `lsn` are not applied.
pub(crate) fn start_sql(id: SubscriptionId, lsn: Lsn, epoch: i64) -> String {
    format!(
        "DELETE FROM pgapace.progress WHERE subscription = {id}; \
         INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch, quiet_from) \
         VALUES ({id}, '{lsn}', '0/0', {epoch}, '{lsn}')",
        id = id.0
    )
}

/// The part of the stream that is applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AppliedStream {
    /// Everything up to this LSN is applied (the low watermark).
    pub(crate) through: Lsn,
    /// The mark of the publisher's history up to there.
    pub(crate) history: Option<HistoryMark>,
    /// Where the prepared transactions begin that were held when the last transaction up to there was
    /// taken. Each has a row in `pgapace.prepared` since, or the publisher must still have its PREPARE.
    pub(crate) held: Vec<Lsn>,
    /// Ranges applied beyond `through`, in order. Only possible if commits do not keep the
    /// publisher's order.
    pub(crate) beyond: Vec<history::AppliedRange>,
}

impl AppliedStream {
    /// End LSN of the last applied transaction.
    pub(crate) fn highest(&self) -> Lsn {
        self.beyond.last().map_or(self.through, |last| last.range.through)
    }

    /// This position, or an earlier one where a transaction begins that is held: its PREPARE may come again.
    pub(crate) fn with_held(&self, position: Lsn) -> Lsn {
        self.held.iter().copied().min().map_or(position, |held| held.min(position))
    }

    /// The mark of the publisher's history at the last applied transaction.
    pub(crate) fn newest_history(&self) -> Option<HistoryMark> {
        self.beyond.last().map_or(self.history, |last| last.history)
    }

    /// Drops all marks of the publisher's history, because the publisher will send other
    /// transactions.
    pub(crate) fn forget_history(&mut self) {
        self.history = None;
        self.beyond.iter_mut().for_each(|one| one.history = None);
    }

    /// All applied ranges, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = history::AppliedRange> {
        let range = Range { after: Lsn::INVALID, through: self.through };
        let first = history::AppliedRange { range, history: self.history };
        std::iter::once(first).chain(self.beyond.iter().copied())
    }
}

/// The query for [`applied`], of the subscription `$1`.
pub(crate) const APPLIED: &str = "\
    SELECT lsn, predecessor, quiet_from, last_lsn, last_xid, \
      (EXTRACT(epoch FROM last_time - '2000-01-01 00:00:00+00'::pg_catalog.timestamptz) \
        * 1000000)::pg_catalog.int8, pg_catalog.array_to_string(held, ' ') \
    FROM pgapace.progress WHERE subscription = $1::pg_catalog.int4 ORDER BY lsn";

/// Reads the part of the stream that the subscription has applied; `None` without progress rows.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<AppliedStream>> {
    let rows = session
        .query(APPLIED, &[Some(&id.0.to_string())])
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    applied(&rows)
}

/// From the rows of [`APPLIED`].
pub(crate) fn applied(rows: &Rows) -> Result<Option<AppliedStream>> {
    let mut applied: Option<AppliedStream> = None;
    for row in rows.iter() {
        let range = Range { after: field(&row, 1)?, through: field(&row, 0)? };
        let (history, held) = (read_mark(&row)?, read_held(&row)?);
        match &mut applied {
            // Earlier rows were removed after everything up to this row was applied and durable.
            None => {
                let through = range.through;
                applied = Some(AppliedStream { through, history, held, beyond: Vec::new() });
            }
            Some(applied) => match applied.beyond.last_mut() {
                None if range.after == applied.through => {
                    (applied.through, applied.history) = (range.through, history);
                    applied.held = held;
                }
                Some(last) if range.after == last.range.through => {
                    (last.range.through, last.history) = (range.through, history);
                }
                _ => applied.beyond.push(history::AppliedRange { range, history }),
            },
        }
    }
    Ok(applied)
}

/// How far a subscription has followed its publisher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Followed {
    /// The highest LSN of the publisher that any data comes from. Table copies and prepared
    /// transactions may be ahead of what is applied.
    pub(crate) farthest: Lsn,
    /// The mark of the publisher's history at the last applied transaction.
    pub(crate) history: Option<HistoryMark>,
}

/// The query for [`followed_beyond`], of the subscription `$1`: the highest LSN of table copies and
/// prepared transactions.
pub(crate) const BEYOND: &str = "\
    SELECT coalesce(greatest( \
      (SELECT pg_catalog.max(sync_lsn) FROM pgapace.relation \
       WHERE subscription = $1::pg_catalog.int4), \
      (SELECT pg_catalog.max(prepare_lsn) FROM pgapace.prepared \
       WHERE subscription = $1::pg_catalog.int4)), '0/0')";

/// Returns how far the subscription, with this applied part, has followed its publisher.
pub(crate) fn followed(
    session: &mut Session,
    id: SubscriptionId,
    applied: &AppliedStream,
) -> Result<Followed> {
    let rows = session
        .query(BEYOND, &[Some(&id.0.to_string())])
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    followed_beyond(&rows, applied)
}

/// From the rows of [`BEYOND`].
pub(crate) fn followed_beyond(rows: &Rows, applied: &AppliedStream) -> Result<Followed> {
    let other: Lsn = rows.first().map_or(Ok(Lsn::INVALID), |row| field(&row, 0))?;
    Ok(Followed { farthest: applied.highest().max(other), history: applied.newest_history() })
}

/// Reads the mark of the publisher's history from a row.
fn read_mark(row: &Row<'_>) -> Result<Option<HistoryMark>> {
    if row.get(2).is_none() {
        return Ok(None);
    }
    let quiet_from = field(row, 2)?;
    if row.get(3).is_none() {
        return Ok(Some(HistoryMark::since(quiet_from)));
    }
    Ok(Some(HistoryMark::of(Identity {
        commit_lsn: field(row, 3)?,
        end_lsn: quiet_from,
        xid: Xid(field(row, 4)?),
        commit_time: Timestamp(field(row, 5)?),
    })))
}

/// Reads where the held transactions begin from a row.
fn read_held(row: &Row<'_>) -> Result<Vec<Lsn>> {
    let lsn = |text: &str| {
        text.parse().map_err(|_| Failure::internal("a progress row holds something unknown"))
    };
    row.get(6).unwrap_or_default().split_whitespace().map(lsn).collect()
}

/// Drops what the progress says of held transactions, because the publisher sends each at its COMMIT PREPARED.
pub(crate) fn forget_held(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!(
        "UPDATE pgapace.progress SET held = NULL WHERE subscription = {} AND held IS NOT NULL",
        id.0
    );
    session.simple(&sql).map_err(|e| Failure::subscriber(&e, "recording progress"))?;
    Ok(())
}

/// Drops the mark of the publisher's history if `sent_as` has changed. Then the publisher sends
/// other transactions, for example because of other publications. Returns whether it was dropped.
pub(crate) fn forget_if_sent_otherwise(
    session: &mut Session,
    id: SubscriptionId,
    sent_as: &str,
) -> Result<bool> {
    let rows = session
        .query(
            "WITH changed AS (UPDATE pgapace.subscription SET sent_as = $2 \
               WHERE id = $1::pg_catalog.int4 AND sent_as IS DISTINCT FROM $2 RETURNING id), \
             forgotten AS (UPDATE pgapace.progress p \
               SET quiet_from = NULL, last_lsn = NULL, last_xid = NULL, last_time = NULL \
               FROM changed c WHERE p.subscription = c.id) \
             SELECT id FROM changed",
            &[Some(&id.0.to_string()), Some(sent_as)],
        )
        .map_err(|e| Failure::subscriber(&e, "recording what the publisher is asked for"))?;
    Ok(!rows.is_empty())
}

/// Whether the transaction or group that ends at this LSN is committed.
pub(crate) fn is_recorded(session: &mut Session, id: SubscriptionId, end: Lsn) -> Result<bool> {
    let rows = session
        .query(
            "SELECT 1 FROM pgapace.progress WHERE subscription = $1::pg_catalog.int4 \
             AND lsn = $2::pg_catalog.pg_lsn",
            &[Some(&id.0.to_string()), Some(&end.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    Ok(!rows.is_empty())
}

/// Seconds since the publisher committed the newest applied transaction. `None` if its progress row
/// was removed or never existed.
pub(crate) fn seconds_behind(session: &mut Session, id: SubscriptionId) -> Result<Option<f64>> {
    // Rows that only advance the position over skipped work have time 0, which is 2000-01-01.
    let rows = session
        .query(
            "SELECT pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - p.source_time) \
             FROM pgapace.progress p WHERE p.subscription = $1::pg_catalog.int4 \
               AND p.source_time > '2000-01-02' ORDER BY p.lsn DESC LIMIT 1",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    rows.first().map(|row| field(&row, 0)).transpose()
}

/// The commit that makes others durable. It waits for the synchronous standbys, whatever else the session does, unless
/// their setting is the given one (NULL for none).
///
/// It does useful work, the removal of progress rows. If there are none, it writes a message to WAL, which takes no
/// lock: it may wait for a standby that is gone, and another session would wait for the row that it has changed.
///
/// The deletes find their rows in order, by the primary key: see the head of this module.
const FLUSH: PreparedStatement<'_> = PreparedStatement {
    name: "flush",
    sql: "\
WITH removed AS ( \
  DELETE FROM pgapace.progress WHERE ctid = ANY (ARRAY( \
    SELECT p.ctid FROM pgapace.progress p WHERE p.subscription = $1::pg_catalog.int4 \
      AND p.lsn >= $2::pg_catalog.pg_lsn AND p.lsn < $3::pg_catalog.pg_lsn \
    ORDER BY p.lsn)) RETURNING 1) \
SELECT pg_catalog.set_config('synchronous_commit', \
    CASE WHEN pg_catalog.current_setting('synchronous_standby_names') = $4 \
    THEN 'local' ELSE 'on' END, true), \
  CASE WHEN NOT EXISTS (SELECT FROM removed) \
  THEN pg_catalog.pg_logical_emit_message(true, 'pgapace'::pg_catalog.text, ''::pg_catalog.text) END",
};

/// Makes everything committed before this call durable, on synchronous standbys too: a commit with
/// `synchronous_commit = on` waits for all WAL before it. Progress rows before `lsn` are removed.
///
/// `done` is the `lsn` of the previous call. It keeps the index scan from reading dead rows.
pub(crate) fn flush(session: &mut Session, id: SubscriptionId, done: Lsn, lsn: Lsn) -> Result<()> {
    flush_unless(session, id, (done, lsn), &|| None, &|| false)
}

/// The same. It does not wait for synchronous standbys under the setting that `passed` returns. It fails if the wait for
/// them was canceled and `gives_up`.
pub(crate) fn flush_unless(
    session: &mut Session,
    id: SubscriptionId,
    (done, lsn): (Lsn, Lsn),
    passed: &dyn Fn() -> Option<String>,
    gives_up: &dyn Fn() -> bool,
) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "making commits durable");
    let (id, done, lsn) = (id.0.to_string(), done.to_string(), lsn.to_string());
    loop {
        let (unreplicated, passed) = (session.unreplicated_commits(), passed());
        let [waiting] = session
            .query_prepared_each([(
                FLUSH,
                &[Some(&id), Some(&done), Some(&lsn), passed.as_deref()],
            )])
            .map_err(|e| failed(&e))?;
        let set = waiting.first().and_then(|row| row.get(0).map(str::to_owned));
        let is_set = match set.as_deref() {
            Some("on") => true,
            Some("local") => passed.is_some(),
            _ => false,
        };
        if !is_set {
            return Err(Failure::internal("synchronous_commit was not set"));
        }
        if session.unreplicated_commits() == unreplicated {
            return Ok(());
        }
        // The wait for the synchronous standbys was canceled: the next commit waits for them again.
        if gives_up() {
            let message = "stopped while commits wait for a synchronous standby of the subscriber";
            return Err(Failure::new(Class::Stopped, message));
        }
    }
}
