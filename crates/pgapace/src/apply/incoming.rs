//! From messages to parts of transactions, those of kept transactions read back from the spool.
//!
//! Parts of a transaction that has left memory are read one at a time, when they are wanted; what
//! the publisher sent after its commit waits until the last of them is taken.

use std::sync::Arc;

use bytes::Bytes;
use engine::assemble::{
    AssembleError, Assembled, Assembler, BlockSource, Committed, PartLimits, Replay, ReplayError,
    SpoolId,
};
use engine::gate::already_applied;
use engine::transaction::{Location, TransactionPart};
use pgoutput::{Lsn, Message};

use crate::error::{Class, Failure, Result};
use crate::publisher::receiver::Memory;
use crate::spool::Spool;

/// What comes in on one connection.
pub(crate) struct Incoming {
    assembler: Assembler,
    spool: Spool,
    memory: Arc<Memory>,
    /// A kept transaction that has committed, and was not taken to its end.
    replay: Option<Replay>,
    /// Prepared transactions that were committed and may not be durable: where they were prepared,
    /// and where their commit ends.
    resolving: Vec<(Lsn, Lsn)>,
    /// What was applied before this run.
    resumed_at: Lsn,
    /// Transactions before it are not read back: no table lacks them.
    needed_from: Lsn,
    /// Whether the slot is ours, so that whatever it has passed was sent to us.
    only_reader: bool,
}

impl Incoming {
    pub(crate) fn new(
        limits: PartLimits,
        spool: Spool,
        memory: Arc<Memory>,
        (resumed_at, needed_from): (Lsn, Lsn),
        only_reader: bool,
    ) -> Self {
        Self {
            assembler: Assembler::new(limits),
            spool,
            memory,
            replay: None,
            resolving: Vec::new(),
            resumed_at,
            needed_from,
            only_reader,
        }
    }

    /// Takes one message; returns a part that is complete with it. Then there may be
    /// [more](Self::next_part).
    pub(crate) fn push(
        &mut self,
        at: Location<'_>,
        message: &Message<'_>,
    ) -> Result<Option<TransactionPart>> {
        debug_assert!(self.replay.is_none(), "its parts come first");
        let assembled = match self.assembler.push(at, message) {
            Ok(assembled) => assembled,
            // It was applied, so its PREPARE was acknowledged and does not come again: one that is
            // held stands between the two.
            Err(AssembleError::UnknownPrepared { lsn, .. })
                if already_applied(lsn, self.resumed_at) =>
            {
                return Ok(None);
            }
            // Before their July 2026 minors, publishers do not send the PREPARE of a transaction
            // that only locked rows. Any other PREPARE would be here: nobody else has moved the
            // slot, and we never acknowledge one before its end is durable.
            Err(AssembleError::UnknownPrepared { gid, xid, lsn }) if self.only_reader => {
                tracing::warn!(
                    gid, %xid, %lsn,
                    "the publisher committed a prepared transaction that has no changes"
                );
                return Ok(None);
            }
            Err(error) => return Err(unassemblable(&error)),
        };
        for command in self.assembler.spool_commands().drain(..) {
            self.spool.carry_out(command)?;
        }
        match assembled {
            Assembled::Nothing => Ok(None),
            Assembled::Part(part) => Ok(Some(part)),
            Assembled::Committed(committed) => {
                self.committed(committed);
                Ok(None)
            }
        }
    }

    fn committed(&mut self, committed: Committed) {
        let Committed { replay, prepared_at } = committed;
        if already_applied(replay.head().commit_lsn, self.needed_from) {
            self.spool.discard(replay.id());
            return;
        }
        self.resolving.extend(prepared_at.map(|at| (at, replay.end())));
        self.replay = Some(replay);
    }

    /// The next part of a kept transaction that has committed; none if there is no such
    /// transaction, or if its next part would have to be read and nobody is `free` to take it.
    pub(crate) fn next_part(&mut self, free: bool) -> Result<Option<TransactionPart>> {
        let Some(replay) = self.replay.as_mut().filter(|replay| free || !replay.reads_spool())
        else {
            return Ok(None);
        };
        let mut source = Source { spool: &mut self.spool, memory: &self.memory };
        let part = replay.next_part(&mut source).map_err(|error| match error {
            ReplayError::Source(failure) => failure,
            error @ ReplayError::Malformed => Failure::internal(error.to_string()),
        })?;
        if part.as_ref().is_none_or(|part| part.end_lsn.is_some()) {
            self.give_up();
        }
        Ok(part)
    }

    /// The spool and the memory budget, for what is put off.
    pub(crate) fn spool(&mut self) -> (&mut Spool, &Arc<Memory>) {
        (&mut self.spool, &self.memory)
    }

    /// Whether more than half of what the spool may have is used.
    pub(crate) fn spool_is_half_full(&self) -> bool {
        self.spool.is_half_full()
    }

    /// Whether parts are to be taken before anything else is pushed.
    pub(crate) fn has_parts(&self) -> bool {
        self.replay.is_some()
    }

    /// The rest of the transaction in hand is not wanted.
    pub(crate) fn give_up(&mut self) {
        if let Some(replay) = self.replay.take() {
            self.spool.discard(replay.id());
        }
    }

    /// Whether something has begun and not ended, so that a position says nothing about it.
    pub(crate) fn in_transaction(&self) -> bool {
        self.assembler.in_transaction() || self.replay.is_some()
    }

    /// Start of the oldest PREPARE whose transaction is not resolved, or not durable up to here:
    /// after a crash it must be sent again, and COMMIT PREPARED alone does not bring it.
    pub(crate) fn oldest_held(&mut self, durable: Lsn) -> Option<Lsn> {
        self.resolving.retain(|(_, end)| *end > durable);
        let resolving = self.resolving.iter().map(|(prepared, _)| *prepared);
        resolving.chain(self.assembler.oldest_held()).min()
    }

    /// Tells the receiver how much memory is taken beside what it has received.
    pub(crate) fn report_memory(&self) {
        let replay = self.replay.as_ref().map_or(0, Replay::in_memory);
        self.memory.reserve(self.assembler.kept_bytes() + replay);
    }
}

/// Where blocks come from, with their place in the memory budget.
pub(crate) struct Source<'a> {
    pub(crate) spool: &'a mut Spool,
    pub(crate) memory: &'a Arc<Memory>,
}

impl BlockSource for Source<'_> {
    type Error = Failure;

    fn spooled(&mut self, id: SpoolId) -> Result<Bytes> {
        Ok(Memory::account(self.memory, self.spool.read(id)?))
    }

    fn in_memory(&mut self, block: Vec<u8>) -> Bytes {
        Memory::account(self.memory, Bytes::from(block))
    }
}

fn unassemblable(error: &AssembleError) -> Failure {
    let hint = match error {
        AssembleError::UnknownPrepared { .. } => {
            "Whoever read the slot before has passed its PREPARE. If the transaction only locked \
             rows, its PREPARE is not sent by publishers before their July 2026 minors."
        }
        _ => "This is a bug of the publisher or of pgapace; please report it.",
    };
    Failure::new(Class::Publisher, error.to_string()).hint(hint)
}
