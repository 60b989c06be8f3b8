//! Tables with inserted rows that lack a value, because the publisher did not send it.
//!
//! An UPDATE that brings a row into the row filter of a publication is sent as an INSERT. It lacks the values that are
//! TOASTed and did not change, unless the replica identity is FULL. They become NULL on the subscriber, as with the native
//! apply worker; a row that a rule replaces keeps its own. So that no value is lost in silence, the transaction of such a
//! row also marks the table as one that may lack changes; `pgapace verify` and `pgapace repair` end that mark.
//!
//! A group does so directly before its progress row, so that no other group waits for the mark for long. A transaction that
//! is prepared would keep the lock of the mark until it ends; for it, the leader marks the table before. No verification
//! ends that mark too early: its snapshot of the publisher waits for the end of such a transaction.

use std::sync::Arc;

use engine::table_name::TableName;
use pgoutput::{Column, Lsn, Tuple};
use wire::{Param, Session};

use crate::error::{Failure, Result};
use crate::subscriber::mapping::TableMap;
use crate::subscriber::state::SubscriptionId;
use crate::table_name::sql_name;

/// Why such a table may lack changes.
const REASON: &str = "a row filter of the publication turned an UPDATE into an INSERT, and the publisher did not send the \
                      unchanged TOASTed values: rows may lack them";

/// int4, text, text, pg_lsn, text.
const TYPES: [u32; 5] = [23, 25, 25, 3220, 25];

/// The tables of a subscriber transaction that lack values, in the order of their names. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct LackingTables(Option<Arc<[TableName]>>);

impl LackingTables {
    pub(crate) fn of<'m>(maps: impl Iterator<Item = &'m TableMap>) -> Self {
        let mut names: Vec<_> = maps.map(|map| map.remote.name.clone()).collect();
        names.sort_unstable();
        names.dedup();
        Self((!names.is_empty()).then(|| names.into()))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &TableName> {
        self.0.iter().flat_map(|names| names.iter())
    }

    /// Adds the table of this insert, if it lacks values.
    #[inline]
    pub(crate) fn add_if_lacks(&mut self, map: &TableMap, new: &Tuple<'_>) {
        if new.has_unchanged() {
            self.add(map, new);
        }
    }

    #[cold]
    fn add(&mut self, map: &TableMap, new: &Tuple<'_>) {
        let name = &map.remote.name;
        if self.names().any(|known| known == name) {
            return;
        }
        let mut names: Vec<_> = self.names().chain([name]).cloned().collect();
        names.sort_unstable();
        self.0 = Some(names.into());
        if map.told_lacking.is_first(name) {
            let column = new.columns().position(|value| value == Column::Unchanged);
            let column = column.and_then(|index| map.remote.columns.get(index));
            tracing::warn!(
                event = "unchanged_value_not_sent",
                table = name.to_string(),
                column = column.map_or("", |column| column.name.as_str()),
                "publisher sent an UPDATE as an INSERT without an unchanged value, which the subscriber lacks; on the \
                 publisher, ALTER TABLE {} REPLICA IDENTITY FULL prevents that; pgapace verify and then pgapace repair correct the rows",
                sql_name(name)
            );
        }
    }

    /// Queues one statement for each table, in the subscriber transaction that ends at `end`. The order of the names keeps
    /// two transactions from a deadlock.
    pub(crate) fn queue(
        &self,
        session: &mut Session,
        id: SubscriptionId,
        end: Lsn,
    ) -> wire::Result<()> {
        let (id, end) = (id.0.to_be_bytes(), end.as_u64().to_be_bytes());
        for name in self.names() {
            let params = [
                Param::Binary(&id),
                Param::Text(name.schema.as_bytes()),
                Param::Text(name.name.as_bytes()),
                Param::Binary(&end),
                Param::Text(REASON.as_bytes()),
            ];
            session.queue_statement(MARK, &TYPES, params.into_iter())?;
        }
        Ok(())
    }

    /// Marks the tables in a commit of its own. The commit is asynchronous: a later PREPARE TRANSACTION makes it durable.
    pub(crate) fn mark(&self, session: &mut Session, id: SubscriptionId, end: Lsn) -> Result<()> {
        let failed = |e: &wire::Error| Failure::subscriber(e, "marking tables that lack values");
        let (id, end) = (id.0.to_string(), end.to_string());
        session.simple("BEGIN; SET LOCAL synchronous_commit TO off").map_err(|e| failed(&e))?;
        for name in self.names() {
            let params = [&id, &name.schema, &name.name, &end, REASON].map(Some);
            session.query(MARK, &params).map_err(|e| failed(&e))?;
        }
        session.simple("COMMIT").map_err(|e| failed(&e))?;
        Ok(())
    }
}

/// Marks a table (`$2`, `$3`) of the subscription `$1` as one that lacks values of rows up to `$4`, because of `$5`.
const MARK: &str = "UPDATE pgapace.relation SET stale_lsn = coalesce(stale_lsn, $4::pg_catalog.pg_lsn), \
      stale_through = greatest(stale_through, $4::pg_catalog.pg_lsn), \
      stale_reason = coalesce(stale_reason, $5::pg_catalog.text) \
    WHERE subscription OPERATOR(pg_catalog.=) $1::pg_catalog.int4 \
      AND schema_name OPERATOR(pg_catalog.=) $2::pg_catalog.text \
      AND table_name OPERATOR(pg_catalog.=) $3::pg_catalog.text";
