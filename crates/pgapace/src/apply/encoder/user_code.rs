//! User code on the subscriber may change settings of the session in which it runs: `session_replication_role`, so that
//! ordinary triggers fire and foreign keys are checked, or those that define the text form of values. It may do so at the
//! COMMIT too, in a deferred trigger. So pgapace makes the settings that decide about rows again before the next change of
//! another table, and in the next transaction. Before changes of one table that follow each other, it makes only the
//! encoding again, which decides what the values of the next one are.
//!
//! A transaction that has run user code may commit with another `synchronous_commit` than the session has. Nothing sent
//! before the COMMIT rules that out, again because of deferred triggers. So its commit counts as durable after the next
//! flush of the durability session.
//!
//! The definition of a table tells whether its changes run user code. It may be out of date. When another definition is
//! read, each session makes its settings again once: see [`Definition`](crate::subscriber::mapping::Definition).

use std::collections::VecDeque;

use engine::net::TableFolding;
use wire::Session;

use crate::apply::encoder::Encoder;
use crate::apply::expected::Expected;
use crate::error::{Failure, Result};
use crate::subscriber::mapping::TableMap;

/// Whether user code may have changed settings of the session.
#[derive(Debug, Default)]
pub(super) struct SettingsInDoubt {
    /// The last table whose changes have run user code since the settings were made.
    since: Option<Changed>,
    /// Whether user code ever ran.
    ever: bool,
    /// Whether the subscriber transaction that is being queued has run user code.
    in_transaction: bool,
    /// How many changes of definitions were heeded.
    definitions: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Changed {
    Table(u32),
    /// The statement that made the settings may be undone.
    Unknown,
}

impl SettingsInDoubt {
    /// A change of this table is queued.
    pub(super) fn changes(&mut self, map: &TableMap) {
        if map.rules.fold == (TableFolding::Never { user_code: true })
            || map.definition.is_out_of_date()
        {
            (self.since, self.ever) = (Some(Changed::Table(map.table.oid)), true);
            self.in_transaction = true;
        }
    }

    /// A change of this table comes next. Since the last one, a table may have been found to run user code.
    pub(super) fn heed(&mut self, map: &TableMap) {
        let definitions = map.definition.changes();
        if self.definitions != definitions {
            self.definitions = definitions;
            self.unknown();
        }
    }

    /// User code that is not known may have run.
    pub(super) fn unknown(&mut self) {
        (self.since, self.ever) = (Some(Changed::Unknown), true);
    }

    pub(super) fn ran_user_code(&self) -> bool {
        self.in_transaction
    }

    pub(super) fn set_ran_user_code(&mut self, ran: bool) {
        self.in_transaction = ran;
    }

    /// The transaction ends. Returns whether it has run user code.
    pub(super) fn take_user_code(&mut self) -> bool {
        std::mem::take(&mut self.in_transaction)
    }

    pub(super) fn any(&self) -> bool {
        self.since.is_some()
    }

    /// A part of what was queued is rolled back or not sent.
    pub(super) fn undone(&mut self) {
        if self.ever {
            self.since = Some(Changed::Unknown);
        }
    }
}

impl Encoder {
    /// Has the settings made again if user code may have changed them, except right behind other changes of the same
    /// table.
    pub(super) fn ensure_settings(
        &mut self,
        session: &mut Session,
        next: Option<&TableMap>,
        expected: &mut VecDeque<Expected>,
    ) -> wire::Result<()> {
        next.into_iter().for_each(|map| self.in_doubt.heed(map));
        let Some(since) = self.in_doubt.since else { return Ok(()) };
        if next.is_some_and(|map| since == Changed::Table(map.table.oid)) {
            return Ok(());
        }
        session.queue_bind("settings", std::iter::empty())?;
        session.queue_execute();
        expected.push_back(Expected::Control);
        self.in_doubt.since = None;
        Ok(())
    }

    /// Has the encoding made again, before a value of text, if user code of the same table may have changed it.
    pub(crate) fn ensure_encoding(
        &mut self,
        session: &mut Session,
        expected: &mut VecDeque<Expected>,
    ) -> wire::Result<()> {
        if self.in_doubt.any() {
            session.queue_bind("encoding", std::iter::empty())?;
            session.queue_execute();
            expected.push_back(Expected::Control);
        }
        Ok(())
    }

    /// The same as [`Self::ensure_settings`] before what does not follow changes of one table.
    pub(super) fn ensure_all_settings(
        &mut self,
        session: &mut Session,
        expected: &mut VecDeque<Expected>,
    ) -> Result<()> {
        self.ensure_settings(session, None, expected)
            .map_err(|e| Failure::subscriber(&e, "queueing a statement"))
    }
}
