//! The spool, with the place of its blocks in the memory budget.

use std::sync::Arc;

use bytes::Bytes;
use engine::assemble::{BlockSource, SpoolCommand, SpoolId};

use crate::error::{Failure, Result};
use crate::publisher::memory::Memory;
use crate::spool::Spool;

/// The spool of a run. Records that are read back count as memory until their last part is dropped.
pub(crate) struct AccountedSpool {
    pub(crate) spool: Spool,
    pub(crate) memory: Arc<Memory>,
}

impl engine::intake::Spool for AccountedSpool {
    fn carry_out(&mut self, command: SpoolCommand) -> Result<()> {
        self.spool.carry_out(command)
    }
}

impl BlockSource for AccountedSpool {
    type Error = Failure;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes> {
        Ok(Memory::account(&self.memory, self.spool.read(id)?))
    }

    fn spooled_from(&mut self, id: SpoolId, place: u64) -> Result<Bytes> {
        Ok(Memory::account(&self.memory, self.spool.read_from(id, place)?))
    }

    fn out_of_memory(bytes: usize) -> Failure {
        Failure::out_of_memory(bytes, "a change that is kept")
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Memory::account(&self.memory, Bytes::from(block))
    }
}
