//! Forecasts of transactions that are applied in parts.

use std::time::Duration;

use super::tests::{FREE, settings};
use super::{Chunk, GroupWork, Recorded, Statements, forecast};
use crate::dispatch::tests::{Insertion, row};
use crate::worker::{Group, GroupMember};

/// Transactions of so many parts.
struct Parts {
    transactions: u64,
    parts: u64,
    at: u64,
}

impl Recorded for Parts {
    type Work = Insertion;
    type Error = std::convert::Infallible;

    fn next(&mut self) -> Result<Option<Chunk<Insertion>>, Self::Error> {
        let (transaction, part) = (self.at / self.parts, self.at % self.parts);
        if transaction == self.transactions {
            return Ok(None);
        }
        self.at += 1;
        let work = row(self.at).committed_at((transaction + 1) * 10);
        let works = vec![work.into_part(part == 0, part + 1 == self.parts)];
        Ok(Some(Chunk { works, sent: Duration::ZERO, age: Duration::ZERO }))
    }

    fn work(&mut self, group: &Group<Insertion>) -> Result<GroupWork, Self::Error> {
        let changes = group.works.len() as u64;
        let all = Statements { statements: 1, inserts: changes, ..Statements::default() };
        Ok(GroupWork {
            transactions: group.works.iter().filter(|work| work.end().is_some()).count() as u64,
            changes,
            dependent_changes: 0,
            independent: all,
            dependent: Statements::default(),
            together: all,
        })
    }
}

/// A part takes no memory any more when it is applied, before its transaction ends.
#[test]
fn a_transaction_beyond_the_memory_limit_is_received_to_its_end() {
    for (workers, parts) in [(1, 30), (4, 30), (4, 1)] {
        let mut settings = settings(workers, 50, Duration::ZERO, FREE);
        // A part has 10 bytes.
        settings.memory = 25;
        let found = forecast(&mut Parts { transactions: 5, parts, at: 0 }, settings).unwrap();
        assert_eq!((found.transactions, found.changes), (5, 5 * parts), "{workers}");
    }
}
