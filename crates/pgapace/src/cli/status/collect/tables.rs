//! The tables of a subscription.

use std::collections::HashMap;

use engine::table_name::TableName;
use serde::Serialize;
use wire::Session;

use crate::cli::status::collect::text;
use crate::error::Result;
use crate::subscriber::state::error_detail::FullTexts;
use crate::subscriber::state::{self, RelationMode, RelationState, Subscription};
use crate::table_name::TableNameFields;

#[derive(Debug, Serialize)]
pub(crate) struct Table {
    #[serde(flatten, with = "TableNameFields")]
    pub(crate) name: TableName,
    /// `init`, `datasync`, `catchup`, `ready`; or `blocked`.
    pub(crate) state: &'static str,
    /// When pgapace resync requested a copy that has not begun.
    pub(crate) requested_at: Option<String>,
    /// Why it is blocked, and since when.
    pub(crate) reason: Option<String>,
    pub(crate) blocked_since: Option<String>,
    /// The LSN from which on it may lack changes, and the reason.
    pub(crate) stale_lsn: Option<String>,
    pub(crate) stale_reason: Option<String>,
    /// Whether the publications no longer contain it. The next start forgets it, unless added tables are not copied.
    pub(crate) unpublished: bool,
    /// The sync LSN; null until it is copied.
    pub(crate) sync_lsn: Option<String>,
    /// Copied so far, while it is copied in parts.
    pub(crate) copied_rows: Option<i64>,
    /// Size on the publisher at the time of the copy; null if it is not known.
    pub(crate) publisher_bytes: Option<i64>,
    /// Number of parts of its copy, and how many are copied.
    pub(crate) copy_parts: i32,
    pub(crate) copy_parts_done: i32,
    /// Whether it is copied or catches up while other tables stream.
    pub(crate) joins: bool,
    /// How its changes are applied: `set`, `append` or `row`; null until the first change.
    pub(crate) apply_mode: Option<String>,
    /// Why they are not applied as sets.
    pub(crate) apply_reason: Option<String>,
}

pub(super) fn tables(session: &mut Session, row: &Subscription) -> Result<Vec<Table>> {
    let tables = state::relations(session, row.id)?;
    let mut modes: HashMap<TableName, RelationMode> =
        state::modes(session, row.id)?.into_iter().map(|mode| (mode.name.clone(), mode)).collect();
    let table = |table: RelationState| {
        let mode = modes.remove(&table.name);
        Table::of(table, mode)
    };
    Ok(tables.into_iter().map(table).collect())
}

impl Table {
    /// Whether it is not ready, or may lack changes: with --on-missed-changes ignore it stays ready then.
    pub(crate) fn is_remarkable(&self) -> bool {
        self.state != "ready" || self.stale_lsn.is_some() || self.unpublished
    }

    /// Whether it is blocked or may lack changes, although it is published.
    pub(crate) fn lacks_changes(&self) -> bool {
        !self.unpublished && (self.reason.is_some() || self.stale_lsn.is_some())
    }

    /// Puts in what the reasons quote of rows, as far as that is known.
    pub(super) fn quote_rows(&mut self, texts: &FullTexts) {
        let about = self.name.to_string();
        self.reason = texts.of(&about, self.reason.take());
        self.stale_reason = texts.of(&about, self.stale_reason.take());
    }

    pub(super) fn of(table: RelationState, mode: Option<RelationMode>) -> Self {
        let (apply_mode, apply_reason) =
            mode.map_or((None, None), |mode| (Some(mode.mode), mode.reason));
        Self {
            name: table.name,
            state: table.state.name(),
            requested_at: table.requested,
            reason: table.reason,
            blocked_since: table.blocked_since,
            stale_lsn: text(table.stale_from),
            stale_reason: table.stale_reason,
            unpublished: table.unpublished,
            sync_lsn: text(table.sync_lsn.map(|sync_lsn| sync_lsn.0)),
            copied_rows: table.copied_rows,
            publisher_bytes: table.publisher_bytes,
            copy_parts: table.parts,
            copy_parts_done: table.parts_done,
            joins: table.joins,
            apply_mode,
            apply_reason,
        }
    }
}
