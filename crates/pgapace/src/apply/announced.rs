//! The relations that a received chunk announces: those whose first change comes next.
//!
//! The publisher describes a relation just before its first change. When the leader meets a table
//! that it has not read from the subscriber's catalogue, the rest of the chunk names the others that
//! it will meet, so that they are read together.
//!
//! Nothing is read before its description has arrived. A user who adds a column on the subscriber,
//! and then on the publisher, must find the new column in use when the publisher uses it.

use std::collections::VecDeque;

use bytes::Bytes;
use engine::relation::RemoteRelation;
use pgoutput::{Decoder, Frame, Message};
use wire::Frames;

/// The relations of the chunk that the leader is taking. The chunk is searched only when they are
/// asked for: once for each chunk in which a table appears for the first time.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    chunk: Option<(Bytes, Decoder)>,
    found: VecDeque<RemoteRelation>,
}

impl Announced {
    /// The leader begins to take a chunk. `decoder` has decoded everything before it.
    pub(crate) fn begin(&mut self, chunk: &Bytes, decoder: &Decoder) {
        self.chunk = Some((chunk.clone(), decoder.clone()));
        self.found.clear();
    }

    /// The leader has taken the chunk.
    pub(crate) fn end(&mut self) {
        self.chunk = None;
        self.found.clear();
    }

    /// The next relation, in the order of the stream. Relations that the leader has passed come too.
    pub(crate) fn next(&mut self) -> Option<RemoteRelation> {
        if let Some((chunk, decoder)) = self.chunk.take() {
            self.search(&chunk, decoder);
        }
        self.found.pop_front()
    }

    /// Ends where something cannot be decoded: the leader reports that when it gets there.
    fn search(&mut self, chunk: &Bytes, mut decoder: Decoder) {
        for (_, payload) in Frames::new(chunk) {
            let Ok(frame) = Frame::decode(payload) else { return };
            let Frame::XLogData { payload, .. } = frame else { continue };
            match decoder.decode(payload) {
                Ok(Message::Relation(relation)) => {
                    self.found.push_back(RemoteRelation::from_message(&relation));
                }
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }
}
