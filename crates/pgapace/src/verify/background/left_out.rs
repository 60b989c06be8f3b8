//! Tables that could not be compared, and when they are tried again. Pure, but for the clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use engine::table_name::TableName;

use crate::error::Failure;

/// The first pause, which doubles with each failure.
const FIRST: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct LeftTable {
    /// Why.
    reason: String,
    pause: Duration,
    until: Instant,
}

/// By name.
#[derive(Debug, Default)]
pub(super) struct LeftOut(HashMap<TableName, LeftTable>);

impl LeftOut {
    /// A table could not be compared. Returns whether the reason is a new one. The pause is no longer than
    /// `most`.
    pub(super) fn add(&mut self, table: &TableName, failure: &Failure, most: Duration) -> bool {
        let reason = failure.message.clone();
        let before = self.0.get(table);
        let is_new = before.is_none_or(|before| before.reason != reason);
        let pause = before.map_or(FIRST, |before| before.pause * 2).min(most.max(FIRST));
        self.0.insert(table.clone(), LeftTable { reason, pause, until: Instant::now() + pause });
        is_new
    }

    /// How long a table is left; `None` if it is not.
    pub(super) fn left(&self, table: &TableName) -> Option<Duration> {
        let table = self.0.get(table)?;
        Some(table.until.saturating_duration_since(Instant::now()))
    }

    /// A table was compared.
    pub(super) fn remove(&mut self, table: &TableName) {
        self.0.remove(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_a_reason_is_named_once() {
        let (mut out, most) = (LeftOut::default(), Duration::from_secs(25));
        let failure = Failure::internal("no");
        let table = TableName { schema: "s".to_owned(), name: "t".to_owned() };
        assert_eq!(out.left(&table), None);
        assert!(out.add(&table, &failure, most));
        assert!(out.left(&table).is_some_and(|left| left > Duration::from_secs(9)));
        assert!(!out.add(&table, &failure, most));
        assert!(!out.add(&table, &failure, most));
        assert!(
            out.left(&table).is_some_and(|left| left > Duration::from_secs(20) && left <= most)
        );
        assert!(out.add(&table, &Failure::internal("other"), most));
        out.remove(&table);
        assert_eq!(out.left(&table), None);
    }
}
