//! The end of the publisher's WAL, behind everything that has committed.
//!
//! A transaction with synchronous_commit = off is visible before its commit record is flushed, and the publisher only
//! sends WAL that is flushed. So the end of the flushed WAL may lie before transactions that have committed.
//! [`wait_until_sendable`] waits for the WAL writer, which flushes them within three times wal_writer_delay. It need not
//! flush the records of open transactions behind them. So after a moment, a message without an effect is committed, and
//! its commit flushes all WAL before it. [`make_sendable`] commits it at once, for a caller that keeps others waiting.
//!
//! The WAL writer flushes whole pages, so the flushed WAL may end in the middle of a record. A walsender does not send
//! up to there, and an SQL function that reads a slot up to there waits until the rest is flushed: on a quiet server
//! until the background writer logs the running transactions, which it does every 15 seconds. So nothing may wait for
//! [`WalEnd::flushed`], and each SQL function that reads a slot is given a position of this module as its end.

use std::time::{Duration, Instant};

use pgoutput::Lsn;
use wire::{Row, Session};

use crate::error::{Failure, Result};
use crate::publisher::session::CURRENT_LSN;
use crate::subscriber::catalogue::{field, first_row};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long the WAL writer may take. With its default delay of 200 ms, it needs 600 ms at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where the publisher's WAL ends. On a standby, both are where it is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WalEnd {
    /// The publisher can send WAL up to here.
    pub(crate) flushed: Lsn,
    /// Behind the last record. Everything that a session could see before this was read had committed before.
    pub(crate) inserted: Lsn,
}

impl WalEnd {
    /// The number of columns of [`WalEnd::sql`].
    pub(crate) const COLUMNS: usize = 4;

    /// The columns that [`WalEnd::of`] reads.
    pub(crate) fn sql() -> String {
        format!(
            "{CURRENT_LSN}, CASE WHEN NOT pg_catalog.pg_is_in_recovery() \
               THEN pg_catalog.pg_current_wal_insert_lsn() END, \
             pg_catalog.current_setting('wal_block_size'), \
             pg_catalog.pg_size_bytes(pg_catalog.current_setting('wal_segment_size'))"
        )
    }

    /// From the first columns of a row.
    pub(crate) fn of(row: &Row<'_>) -> Result<Self> {
        let flushed = field(row, 0)?;
        let inserted = match row.get(1) {
            Some(_) => end_of_record(field(row, 1)?, field(row, 2)?, field(row, 3)?),
            None => flushed,
        };
        Ok(Self { flushed, inserted })
    }

    pub(crate) fn read(session: &mut Session) -> Result<Self> {
        let results = session
            .simple(&format!("SELECT {}", Self::sql()))
            .map_err(|e| Failure::publisher(&e, "reading where its WAL ends"))?;
        Self::of(&first_row(&results, "the end of WAL")?)
    }
}

/// Where the last record ends, if the next one begins at `insert`. At the beginning of a page, the server skips the
/// header of the page, which it has not written yet: no WAL is flushed up to there before the next record.
fn end_of_record(insert: Lsn, page: u64, segment: u64) -> Lsn {
    /// Sizes of `XLogLongPageHeaderData`, with which a segment begins, and of `XLogPageHeaderData`.
    const HEADERS: [u64; 2] = [40, 24];
    let lsn = insert.as_u64();
    let [long, short] = HEADERS;
    let in_segment = lsn.checked_rem(segment).unwrap_or(lsn);
    let in_page = lsn.checked_rem(page).unwrap_or(lsn);
    if in_segment == long {
        Lsn(lsn - long)
    } else if in_page == short && in_segment != short {
        Lsn(lsn - short)
    } else {
        insert
    }
}

/// Waits until the publisher can send everything that had committed when `end` was read. Returns the LSN behind that.
pub(crate) fn wait_until_sendable(session: &mut Session, end: WalEnd) -> Result<Lsn> {
    let begun = Instant::now();
    let mut flushed = end.flushed;
    while flushed < end.inserted && begun.elapsed() < PATIENCE {
        std::thread::sleep(LOOK_EVERY);
        flushed = WalEnd::read(session)?.flushed;
    }
    make_sendable(session, WalEnd { flushed, ..end })
}

/// Lets the publisher send everything that had committed when `end` was read: has it flush its WAL, if it has not. The
/// commit waits for no standby. Returns the LSN behind all that, where a record ends.
pub(crate) fn make_sendable(session: &mut Session, end: WalEnd) -> Result<Lsn> {
    if end.flushed < end.inserted {
        session
            .simple(
                "BEGIN; SET LOCAL synchronous_commit = local; \
                 SELECT pg_catalog.pg_logical_emit_message(true, 'pgapace', ''); COMMIT",
            )
            .map_err(|e| Failure::publisher(&e, "having its WAL flushed"))?;
    }
    Ok(end.inserted)
}

#[cfg(test)]
mod tests {
    use super::{Lsn, end_of_record};

    #[test]
    fn the_header_of_a_page_is_no_record() {
        const SEGMENT: u64 = 16 << 20;
        let end = |lsn| end_of_record(Lsn(lsn), 8192, SEGMENT).as_u64();
        // A record may end 40 bytes behind the beginning of a page, or 24 behind that of a segment.
        for (insert, ends) in [
            (8192 + 24, 8192),
            (8192 + 32, 8192 + 32),
            (8192 + 40, 8192 + 40),
            (SEGMENT + 40, SEGMENT),
            (SEGMENT + 48, SEGMENT + 48),
            (SEGMENT + 8192 + 24, SEGMENT + 8192),
            (5000, 5000),
        ] {
            assert_eq!(end(insert), ends, "{insert}");
        }
    }
}
