//! The spool file of one transaction: a sequence of blocks, each with its length and checksum.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use engine::assemble::SpoolId;

/// Size of the header of each block, in bytes: length and checksum.
const HEADER: usize = 8;

/// Why a block cannot be read.
#[derive(Debug)]
pub(super) enum ReadError {
    Io(io::Error),
    /// The file contains other data than was written.
    Damaged {
        offset: u64,
    },
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The file of a transaction. Positions count the bytes of blocks without headers, unless stated
/// otherwise.
#[derive(Debug)]
pub(super) struct SpoolFile {
    file: File,
    id: SpoolId,
    /// The end position of each block.
    ends: Vec<u64>,
    /// The block to read next.
    next: usize,
}

impl SpoolFile {
    /// Starts with an empty file.
    pub(super) fn new(file: File, id: SpoolId) -> Self {
        Self { file, id, ends: Vec::new(), next: 0 }
    }

    /// Size of a block in the file, with its header.
    pub(super) fn size_of_block(block: &[u8]) -> u64 {
        (HEADER + block.len()) as u64
    }

    /// Size of the file.
    pub(super) fn size(&self) -> u64 {
        self.start(self.ends.len()) + (self.ends.len() * HEADER) as u64
    }

    fn start(&self, block: usize) -> u64 {
        block.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// Offset of a block's header in the file.
    fn offset(&self, block: usize) -> u64 {
        self.start(block) + (block * HEADER) as u64
    }

    pub(super) fn append(&mut self, block: &[u8]) -> io::Result<()> {
        let start = self.start(self.ends.len());
        let offset = self.size();
        self.file.write_all_at(&self.header(start, block)?, offset)?;
        self.file.write_all_at(block, offset + HEADER as u64)?;
        self.ends.push(start + block.len() as u64);
        Ok(())
    }

    /// Cuts off everything after a position. The block that contains the position is shortened.
    pub(super) fn truncate(&mut self, length: u64) -> Result<(), ReadError> {
        let whole = self.ends.partition_point(|end| *end <= length);
        let start = self.start(whole);
        let offset = self.offset(whole);
        if start < length {
            let mut block = self.block(whole)?;
            let keep = usize::try_from(length - start).unwrap_or(usize::MAX);
            block.truncate(keep);
            self.file.write_all_at(&self.header(start, &block)?, offset)?;
            self.file.set_len(offset + (HEADER + keep) as u64)?;
            self.ends.truncate(whole);
            self.ends.push(length);
        } else {
            self.file.set_len(offset)?;
            self.ends.truncate(whole);
        }
        Ok(())
    }

    /// Reads the next block.
    pub(super) fn read(&mut self) -> Result<Vec<u8>, ReadError> {
        if self.next >= self.ends.len() {
            return Err(ReadError::Damaged { offset: self.size() });
        }
        let block = self.block(self.next)?;
        self.next += 1;
        Ok(block)
    }

    /// Reads the block that contains a position, from that position on.
    pub(super) fn read_from(&self, place: u64) -> Result<Vec<u8>, ReadError> {
        let number = self.ends.partition_point(|end| *end <= place);
        if number >= self.ends.len() {
            return Err(ReadError::Damaged { offset: self.size() });
        }
        let mut block = self.block(number)?;
        let before = usize::try_from(place - self.start(number)).unwrap_or(usize::MAX);
        block.drain(..before);
        Ok(block)
    }

    fn block(&self, number: usize) -> Result<Vec<u8>, ReadError> {
        let (start, offset) = (self.start(number), self.offset(number));
        let length = self.ends[number] - start;
        let mut header = [0; HEADER];
        self.file.read_exact_at(&mut header, offset)?;
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let refused = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let mut block = wire::zeroed(length).map_err(refused)?;
        self.file.read_exact_at(&mut block, offset + HEADER as u64)?;
        if header != self.header(start, &block)? {
            return Err(ReadError::Damaged { offset });
        }
        Ok(block)
    }

    /// Length and checksum. The checksum also covers the transaction and the position, so that a
    /// block of another transaction or position is not mistaken for this one.
    fn header(&self, start: u64, block: &[u8]) -> io::Result<[u8; HEADER]> {
        let length = u32::try_from(block.len()).map_err(io::Error::other)?;
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&self.id.0.to_le_bytes());
        checksum.update(&start.to_le_bytes());
        checksum.update(block);
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..].copy_from_slice(&checksum.finalize().to_le_bytes());
        Ok(header)
    }

    /// The file itself, for tests that damage it.
    #[cfg(test)]
    pub(super) fn file(&self) -> &File {
        &self.file
    }
}
