//! Who holds which key.
//!
//! An entry names the latest group that wrote a key and the latest that read it. That is enough:
//! who takes a lock that conflicts waits for those who had it, so whoever waits for the latest
//! writer waits for all before it; and readers are waited for by number, with every group before
//! them.
//!
//! Nothing is removed when a group commits. Entries of committed groups are recognized by their
//! number, and swept out in one pass when the table has doubled, which costs far less than looking
//! every key up again.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;

use crate::group::GroupSeq;

/// How a lock is held: any number of groups may read, and who writes excludes everybody else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// A group that holds a lock, or nobody, in 32 bits.
///
/// Numbers are cut to 29 bits. The groups in flight are far fewer, so they are never confused with
/// each other; an entry that was forgotten for so long may look like one of them, which costs a
/// needless wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp(u32);

impl Stamp {
    const NOBODY: Self = Self(0);
    const SOMEBODY: u32 = 1 << 31;
    /// A change that took the lock is contended.
    const CONTENDED: u32 = 1 << 30;
    /// Of a reader: there were others before it that matter to it.
    const SHARED: u32 = 1 << 29;
    const NUMBER: u32 = Self::SHARED - 1;

    fn new(group: GroupSeq) -> Self {
        Self(Self::SOMEBODY | low_bits(group))
    }

    /// Which group this is; `now` is the newest one.
    #[inline]
    pub(super) fn group(self, now: GroupSeq) -> GroupSeq {
        if self == Self::NOBODY {
            return GroupSeq::NONE;
        }
        let ago = low_bits(now).wrapping_sub(self.0) & Self::NUMBER;
        GroupSeq(now.0.saturating_sub(u64::from(ago)))
    }

    pub(super) fn is_contended(self) -> bool {
        self.0 & Self::CONTENDED != 0
    }

    pub(super) fn is_shared(self) -> bool {
        self.0 & Self::SHARED != 0
    }
}

fn low_bits(group: GroupSeq) -> u32 {
    let [.., a, b, c, d] = group.0.to_be_bytes();
    u32::from_be_bytes([a, b, c, d]) & Stamp::NUMBER
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u64,
    writer: Stamp,
    reader: Stamp,
}

/// Who held a key before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before {
    pub(super) writer: Stamp,
    pub(super) reader: Stamp,
}

/// The keys that are held, and some that were.
#[derive(Debug, Default)]
pub(super) struct LockTable {
    entries: HashTable<Entry>,
    /// With so many entries it is time to sweep.
    sweep_at: usize,
}

/// A small table is not worth a sweep.
const LEAST: usize = 1 << 10;

impl LockTable {
    /// Takes the lock of a key for the newest group, whoever holds it; groups up to `settled` do not
    /// matter to it. Who held it before.
    #[inline]
    pub(super) fn take(
        &mut self,
        hash: u64,
        access: Access,
        group: GroupSeq,
        settled: GroupSeq,
    ) -> Before {
        let own = Stamp::new(group);
        let place = self.entries.entry(hash, |entry| entry.hash == hash, |entry| entry.hash);
        match place {
            Place::Occupied(mut place) => {
                let entry = place.get_mut();
                let before = Before { writer: entry.writer, reader: entry.reader };
                match access {
                    Access::Write if entry.writer.group(group) != group => entry.writer = own,
                    Access::Read => {
                        let reader = entry.reader.group(group);
                        if reader > settled && reader != group {
                            entry.reader = Stamp(own.0 | Stamp::SHARED);
                        } else if reader != group {
                            entry.reader = own;
                        }
                    }
                    Access::Write => {}
                }
                before
            }
            Place::Vacant(place) => {
                let (writer, reader) = match access {
                    Access::Write => (own, Stamp::NOBODY),
                    Access::Read => (Stamp::NOBODY, own),
                };
                place.insert(Entry { hash, writer, reader });
                Before { writer: Stamp::NOBODY, reader: Stamp::NOBODY }
            }
        }
    }

    /// Notes that a change of the newest group is contended, which has just taken this lock.
    pub(super) fn contend(&mut self, hash: u64, access: Access) {
        if let Some(entry) = self.entries.find_mut(hash, |entry| entry.hash == hash) {
            match access {
                Access::Write => entry.writer.0 |= Stamp::CONTENDED,
                Access::Read => entry.reader.0 |= Stamp::CONTENDED,
            }
        }
    }

    /// Whether it is time for [`Self::sweep`].
    #[inline]
    pub(super) fn is_worth_a_sweep(&self) -> bool {
        self.entries.len() >= self.sweep_at.max(LEAST)
    }

    /// Drops the entries that no group holds. `writes` and `reads` say of a group whether what it
    /// wrote or read still counts.
    pub(super) fn sweep(
        &mut self,
        now: GroupSeq,
        writes: impl Fn(GroupSeq) -> bool,
        reads: impl Fn(GroupSeq) -> bool,
    ) {
        self.entries
            .retain(|entry| writes(entry.writer.group(now)) || reads(entry.reader.group(now)));
        self.sweep_at = self.entries.len() * 2;
    }

    /// Entries, those of committed groups included.
    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.entries.allocation_size()
    }
}
