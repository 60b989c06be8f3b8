//! Which transactions a snapshot of the publisher shows.
//!
//! The publisher sends a transaction as soon as its commit record is flushed. Other sessions see it only when it has
//! waited for the synchronous standbys (`RecordTransactionCommit` comes before `ProcArrayEndTransaction` in `xact.c`), and
//! a prepared transaction only when it has committed. So what a query does not find may be there all the same.

use pgoutput::Xid;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row};

/// The transactions that were in progress on the publisher, without their subtransactions.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SnapshotXids {
    /// All before it had ended.
    oldest: u64,
    /// The first that had not begun.
    next: u64,
    in_progress: Vec<u64>,
    /// Whether commits may wait for a standby, so that one in progress may have been sent.
    commits_wait: bool,
}

impl SnapshotXids {
    /// Those of the session's next query, or of earlier ones.
    pub(crate) fn read(session: &mut Session) -> Result<Self> {
        let results = session
            .simple(
                "SELECT pg_catalog.pg_current_snapshot()::pg_catalog.text, \
                   pg_catalog.current_setting('synchronous_standby_names') <> ''",
            )
            .map_err(|e| Failure::publisher(&e, "reading which transactions are visible"))?;
        let row = first_row(&results, "pg_current_snapshot")?;
        let text: String = field(&row, 0)?;
        Self::parse(&text, boolean(&row, 1)?).ok_or_else(|| {
            Failure::new(Class::Publisher, format!("pg_current_snapshot returned {text:?}"))
        })
    }

    fn parse(text: &str, commits_wait: bool) -> Option<Self> {
        let mut parts = text.split(':');
        let mut number = || parts.next()?.parse().ok();
        let (oldest, next) = (number()?, number()?);
        let listed = parts.next()?.split(',').filter(|xid| !xid.is_empty());
        let in_progress = listed.map(|xid| xid.parse().ok()).collect::<Option<_>>()?;
        Some(Self { oldest, next, in_progress, commits_wait })
    }

    /// Whether the transaction had ended. It is one of the last 2^31, as each is that the publisher may send.
    pub(crate) fn show(&self, xid: Xid) -> bool {
        // The nearest number to the next one that ends in these 32 bits.
        let ahead = xid.0.wrapping_sub(without_epoch(self.next)).cast_signed();
        let full = self.next.wrapping_add_signed(i64::from(ahead));
        full < self.oldest || full < self.next && !self.in_progress.contains(&full)
    }

    /// Whether another transaction than this one may have been sent, and is not shown.
    pub(crate) fn may_lack_others(&self, xid: Xid) -> bool {
        self.commits_wait && self.in_progress.iter().any(|other| without_epoch(*other) != xid.0)
    }
}

/// The 32 bits of an xid that the stream has.
fn without_epoch(xid: u64) -> u32 {
    (xid & 0xFFFF_FFFF) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<SnapshotXids> {
        SnapshotXids::parse(text, true)
    }

    #[test]
    fn what_had_ended_is_shown() {
        let xids = parse("100:105:100,103").expect("valid");
        let shown: Vec<_> = (98..107).filter(|xid| xids.show(Xid(*xid))).collect();
        assert_eq!(shown, [98, 99, 101, 102, 104]);
        assert!(xids.may_lack_others(Xid(100)) && xids.may_lack_others(Xid(99)));
        let one = parse("100:105:100").expect("valid");
        assert!(!one.may_lack_others(Xid(100)) && one.may_lack_others(Xid(101)));
        let none = parse("105:105:").expect("valid");
        assert!(none.show(Xid(104)) && !none.show(Xid(105)) && !none.may_lack_others(Xid(104)));
    }

    #[test]
    fn xids_that_were_assigned_again_are_the_newest() {
        let epoch = 3_u64 << 32;
        let text = format!("{}:{}:{}", epoch - 5, epoch + 10, epoch - 5);
        let xids = parse(&text).expect("valid");
        let ended = [u32::MAX - 6, u32::MAX - 3, 3, 9];
        assert!(ended.iter().all(|xid| xids.show(Xid(*xid))));
        let not_ended = [u32::MAX - 4, 10, 1000];
        assert!(not_ended.iter().all(|xid| !xids.show(Xid(*xid))));
    }

    #[test]
    fn other_texts_are_none() {
        for text in ["", "1", "1:2", "a:2:", "1:b:", "1:2:c", "1:2:3,d"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
