//! What the leader hands to a worker.

use std::sync::Arc;

use engine::transaction::TransactionPart;
use pgoutput::Lsn;

use crate::target::mapping::TableMap;

/// A part of a transaction, with the target tables of its relations.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) part: TransactionPart,
    /// By index of `part.relations()`; `None` where the changes are not to be applied (already in
    /// the initial copy, or a table of ours).
    pub(crate) tables: Vec<Option<Arc<TableMap>>>,
    /// The progress that must be committed before this transaction.
    pub(crate) predecessor: Lsn,
}
