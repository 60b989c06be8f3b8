//! Problems that are reported once for all tables, because one step mends them.

use std::collections::HashSet;

use engine::table_sync::TableSyncState;

use super::Checker;
use crate::check::partitions::lacking_above;
use crate::check::report::{Finding, Severity};
use crate::check::shown_conninfo;
use crate::error::Result;
use crate::publisher::dump_command::dump_command;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::state::{self, Phase};

/// Most tables that one statement of a fix names.
const NAMED: usize = 50;

impl Checker<'_, '_> {
    /// The fix is one command for all tables: pg_dump orders them by their dependencies.
    pub(super) fn report_missing(&mut self, published: &[PublishedTable]) {
        if self.missing.is_empty() {
            return;
        }
        let missing: HashSet<_> = self.missing.iter().collect();
        let missing: Vec<_> = published.iter().filter(|one| missing.contains(&one.name)).collect();
        let sessions = (&mut *self.publisher, &mut *self.session);
        // Without them, pg_dump has partitions that it cannot attach.
        let above = self.reporter.group("table", |_| lacking_above(sessions, &missing));
        let above = above.unwrap_or_default();
        let mut names: Vec<_> = self.missing.iter().chain(&above).collect();
        names.sort_unstable();
        names.dedup();
        let command = dump_command(
            &names,
            &shown_conninfo(&self.config.publisher),
            &shown_conninfo(&self.config.subscriber),
        );
        let is_new = self.known.settled().is_none() && self.known.is_read;
        let hint = if self.missing.len() == published.len() && is_new {
            "; the first run creates all tables with --copy-schema"
        } else {
            ""
        };
        for name in &self.missing {
            self.reporter
                .block("table", format!("table {name} does not exist{hint}"))
                .on(name.to_string())
                .command(&command);
        }
    }

    /// The fix is one TRUNCATE of all tables, because TRUNCATE refuses a table that another one
    /// references.
    pub(super) fn report_filled(&mut self) -> Result<()> {
        let is_lost =
            |found: &Finding| found.topic == "slot" && found.severity == Severity::Blocker;
        let streamed = self.known.row.as_ref().is_some_and(|row| row.phase == Phase::Streaming);
        if streamed && self.reporter.report.findings.iter().any(is_lost) {
            // The way on compares the tables. Their rows may exist nowhere else.
            return Ok(());
        }
        if let Some(row) = &self.known.row
            && !self.filled.is_empty()
        {
            // A running process may have copied a table since the state was read, or may be copying
            // it now.
            let states = state::relations_by_name(self.session, row.id)?;
            self.filled.retain(|(key, _)| {
                states.get(key).is_none_or(|table| {
                    table.sync_lsn.is_none() && table.state != TableSyncState::DataSync
                })
            });
        }
        let (shared, filled): (Vec<_>, Vec<_>) =
            self.filled.iter().partition(|(key, _)| self.shared.tables.contains(key));
        // Another finding names the subscription already.
        for (name, _) in shared.iter().filter(|(key, _)| !self.shared.same_rows.contains(key)) {
            let message = format!(
                "table {name} is not empty. If the other subscription has other rows, pass --if-not-empty keep to \
                 copy into it, and keep them. If it is the native one of this publisher: pgapace adopt"
            );
            self.reporter.block("rows", message).on(name.to_string());
        }
        // A statement that nobody can paste is none for each of so many tables.
        let all: Vec<_> = filled.iter().take(NAMED + 1).map(|(_, sql)| sql.as_str()).collect();
        let fix = (all.len() <= NAMED).then(|| format!("TRUNCATE {};", all.join(", ")));
        for (name, _) in filled {
            let finding = self.reporter.block(
                "rows",
                format!(
                    "table {name} is not empty. Empty it, or pass --copy-data=false if it \
                         already holds the publisher's rows as of the slot"
                ),
            );
            finding.on(name.to_string());
            if let Some(fix) = &fix {
                finding.sql(fix);
            }
        }
        Ok(())
    }
}
