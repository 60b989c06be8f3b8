//! The locks that a change takes.

use pgoutput::{Message, OldTuple};

use super::key::{Key, Kind, Nulls, Rows};
use super::rules::{ForeignLock, LockColumn, LockRules, ReferencedLock, RowLock, UniqueLock};
use super::table::{Access, Past};
use super::{Touched, Verdict, Writeset};
use crate::group::GroupSeq;

/// The stream does not tell which keys to lock, so the whole table must be locked.
struct Uncertain;

type Certain = Result<(), Uncertain>;

/// The topmost relation of the changed table.
#[derive(Clone, Copy)]
struct Root {
    oid: u32,
    place: usize,
}

impl Writeset {
    pub(super) fn begin_change(&mut self) {
        debug_assert!(self.newest.open, "changes belong to a group");
        if self.table.needs_sweep() {
            self.sweep();
        }
        self.newest.taken.clear();
        self.newest.touched.clear();
        self.newest.dependent = self.newest.all;
        if self.isolated != self.newest.seq {
            self.wait_for(self.isolated);
        }
    }

    /// Marks the locks of a dependent change, so that later changes of the group that conflict with
    /// them become dependent too.
    pub(super) fn end_change(&mut self) -> Verdict {
        let newest = &self.newest;
        if !newest.dependent {
            return Verdict::Independent;
        }
        for &(hash, access) in &newest.taken {
            self.table.mark_dependent(hash, access);
        }
        for touched in &newest.touched {
            let root = self.roots.at(touched.place);
            root.dependent = newest.seq;
            if touched.rest {
                root.rest = newest.seq;
            }
        }
        Verdict::Dependent
    }

    pub(super) fn lock(&mut self, rules: &LockRules, message: &Message<'_>) {
        let Some(rows) = Rows::of(message) else {
            // A TRUNCATE. Other messages are not expected here, and lock the whole table to be
            // safe.
            return self.lock_tables(&[rules]);
        };
        if rules.user_code {
            return self.lock_everything();
        }
        let own = Root { oid: rules.root, place: self.roots.place(rules.root) };
        let root = self.roots.at(own.place);
        let known = root.identity.replace(rules.identity).unwrap_or(rules.identity);
        let whole = rules.whole_table
            || root.serialized
            || root.escalated == self.newest.seq
            || known != rules.identity
            || rules.row == RowLock::Table && !matches!(message, Message::Insert(_));
        // Locking the whole table replaces the locks of the remaining keys.
        if whole || self.lock_keys(own, rules, &rows).is_err() {
            self.lock_table(own.place);
        }
        for foreign in &rules.foreign {
            self.lock_parents(foreign, &rows);
        }
    }

    pub(super) fn lock_tables(&mut self, tables: &[&LockRules]) {
        self.wait_through(self.newest.seq.previous());
        for rules in tables {
            let place = self.roots.place(rules.root);
            self.lock_table(place);
            for foreign in &rules.foreign {
                let parent = self.roots.place(foreign.parent);
                self.share_table(parent);
                self.roots.at(parent).unknown_drops.note(self.newest.seq);
            }
        }
        // A TRUNCATE runs triggers of users as any other change does.
        if tables.iter().any(|rules| rules.user_code) {
            self.lock_everything();
        }
    }

    /// Makes the change and all further changes of its group wait for all earlier groups, and all
    /// later groups wait for this one.
    pub(super) fn lock_everything(&mut self) {
        self.wait_through(self.newest.seq.previous());
        self.newest.all = self.newest.dependent;
        self.isolated = self.newest.seq;
    }

    /// Takes the locks of a change in its own table.
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

    /// Locks keys that other tables may refer to. Inserts of such references share the table lock
    /// of this root too, so a lock on the whole table covers all keys.
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

    /// Orders the removal of a referenced key after the removal of references to it. A removed
    /// reference with an unknown key may have referred to this key; and if the removed key is
    /// unknown, any removed reference may have referred to it. The reverse order is not enforced: a
    /// removed reference need not wait for the removal of another key.
    fn follow_drops(&mut self, place: usize, any: bool) {
        let group = self.newest.seq;
        let root = self.roots.at(place);
        let (known, unknown) = (root.known_drops, root.unknown_drops);
        let own = unknown.is(group) || any && known.is(group);
        self.newest.dependent |= own && root.dependent == group;
        self.wait_through(unknown.other_than(group));
        if any {
            self.wait_through(known.other_than(group));
        }
    }

    /// Locks the keys that the row refers to. These locks belong to the root of the referenced
    /// table.
    fn lock_parents(&mut self, foreign: &ForeignLock, rows: &Rows<'_>) {
        if rows.is_update() && rows.are_unchanged(&foreign.columns) {
            return;
        }
        let parent = Root { oid: foreign.parent, place: self.roots.place(foreign.parent) };
        let escalated = self.roots.at(parent.place).escalated == self.newest.seq;
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
                self.roots.at(parent.place).known_drops.note(self.newest.seq);
                self.take(parent.place, old, Access::Read)?;
            }
            Key::Unknown => self.roots.at(parent.place).unknown_drops.note(self.newest.seq),
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
        self.keys.key::<false>((kind, root, id), columns, nulls, rows)
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
        self.keys.key::<true>((kind, root, id), columns, nulls, rows)
    }

    /// Locks a key for the current change. Returns `Err` if the group now has too many keys of this
    /// root: then the whole table must be locked.
    #[inline]
    fn take(&mut self, place: usize, hash: u64, access: Access) -> Certain {
        let group = self.newest.seq;
        let past = Past { committed: self.committed, settled: self.newest.settled };
        let before = self.table.take(hash, access, group, past);
        self.newest.taken.push((hash, access));
        let (writer, reader) = (before.writer.group(group), before.reader.group(group));
        if access == Access::Read && reader != group {
            self.newest.reads += 1;
        }
        if writer == group {
            self.newest.dependent |= before.writer.is_dependent();
        } else {
            self.wait_for(writer);
        }
        if access == Access::Write {
            if reader == group {
                self.newest.dependent |= before.reader.is_dependent();
                if before.reader.is_shared() {
                    self.wait_through(group.previous());
                }
            } else {
                self.wait_through(reader);
            }
        }
        if writer != group && reader != group {
            self.newest.keys += 1;
            let root = self.roots.at(place);
            if root.count(group) > self.limits.keys_per_table {
                root.escalated = group;
                return Err(Uncertain);
            }
        }
        Ok(())
    }

    /// Notes that the change has locks in a table. A lock on the whole table conflicts with them.
    #[inline]
    fn share_table(&mut self, place: usize) {
        let group = self.newest.seq;
        let root = self.roots.at(place);
        root.rows.note(group);
        self.newest.dependent |= root.rest == group;
        let holder = root.table;
        if holder != group {
            self.wait_for(holder);
        }
        self.touch(place, false);
    }

    /// Locks a whole table.
    fn lock_table(&mut self, place: usize) {
        let group = self.newest.seq;
        let root = self.roots.at(place);
        let (holder, others) = (root.table, root.rows.other_than(group));
        root.table = group;
        self.newest.dependent |= root.rest == group || root.dependent == group;
        if holder != group {
            self.wait_for(holder);
        }
        self.wait_through(others);
        self.touch(place, true);
    }

    #[inline]
    fn touch(&mut self, place: usize, rest: bool) {
        self.newest.touched.push(Touched { place, rest });
    }

    #[cold]
    fn sweep(&mut self) {
        let Self { table, groups, committed, ordered, newest, .. } = self;
        let holds = |group: GroupSeq| {
            group > *committed
                && (*ordered
                    || groups
                        .binary_search_by_key(&group, |group| group.seq)
                        .is_ok_and(|place| !groups[place].committed))
        };
        table.sweep(newest.seq, holds, |group| group > *committed);
    }
}

/// The hash of a row's key. A NULL or unknown key may be that of any row.
fn certain(key: Key) -> Result<u64, Uncertain> {
    match key {
        Key::Is(hash) => Ok(hash),
        Key::Null | Key::Unknown => Err(Uncertain),
    }
}
