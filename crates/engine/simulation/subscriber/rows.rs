//! Row versions and their locks: how a statement finds, changes and deletes rows.

use crate::simulation::history::{AUDIT, Row, TABLES, TRIGGERED, UNIQUE, audit, digest, is_keyed};
use crate::simulation::subscriber::commands::{Fault, Find, RowOp};
use crate::simulation::subscriber::sessions::Session;
use crate::simulation::subscriber::{Database, Done, Stop, Tx, Version};

impl Database {
    pub(super) fn lock_table(&mut self, number: usize, table: usize) -> Done<()> {
        let own = self.sessions[number].tx;
        for (tx, changed, truncated) in self.holders() {
            if tx != own && (truncated | changed & self.hidden) & 1 << table != 0 {
                return Err(Stop::Wait(tx));
            }
        }
        self.sessions[number].changed |= 1 << table;
        Ok(())
    }

    /// Transactions that have locked tables, and which tables.
    fn holders(&self) -> impl Iterator<Item = (Tx, u16, u16)> {
        let sessions = self.sessions.iter().map(|one| (one.tx, one.changed, one.truncated));
        let prepared = self.prepared.iter().map(|one| (one.tx, one.changed, one.truncated));
        sessions.chain(prepared).filter(|(tx, ..)| self.is_running(*tx))
    }

    pub(super) fn truncate(&mut self, number: usize, tables: u16) -> Done<()> {
        let tx = self.sessions[number].tx;
        for (other, changed, truncated) in self.holders() {
            if other != tx && (truncated | changed) & tables != 0 {
                return Err(Stop::Wait(other));
            }
        }
        let command = self.sessions[number].command_id;
        for table in (0..TABLES).filter(|table| tables & 1 << table != 0) {
            for at in 0..self.tables[table].len() {
                let version = &self.tables[table][at];
                let there = version.created.0 == tx || self.is_committed(version.created.0);
                let gone = version.deleted.0 == tx || self.is_committed(version.deleted.0);
                if there && !gone {
                    self.delete(number, table, at, command);
                }
            }
        }
        self.sessions[number].truncated |= tables;
        Ok(())
    }

    fn delete(&mut self, number: usize, table: usize, at: usize, command: u32) {
        let version = &mut self.tables[table][at];
        let session = &mut self.sessions[number];
        version.deleted = (session.tx, command);
        version.next = None;
        session.delta = session.delta.wrapping_sub(digest(table, version.row));
    }

    fn create(&mut self, number: usize, table: usize, row: Row) -> usize {
        let session = &mut self.sessions[number];
        session.delta = session.delta.wrapping_add(digest(table, row));
        let created = (session.tx, session.command_id);
        self.tables[table].push(Version { row, created, deleted: (0, 0), next: None });
        self.tables[table].len() - 1
    }

    /// Returns how many rows were affected. `later` are the rows that the same net changes change later: with this
    /// statement and with the next.
    pub(super) fn row(
        &mut self,
        number: usize,
        table: usize,
        op: &RowOp,
        later: [&[RowOp]; 2],
    ) -> Done<usize> {
        let half = self.sessions[number].now.half;
        match (op, half) {
            (RowOp::Insert(row), _) => {
                self.check_unique(number, table, *row, later)?;
                self.create(number, table, *row);
            }
            (RowOp::Delete(find), _) => {
                let Some(at) = self.find(number, table, find)? else { return Ok(0) };
                let command = self.sessions[number].command_id;
                self.delete(number, table, at, command);
            }
            (RowOp::Update(find, set), None) => {
                let Some(at) = self.find(number, table, find)? else { return Ok(0) };
                let command = self.sessions[number].command_id;
                let old = self.tables[table][at].row;
                let new = updated(old, set);
                self.delete(number, table, at, command);
                self.sessions[number].now.half = Some((at, new));
                return self.row(number, table, op, later);
            }
            (RowOp::Update(..), Some((at, new))) => {
                self.check_unique(number, table, new, later)?;
                let next = self.create(number, table, new);
                self.tables[table][at].next = Some(next);
                self.sessions[number].now.half = None;
            }
        }
        if table == TRIGGERED {
            let session = &mut self.sessions[number];
            session.fired += 1;
            let row = audit(self.digest.wrapping_add(session.delta), session.fired);
            self.create(number, AUDIT, row);
        }
        Ok(1)
    }

    /// The version to be changed, when no other transaction is changing it.
    pub(super) fn find(&self, number: usize, table: usize, find: &Find) -> Done<Option<usize>> {
        let Session { tx, command_id, now, .. } = &self.sessions[number];
        let matches = |row: &Row| find.is(*row);
        let before = |(writer, command): (Tx, u32)| {
            if writer == *tx { command < *command_id } else { self.is_in(writer, now.snapshot) }
        };
        let versions = &self.tables[table];
        let found = versions.iter().position(|version| {
            matches(&version.row)
                && before(version.created)
                && !before(version.deleted)
                && version.deleted.0 != *tx
        });
        let Some(mut at) = found else { return Ok(None) };
        loop {
            let version = &versions[at];
            let deleter = version.deleted.0;
            if deleter == *tx {
                return Ok(None);
            }
            if self.is_running(deleter) {
                return Err(Stop::Wait(deleter));
            }
            if !self.is_committed(deleter) {
                return Ok(Some(at));
            }
            match version.next {
                Some(next) if matches(&versions[next].row) => at = next,
                _ => return Ok(None),
            }
        }
    }

    fn check_unique(
        &self,
        number: usize,
        table: usize,
        row: Row,
        later: [&[RowOp]; 2],
    ) -> Done<()> {
        let tx = self.sessions[number].tx;
        let meets = |other: &Row| {
            is_keyed(table) && other[0] == row[0]
                || table == UNIQUE && row[1] != 0 && other[1] == row[1]
        };
        for version in &self.tables[table] {
            if !meets(&version.row) {
                continue;
            }
            let (created, deleted) = (version.created.0, version.deleted.0);
            if created != tx && self.is_running(created) {
                return Err(Stop::Wait(created));
            }
            if created != tx && !self.is_committed(created) || deleted == tx {
                continue;
            }
            if self.is_running(deleted) {
                return Err(Stop::Wait(deleted));
            }
            if !self.is_committed(deleted) {
                // The same net changes take its values away later.
                let makes_way = |op: &RowOp| match op {
                    RowOp::Update(find, set) => {
                        find.is(version.row) && !meets(&updated(version.row, set))
                    }
                    _ => false,
                };
                let in_order = !later.into_iter().flatten().any(makes_way);
                return Err(Stop::Fail(if in_order { Fault::Unique } else { Fault::AsSet }));
            }
        }
        Ok(())
    }
}

/// A row after an update.
fn updated(row: Row, set: &[Option<u16>; 4]) -> Row {
    std::array::from_fn(|column| set[column].unwrap_or(row[column]))
}
