//! Updates of keys: the row moves to another key.

use pgoutput::Tuple;

use super::entry::{Before, Now};
use super::{KeyLookup, Keyed, has_key_at, hash, index_u32, spread};
use crate::net::Row;
use crate::net::merge::overwrite;

impl<'a> Keyed<'_, 'a> {
    /// Takes an update of a key. `values` holds the new key. A row that moves to a key and away again leaves an
    /// absent row there, as one that was inserted and deleted does.
    pub(super) fn move_row(&mut self, old: &Tuple<'a>, new: Tuple<'a>) -> Option<()> {
        let to = self.look_up()?;
        let new_key = self.values.clone();
        self.read_key(old)?;
        let from = self.look_up()?;
        let now = |place: Option<u32>| place.map(|place| self.entries[place as usize].now);
        let same_form = from.is_some() && from == to;
        if now(from) == Some(Now::Absent)
            || from.is_some_and(|from| self.ends_written(from, Some(&new)))
            || !same_form && now(to).is_some_and(|now| now != Now::Absent)
        {
            return None;
        }
        let from = match from {
            Some(place) => place,
            None => self.find_or_add(Before::Stays, Now::Same)?,
        };
        self.values.clone_from(&new_key);
        let to = match to {
            Some(place) => place,
            None => self.find_or_add(Before::Absent, Now::Absent)?,
        };
        let origin = match self.entries[from as usize].now {
            Now::Same => Some(from),
            Now::Arrived(origin) => Some(origin),
            Now::Inserted | Now::Absent => None,
        };
        let mut row = self.leave(from, *old);
        overwrite(&mut row, new);
        self.fill_key(&mut row);
        let Some(origin) = origin else {
            let inserted = index_u32(self.inserts.len());
            self.inserts.push(to);
            let entry = &mut self.entries[to as usize];
            (entry.now, entry.inserted, entry.row) = (Now::Inserted, inserted, row);
            return Some(());
        };
        let is_home = to == origin && self.has_key(&self.entries[origin as usize].old);
        let (before, now) = match is_home {
            true => (Before::Stays, Now::Same),
            false => (Before::Moved(to), Now::Arrived(origin)),
        };
        self.entries[origin as usize].before = before;
        let entry = &mut self.entries[to as usize];
        (entry.now, entry.row) = (now, row);
        Some(())
    }

    /// The entry of the key in `values`, which is added if there is none.
    fn find_or_add(&mut self, before: Before, now: Now) -> Option<u32> {
        Some(match self.find()? {
            KeyLookup::Known(place) => place,
            KeyLookup::New(key) => self.add(key, (before, now), Row::Sent(Tuple::default())),
        })
    }

    /// Whether these are the key columns of the row, in the same spelling.
    fn has_key(&self, row: &Tuple<'a>) -> bool {
        let columns: Vec<_> = row.columns().collect();
        self.key_columns
            .iter()
            .all(|&(column, place)| columns.get(column) == Some(&self.values[place]))
    }

    /// Like [`Self::find`], but reserves nothing.
    fn look_up(&mut self) -> Option<Option<u32>> {
        let start = self.append_key()?;
        let Self { keys, entries, .. } = self;
        let hash = hash(&keys[start..]);
        let found = self
            .index
            .find(spread(hash), has_key_at(keys, entries, start, hash))
            .map(|indexed| indexed.entry);
        keys.truncate(start);
        Some(found)
    }
}
