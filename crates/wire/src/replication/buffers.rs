//! Receive buffers, used again when nobody holds their chunks.
//!
//! A buffer is too large for the C library to keep when it is freed (crate `malloc`), so the system would have to
//! clear the pages of each new one.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

use crate::error::Result;
use crate::memory;

/// Size in bytes of a buffer.
pub(super) const BUFFER_SIZE: usize = 256 * 1024;
/// The most buffers that are kept although nobody holds their chunks.
const FREE: usize = 64;
/// The most buffers that are known. Chunks may be held for hours.
const KNOWN: usize = 1024;

/// The buffers whose chunks were handed out; see the head of this module.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// The first chunk of each, in the order in which they were filled: so they become free, mostly.
    used: VecDeque<Bytes>,
}

impl Buffers {
    /// A buffer of at least this size. Its content is arbitrary.
    pub(super) fn take(&mut self, size: usize) -> Result<BytesMut> {
        if size <= BUFFER_SIZE {
            let free = self.used.iter().take(FREE).position(Bytes::is_unique);
            let again = free.and_then(|place| self.used.remove(place));
            if let Some(mut buffer) = again.and_then(|first| first.try_into_mut().ok()) {
                self.trim();
                // Its first chunk was shorter.
                buffer.resize(BUFFER_SIZE, 0);
                return Ok(buffer);
            }
        }
        memory::zeroed_bytes(size.max(BUFFER_SIZE))
    }

    /// Takes note of a buffer by its first chunk, which begins where the buffer does. `size` is that of the buffer.
    pub(super) fn filled(&mut self, first: Bytes, size: usize) {
        if size == BUFFER_SIZE {
            self.used.push_back(first);
            if self.used.len() > KNOWN {
                self.used.pop_front();
            }
        }
    }

    /// Gives up free buffers beyond those that are kept.
    fn trim(&mut self) {
        while self.used.get(FREE).is_some_and(Bytes::is_unique) {
            self.used.pop_front();
        }
    }

    /// Gives up all buffers: nothing arrives.
    pub(super) fn clear(&mut self) {
        self.used = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fills a buffer, and returns its chunks.
    fn fill(buffers: &mut Buffers) -> Vec<Bytes> {
        let mut buffer = buffers.take(1).unwrap();
        assert_eq!(buffer.len(), BUFFER_SIZE);
        let size = buffer.len();
        let first = buffer.split_to(1000).freeze();
        let chunks = vec![first.clone(), buffer.freeze()];
        buffers.filled(first, size);
        chunks
    }

    fn address(chunks: &[Bytes]) -> *const u8 {
        chunks[0].as_ptr()
    }

    #[test]
    fn a_buffer_is_used_again_when_nobody_holds_a_chunk() {
        let mut buffers = Buffers::default();
        let mut first = fill(&mut buffers);
        let place = address(&first);
        let second = fill(&mut buffers);
        assert_ne!(place, address(&second));
        drop(first.remove(0));
        let third = fill(&mut buffers);
        assert_ne!(place, address(&third), "a chunk is held");
        drop(first);
        assert_eq!(place, address(&fill(&mut buffers)));
    }

    #[test]
    fn few_free_buffers_are_kept_and_none_of_another_size() {
        let mut buffers = Buffers::default();
        let held: Vec<_> = (0..3 * FREE).map(|_| fill(&mut buffers)).collect();
        drop(held);
        drop(fill(&mut buffers));
        let kept = buffers.used.iter().filter(|first| first.is_unique()).count();
        assert!((1..=FREE + 1).contains(&kept), "{kept} buffers");
        let large = buffers.take(BUFFER_SIZE + 1).unwrap();
        assert_eq!(large.len(), BUFFER_SIZE + 1);
        buffers.clear();
        buffers.filled(large.freeze(), BUFFER_SIZE + 1);
        assert!(buffers.used.is_empty());
    }
}
