//! Progress rows: promise P3, and the turn of each commit, enforced by the database.
//!
//! Each subscriber transaction inserts its row in the packet of its COMMIT. The statement fails, rather
//! than touching no row, unless the predecessor's row is committed and the epoch is ours: both are
//! NOT NULL columns filled by sub-selects. So a session of an older start, a second commit of the
//! same transaction, and a commit out of turn are refused by the subscriber itself.

use engine::history::{self, Identity, Memory};
use engine::progress::Range;
use pgoutput::{Lsn, Timestamp, Xid};
use wire::{Row, Session};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;
use crate::subscriber::state::SubscriptionId;

/// The statement that a transaction runs right before its COMMIT.
///
/// With `ordered`, that is the order of commits. Without, a row only says which range of
/// transactions its own stands for, and a commit waits for none but those it depends on: the
/// program sees to that.
///
/// Parameters: subscription, LSN, predecessor, epoch, the source's commit time (NULL for idle
/// progress), and what is remembered of the publisher's history. With `tagged`, the session has a replication origin, and the commit carries the source's time; the origin's LSN is
/// left alone ('0/0'), because since PostgreSQL 16 an abort would move it too (reference 7.1).
///
/// `of` is whose progress it is: the subscription's, or that of a table that joins.
pub(crate) fn record_sql(of: SubscriptionId, tagged: bool, ordered: bool) -> String {
    let of = of.0;
    let predecessor = if ordered {
        format!(
            "(SELECT p.lsn FROM pgapace.progress p \
                WHERE p.subscription OPERATOR(pg_catalog.=) ({of}) \
                  AND p.lsn OPERATOR(pg_catalog.=) $3)"
        )
    } else {
        "$3".to_owned()
    };
    let tag = if tagged {
        // The function is strict: it must not be asked with the NULL of idle progress.
        " WHERE pg_catalog.pg_replication_origin_xact_setup('0/0', coalesce($5, \
           pg_catalog.now())) IS NOT NULL"
    } else {
        ""
    };
    format!(
        "INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch, source_time, \
           quiet_from, last_lsn, last_xid, last_time) \
         SELECT {of}, $2, \
           {predecessor}, \
           (SELECT s.epoch FROM pgapace.subscription s \
            WHERE s.id OPERATOR(pg_catalog.=) $1 AND s.epoch OPERATOR(pg_catalog.=) $4), \
           $5, $6, $7, $8, $9{tag}"
    )
}

/// Types of the parameters of [`record_sql`]: int4, pg_lsn, pg_lsn, int8, timestamptz, pg_lsn,
/// pg_lsn, int8, timestamptz.
pub(crate) const RECORD_TYPES: [u32; 9] = [23, 3220, 3220, 20, 1184, 3220, 3220, 20, 1184];

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
}

impl RecordParams {
    pub(crate) fn new(
        id: SubscriptionId,
        (lsn, predecessor): (Lsn, Lsn),
        epoch: i64,
        time: Option<Timestamp>,
        memory: Option<Memory>,
    ) -> Self {
        let last = memory.and_then(|memory| memory.last);
        Self {
            subscription: id.0.to_be_bytes(),
            lsn: lsn.as_u64().to_be_bytes(),
            predecessor: predecessor.as_u64().to_be_bytes(),
            epoch: epoch.to_be_bytes(),
            time: time.map(|time| time.0.to_be_bytes()),
            quiet_from: memory.map(|memory| memory.quiet_from.as_u64().to_be_bytes()),
            last: last.map(|last| {
                [
                    last.commit_lsn.as_u64().to_be_bytes(),
                    i64::from(last.xid.0).to_be_bytes(),
                    last.commit_time.0.to_be_bytes(),
                ]
            }),
        }
    }

    pub(crate) fn params(&self) -> [wire::Param<'_>; 9] {
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
        ]
    }
}

fn param(value: Option<&[u8; 8]>) -> wire::Param<'_> {
    value.map_or(wire::Param::Null, |value| wire::Param::Binary(value))
}

/// The first row of a subscription: nothing before `lsn` is to be applied.
pub(crate) fn start_sql(id: SubscriptionId, lsn: Lsn, epoch: i64) -> String {
    format!(
        "DELETE FROM pgapace.progress WHERE subscription = {id}; \
         INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch, quiet_from) \
         VALUES ({id}, '{lsn}', '0/0', {epoch}, '{lsn}')",
        id = id.0
    )
}

/// What of the stream is applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// Everything up to here (the low watermark).
    pub(crate) through: Lsn,
    /// What is remembered of the publisher's history up to there.
    pub(crate) memory: Option<Memory>,
    /// What is applied beyond, in order, where commits were not kept in order.
    pub(crate) beyond: Vec<history::Applied>,
}

impl Applied {
    /// The end of the last transaction that is applied.
    pub(crate) fn highest(&self) -> Lsn {
        self.beyond.last().map_or(self.through, |last| last.range.through)
    }

    /// What is remembered of the last of them.
    pub(crate) fn newest_memory(&self) -> Option<Memory> {
        self.beyond.last().map_or(self.memory, |last| last.memory)
    }

    /// Other transactions are sent from now on.
    pub(crate) fn forget_history(&mut self) {
        self.memory = None;
        self.beyond.iter_mut().for_each(|one| one.memory = None);
    }

    /// All of it, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = history::Applied> {
        let range = Range { after: Lsn::INVALID, through: self.through };
        let first = history::Applied { range, memory: self.memory };
        std::iter::once(first).chain(self.beyond.iter().copied())
    }
}

/// What of the stream the subscription has applied; `None` if nothing says so.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<Applied>> {
    let rows = session
        .query(
            "SELECT lsn, predecessor, quiet_from, last_lsn, last_xid, \
               (EXTRACT(epoch FROM last_time - '2000-01-01 00:00:00+00'::pg_catalog.timestamptz) \
                 * 1000000)::pg_catalog.int8 \
             FROM pgapace.progress WHERE subscription = $1::pg_catalog.int4 ORDER BY lsn",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    let mut applied: Option<Applied> = None;
    for row in rows.iter() {
        let range = Range { after: field(&row, 1)?, through: field(&row, 0)? };
        let memory = memory(&row)?;
        match &mut applied {
            // Rows before it were removed, when everything up to it was applied and durable.
            None => {
                let through = range.through;
                applied = Some(Applied { through, memory, beyond: Vec::new() });
            }
            Some(applied) => match applied.beyond.last_mut() {
                None if range.after == applied.through => {
                    (applied.through, applied.memory) = (range.through, memory);
                }
                Some(last) if range.after == last.range.through => {
                    (last.range.through, last.memory) = (range.through, memory);
                }
                _ => applied.beyond.push(history::Applied { range, memory }),
            },
        }
    }
    Ok(applied)
}

/// How far a subscription has followed its publisher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Followed {
    /// The end of the last transaction that is applied.
    pub(crate) applied: Lsn,
    /// The farthest position that anything of it stems from: copies of tables and prepared
    /// transactions may be ahead.
    pub(crate) farthest: Lsn,
    /// What is remembered of the last transaction.
    pub(crate) memory: Option<Memory>,
}

/// How far the subscription has followed its publisher, which has `applied` this.
pub(crate) fn followed(
    session: &mut Session,
    id: SubscriptionId,
    applied: &Applied,
) -> Result<Followed> {
    let rows = session
        .query(
            "SELECT coalesce(greatest( \
               (SELECT pg_catalog.max(sync_lsn) FROM pgapace.relation \
                WHERE subscription = $1::pg_catalog.int4), \
               (SELECT pg_catalog.max(prepare_lsn) FROM pgapace.prepared \
                WHERE subscription = $1::pg_catalog.int4)), '0/0')",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the progress"))?;
    let other: Lsn = rows.first().map_or(Ok(Lsn::INVALID), |row| field(&row, 0))?;
    let (highest, memory) = (applied.highest(), applied.newest_memory());
    Ok(Followed { applied: highest, farthest: highest.max(other), memory })
}

/// What a row remembers.
fn memory(row: &Row<'_>) -> Result<Option<Memory>> {
    if row.get(2).is_none() {
        return Ok(None);
    }
    let quiet_from = field(row, 2)?;
    if row.get(3).is_none() {
        return Ok(Some(Memory::since(quiet_from)));
    }
    Ok(Some(Memory::of(Identity {
        commit_lsn: field(row, 3)?,
        end_lsn: quiet_from,
        xid: Xid(field(row, 4)?),
        commit_time: Timestamp(field(row, 5)?),
    })))
}

/// Forgets what identifies the publisher's history, if the publisher is asked for something else
/// from now on: then other transactions are sent. Returns whether it was forgotten.
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

/// Whether the transaction that ends here, or the group that it ends, is committed.
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

/// Seconds since the newest transaction that is applied was committed on the publisher; `None` if
/// its row is not there any more, or never was.
pub(crate) fn seconds_behind(session: &mut Session, id: SubscriptionId) -> Result<Option<f64>> {
    // Rows that only carry the position over skipped work have the time 0, which is the year 2000.
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

/// Makes everything that was committed before this call durable, on synchronous standbys too: a
/// commit with `synchronous_commit = on` waits for all WAL before it. What it commits is useful
/// work, the removal of progress rows before `lsn`; with none left it touches the subscription.
///
/// `done` is the bound of the previous call, so that the scan does not walk over dead rows.
pub(crate) fn flush(session: &mut Session, id: SubscriptionId, done: Lsn, lsn: Lsn) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "making commits durable");
    let id = id.0.to_string();
    let removed = session
        .execute(
            "DELETE FROM pgapace.progress WHERE subscription = $1::pg_catalog.int4 \
             AND lsn >= $2::pg_catalog.pg_lsn AND lsn < $3::pg_catalog.pg_lsn",
            &[Some(&id), Some(&done.to_string()), Some(&lsn.to_string())],
        )
        .map_err(|e| failed(&e))?;
    if removed == 0 {
        session
            .execute(
                "UPDATE pgapace.subscription SET flushed_at = pg_catalog.now() \
                 WHERE id = $1::pg_catalog.int4",
                &[Some(&id)],
            )
            .map_err(|e| failed(&e))?;
    }
    Ok(())
}
