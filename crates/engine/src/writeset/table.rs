//! Who holds which key.
//!
//! An entry names the latest group that wrote a key and the latest that read it. That is enough:
//! who takes a lock that conflicts waits for those who had it, so whoever waits for the latest
//! writer waits for all before it; and readers are waited for by number, with every group before
//! them.
//!
//! Nothing is removed when a group commits. Entries of committed groups are recognized by their
//! number; others take their places, and what is left of them is swept out before the table grows.
//! That costs far less than looking every key up again. Keys are hashes already, so each is looked
//! for from its own place on: one cache line, mostly.

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
    /// A change that took the lock is dependent.
    const DEPENDENT: u32 = 1 << 30;
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

    pub(super) fn is_dependent(self) -> bool {
        self.0 & Self::DEPENDENT != 0
    }

    pub(super) fn is_shared(self) -> bool {
        self.0 & Self::SHARED != 0
    }
}

fn low_bits(group: GroupSeq) -> u32 {
    let [.., a, b, c, d] = group.0.to_be_bytes();
    u32::from_be_bytes([a, b, c, d]) & Stamp::NUMBER
}

/// A key, or nothing where neither has a group.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u64,
    writer: Stamp,
    reader: Stamp,
}

impl Entry {
    const NOTHING: Self = Self { hash: 0, writer: Stamp::NOBODY, reader: Stamp::NOBODY };

    #[inline]
    fn is_nothing(&self) -> bool {
        self.writer == Stamp::NOBODY && self.reader == Stamp::NOBODY
    }

    /// Whether all its groups have committed, `now` being the newest.
    #[inline]
    fn is_past(&self, now: GroupSeq, committed: GroupSeq) -> bool {
        self.writer.group(now) <= committed && self.reader.group(now) <= committed
    }
}

/// Who held a key before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before {
    pub(super) writer: Stamp,
    pub(super) reader: Stamp,
}

/// What groups do not matter any more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past {
    /// All groups up to this one have committed.
    pub(super) committed: GroupSeq,
    /// Groups up to this one do not matter to the newest one.
    pub(super) settled: GroupSeq,
}

/// The keys that are held, and some that were.
#[derive(Debug, Default)]
pub(super) struct LockTable {
    /// A power of two of them, never all in use.
    places: Vec<Entry>,
    used: usize,
}

/// The smallest table.
const LEAST: usize = 1 << 10;

impl LockTable {
    /// Takes the lock of a key for the newest group, whoever holds it. Who held it before.
    #[inline]
    pub(super) fn take(
        &mut self,
        hash: u64,
        access: Access,
        group: GroupSeq,
        past: Past,
    ) -> Before {
        let own = Stamp::new(group);
        let place = self.place(hash, group, past.committed);
        let entry = &mut self.places[place];
        if entry.hash != hash || entry.is_nothing() {
            self.used += usize::from(entry.is_nothing());
            let (writer, reader) = match access {
                Access::Write => (own, Stamp::NOBODY),
                Access::Read => (Stamp::NOBODY, own),
            };
            *entry = Entry { hash, writer, reader };
            return Before { writer: Stamp::NOBODY, reader: Stamp::NOBODY };
        }
        let before = Before { writer: entry.writer, reader: entry.reader };
        match access {
            Access::Write if before.writer.group(group) != group => entry.writer = own,
            Access::Write => {}
            Access::Read => {
                let reader = before.reader.group(group);
                if reader > past.settled && reader != group {
                    entry.reader = Stamp(own.0 | Stamp::SHARED);
                } else if reader != group {
                    entry.reader = own;
                }
            }
        }
        before
    }

    /// Where a key is, or else where it may be put: in the first place on its way where nothing is,
    /// or nothing that matters.
    #[inline]
    fn place(&mut self, hash: u64, now: GroupSeq, committed: GroupSeq) -> usize {
        if self.used + 1 >= self.places.len() {
            self.rebuild(|_| true);
        }
        let mut at = home(hash, self.places.len());
        let mut free = None;
        loop {
            let entry = &self.places[at];
            if entry.is_nothing() {
                return free.unwrap_or(at);
            }
            if entry.hash == hash {
                return at;
            }
            if free.is_none() && entry.is_past(now, committed) {
                free = Some(at);
            }
            at = (at + 1) & (self.places.len() - 1);
        }
    }

    /// Notes that a change of the newest group is dependent, which has just taken this lock.
    pub(super) fn contend(&mut self, hash: u64, access: Access) {
        let mut at = home(hash, self.places.len());
        while !self.places[at].is_nothing() {
            let entry = &mut self.places[at];
            if entry.hash == hash {
                match access {
                    Access::Write => entry.writer.0 |= Stamp::DEPENDENT,
                    Access::Read => entry.reader.0 |= Stamp::DEPENDENT,
                }
                return;
            }
            at = (at + 1) & (self.places.len() - 1);
        }
    }

    /// Whether it is time for [`Self::sweep`]: ways become long.
    #[inline]
    pub(super) fn is_worth_a_sweep(&self) -> bool {
        self.used * 3 >= self.places.len() * 2
    }

    /// Drops the entries that no group holds, and makes room. `writes` and `reads` say of a group
    /// whether what it wrote or read still counts.
    pub(super) fn sweep(
        &mut self,
        now: GroupSeq,
        writes: impl Fn(GroupSeq) -> bool,
        reads: impl Fn(GroupSeq) -> bool,
    ) {
        self.rebuild(|entry| writes(entry.writer.group(now)) || reads(entry.reader.group(now)));
    }

    #[cold]
    fn rebuild(&mut self, keeps: impl Fn(&Entry) -> bool) {
        let keeps = |entry: &&Entry| !entry.is_nothing() && keeps(entry);
        let kept = self.places.iter().filter(keeps).count();
        // Room for as many again, at least, before the next time.
        let size = (kept * 3).next_power_of_two().max(LEAST);
        let mut places = vec![Entry::NOTHING; size];
        for entry in self.places.iter().filter(keeps) {
            let mut at = home(entry.hash, size);
            while !places[at].is_nothing() {
                at = (at + 1) & (size - 1);
            }
            places[at] = *entry;
        }
        (self.places, self.used) = (places, kept);
    }

    /// Bytes allocated.
    pub(super) fn bytes(&self) -> usize {
        self.places.capacity() * size_of::<Entry>()
    }
}

/// Where a key should be among so many places.
#[inline]
fn home(hash: u64, places: usize) -> usize {
    let [.., a, b, c, d] = hash.to_be_bytes();
    u32::from_be_bytes([a, b, c, d]) as usize & (places - 1)
}
