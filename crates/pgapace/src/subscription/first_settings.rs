//! The settings of a first start: what is copied, and what becomes of rows that the tables hold already.
//!
//! They are recorded before the slot is created, so that whatever interrupts the first start, another one completes
//! it. As long as no slot of the subscription exists, nothing is lost if the present settings replace them: the user
//! who stops a start that waits, or corrects the command of one that failed, wants what the new command says. Once
//! the slot exists, tables may have been copied as recorded, and other settings are refused.

use wire::Session;

use super::Supervisor;
use super::first_run::{begin_to_record, recording};
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::{Class, Failure, Result};
use crate::native::guard;
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::subscriber::state::{self, Phase, RelationState, SchemaCopy, Subscription};
use crate::switchover::way_back;
use crate::tablesync::{copy_requests, leave_out_missing, schema};

impl Supervisor<'_> {
    /// Gives a subscription that this process owns the present settings if its slot does not exist yet, and refuses
    /// those that contradict its own otherwise. `created`: this run has created `row`.
    pub(super) fn settle(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &mut Subscription,
        created: bool,
    ) -> Result<()> {
        // Nobody has owned it before.
        let is_new = created && row.epoch == 1;
        if is_new || row.has_streamed() {
            return Ok(());
        }
        if row.is_first_start() {
            let found = slot::find(source, &row.slot_name)?;
            let is_ours = |slot: &slot::Slot| slot::is_ours(slot, row.slot_made_at);
            if !(row.owns_slot && found.as_ref().is_some_and(is_ours)) {
                *row = self.begin_anew(control, source, row, found.is_some())?;
                return Ok(());
            }
        }
        if self.options.rebases {
            return Ok(());
        }
        let relations = state::relations(control, row.id)?;
        contradiction(row, &self.config, &relations).map_or(Ok(()), Err)
    }

    /// The failure of [`Self::settle`]: of a way back, whose settings this process does not have yet, another one.
    pub(super) fn or_turn_round(
        &self,
        publisher: &Publisher,
        row: &Subscription,
        failure: Failure,
    ) -> Failure {
        match self.options.supersedes {
            Some(_) => failure,
            None => way_back::or_turn_round(publisher, row, failure),
        }
    }

    /// Repeats the checks of a first start, and records its settings.
    fn begin_anew(
        &self,
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
        slot_exists: bool,
    ) -> Result<Subscription> {
        let config = &self.config;
        let gone = || {
            Failure::new(Class::Busy, "the subscription was dropped, or another process runs it")
        };
        let mut schema_copy = row.schema_copy;
        if schema_copy == Some(SchemaCopy::Before) {
            // A tool of a process that was killed could still create the tables, with its record.
            schema::end_leftovers(control, row.id)?;
            schema_copy = state::find(control, &row.name)?.ok_or_else(gone)?.schema_copy;
        }
        if config.create_slot && slot_exists {
            return Err(slot::not_ours(&row.slot_name));
        }
        let looked = self.look_at_publisher(source);
        if looked.as_ref().is_err_and(|failure| failure.class == Class::Slot) {
            guard::first_start(control, config, self.slot_history())?;
        }
        // Tables that pgapace has created are completed.
        if schema_copy != Some(SchemaCopy::After) {
            schema_copy = config.copy_schema.then_some(SchemaCopy::Before);
        }
        let copies_schema = schema_copy == Some(SchemaCopy::Before);
        let mut tables = looked?;
        if schema_copy == Some(SchemaCopy::After) {
            leave_out_missing(control, &mut tables)?;
        }
        self.refuse_same_rows(control, source, &tables)?;
        let emptied = self.check_first_start(control, &tables, copies_schema)?;
        begin_to_record(control)?;
        let new = self.new_subscription(schema_copy);
        let row = state::begin_anew(control, row.owned_epoch(), &new)?.ok_or_else(gone)?;
        copy_requests::decide_to_empty(control, row.id, &emptied)?;
        control.simple("COMMIT").map_err(|e| recording(&e))?;
        Ok(row)
    }
}

/// Why a first start whose slot exists cannot be completed with these settings. One that has streamed was completed:
/// then the settings are about tables that are added. So a rebase of such a subscription ends with any of them.
pub(crate) fn contradiction(
    row: &Subscription,
    config: &Config,
    relations: &[RelationState],
) -> Option<Failure> {
    if row.has_streamed() || row.phase == Phase::Creating && !row.is_first_start() {
        return None;
    }
    let refused = |was: &str, give: &str| {
        let message = format!("the first start of subscription {} {was}", row.name);
        let hint = format!(
            "Its slot exists, and tables may have been copied with those settings. Start it {give}; or run pgapace \
             drop, and begin anew."
        );
        Some(Failure::new(Class::Config, message).hint(hint))
    };
    let keeps = config.if_not_empty == IfNotEmpty::Keep;
    if row.rebasing && (keeps || config.if_not_empty == IfNotEmpty::Truncate) {
        return refused(
            "compares tables that hold rows, and deletes rows that only the subscriber has",
            "with --if-not-empty rebase",
        );
    }
    if !row.rebasing && row.copy_data != config.copies_data() {
        return if row.copy_data {
            refused("copies its tables, so that --copy-data=false comes too late", "without it")
        } else {
            refused("copies no table", "with --copy-data=false")
        };
    }
    let is_to_empty =
        |table: &&RelationState| !table.state.is_copied() && table.empty_snapshot.is_some();
    let table = relations.iter().find(|table| keeps && is_to_empty(table))?;
    refused(&format!("is to truncate table {}", table.name), "without --if-not-empty keep")
}
