//! A model of the spool: blocks that left memory.

use std::collections::BTreeMap;

use bytes::Bytes;
use engine::assemble::{BlockSource, SpoolCommand, SpoolId};

/// Blocks that left memory.
#[derive(Debug, Default)]
pub(crate) struct Spool {
    /// The appended blocks of each file, and the index of the block to read next.
    files: BTreeMap<u64, (Vec<Bytes>, usize)>,
}

impl Spool {
    fn take(&mut self, command: SpoolCommand) {
        match command {
            SpoolCommand::Append { id, block } => {
                self.files.entry(id.0).or_default().0.push(Bytes::from(block));
            }
            SpoolCommand::Truncate { id, length } => {
                let Some((blocks, _)) = self.files.get_mut(&id.0) else { return };
                let mut left = usize::try_from(length).expect("a short transaction");
                for block in blocks.iter_mut() {
                    block.truncate(left);
                    left -= block.len();
                }
                blocks.retain(|block| !block.is_empty());
            }
            SpoolCommand::Discard { id } => drop(self.files.remove(&id.0)),
        }
    }

    /// How many files there are.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }
}

impl engine::intake::Spool for Spool {
    fn carry_out(&mut self, command: SpoolCommand) -> Result<(), String> {
        self.take(command);
        Ok(())
    }
}

impl BlockSource for Spool {
    type Error = String;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes, String> {
        let Some((blocks, next)) = self.files.get_mut(&id.0) else { return Ok(Bytes::new()) };
        *next += 1;
        Ok(blocks.get(*next - 1).cloned().unwrap_or_default())
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes, String> {
        let Some((blocks, _)) = self.files.get(&id.0) else { return Ok(Bytes::new()) };
        let mut place = usize::try_from(place).expect("a short transaction");
        for block in blocks {
            if place < block.len() {
                return Ok(block.slice(place..));
            }
            place -= block.len();
        }
        Ok(Bytes::new())
    }

    fn out_of_memory(bytes: usize) -> Self::Error {
        panic!("no memory for {bytes} bytes");
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Bytes::from(block)
    }
}
