//! Tables that could not be compared, and when they are tried again. Pure, but for the clock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

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

/// By schema and name.
#[derive(Debug, Default)]
pub(super) struct LeftOut(HashMap<(String, String), LeftTable>);

impl LeftOut {
    /// A table could not be compared. Returns whether the reason is a new one. The pause is no longer than
    /// `most`.
    pub(super) fn add(
        &mut self,
        (schema, name): (&str, &str),
        failure: &Failure,
        most: Duration,
    ) -> bool {
        let key = (schema.to_owned(), name.to_owned());
        let reason = failure.message.clone();
        let before = self.0.get(&key);
        let is_new = before.is_none_or(|before| before.reason != reason);
        let pause = before.map_or(FIRST, |before| before.pause * 2).min(most.max(FIRST));
        self.0.insert(key, LeftTable { reason, pause, until: Instant::now() + pause });
        is_new
    }

    /// How long a table is left; `None` if it is not.
    pub(super) fn left(&self, schema: &str, name: &str) -> Option<Duration> {
        let table = self.0.get(&(schema.to_owned(), name.to_owned()))?;
        Some(table.until.saturating_duration_since(Instant::now()))
    }

    /// A table was compared.
    pub(super) fn remove(&mut self, schema: &str, name: &str) {
        self.0.remove(&(schema.to_owned(), name.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_a_reason_is_named_once() {
        let (mut out, most) = (LeftOut::default(), Duration::from_secs(25));
        let failure = Failure::internal("no");
        assert_eq!(out.left("s", "t"), None);
        assert!(out.add(("s", "t"), &failure, most));
        assert!(out.left("s", "t").is_some_and(|left| left > Duration::from_secs(9)));
        assert!(!out.add(("s", "t"), &failure, most));
        assert!(!out.add(("s", "t"), &failure, most));
        assert!(
            out.left("s", "t").is_some_and(|left| left > Duration::from_secs(20) && left <= most)
        );
        assert!(out.add(("s", "t"), &Failure::internal("other"), most));
        out.remove("s", "t");
        assert_eq!(out.left("s", "t"), None);
    }
}
