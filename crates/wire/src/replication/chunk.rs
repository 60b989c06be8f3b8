//! Chunks of a replication stream: whole CopyData messages, split wherever a read ended.

use bytes::Bytes;

/// One or more complete, contiguous CopyData messages with their 5-byte headers. Cheap to clone and
/// to send to another thread; neighbouring chunks share the memory.
#[derive(Debug, Clone)]
pub struct CopyChunk {
    bytes: Bytes,
}

/// Size in bytes of the tag and length word before each payload.
const HEADER: usize = 5;

impl CopyChunk {
    /// `bytes` must contain whole CopyData messages only, headers included.
    pub fn new(bytes: Bytes) -> CopyChunk {
        CopyChunk { bytes }
    }

    /// All bytes, headers included.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The number of bytes, headers included.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Always false for a chunk from a stream.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The payloads in order, each with its offset in [`CopyChunk::bytes`].
    pub fn frames(&self) -> Frames<'_> {
        Frames::new(&self.bytes)
    }
}

/// Iterator over the payloads of a [`CopyChunk`].
#[derive(Debug, Clone)]
pub struct Frames<'c> {
    bytes: &'c [u8],
    at: usize,
}

impl<'c> Frames<'c> {
    /// Iterates over whole CopyData messages, as in [`CopyChunk::bytes`].
    pub fn new(bytes: &'c [u8]) -> Frames<'c> {
        Frames { bytes, at: 0 }
    }
}

impl<'c> Iterator for Frames<'c> {
    type Item = (usize, &'c [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.bytes.get(self.at..)?;
        let (&[_, a, b, c, d], _) = rest.split_first_chunk::<HEADER>()?;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        let payload = rest.get(HEADER..length + 1)?;
        let offset = self.at + HEADER;
        self.at += length + 1;
        Some((offset, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_frames_with_offsets() {
        let chunk = CopyChunk::new(Bytes::from_static(b"d\0\0\0\x06abd\0\0\0\x04d\0\0\0\x05x"));
        let frames: Vec<_> = chunk.frames().collect();
        assert_eq!(frames, [(5, &b"ab"[..]), (12, &b""[..]), (17, &b"x"[..])]);
        for (offset, payload) in frames {
            assert_eq!(&chunk.bytes()[offset..offset + payload.len()], payload);
        }
    }
}
