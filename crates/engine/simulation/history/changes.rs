//! Changes that the publisher could make now.

use crate::simulation::history::builder::Builder;
use crate::simulation::history::tables::{
    APPEND, CHILD, FULL, PARENT, PLAIN, Row, TRIGGERED, UNCERTAIN, UNIQUE, is_keyed,
};
use crate::simulation::history::{Change, Kind};

impl Builder {
    pub(super) fn find_change(&mut self, at: usize) -> Option<Change> {
        let rng = &mut self.rng;
        let mut weight = rng.below(self.weights.iter().sum());
        let mut table = 0;
        while weight >= self.weights[table] {
            weight -= self.weights[table];
            table += 1;
        }
        if table == TRIGGERED && self.open[at].prepares {
            // A trigger runs when it is prepared, and sees another database.
            return None;
        }
        if self.truncates && rng.chance(1, 40) {
            return self.truncate(table);
        }
        let rows = &self.tables[table];
        let picked = (!rows.is_empty()).then(|| rows[rng.below(rows.len())]);
        let kind = match rng.below(10) {
            0..4 => Kind::Insert,
            4..8 => Kind::Update,
            _ => Kind::Delete,
        };
        let kind = if table == APPEND { Kind::Insert } else { kind };
        let (old, mut new) = match (kind, picked) {
            (Kind::Insert, _) => ([0; 4], self.row(table)),
            (_, None) => return None,
            (Kind::Update, Some(old)) => (old, self.row(table)),
            (_, Some(old)) => (old, [0; 4]),
        };
        let rng = &mut self.rng;
        if kind == Kind::Update {
            let kept: [bool; 4] = match rng.below(4) {
                0 => [false; 4],
                1 => [true, false, false, false],
                _ => [true, true, true, false],
            };
            for column in 0..4 {
                if kept[column] {
                    new[column] = old[column];
                }
            }
        }
        let mut left_out = [false; 4];
        if kind == Kind::Update {
            for column in [1, 3] {
                let same = old[column] == new[column] && old[column] != 0;
                left_out[column] = same && rng.chance(1, 2);
            }
        }
        let change = Change { kind, table, truncated: 0, old, new, left_out };
        self.is_possible(kind, table, old, new).then_some(change)
    }

    pub(super) fn row(&mut self, table: usize) -> Row {
        let rng = &mut self.rng;
        let key = 1 + rng.value(self.keys - 1);
        if matches!(table, FULL | UNCERTAIN | APPEND) {
            return [key.min(3), rng.value(1), 0, rng.value(1)];
        }
        self.values += 1;
        let second = if table == UNIQUE { rng.value(self.keys) } else { 0 };
        let third = if table == CHILD { rng.value(self.keys) } else { 0 };
        [key, second, third, self.values]
    }

    /// Whether the publisher's constraints allow it.
    fn is_possible(&self, kind: Kind, table: usize, old: Row, new: Row) -> bool {
        let is_free = |column: usize| {
            old[column] == new[column]
                || self.tables[table].iter().all(|row| row[column] != new[column])
        };
        let writes = kind != Kind::Delete;
        if writes && is_keyed(table) && !is_free(0) {
            return false;
        }
        if writes && table == UNIQUE && new[1] != 0 && !is_free(1) {
            return false;
        }
        if writes && table == CHILD && new[2] != 0 {
            return self.tables[PARENT].iter().any(|parent| parent[0] == new[2]);
        }
        let leaves = kind != Kind::Insert && old[0] != new[0];
        if leaves && table == PARENT {
            return self.tables[CHILD].iter().all(|child| child[2] != old[0]);
        }
        true
    }

    pub(super) fn truncate(&mut self, table: usize) -> Option<Change> {
        let mut truncated = 1_u16 << table;
        if self.rng.chance(1, 3) {
            truncated |= 1 << self.rng.one_of(&[PLAIN, UNIQUE, FULL, APPEND]);
        }
        if truncated & 1 << PARENT != 0 {
            truncated |= 1 << CHILD;
        }
        // A trigger of its own would run there.
        truncated &= !(1 << TRIGGERED);
        let (kind, old, new, left_out) = (Kind::Truncate, [0; 4], [0; 4], [false; 4]);
        (truncated != 0).then_some(Change { kind, table, truncated, old, new, left_out })
    }
}
