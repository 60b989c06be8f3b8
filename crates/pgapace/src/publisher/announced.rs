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

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::relation::RemoteRelation;
use pgoutput::{Decoder, Frame, Message, Streaming};

/// Most relations that are noted. Those that the leader has passed without asking are among them, so the
/// oldest are dropped.
const NOTED: usize = 1000;

/// Relations that were described lately, for the leader. Locked once for each chunk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Announced(Arc<Mutex<Described>>);

#[derive(Debug, Default)]
struct Described {
    relations: VecDeque<RemoteRelation>,
    /// Bytes that were received.
    received: u64,
}

impl Announced {
    /// The relations since the last call, in the order of the stream, and how many bytes had been
    /// received. Relations that the leader has passed come too.
    pub(crate) fn take(&self) -> (VecDeque<RemoteRelation>, u64) {
        let mut described = self.lock();
        (std::mem::take(&mut described.relations), described.received)
    }

    fn lock(&self) -> MutexGuard<'_, Described> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notes the relations of a stream, for [`Announced`].
#[derive(Debug)]
pub(crate) struct Announcer {
    announced: Announced,
    /// Those of the present chunk.
    relations: Vec<RemoteRelation>,
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
                self.relations.push(RemoteRelation::from_message(&relation));
            }
            Ok(_) => {}
            Err(_) => self.decoder = None,
        }
    }

    /// A chunk of so many bytes ends.
    pub(crate) fn end(&mut self, bytes: usize) {
        let mut described = self.announced.lock();
        described.received += bytes as u64;
        described.relations.extend(self.relations.drain(..));
        let passed = described.relations.len().saturating_sub(NOTED);
        described.relations.drain(..passed);
    }
}

/// Where the message begins in a frame with one: behind its kind, two LSNs and a time.
pub(super) const MESSAGE: usize = 25;

#[cfg(test)]
mod tests {
    use pgoutput::Streaming;

    use super::{Announced, Announcer, NOTED};

    fn frame(message: &[u8]) -> Vec<u8> {
        [b"w".as_slice(), &[0; 24], message].concat()
    }

    /// A relation without columns.
    fn relation(xid: Option<u32>, id: u32) -> Vec<u8> {
        let xid = xid.map(u32::to_be_bytes);
        let xid = xid.as_ref().map_or([].as_slice(), |xid| xid);
        frame(&[b"R".as_slice(), xid, &id.to_be_bytes(), b"public\0t\0d\0\0"].concat())
    }

    fn ids(announced: &Announced) -> Vec<u32> {
        announced.take().0.iter().map(|relation| relation.id.0).collect()
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
        assert_eq!((ids(&announced), announced.take().1), (vec![10], 500));
    }

    #[test]
    fn those_that_nobody_asks_for_are_bounded() {
        let announced = Announced::default();
        let mut announcer = Announcer::new(announced.clone(), Streaming::Off);
        let many = u32::try_from(NOTED).expect("small") + 5;
        for id in 0..many {
            announcer.frame(&relation(None, id));
            announcer.end(1);
        }
        assert_eq!(ids(&announced), (5..many).collect::<Vec<_>>());
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
