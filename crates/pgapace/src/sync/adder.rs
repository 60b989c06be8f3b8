//! Tables that join a subscription while it streams.

use engine::gate::Gate;
use engine::relation::RemoteRelation;
use pgoutput::Lsn;
use wire::Session;

use crate::apply::tables::Tables;
use crate::error::Result;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::current_lsn;
use crate::stopping::interrupt::interruptible;
use crate::sync::{SyncContext, check_targets, copy_tables};
use crate::target::state::{self, copies};

/// Copies tables that appear in the stream without being part of the subscription yet: they were
/// added to the publication later. The stream waits meanwhile; the receiver still answers.
#[derive(Debug)]
pub(crate) struct Adder<'a> {
    context: SyncContext<'a>,
}

impl<'a> Adder<'a> {
    pub(crate) fn new(context: SyncContext<'a>) -> Self {
        Self { context }
    }

    /// Copies the table under a snapshot of its own, whose LSN becomes the table's gate.
    pub(crate) fn add(
        &self,
        control: &mut Session,
        tables: &mut Tables,
        remote: &RemoteRelation,
    ) -> Result<()> {
        let context = self.context;
        let mut session = context.publisher.connect_to_look()?;
        let sessions = [control.cancel_handle(), session.cancel_handle()];
        let found = interruptible(context.shutdown, &sessions, "table sync", || {
            // Before the look: what commits from here on is not judged by it.
            let now = current_lsn(&mut session)?;
            let (schema, name) = (&remote.schema, &remote.name);
            let published = publication::table(&mut session, context.publications, schema, name)?;
            if let Some(published) = &published {
                let tables = std::slice::from_ref(published);
                check_targets(control, tables, false, context.options.filled)?;
            }
            Ok((now, published))
        })?;
        drop(session);
        let (now, Some(published)) = found else {
            // Dropped or renamed since, or taken out again: should it, or the table under its new
            // name, be published later, it is copied then.
            let now = found.0;
            tracing::warn!(
                table = remote.display_name(),
                until = %now,
                "changes of a table that is not published any more are skipped"
            );
            tables.set_gone(&remote.schema, &remote.name, now);
            return Ok(());
        };
        tracing::info!(table = remote.display_name(), %now, "a table was added to the publication");
        tables.add_types(&published);
        if !context.copy_data {
            // Nothing is copied, so every change counts.
            let gate = Lsn::INVALID;
            copies::set_gates(control, context.owner(), &[published], gate)?;
            tables.add(&remote.schema, &remote.name, Gate(gate));
            return Ok(());
        }
        let this =
            |table: &PublishedTable| table.schema == remote.schema && table.name == remote.name;
        copy_tables(context, control, None, &this)?;
        let recorded = state::relations_by_name(control, context.id)?
            .remove(&(remote.schema.clone(), remote.name.clone()));
        match recorded.and_then(|state| state.gate) {
            Some(gate) => tables.add(&remote.schema, &remote.name, gate),
            // It was taken out, or dropped, before the snapshot.
            None => tables.set_gone(&remote.schema, &remote.name, now),
        }
        Ok(())
    }
}
