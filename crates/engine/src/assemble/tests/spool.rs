//! A spool in memory that does what it is told, and notices when it is told nonsense.

use std::collections::HashMap;
use std::convert::Infallible;

use bytes::Bytes;

use super::super::{BlockSource, Records, SpoolCommand, SpoolId};
use super::{Assembler, Committed, PartLimits, TransactionPart};

#[derive(Debug, Default)]
pub(super) struct Spool {
    files: HashMap<SpoolId, Vec<Vec<u8>>>,
    reading: HashMap<SpoolId, usize>,
    /// Bytes that were ever appended.
    pub(super) appended: usize,
}

impl Spool {
    pub(super) fn obey(&mut self, assembler: &mut Assembler) {
        for command in assembler.spool_commands().drain(..) {
            match command {
                SpoolCommand::Append { id, block } => {
                    assert!(!block.is_empty());
                    self.appended += block.len();
                    self.files.entry(id).or_default().push(block);
                }
                SpoolCommand::Truncate { id, length } => {
                    let blocks = self.files.get_mut(&id).expect("truncated after an append");
                    let mut left = usize::try_from(length).expect("small");
                    assert!(left < blocks.iter().map(Vec::len).sum());
                    for block in &mut *blocks {
                        block.truncate(left);
                        left -= block.len();
                    }
                    blocks.retain(|block| !block.is_empty());
                }
                SpoolCommand::Discard { id } => {
                    self.files.remove(&id).expect("discarded after an append");
                }
            }
        }
    }

    /// All parts of a transaction, which is then forgotten.
    pub(super) fn read(&mut self, committed: Committed) -> Vec<TransactionPart> {
        let mut replay = committed.replay;
        let again = self.read_aside(replay.records().expect("nothing was taken"));
        let mut parts = Vec::new();
        while let Some(part) = replay.next_part(self).expect("what was written is read") {
            parts.push(part);
        }
        self.files.remove(&replay.id());
        assert_eq!(changes(&parts), changes(&again));
        parts
    }

    /// The same without taking them, a few at a time.
    pub(super) fn read_aside(&mut self, records: Records<'_>) -> Vec<TransactionPart> {
        let limits = PartLimits { changes: 3, ..PartLimits::default() };
        let (mut parts, mut at) = (Vec::new(), 0);
        while at < records.length() {
            let read = records.read(at..records.length(), limits, self);
            let (part, next) = read.expect("what was written is read");
            assert_eq!(part.first, at == 0);
            assert!(next > at);
            at = next;
            parts.push(part);
        }
        parts
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

fn changes(parts: &[TransactionPart]) -> Vec<String> {
    let changes = parts.iter().flat_map(|part| (0..part.len()).map(|index| part.change(index)));
    changes.map(|change| format!("{:?}", change.expect("decodable").0)).collect()
}

impl BlockSource for Spool {
    type Error = Infallible;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, Infallible> {
        let next = self.reading.entry(id).or_default();
        *next += 1;
        Ok(Bytes::from(self.files[&id][*next - 1].clone()))
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes, Infallible> {
        let mut left = usize::try_from(place).expect("small");
        for block in &self.files[&id] {
            if left < block.len() {
                return Ok(Bytes::copy_from_slice(&block[left..]));
            }
            left -= block.len();
        }
        panic!("nothing is at {place}");
    }

    fn out_of_memory(bytes: usize) -> Self::Error {
        panic!("no memory for {bytes} bytes");
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}
