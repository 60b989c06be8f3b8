//! The locks of a change.

use pgoutput::{Message, OldTuple};

use super::key::{Key, Kind, Nulls, Rows};
use super::rules::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use super::table::{Access, Past};
use super::{Touched, Verdict, Writeset};
use crate::group::GroupSeq;

/// The stream does not say what is to be locked: it must be the table.
struct Uncertain;

type Certain = Result<(), Uncertain>;

/// Of the table that changes.
#[derive(Clone, Copy)]
struct Root {
    oid: u32,
    place: usize,
}

impl Writeset {
    pub(super) fn begin_change(&mut self) {
        debug_assert!(self.now.open, "changes belong to a group");
        if self.table.is_worth_a_sweep() {
            self.sweep();
        }
        self.now.taken.clear();
        self.now.touched.clear();
        self.now.dependent = self.now.all;
        if self.barrier != self.now.seq {
            self.meet(self.barrier);
        }
    }

    /// Whoever conflicts with the locks of a dependent change of the group is dependent too.
    pub(super) fn end_change(&mut self) -> Verdict {
        let now = &self.now;
        if !now.dependent {
            return Verdict::Free;
        }
        for &(hash, access) in &now.taken {
            self.table.contend(hash, access);
        }
        for touched in &now.touched {
            let root = self.roots.at(touched.place);
            root.dependent = now.seq;
            if touched.rest {
                root.rest = now.seq;
            }
        }
        Verdict::Dependent
    }

    pub(super) fn lock(&mut self, rules: &LockRules, message: &Message<'_>) {
        let Some(rows) = Rows::of(message) else {
            // TRUNCATE, or what is no change at all and should not be here.
            return self.lock_tables(&[rules]);
        };
        if rules.barrier {
            return self.stand_alone();
        }
        let own = Root { oid: rules.root, place: self.roots.place(rules.root) };
        let root = self.roots.at(own.place);
        let known = root.identity.replace(rules.identity).unwrap_or(rules.identity);
        let whole = rules.whole_table
            || root.serialized
            || root.escalated == self.now.seq
            || known != rules.identity
            || rules.row == RowLock::Table && !matches!(message, Message::Insert(_));
        // Even who is about to lock the table has nothing to lock in it but the rest of its keys.
        if whole || self.lock_keys(own, rules, &rows).is_err() {
            self.lock_table(own.place);
        }
        for foreign in &rules.foreign {
            self.lock_parents(foreign, &rows);
        }
    }

    pub(super) fn lock_tables(&mut self, tables: &[&LockRules]) {
        self.meet_through(self.now.seq.previous());
        for rules in tables {
            let place = self.roots.place(rules.root);
            self.lock_table(place);
            for foreign in &rules.foreign {
                let parent = self.roots.place(foreign.parent);
                self.share_table(parent);
                self.roots.at(parent).unknown_drops.note(self.now.seq);
            }
        }
        // A TRUNCATE runs code of users as any other change does.
        if tables.iter().any(|rules| rules.barrier) {
            self.stand_alone();
        }
    }

    /// The change, and with it all that follow in the group, waits for everything before the group,
    /// and everything after waits for it.
    pub(super) fn stand_alone(&mut self) {
        self.meet_through(self.now.seq.previous());
        self.now.all = self.now.dependent;
        self.barrier = self.now.seq;
    }

    /// What a change locks in its own table.
    fn lock_keys(&mut self, own: Root, rules: &LockRules, rows: &Rows<'_>) -> Certain {
        self.share_table(own.place);
        self.lock_row(own, &rules.row, rows)?;
        for unique in &rules.unique {
            self.lock_unique(own, unique, rows)?;
        }
        for referenced in &rules.referenced {
            self.lock_referenced(own, referenced, rows)?;
        }
        Ok(())
    }

    fn lock_row(&mut self, own: Root, row: &RowLock, rows: &Rows<'_>) -> Certain {
        let (columns, nulls) = match row {
            RowLock::Key(columns) => (columns, Nulls::Distinct),
            RowLock::WholeRow(columns) => (columns, Nulls::Equal),
            RowLock::Table => return Ok(()),
        };
        let whole_old = matches!(rows.old, Some(OldTuple::Full(_))) || rows.is_insert();
        if columns.is_empty() || nulls == Nulls::Equal && !whole_old {
            return Err(Uncertain);
        }
        let (mut old, mut new) = (None, None);
        if rows.old.is_some() {
            let key = self.key_before(Kind::Row, own.oid, 0, columns, nulls, rows);
            old = Some(certain(key)?);
        } else if !rows.is_insert() && !columns.iter().all(|column| column.in_identity) {
            return Err(Uncertain);
        }
        if rows.new.is_some() {
            let key = self.key_after(Kind::Row, own.oid, 0, columns, nulls, rows);
            new = Some(certain(key)?);
        }
        if let Some(old) = old {
            self.take(own.place, old, Access::Write)?;
        }
        if let Some(new) = new
            && Some(new) != old
        {
            self.take(own.place, new, Access::Write)?;
            if old.is_some() {
                self.touch(own.place, true);
            }
        }
        Ok(())
    }

    fn lock_unique(&mut self, own: Root, unique: &UniqueLock, rows: &Rows<'_>) -> Certain {
        if rows.is_update() && rows.are_unchanged(&unique.columns) {
            return Ok(());
        }
        if !unique.certain {
            let hash = self.keys.constant(Kind::Unique, own.oid, unique.id);
            let access = if rows.is_insert() { Access::Read } else { Access::Write };
            return self.take(own.place, hash, access);
        }
        let columns = &unique.columns;
        let nulls = if unique.nulls_not_distinct { Nulls::Equal } else { Nulls::Distinct };
        if let Key::Is(old) =
            self.key_before(Kind::Unique, own.oid, unique.id, columns, nulls, rows)
        {
            self.take(own.place, old, Access::Write)?;
        }
        if rows.new.is_none() {
            return Ok(());
        }
        match self.key_after(Kind::Unique, own.oid, unique.id, columns, nulls, rows) {
            Key::Is(new) => self.take(own.place, new, Access::Write),
            Key::Null => Ok(()),
            Key::Unknown => Err(Uncertain),
        }
    }

    /// Keys that others refer to. Those who insert such references say so to this root too, so
    /// that who holds the table holds all keys.
    fn lock_referenced(
        &mut self,
        own: Root,
        referenced: &ReferencedLock,
        rows: &Rows<'_>,
    ) -> Certain {
        let columns = &referenced.columns;
        if rows.is_update() && rows.are_unchanged(columns) {
            return Ok(());
        }
        if !referenced.certain {
            return Err(Uncertain);
        }
        let id = referenced.id;
        match self.key_before(Kind::Foreign, own.oid, id, columns, Nulls::Distinct, rows) {
            Key::Is(old) => {
                self.take(own.place, old, Access::Write)?;
                self.follow_drops(own.place, false);
            }
            Key::Unknown if rows.new.is_none() => return Err(Uncertain),
            Key::Unknown => self.follow_drops(own.place, true),
            Key::Null => {}
        }
        if rows.new.is_none() {
            return Ok(());
        }
        match self.key_after(Kind::Foreign, own.oid, id, columns, Nulls::Distinct, rows) {
            Key::Is(new) => self.take(own.place, new, Access::Write),
            Key::Null => Ok(()),
            Key::Unknown => Err(Uncertain),
        }
    }

    /// A key that others refer to goes: after the references to it. One whose key is not known may
    /// have been to this one, and a key that is not known may have been in any of them. Not the
    /// other way round: who takes away a reference need not wait for the end of some other key.
    fn follow_drops(&mut self, place: usize, any: bool) {
        let group = self.now.seq;
        let root = self.roots.at(place);
        let (known, unknown) = (root.known_drops, root.unknown_drops);
        let own = unknown.is(group) || any && known.is(group);
        self.now.dependent |= own && root.dependent == group;
        self.meet_through(unknown.other_than(group));
        if any {
            self.meet_through(known.other_than(group));
        }
    }

    /// Keys that the row refers to. These locks are the parent's, whatever happens to this table.
    fn lock_parents(&mut self, foreign: &ForeignLock, rows: &Rows<'_>) {
        if rows.is_update() && rows.are_unchanged(&foreign.columns) {
            return;
        }
        let parent = Root { oid: foreign.parent, place: self.roots.place(foreign.parent) };
        let escalated = self.roots.at(parent.place).escalated == self.now.seq;
        if escalated || self.lock_parent_keys(parent, foreign, rows).is_err() {
            self.lock_table(parent.place);
        }
    }

    fn lock_parent_keys(
        &mut self,
        parent: Root,
        foreign: &ForeignLock,
        rows: &Rows<'_>,
    ) -> Certain {
        self.share_table(parent.place);
        if !foreign.certain {
            return Err(Uncertain);
        }
        let (id, columns) = (foreign.id, &foreign.columns);
        match self.key_before(Kind::Foreign, parent.oid, id, columns, Nulls::Distinct, rows) {
            Key::Is(old) => {
                self.roots.at(parent.place).known_drops.note(self.now.seq);
                self.take(parent.place, old, Access::Read)?;
            }
            Key::Unknown => self.roots.at(parent.place).unknown_drops.note(self.now.seq),
            Key::Null => {}
        }
        if rows.new.is_none() {
            return Ok(());
        }
        match self.key_after(Kind::Foreign, parent.oid, id, columns, Nulls::Distinct, rows) {
            Key::Is(new) => self.take(parent.place, new, Access::Read),
            Key::Null => Ok(()),
            Key::Unknown => Err(Uncertain),
        }
    }

    #[inline]
    fn key_before(
        &mut self,
        kind: Kind,
        root: u32,
        id: u32,
        columns: &[LockColumn],
        nulls: Nulls,
        rows: &Rows<'_>,
    ) -> Key {
        if rows.is_insert() {
            return Key::Null;
        }
        self.keys.key((kind, root, id), columns, nulls, |column| rows.before(column))
    }

    #[inline]
    fn key_after(
        &mut self,
        kind: Kind,
        root: u32,
        id: u32,
        columns: &[LockColumn],
        nulls: Nulls,
        rows: &Rows<'_>,
    ) -> Key {
        self.keys.key((kind, root, id), columns, nulls, |column| rows.after(column))
    }

    /// Takes a key for the change. `Err` if the group has too many of this root: then the table
    /// must be taken.
    #[inline]
    fn take(&mut self, place: usize, hash: u64, access: Access) -> Certain {
        let group = self.now.seq;
        let past = Past { committed: self.committed, settled: self.now.settled };
        let before = self.table.take(hash, access, group, past);
        self.now.taken.push((hash, access));
        let (writer, reader) = (before.writer.group(group), before.reader.group(group));
        if access == Access::Read && reader != group {
            self.now.reads += 1;
        }
        if writer == group {
            self.now.dependent |= before.writer.is_dependent();
        } else {
            self.meet(writer);
        }
        if access == Access::Write {
            if reader == group {
                self.now.dependent |= before.reader.is_dependent();
                if before.reader.is_shared() {
                    self.meet_through(group.previous());
                }
            } else {
                self.meet_through(reader);
            }
        }
        if writer != group && reader != group {
            self.now.keys += 1;
            let root = self.roots.at(place);
            if root.count(group) > self.limits.keys_per_table {
                root.escalated = group;
                return Err(Uncertain);
            }
        }
        Ok(())
    }

    /// Notes that the change has locks in a table, which whoever holds the table holds too.
    #[inline]
    fn share_table(&mut self, place: usize) {
        let group = self.now.seq;
        let root = self.roots.at(place);
        root.rows.note(group);
        self.now.dependent |= root.rest == group;
        let holder = root.table;
        if holder != group {
            self.meet(holder);
        }
        self.touch(place, false);
    }

    /// Takes a table whole.
    fn lock_table(&mut self, place: usize) {
        let group = self.now.seq;
        let root = self.roots.at(place);
        let (holder, others) = (root.table, root.rows.other_than(group));
        root.table = group;
        self.now.dependent |= root.rest == group || root.dependent == group;
        if holder != group {
            self.meet(holder);
        }
        self.meet_through(others);
        self.touch(place, true);
    }

    #[inline]
    fn touch(&mut self, place: usize, rest: bool) {
        self.now.touched.push(Touched { place, rest });
    }

    #[cold]
    fn sweep(&mut self) {
        let Self { table, groups, committed, ordered, now, .. } = self;
        let holds = |group: GroupSeq| {
            group > *committed
                && (*ordered
                    || groups
                        .binary_search_by_key(&group, |group| group.seq)
                        .is_ok_and(|place| !groups[place].committed))
        };
        table.sweep(now.seq, holds, |group| group > *committed);
    }
}

/// The key of a row: one that has none, or of which the stream does not tell, may be any.
fn certain(key: Key) -> Result<u64, Uncertain> {
    match key {
        Key::Is(hash) => Ok(hash),
        Key::Null | Key::Unknown => Err(Uncertain),
    }
}
