//! The lock table: which groups hold which key.
//!
//! An entry names the latest group that wrote a key and the latest group that read it. That is
//! enough. A group with a conflicting lock waits for the earlier holders, so a wait for the latest
//! writer includes all earlier ones. A wait for readers is a wait for all groups up to the latest
//! reader.
//!
//! Nothing is removed when a group commits. Entries of committed groups are recognized by their
//! number and reused; a sweep drops the rest before the table grows. That costs far less than
//! another lookup of every key. Keys are hashes, so the search for a key starts at its own slot and
//! mostly stays within one cache line.

use crate::group::GroupSeq;

/// How a lock is held: any number of groups may read, and a writer excludes all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// A group that holds a lock, or none, in 32 bits.
///
/// Numbers are truncated to 29 bits. That is far more than the number of groups in flight, so two
/// of those are never confused. A very old entry may look like one of them, which costs a needless
/// wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp(u32);

impl Stamp {
    const NONE: Self = Self(0);
    const PRESENT: u32 = 1 << 31;
    /// A dependent change took the lock.
    const DEPENDENT: u32 = 1 << 30;
    /// For a reader: earlier readers also matter to it.
    const SHARED: u32 = 1 << 29;
    const NUMBER: u32 = Self::SHARED - 1;

    fn new(group: GroupSeq) -> Self {
        Self(Self::PRESENT | low_bits(group))
    }

    /// The number of the group, given the newest one.
    #[inline]
    pub(super) fn group(self, newest: GroupSeq) -> GroupSeq {
        if self == Self::NONE {
            return GroupSeq::NONE;
        }
        let ago = low_bits(newest).wrapping_sub(self.0) & Self::NUMBER;
        GroupSeq(newest.0.saturating_sub(u64::from(ago)))
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

/// The holders of a key. Empty if there is neither a writer nor a reader.
#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u64,
    writer: Stamp,
    reader: Stamp,
}

impl Entry {
    const EMPTY: Self = Self { hash: 0, writer: Stamp::NONE, reader: Stamp::NONE };

    #[inline]
    fn is_empty(&self) -> bool {
        self.writer == Stamp::NONE && self.reader == Stamp::NONE
    }

    /// Whether all its groups have committed.
    #[inline]
    fn is_past(&self, newest: GroupSeq, committed: GroupSeq) -> bool {
        self.writer.group(newest) <= committed && self.reader.group(newest) <= committed
    }
}

/// The earlier holders of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Before {
    pub(super) writer: Stamp,
    pub(super) reader: Stamp,
}

/// Groups that do not matter any more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past {
    /// All groups up to this one have committed.
    pub(super) committed: GroupSeq,
    /// The newest group need not wait for groups up to this one.
    pub(super) settled: GroupSeq,
}

/// The keys that are held, and some that were.
#[derive(Debug, Default)]
pub(super) struct LockTable {
    /// The number of slots is a power of two, and never all are in use.
    slots: Vec<Entry>,
    used: usize,
}

/// The minimum number of slots.
const MIN_SLOTS: usize = 1 << 10;

impl LockTable {
    /// Takes the lock of a key for the newest group, whichever groups hold it. Returns the earlier
    /// holders.
    #[inline]
    pub(super) fn take(
        &mut self,
        hash: u64,
        access: Access,
        group: GroupSeq,
        past: Past,
    ) -> Before {
        let own = Stamp::new(group);
        let slot = self.slot(hash, group, past.committed);
        let entry = &mut self.slots[slot];
        if entry.hash != hash || entry.is_empty() {
            self.used += usize::from(entry.is_empty());
            let (writer, reader) = match access {
                Access::Write => (own, Stamp::NONE),
                Access::Read => (Stamp::NONE, own),
            };
            *entry = Entry { hash, writer, reader };
            return Before { writer: Stamp::NONE, reader: Stamp::NONE };
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

    /// The slot of a key. If there is none, the first slot on its search path that is empty or
    /// past.
    #[inline]
    fn slot(&mut self, hash: u64, newest: GroupSeq, committed: GroupSeq) -> usize {
        if self.used + 1 >= self.slots.len() {
            self.rebuild(|_| true);
        }
        let mut at = home(hash, self.slots.len());
        let mut free = None;
        loop {
            let entry = &self.slots[at];
            if entry.is_empty() {
                return free.unwrap_or(at);
            }
            if entry.hash == hash {
                return at;
            }
            if free.is_none() && entry.is_past(newest, committed) {
                free = Some(at);
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Marks a lock that the newest group has just taken: the change is dependent.
    pub(super) fn mark_dependent(&mut self, hash: u64, access: Access) {
        let mut at = home(hash, self.slots.len());
        while !self.slots[at].is_empty() {
            let entry = &mut self.slots[at];
            if entry.hash == hash {
                match access {
                    Access::Write => entry.writer.0 |= Stamp::DEPENDENT,
                    Access::Read => entry.reader.0 |= Stamp::DEPENDENT,
                }
                return;
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    /// Whether to call [`Self::sweep`]: the search paths become long.
    #[inline]
    pub(super) fn needs_sweep(&self) -> bool {
        self.used * 3 >= self.slots.len() * 2
    }

    /// Drops the entries that no group holds, and makes room. `writes` and `reads` tell whether the
    /// locks that a group wrote or read still count.
    pub(super) fn sweep(
        &mut self,
        newest: GroupSeq,
        writes: impl Fn(GroupSeq) -> bool,
        reads: impl Fn(GroupSeq) -> bool,
    ) {
        self.rebuild(|entry| {
            writes(entry.writer.group(newest)) || reads(entry.reader.group(newest))
        });
    }

    #[cold]
    fn rebuild(&mut self, keeps: impl Fn(&Entry) -> bool) {
        let keeps = |entry: &&Entry| !entry.is_empty() && keeps(entry);
        let kept = self.slots.iter().filter(keeps).count();
        // At least as many slots stay free as are in use.
        let size = (kept * 3).next_power_of_two().max(MIN_SLOTS);
        let mut slots = vec![Entry::EMPTY; size];
        for entry in self.slots.iter().filter(keeps) {
            let mut at = home(entry.hash, size);
            while !slots[at].is_empty() {
                at = (at + 1) & (size - 1);
            }
            slots[at] = *entry;
        }
        (self.slots, self.used) = (slots, kept);
    }

    /// Allocated memory in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Entry>()
    }
}

/// The slot at which the search for a key starts.
#[inline]
fn home(hash: u64, slots: usize) -> usize {
    let [.., a, b, c, d] = hash.to_be_bytes();
    u32::from_be_bytes([a, b, c, d]) as usize & (slots - 1)
}
