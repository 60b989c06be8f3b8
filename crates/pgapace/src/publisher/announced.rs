//! The relations that the publisher has described: their first changes come next.
//!
//! The publisher describes a relation just before its first change. The receiver notes the descriptions
//! as they arrive. When the leader meets a table that it has not read from the subscriber's catalogue,
//! it takes the names of the others that it will meet, so that they are read together.
//!
//! Nothing is read before its description has arrived. A user who adds a column on the subscriber,
//! and then on the publisher, must find the new column in use when the publisher uses it. For the same
//! reason what was read is used only for descriptions that had arrived before: the leader forgets the
//! rest when it has taken everything that had arrived.
//!
//! While the leader is behind, the oldest descriptions are those that it needs next. So those that it has
//! passed are dropped first, and the newest if there are too many.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::relation::RemoteRelation;
use engine::table_name::TableName;
use pgoutput::{Decoder, Frame, Message, Streaming};
use rustc_hash::FxBuildHasher;

/// Most descriptions that are kept although the leader has passed them without asking.
const PASSED: usize = 1000;

/// Most descriptions that are noted, of some 150 bytes each.
const NOTED: usize = 100_000;

/// Relations that were described lately, for the leader. Locked twice for each chunk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Announced(Arc<Mutex<Described>>);

/// A description of a relation by the publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) table: TableName,
    pub(crate) version: Version,
}

/// A hash of what a description says. Two versions of a table may have the same, hardly ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Version(u64);

impl Version {
    pub(crate) fn of(relation: &RemoteRelation) -> Self {
        Self(FxBuildHasher.hash_one(relation))
    }
}

/// What the publisher has described lately.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Announcement {
    /// In the order of the stream.
    pub(crate) descriptions: VecDeque<Description>,
    /// Whether others arrived, which were dropped.
    pub(crate) incomplete: bool,
    /// Bytes of the stream that have been received, to the last of these descriptions or further.
    pub(crate) received: u64,
}

/// Positions are in bytes of the stream since the run began.
#[derive(Debug, Default)]
struct Described {
    announcement: Announcement,
    /// The ends of the chunks that the descriptions were in.
    positions: VecDeque<u64>,
    /// What the leader has taken.
    taken: u64,
}

impl Announced {
    /// The descriptions since the last call. Some that the leader has passed come too.
    pub(crate) fn take(&self) -> Announcement {
        let mut described = self.lock();
        described.positions.clear();
        let received = described.announcement.received;
        let empty = Announcement { received, ..Announcement::default() };
        std::mem::replace(&mut described.announcement, empty)
    }

    /// The leader has taken so many bytes more of the stream.
    pub(crate) fn taken(&self, bytes: usize) {
        self.lock().taken += bytes as u64;
    }

    fn lock(&self) -> MutexGuard<'_, Described> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Described {
    /// The end of a chunk of so many bytes, with these relations.
    fn add(&mut self, bytes: usize, relations: impl Iterator<Item = Description>) {
        let Self { announcement, positions, taken } = self;
        let descriptions = &mut announcement.descriptions;
        announcement.received += bytes as u64;
        descriptions.extend(relations);
        positions.resize(descriptions.len(), announcement.received);
        let passed = positions.partition_point(|position| position <= taken);
        let dropped = passed.saturating_sub(PASSED);
        descriptions.drain(..dropped);
        positions.drain(..dropped);
        announcement.incomplete |= descriptions.len() > NOTED;
        descriptions.truncate(NOTED);
        positions.truncate(NOTED);
    }
}

/// Notes the relations of a stream, for [`Announced`].
#[derive(Debug)]
pub(crate) struct Announcer {
    announced: Announced,
    /// Those of the present chunk.
    relations: Vec<Description>,
    /// `None` after something that cannot be decoded: the leader reports that when it gets there.
    decoder: Option<Decoder>,
}

impl Announcer {
    pub(crate) fn new(announced: Announced, streaming: Streaming) -> Self {
        Self { announced, relations: Vec::new(), decoder: Some(Decoder::new(streaming)) }
    }

    /// The next frame of the stream.
    #[inline]
    pub(crate) fn frame(&mut self, frame: &[u8]) {
        if matches!(frame.get(MESSAGE), Some(b'R' | b'S' | b'E')) && frame[0] == b'w' {
            self.message(frame);
        }
    }

    /// A description, or the beginning or end of a stream block, inside which descriptions have another
    /// form.
    fn message(&mut self, frame: &[u8]) {
        let Some(decoder) = &mut self.decoder else { return };
        let Ok(Frame::XLogData { payload, .. }) = Frame::decode(frame) else { return };
        match decoder.decode(payload) {
            Ok(Message::Relation(relation)) => {
                let relation = RemoteRelation::from_message(&relation);
                let version = Version::of(&relation);
                let table = relation.name;
                self.relations.push(Description { table, version });
            }
            Ok(_) => {}
            Err(_) => self.decoder = None,
        }
    }

    /// A chunk of so many bytes ends.
    pub(crate) fn end(&mut self, bytes: usize) {
        self.announced.lock().add(bytes, self.relations.drain(..));
    }
}

/// Where the message begins in a frame with one: behind its kind, two LSNs and a time.
pub(super) const MESSAGE: usize = 25;

#[cfg(test)]
mod tests {
    use pgoutput::Streaming;

    use super::{Announced, Announcer, NOTED, PASSED};

    fn frame(message: &[u8]) -> Vec<u8> {
        [b"w".as_slice(), &[0; 24], message].concat()
    }

    /// A relation without columns, whose name is its oid.
    fn relation(xid: Option<u32>, id: u32) -> Vec<u8> {
        let xid = xid.map(u32::to_be_bytes);
        let xid = xid.as_ref().map_or([].as_slice(), |xid| xid);
        let names = format!("public\0{id}\0d\0\0");
        frame(&[b"R".as_slice(), xid, &id.to_be_bytes(), names.as_bytes()].concat())
    }

    fn ids(announced: &Announced) -> Vec<u32> {
        let ids =
            announced.take().descriptions.into_iter().map(|of| of.table.name.parse().unwrap());
        ids.collect()
    }

    /// Relations with the oids from `first` on, each in a chunk of 1 byte.
    fn describe(announcer: &mut Announcer, first: usize, count: usize) {
        for id in first..first + count {
            announcer.frame(&relation(None, u32::try_from(id).expect("small")));
            announcer.end(1);
        }
    }

    #[test]
    fn relations_are_noted_inside_stream_blocks_and_outside() {
        let announced = Announced::default();
        let mut announcer = Announcer::new(announced.clone(), Streaming::Parallel);
        announcer.frame(&relation(None, 7));
        announcer.frame(&frame(b"S\0\0\0\x05\x01"));
        announcer.frame(&relation(Some(5), 8));
        announcer.frame(&frame(b"E"));
        announcer.frame(&frame(b"I of any kind"));
        announcer.frame(&relation(None, 9));
        assert!(ids(&announced).is_empty(), "the chunk goes on");
        announcer.end(400);
        assert_eq!(ids(&announced), [7, 8, 9]);
        announcer.frame(&relation(None, 10));
        announcer.end(100);
        assert_eq!((ids(&announced), announced.take().received), (vec![10], 500));
    }

    #[test]
    fn those_that_the_leader_has_passed_are_dropped_first() {
        let announced = Announced::default();
        let mut announcer = Announcer::new(announced.clone(), Streaming::Off);
        describe(&mut announcer, 0, PASSED + 10);
        announced.taken(PASSED + 5);
        describe(&mut announcer, PASSED + 10, 2000);
        let rest: Vec<_> = (5..PASSED + 2010).map(|id| u32::try_from(id).expect("small")).collect();
        assert_eq!(ids(&announced), rest);
        assert!(!announced.take().incomplete);
    }

    #[test]
    fn the_newest_are_dropped_if_there_are_too_many() {
        let announced = Announced::default();
        let mut announcer = Announcer::new(announced.clone(), Streaming::Off);
        describe(&mut announcer, 0, NOTED + 5);
        let taken = announced.take();
        assert!(taken.incomplete);
        assert_eq!(taken.descriptions.len(), NOTED);
        assert_eq!((&*taken.descriptions[0].table.name, taken.received), ("0", NOTED as u64 + 5));
        describe(&mut announcer, 7, 1);
        let taken = announced.take();
        assert_eq!((taken.descriptions.len(), taken.incomplete), (1, false));
    }

    #[test]
    fn what_cannot_be_decoded_is_left_to_the_leader() {
        let announced = Announced::default();
        let mut announcer = Announcer::new(announced.clone(), Streaming::Off);
        announcer.frame(&frame(b"R"));
        announcer.frame(&relation(None, 7));
        announcer.frame(b"w");
        announcer.end(1);
        assert!(ids(&announced).is_empty());
    }
}
