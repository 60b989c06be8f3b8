//! Where a run asks the publisher to begin the stream.
//!
//! A slot saves its confirmed position only at checkpoints. After a crash of the publisher it is back
//! at the last saved one, and would send everything since again, at each start, until the next
//! checkpoint. A publisher skips transactions whose commit record starts before the position that it
//! is asked for, as [`already_applied`](crate::sync_lsn::already_applied) does, and asking for a later
//! position acknowledges nothing. So a run asks for the oldest position from which something is still
//! needed:
//!
//! * by a table that catches up, or by the progress;
//! * the last transaction that was applied. It is compared with what is remembered of it. Everything
//!   before it is older in both histories, so it need not come again
//!   ([`Witness`](crate::history::Witness)).
//!
//! Where the publisher sends prepared transactions, the slot's own position counts. A transaction that
//! was held in memory since its PREPARE is lost with the run, and must be sent again from there on.
//! Only the slot knows how far back that is.

use pgoutput::Lsn;

use crate::history::HistoryMark;

/// Returns the position to ask for. The slot has confirmed `confirmed`. Nothing before `needed_from` is
/// lacking, and `history` is the mark at the progress.
#[must_use]
pub fn stream_start(
    confirmed: Lsn,
    needed_from: Lsn,
    history: Option<&HistoryMark>,
    sends_prepared: bool,
) -> Lsn {
    if sends_prepared {
        return confirmed;
    }
    let compared_from = history.map(|history| {
        history.last.map_or(history.quiet_from, |last| last.commit_lsn.min(history.quiet_from))
    });
    let start = compared_from.map_or(needed_from, |compared| compared.min(needed_from));
    // The publisher would move an older position up to its own.
    start.max(confirmed)
}

#[cfg(test)]
mod tests {
    use super::stream_start;
    use crate::history::{HistoryMark, Identity};
    use pgoutput::{Lsn, Timestamp, Xid};

    fn mark(last: Option<u64>, quiet_from: u64) -> HistoryMark {
        let identity = |commit| Identity {
            xid: Xid(7),
            commit_lsn: Lsn(commit),
            end_lsn: Lsn(commit + 8),
            commit_time: Timestamp(1),
        };
        HistoryMark { last: last.map(identity), quiet_from: Lsn(quiet_from) }
    }

    fn start(confirmed: u64, needed: u64, history: Option<HistoryMark>) -> u64 {
        stream_start(Lsn(confirmed), Lsn(needed), history.as_ref(), false).as_u64()
    }

    #[test]
    fn the_last_applied_transaction_is_sent_again() {
        assert_eq!(start(100, 500, Some(mark(Some(480), 488))), 480);
        assert_eq!(start(100, 500, Some(mark(None, 300))), 300);
        assert_eq!(start(100, 500, None), 500);
    }

    #[test]
    fn a_table_that_lacks_changes_gets_them() {
        assert_eq!(start(100, 200, Some(mark(Some(480), 488))), 200);
    }

    #[test]
    fn never_before_the_slot() {
        assert_eq!(start(490, 500, Some(mark(Some(480), 488))), 490);
        assert_eq!(start(500, 500, None), 500);
    }

    #[test]
    fn prepared_transactions_come_from_the_slots_position() {
        let mark = mark(Some(480), 488);
        assert_eq!(stream_start(Lsn(100), Lsn(500), Some(&mark), true), Lsn(100));
    }
}
