//! Table sync: the initial content of tables, from a snapshot that goes with a slot.
//!
//! A table is copied in one target transaction together with its gate: the LSN from which its
//! changes in the stream are to be applied. A crash leaves a table either copied or empty.

mod copy;

use std::time::Instant;

use engine::gate::Gate;
use engine::relation::RemoteRelation;
use pgoutput::Lsn;
use wire::Session;

use crate::apply::tables::{Tables, missing};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::{Publisher, backend_pid, current_lsn};
use crate::publisher::slot;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::target::catalogue;
use crate::target::mapping::map_columns;
use crate::target::session::{Purpose, Target};
use crate::target::state::{self, SubscriptionId, ownership};

/// What copying needs to know of the subscription.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncContext<'a> {
    pub(crate) publisher: &'a Publisher,
    pub(crate) target: &'a Target,
    pub(crate) id: SubscriptionId,
    /// Of this run; nothing may be committed under another.
    pub(crate) epoch: i64,
    pub(crate) publications: &'a [String],
    pub(crate) copy_data: bool,
    /// A copy ends as soon as it is asked to.
    pub(crate) shutdown: &'a Shutdown,
}

/// Checks that every table can be copied into, before anything is created on the publisher.
///
/// `may_hold_rows`: tables of an interrupted first run, which are emptied.
pub(crate) fn check_targets(
    session: &mut Session,
    tables: &[PublishedTable],
    copy_data: bool,
) -> Result<()> {
    let (mut absent, mut filled, mut unfit) = (Vec::new(), Vec::new(), Vec::new());
    for table in tables {
        let Some(target) = catalogue::load(session, &table.schema, &table.name)? else {
            absent.push(table.display_name());
            continue;
        };
        if let Err(failure) = map_columns(table.columns.iter().map(|c| c.name.as_str()), &target) {
            unfit.push(failure);
        }
        if copy_data {
            let sql = format!("SELECT 1 FROM {} LIMIT 1", target.sql_only());
            let rows = session.query(&sql, &[]).map_err(|e| {
                Failure::target(&e, &format!("looking whether {} is empty", target.display_name()))
            })?;
            if !rows.is_empty() {
                filled.push(target.display_name());
            }
        }
    }
    if !absent.is_empty() {
        return Err(Failure::new(
            Class::Mismatch,
            format!("the target lacks published tables: {}", absent.join(", ")),
        )
        .hint(
            "Create them: pg_dump --schema-only PUBLISHER | psql TARGET; or take them out of the \
             publication.",
        ));
    }
    let reasons: Vec<_> = unfit.iter().map(|failure| failure.message.clone()).collect();
    if let Some(first) = unfit.into_iter().next() {
        return Err(Failure { message: reasons.join("; "), ..first });
    }
    if !filled.is_empty() {
        return Err(Failure::new(
            Class::Mismatch,
            format!("target tables are not empty: {}", filled.join(", ")),
        )
        .hint(
            "Empty them (TRUNCATE), or pass --copy-data=false if they already hold the publisher's \
             rows as of the slot.",
        ));
    }
    Ok(())
}

/// Copies the published tables that are `wanted` from an exported snapshot, and records their gate.
///
/// What is published is read after the snapshot was made: to make it, the publisher waits for
/// running transactions, and a column that one of them adds and fills belongs to the copy.
pub(crate) fn copy_tables(
    context: SyncContext<'_>,
    wanted: &dyn Fn(&PublishedTable) -> bool,
    snapshot: &str,
    gate: Lsn,
) -> Result<()> {
    let mut target = context.target.connect(Purpose::Copy)?;
    // A later run ends this session, or waits for it, before it looks at the tables.
    ownership::join(&mut target, context.id)?;
    let mut source = context.publisher.connect()?;
    if !context.copy_data {
        let tables = publication::tables(&mut source, context.publications)?;
        for table in tables.iter().filter(|table| wanted(table)) {
            let (owner, gate) = ((context.id, context.epoch), Gate(gate));
            state::set_gate(&mut target, owner, &table.schema, &table.name, gate, None)?;
        }
        return Ok(());
    }
    source
        .simple(&format!(
            "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; \
             SET TRANSACTION SNAPSHOT {}",
            wire::quote_literal(snapshot)
        ))
        .map_err(|e| Failure::publisher(&e, "importing the slot's snapshot"))?;
    let mut tables = publication::tables(&mut source, context.publications)?;
    tables.retain(|table| wanted(table));
    let sessions = [source.cancel_handle(), target.cancel_handle()];
    interruptible(context.shutdown, &sessions, "table sync", || {
        copy_each(context, &tables, gate, &mut source, &mut target)
    })
}

fn copy_each(
    context: SyncContext<'_>,
    tables: &[PublishedTable],
    gate: Lsn,
    source: &mut Session,
    target: &mut Session,
) -> Result<()> {
    for (index, table) in tables.iter().enumerate() {
        if context.shutdown.requested() {
            return Err(Failure::new(Class::Stopped, "stopped during table sync"));
        }
        let started = Instant::now();
        let name = table.display_name();
        let definition = catalogue::load(target, &table.schema, &table.name)?
            .ok_or_else(|| missing(&table.schema, &table.name))?;
        let copied = copy::table(source, target, table, &definition, |session, rows| {
            let owner = (context.id, context.epoch);
            state::set_gate(session, owner, &table.schema, &table.name, Gate(gate), Some(rows))
        })?;
        tracing::info!(
            table = name,
            number = index + 1,
            of = tables.len(),
            rows = copied.rows,
            bytes = copied.bytes,
            format = if copied.binary { "binary" } else { "text" },
            seconds = started.elapsed().as_secs_f64(),
            "copied"
        );
    }
    Ok(())
}

/// Empties the tables of a first run that was interrupted, all that were already copied.
pub(crate) fn empty_copied_tables(session: &mut Session, id: SubscriptionId) -> Result<()> {
    let copied: Vec<_> = state::relations(session, id)?
        .into_iter()
        .filter(|relation| relation.copied_rows.is_some())
        .collect();
    if copied.is_empty() {
        return Ok(());
    }
    let mut names = Vec::new();
    for relation in &copied {
        if let Some(table) = catalogue::load(session, &relation.schema, &relation.name)? {
            names.push(table.sql_only());
        }
    }
    let forget = format!("DELETE FROM pgapace.relation WHERE subscription = {}", id.0);
    let failed = |e: &wire::Error| Failure::target(e, "emptying tables of an interrupted sync");
    if names.is_empty() {
        // All of them have been dropped since.
        return session.simple(&forget).map(|_| ()).map_err(|e| failed(&e));
    }
    let truncate = format!("TRUNCATE TABLE {}; {forget}", names.join(", "));
    match session.simple(&truncate) {
        Ok(_) => Ok(()),
        // Referenced by a foreign key of a table that is not ours to truncate.
        Err(error) if error.sqlstate() == Some("0A000") => {
            let deletes: Vec<_> =
                names.iter().map(|name| format!("DELETE FROM {name}; ")).collect();
            let sql = format!("{}{forget}", deletes.concat());
            session.simple(&sql).map(|_| ()).map_err(|e| failed(&e))
        }
        Err(error) => Err(failed(&error)),
    }
}

/// Forgets tables that are not published any more. Should one be published again, what was written
/// in between is not in the stream: it is then a table that was added, and has to be copied.
///
/// Within one run this cannot be seen; it is looked at when a run starts.
pub(crate) fn forget_unpublished(
    control: &mut Session,
    source: &mut Session,
    context: SyncContext<'_>,
) -> Result<()> {
    // A publication that is missing says nothing about its tables.
    publication::check_exist(source, context.publications)?;
    let published = publication::names(source, context.publications)?;
    for relation in state::relations(control, context.id)? {
        if published.contains(&(relation.schema.clone(), relation.name.clone())) {
            continue;
        }
        tracing::warn!(
            table = format!("{}.{}", relation.schema, relation.name),
            "the table is not published any more: it is no longer part of the subscription"
        );
        state::forget_relation(control, context.id, &relation.schema, &relation.name)?;
    }
    Ok(())
}

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
        let mut session = self.context.publisher.connect()?;
        let sessions = [control.cancel_handle(), session.cancel_handle()];
        interruptible(self.context.shutdown, &sessions, "table sync", || {
            self.add_through(&mut session, control, tables, remote)
        })
    }

    fn add_through(
        &self,
        session: &mut Session,
        control: &mut Session,
        tables: &mut Tables,
        remote: &RemoteRelation,
    ) -> Result<()> {
        let context = self.context;
        // Before the look: what commits from here on is not judged by it.
        let now = current_lsn(session)?;
        let published =
            publication::table(session, context.publications, &remote.schema, &remote.name)?;
        let Some(published) = published else {
            // Dropped or renamed since, or taken out again: should it, or the table under its new
            // name, be published later, it is copied then.
            tracing::warn!(
                table = remote.display_name(),
                until = %now,
                "changes of a table that is not published any more are skipped"
            );
            tables.set_gone(&remote.schema, &remote.name, now);
            return Ok(());
        };
        tables.add_types(&published);
        tracing::info!(table = remote.display_name(), "a table was added to the publication");
        check_targets(control, std::slice::from_ref(&published), context.copy_data)?;
        if !context.copy_data {
            // Nothing is copied, so every change counts.
            let gate = Gate(Lsn::INVALID);
            let owner = (context.id, context.epoch);
            state::set_gate(control, owner, &remote.schema, &remote.name, gate, None)?;
            tables.add(&remote.schema, &remote.name, gate);
            return Ok(());
        }
        // Two subscriptions may have one id, on two targets, and one process: not one session.
        let name = format!("pgapace_sync_{}_{}", context.id.0, backend_pid(session)?);
        let created = slot::create(session, &name, slot::Kind::Temporary)?;
        let this =
            |table: &PublishedTable| table.schema == remote.schema && table.name == remote.name;
        copy_tables(context, &this, &created.snapshot, created.consistent_point)?;
        tables.add(&remote.schema, &remote.name, Gate(created.consistent_point));
        Ok(())
    }
}
