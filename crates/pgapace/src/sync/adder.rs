//! Tables that join a subscription while it streams.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};
use engine::gate::Gate;
use engine::relation::RemoteRelation;
use pgoutput::Lsn;
use wire::Session;

use crate::apply::tables::Tables;
use crate::error::Result;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::current_lsn;
use crate::stopping::interrupt::interruptible;
use crate::sync::{SyncContext, check_targets, copy_tables, facts};
use crate::target::state::{self, copies};

/// Asks the publisher what is published, on a thread: connecting may take its time.
fn ask(context: SyncContext<'_>) -> Option<Receiver<Vec<PublishedTable>>> {
    let (sender, receiver) = bounded(1);
    let (publisher, publications) = (context.publisher.clone(), context.publications.to_vec());
    let thread = std::thread::Builder::new().name("refresh".to_owned()).spawn(move || {
        let published = publisher
            .connect_to_look()
            .and_then(|mut session| publication::tables(&mut session, &publications));
        match published {
            // The leader may be gone.
            Ok(published) => drop(sender.send(published)),
            Err(failure) => tracing::debug!("{failure}"),
        }
    });
    match thread {
        Ok(_) => Some(receiver),
        Err(error) => {
            tracing::debug!(%error, "cannot start a thread");
            None
        }
    }
}

/// How often requests are looked for.
const LOOK_EVERY: Duration = Duration::from_secs(3);

/// Copies tables that appear in the stream without being part of the subscription yet: they were
/// added to the publication later. The stream waits meanwhile; the receiver still answers.
///
/// And tables that somebody asks for while it runs (`refresh`, `resync`): these once nothing is on
/// its way to the target.
#[derive(Debug)]
pub(crate) struct Adder<'a> {
    context: SyncContext<'a>,
    looked: Instant,
    requested: Vec<(String, String)>,
    asked: Instant,
    /// What is published now, from a thread that asks the publisher.
    published: Option<Receiver<Vec<PublishedTable>>>,
}

impl<'a> Adder<'a> {
    pub(crate) fn new(context: SyncContext<'a>) -> Self {
        let now = Instant::now();
        Self { context, looked: now, requested: Vec::new(), asked: now, published: None }
    }

    /// Looks now and then whether tables were published since. Those that the target has, without
    /// rows, are copied; what stands in the way of others is said when their first change comes.
    pub(crate) fn look_for_new_tables(&mut self, control: &mut Session) -> Result<()> {
        if let Some(answer) = &self.published {
            match answer.try_recv() {
                Ok(published) => {
                    self.published = None;
                    self.request_new(control, published)?;
                }
                Err(TryRecvError::Empty) => {}
                // It could not ask: the next time it can, or the stream ends too.
                Err(TryRecvError::Disconnected) => self.published = None,
            }
        } else if let Some(every) = self.context.options.refresh_interval
            && self.asked.elapsed() >= every
        {
            self.asked = Instant::now();
            self.published = ask(self.context);
        }
        Ok(())
    }

    fn request_new(&self, control: &mut Session, published: Vec<PublishedTable>) -> Result<()> {
        let states = state::relations_by_name(control, self.context.id)?;
        let mut new = published;
        new.retain(|table| !states.contains_key(&table.key()));
        if new.is_empty() {
            return Ok(());
        }
        let found = facts::read(control, &new)?;
        let fit: Vec<_> = new
            .into_iter()
            .zip(found)
            .filter_map(|(table, target)| {
                target.filter(|target| target.check(&table).is_ok()).map(|target| (table, target))
            })
            .collect();
        let (tables, targets): (Vec<_>, Vec<_>) = fit.into_iter().unzip();
        let filled = facts::filled(control, &targets)?;
        let empty = tables.into_iter().enumerate().filter(|(index, _)| !filled.contains(index));
        let empty: Vec<_> = empty.map(|(_, table)| table).collect();
        if empty.is_empty() {
            return Ok(());
        }
        tracing::info!(tables = empty.len(), "tables were added to the publication");
        copies::request(control, self.context.id, &empty)
    }

    /// Looks now and then whether somebody asks for a copy.
    pub(crate) fn look_for_requests(&mut self, control: &mut Session) -> Result<()> {
        if self.requested.is_empty() && self.looked.elapsed() >= LOOK_EVERY {
            self.looked = Instant::now();
            self.requested = copies::requested(control, self.context.id)?;
        }
        Ok(())
    }

    /// Whether nothing more is to be received until [`Self::copy_requested`] was called.
    pub(crate) fn waits_for_quiet(&self) -> bool {
        !self.requested.is_empty()
    }

    /// Copies what was asked for. Nothing may be on its way to the target, or be resolved.
    pub(crate) fn copy_requested(
        &mut self,
        control: &mut Session,
        tables: &mut Tables,
    ) -> Result<()> {
        let requested = std::mem::take(&mut self.requested);
        for (schema, name) in &requested {
            tracing::info!(table = format!("{schema}.{name}"), "the table is copied on request");
            tables.remove(schema, name);
        }
        let these = |table: &PublishedTable| {
            requested.iter().any(|(schema, name)| table.schema == *schema && table.name == *name)
        };
        let published = if self.context.copy_data {
            copy_tables(self.context, control, None, &these)?
        } else {
            let mut session = self.context.publisher.connect_to_look()?;
            let published = publication::tables(&mut session, self.context.publications)?;
            let new: Vec<_> = published.iter().filter(|table| these(table)).cloned().collect();
            copies::set_gates(control, self.context.owner(), &new, Lsn::INVALID)?;
            published
        };
        published.iter().filter(|table| these(table)).for_each(|table| tables.add_types(table));
        let mut states = state::relations_by_name(control, self.context.id)?;
        for (schema, name) in requested {
            let state = states.remove(&(schema.clone(), name.clone()));
            match state.and_then(|state| state.gate) {
                Some(gate) => tables.add(&schema, &name, gate),
                // Not published any more.
                None => state::forget_relation(control, self.context.id, &schema, &name)?,
            }
        }
        Ok(())
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
