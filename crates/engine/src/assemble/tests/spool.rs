//! A spool in memory that does what it is told, and notices when it is told nonsense.

use std::collections::HashMap;
use std::convert::Infallible;

use bytes::Bytes;

use super::super::{BlockSource, SpoolCommand, SpoolId};
use super::{Assembler, Committed, TransactionPart};

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
        let mut parts = Vec::new();
        while let Some(part) = replay.next_part(self).expect("what was written is read") {
            parts.push(part);
        }
        self.files.remove(&replay.id());
        parts
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

impl BlockSource for Spool {
    type Error = Infallible;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, Infallible> {
        let next = self.reading.entry(id).or_default();
        *next += 1;
        Ok(Bytes::from(self.files[&id][*next - 1].clone()))
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}
