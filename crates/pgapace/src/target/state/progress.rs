//! Progress rows: promise P3, and the turn of each commit, enforced by the database.
//!
//! Each target transaction inserts its row in the packet of its COMMIT. The statement fails, rather
//! than touching no row, unless the predecessor's row is committed and the epoch is ours: both are
//! NOT NULL columns filled by sub-selects. So a session of an older start, a second commit of the
//! same transaction, and a commit out of turn are refused by the target itself.

use engine::progress::Range;
use pgoutput::{Lsn, Timestamp};
use wire::Session;

use crate::error::{Failure, Result};
use crate::target::catalogue::field;
use crate::target::state::SubscriptionId;

/// The statement that a transaction runs right before its COMMIT.
///
/// With `ordered`, that is the order of commits. Without, a row only says which range of
/// transactions its own stands for, and a commit waits for none but those it depends on: the
/// program sees to that.
///
/// Parameters: subscription, LSN, predecessor, epoch, the source's commit time (NULL for idle
/// progress). With `tagged`, the
/// session has a replication origin, and the commit carries the source's time; the origin's LSN is
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
        "INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch, source_time) \
         SELECT {of}, $2, \
           {predecessor}, \
           (SELECT s.epoch FROM pgapace.subscription s \
            WHERE s.id OPERATOR(pg_catalog.=) $1 AND s.epoch OPERATOR(pg_catalog.=) $4), \
           $5{tag}"
    )
}

/// Types of the parameters of [`record_sql`]: int4, pg_lsn, pg_lsn, int8, timestamptz.
pub(crate) const RECORD_TYPES: [u32; 5] = [23, 3220, 3220, 20, 1184];

/// The binary parameters of [`record_sql`].
#[derive(Debug)]
pub(crate) struct RecordParams {
    subscription: [u8; 4],
    lsn: [u8; 8],
    predecessor: [u8; 8],
    epoch: [u8; 8],
    time: Option<[u8; 8]>,
}

impl RecordParams {
    pub(crate) fn new(
        id: SubscriptionId,
        lsn: Lsn,
        predecessor: Lsn,
        epoch: i64,
        time: Option<Timestamp>,
    ) -> Self {
        Self {
            subscription: id.0.to_be_bytes(),
            lsn: lsn.as_u64().to_be_bytes(),
            predecessor: predecessor.as_u64().to_be_bytes(),
            epoch: epoch.to_be_bytes(),
            time: time.map(|time| time.0.to_be_bytes()),
        }
    }

    pub(crate) fn params(&self) -> [wire::Param<'_>; 5] {
        [
            wire::Param::Binary(&self.subscription),
            wire::Param::Binary(&self.lsn),
            wire::Param::Binary(&self.predecessor),
            wire::Param::Binary(&self.epoch),
            self.time.as_ref().map_or(wire::Param::Null, |time| wire::Param::Binary(time)),
        ]
    }
}

/// The first row of a subscription: nothing before `lsn` is to be applied.
pub(crate) fn start_sql(id: SubscriptionId, lsn: Lsn, epoch: i64) -> String {
    format!(
        "DELETE FROM pgapace.progress WHERE subscription = {id}; \
         INSERT INTO pgapace.progress (subscription, lsn, predecessor, epoch) \
         VALUES ({id}, '{lsn}', '0/0', {epoch})",
        id = id.0
    )
}

/// What of the stream is applied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Applied {
    /// Everything up to here (the low watermark).
    pub(crate) through: Lsn,
    /// What is applied beyond, in order, where commits were not kept in order.
    pub(crate) beyond: Vec<Range>,
}

impl Applied {
    /// The end of the last transaction that is applied.
    pub(crate) fn highest(&self) -> Lsn {
        self.beyond.last().map_or(self.through, |last| last.through)
    }
}

/// What of the stream the subscription has applied; `None` if nothing says so.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Option<Applied>> {
    let rows = session
        .query(
            "SELECT lsn, predecessor FROM pgapace.progress \
             WHERE subscription = $1::pg_catalog.int4 ORDER BY lsn",
            &[Some(&id.0.to_string())],
        )
        .map_err(|e| Failure::target(&e, "reading the progress"))?;
    let mut applied: Option<Applied> = None;
    for row in rows.iter() {
        let range = Range { after: field(&row, 1)?, through: field(&row, 0)? };
        match &mut applied {
            // Rows before it were removed, when everything up to it was applied and durable.
            None => applied = Some(Applied { through: range.through, beyond: Vec::new() }),
            Some(applied) => match applied.beyond.last_mut() {
                None if range.after == applied.through => applied.through = range.through,
                Some(last) if range.after == last.through => last.through = range.through,
                _ => applied.beyond.push(range),
            },
        }
    }
    Ok(applied)
}

/// Whether the transaction that ends here, or the group that it ends, is committed.
pub(crate) fn is_recorded(session: &mut Session, id: SubscriptionId, end: Lsn) -> Result<bool> {
    let rows = session
        .query(
            "SELECT 1 FROM pgapace.progress WHERE subscription = $1::pg_catalog.int4 \
             AND lsn = $2::pg_catalog.pg_lsn",
            &[Some(&id.0.to_string()), Some(&end.to_string())],
        )
        .map_err(|e| Failure::target(&e, "reading the progress"))?;
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
        .map_err(|e| Failure::target(&e, "reading the progress"))?;
    rows.first().map(|row| field(&row, 0)).transpose()
}

/// Makes everything that was committed before this call durable, on synchronous standbys too: a
/// commit with `synchronous_commit = on` waits for all WAL before it. What it commits is useful
/// work, the removal of progress rows before `lsn`; with none left it touches the subscription.
///
/// `done` is the bound of the previous call, so that the scan does not walk over dead rows.
pub(crate) fn flush(session: &mut Session, id: SubscriptionId, done: Lsn, lsn: Lsn) -> Result<()> {
    let failed = |e: &wire::Error| Failure::target(e, "making commits durable");
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
