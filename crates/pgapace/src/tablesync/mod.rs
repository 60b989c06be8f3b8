//! Table sync: copying the initial content of tables from the snapshot of a slot.
//!
//! A table is copied together with its sync LSN, the LSN of the snapshot. Changes in the stream apply to
//! the table from that LSN on. All workers import the same snapshot. Tables that an interrupted copy
//! left over are copied under another snapshot, with sync LSNs of their own. So the stream can start at
//! the slot's own position, whatever happened during the copy.

mod added_copy;
mod added_tables;
mod claim;
mod copy_display;
mod copy_pool;
pub(crate) mod copy_progress;
pub(crate) mod copy_requests;
mod copy_source;
mod copy_worker;
pub(crate) mod deferred;
pub(crate) mod emptying;
mod foreign_keys;
mod indexes;
mod inspection;
mod plan;
mod queue;
pub(crate) mod rebase;
mod scaling;
pub(crate) mod schema;
pub(crate) mod slot_wait;
mod snapshot;
pub(crate) mod subscriber_tables;
pub(crate) mod table_state;
mod truncated;

use engine::table_name::TableName;
use pgoutput::Lsn;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

pub(crate) use added_tables::{Added, Adder, Copying};
pub(crate) use snapshot::Snapshot;

use crate::apply::blockers::CopyWatch;
use crate::check::opposite;
use crate::config::{CopyOptions, IfNotEmpty};
use crate::error::{Class, Failure, Result};
use crate::observe::board::Board;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::sequences::{self, Chosen, SetOptions};
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::format::Servers;
use crate::subscriber::other_subscriptions;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::published::PreviousReading;
use crate::subscriber::state::{
    self, RelationState, RelationsByName, SubscriptionId, error_detail,
};
use crate::tablesync::emptying::{Emptied, TruncateDecision};
use crate::tablesync::subscriber_tables::{Obstacle, SubscriberTable};
use crate::tablesync::truncated::ChangedTable;

/// How many snapshots are tried for tables that change while they are copied.
const SNAPSHOTS: usize = 10;

/// The parts of a subscription that copying needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncContext<'a> {
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    /// Its name.
    pub(crate) subscription: &'a str,
    pub(crate) id: SubscriptionId,
    /// The epoch of this run; nothing may be committed under another.
    pub(crate) epoch: i64,
    pub(crate) publications: &'a [String],
    pub(crate) slot: &'a str,
    pub(crate) copy_data: bool,
    pub(crate) options: CopyOptions,
    /// Whether indexes of empty tables may be built after the rows, which keeps these tables locked
    /// until then.
    pub(crate) indexes_after: bool,
    pub(crate) kind: CopyKind,
    /// A copy stops as soon as this is requested.
    pub(crate) shutdown: &'a Shutdown,
    /// Where the progress is shown.
    pub(crate) board: Option<&'a Board>,
    /// Where sessions that may wait for locks are announced, beside the stream.
    pub(crate) watch: Option<&'a CopyWatch>,
}

/// Which tables are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKind {
    /// The first tables, before anything streams.
    First,
    /// Tables that were added, while others stream.
    BesideStream,
}

impl SyncContext<'_> {
    pub(crate) fn is_beside_stream(&self) -> bool {
        self.kind == CopyKind::BesideStream
    }

    pub(crate) fn owner(&self) -> OwnedEpoch {
        OwnedEpoch { id: self.id, epoch: self.epoch }
    }
}

/// Checks that every table can be copied into, before anything is created on the publisher.
pub(crate) fn check_subscribers(
    session: &mut Session,
    (subscription, tables): (&str, &[PublishedTable]),
    copy_data: bool,
    policy: IfNotEmpty,
) -> Result<()> {
    let subscribers = subscriber_tables::fitting(session, tables)?;
    if copy_data && policy.refuses() {
        refuse_filled(session, subscription, &subscribers)?;
    }
    Ok(())
}

/// The same before the first start, when the user may have decided to empty tables that hold rows.
/// Returns the tables to empty.
pub(crate) fn check_first_subscribers(
    session: &mut Session,
    (subscription, tables): (&str, &[PublishedTable]),
    copy_data: bool,
    policy: IfNotEmpty,
    decisions: &[TruncateDecision],
) -> Result<Vec<Emptied>> {
    let subscribers = subscriber_tables::fitting(session, tables)?;
    if copy_data && policy.refuses() {
        emptying::decide(session, subscription, (tables, &subscribers), decisions)
    } else {
        Ok(Vec::new())
    }
}

/// Leaves out tables that the subscriber lacks: the publisher has got them since the first tables were checked or created,
/// or somebody has dropped them on the subscriber. They are added beside the stream, as tables that the publisher gets
/// later: there they are blocked until they exist, and keep no other table from anything.
pub(crate) fn leave_out_missing(
    session: &mut Session,
    tables: &mut Vec<PublishedTable>,
) -> Result<()> {
    let found = subscriber_tables::read(session, tables)?;
    let mut exists = found.iter().map(Option::is_some);
    tables.retain(|_| exists.next() == Some(true));
    Ok(())
}

/// Leaves out the same tables before the first copy, and new ones, which have no state, that cannot be copied.
fn leave_out_new(
    session: &mut Session,
    tables: &mut Vec<PublishedTable>,
    states: &RelationsByName,
    policy: IfNotEmpty,
) -> Result<()> {
    let is_new = |table: &PublishedTable| !states.contains_key(&table.name);
    let found =
        subscriber_tables::fit(session, tables, |table, _| policy.refuses() && is_new(table))?;
    let mut found = found.into_iter();
    tables.retain(|table| match found.next() {
        Some(Err(Obstacle::Absent)) => false,
        Some(Err(Obstacle::Unfit(_) | Obstacle::NotEmpty)) => !is_new(table),
        Some(Ok(_)) | None => true,
    });
    Ok(())
}

/// Checks that the subscriber has none of the tables, because `--copy-schema` creates them.
pub(crate) fn check_absent(session: &mut Session, tables: &[PublishedTable]) -> Result<()> {
    let found = subscriber_tables::read(session, tables)?;
    let existing: Vec<_> = found.iter().flatten().map(|table| table.name.to_string()).collect();
    if existing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Mismatch,
        format!("the subscriber already has published tables: {}", existing.join(", ")),
    )
    .hint("Omit --copy-schema, or drop these tables on the subscriber."))
}

/// Why each of these blocked tables still cannot be copied; `None` if it can be.
pub(crate) fn obstacles(
    session: &mut Session,
    tables: &[PublishedTable],
    states: &RelationsByName,
    policy: IfNotEmpty,
) -> Result<Vec<Option<Failure>>> {
    let found = subscriber_tables::fit(session, tables, |table, subscriber| {
        let state = states.get(&table.name);
        policy.refuses() && !state.is_some_and(|state| subscriber.is_partly_copied(state))
    })?;
    let obstacle = |(table, found): (&PublishedTable, std::result::Result<_, Obstacle>)| {
        found.err().map(|obstacle| obstacle.failure(table))
    };
    Ok(tables.iter().zip(found).map(obstacle).collect())
}

fn refuse_filled(
    session: &mut Session,
    subscription: &str,
    subscribers: &[SubscriberTable],
) -> Result<()> {
    let filled = subscriber_tables::filled(session, subscribers)?;
    let filled: Vec<_> = filled.iter().map(|index| &subscribers[*index]).collect();
    emptying::refuse(session, subscription, &filled, false)
}

/// Copies the published tables that `wanted` selects and that are not copied yet. Uses the snapshot
/// `first`, whose session holds it and is released, and other snapshots for tables that changed
/// since. Returns the published tables.
///
/// First tables that have changed under all of these snapshots keep the others from nothing: they are copied beside the
/// stream, as tables that are added.
///
/// The publications are read after the snapshot was created. Creating it waits for running
/// transactions on the publisher, and a column that one of them adds and fills belongs to the copy.
pub(crate) fn copy_tables(
    context: SyncContext<'_>,
    control: &mut Session,
    mut first: Option<(Snapshot, &mut Session)>,
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<PublishedTable>> {
    let mut changed = Vec::new();
    let mut whole = FxHashSet::default();
    for snapshots in 1..=SNAPSHOTS {
        let mut holder = None;
        let (snapshot, publisher) = match first.take() {
            Some(first) => first,
            None => {
                let (snapshot, session) = Snapshot::temporary(context)?;
                (snapshot, holder.insert(session))
            }
        };
        let sessions = [publisher.cancel_handle(), control.cancel_handle()];
        let mut published = Vec::new();
        changed = interruptible(context.shutdown, &sessions, "table sync", || {
            published = publication::tables(publisher, context.publications)?;
            let pending = pending(control, context, &published, wanted)?;
            let changed = copy_pending(context, control, publisher, &snapshot, pending, &whole)?;
            let slot = snapshot.temporary_slot();
            snapshot.release(publisher)?;
            match slot {
                Some(slot) => {
                    let servers = (&mut *control, &mut *publisher);
                    truncated::complete(context, servers, &slot, changed, snapshots)
                }
                None => Ok(changed),
            }
        })?;
        let added_later = snapshots == SNAPSHOTS && may_be_added_later(context, &changed);
        if added_later {
            changed.iter().for_each(ChangedTable::log_added_later);
        }
        if changed.is_empty() || added_later {
            let mut of = published.clone();
            of.retain(|table| !context.is_beside_stream() || wanted(table));
            set_sequences(context, control, publisher, &of)?;
            return Ok(published);
        }
        // Nothing can come between the parts of a table that has only one.
        whole.extend(changed.iter().filter_map(ChangedTable::split).cloned());
        for ChangedTable { failure, .. } in &changed {
            tracing::info!(
                event = "table_copy_repeated",
                reason = failure.message,
                "table is copied again under another snapshot"
            );
        }
    }
    let last = changed.into_iter().next().map(|changed| changed.failure);
    Err(last.unwrap_or_else(|| Failure::internal("nothing was left to copy")).hint(
        "Tables were truncated, rewritten, replaced or altered repeatedly while they were copied. \
         Copied tables stay: start pgapace again when the others no longer change.",
    ))
}

/// Whether first tables that have changed may be copied beside the stream. One that was compared may not: a rebase is over
/// with the first tables.
fn may_be_added_later(context: SyncContext<'_>, changed: &[ChangedTable]) -> bool {
    !context.is_beside_stream() && changed.iter().all(|changed| changed.copy.is_some())
}

/// Sets the sequences to their current values, because sequences are not transactional. With the first
/// tables, these are all sequences of the publications, otherwise those of `tables`.
///
/// Where both servers write, each may produce values of its own (INCREMENT 2): then the sequences are left alone.
///
/// No snapshot of a copy may be in force: under it, sequences that were dropped or renamed since would
/// still be listed.
pub(crate) fn set_sequences(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    tables: &[PublishedTable],
) -> Result<()> {
    let chosen = if context.is_beside_stream() { Chosen::OfTables } else { Chosen::All };
    let sessions = [publisher.cancel_handle(), control.cancel_handle()];
    let report = interruptible(context.shutdown, &sessions, "table sync", || {
        let found = sequences::read(publisher, context.publications, tables, chosen)?;
        if !found.is_empty()
            && let Some(reason) = other_writers(context, publisher, control)?
        {
            tracing::warn!(
                event = "sequences_left",
                sequences = found.len(),
                reason,
                "sequences were not set to the publisher's values"
            );
            return Ok(None);
        }
        sequences::set(control, &found, &SetOptions::default()).map(Some)
    })?;
    if let Some(report) = report {
        report.log();
    }
    Ok(())
}

/// Why the subscriber may have writers of its own, if it may.
fn other_writers(
    context: SyncContext<'_>,
    publisher: &mut Session,
    subscriber: &mut Session,
) -> Result<Option<String>> {
    if context.options.origin_none {
        return Ok(Some("--origin none".to_owned()));
    }
    let opposite = opposite::first(publisher, subscriber)?;
    Ok(opposite.map(|name| format!("subscription {name} in the opposite direction")))
}

/// The published tables to copy, with their recorded state.
fn pending(
    control: &mut Session,
    context: SyncContext<'_>,
    published: &[PublishedTable],
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<(PublishedTable, Option<RelationState>)>> {
    let mut states = state::relations_by_name(control, context.id)?;
    let mut tables: Vec<_> = published.iter().filter(|table| wanted(table)).cloned().collect();
    if !context.is_beside_stream() {
        leave_out_new(control, &mut tables, &states, context.options.if_not_empty)?;
    }
    let pending = tables.into_iter().filter_map(|table| {
        let state = states.remove(&table.name);
        let is_to_copy = state.as_ref().is_none_or(|state| state.state.is_to_copy());
        is_to_copy.then_some((table, state))
    });
    Ok(pending.collect())
}

/// Copies tables, those of `whole` in one part. Returns those that have changed since the snapshot.
fn copy_pending(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    snapshot: &Snapshot,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
    whole: &FxHashSet<TableName>,
) -> Result<Vec<ChangedTable>> {
    if pending.is_empty() {
        return Ok(Vec::new());
    }
    let partly =
        |state: &Option<RelationState>| state.as_ref().is_some_and(RelationState::is_partly_copied);
    let emptied = pending.iter().filter(|(_, state)| partly(state));
    let emptied: Vec<_> = emptied.map(|(table, _)| table.name.clone()).collect();
    if !emptied.is_empty() {
        opposite::warn(publisher, control, &emptied)?;
    }
    let pending = claim::allowed(context, control, publisher, pending)?;
    if pending.is_empty() {
        return Ok(Vec::new());
    }
    let (published, subscribers) = if context.is_beside_stream() {
        only_possible(control, context, pending)?
    } else {
        all(control, context, pending)?
    };
    if published.is_empty() {
        return Ok(Vec::new());
    }
    if context.options.if_not_empty == IfNotEmpty::Rebase {
        let filled = subscriber_tables::filled(control, &subscribers)?;
        let (filled, empty): (Vec<_>, Vec<_>) = published
            .into_iter()
            .zip(subscribers)
            .enumerate()
            .partition(|(i, _)| filled.contains(i));
        let filled: Vec<_> = filled.into_iter().map(|(_, (published, _))| published).collect();
        let again = if context.is_beside_stream() {
            rebase_added(context, control, snapshot, &filled)?
        } else {
            rebase::tables(context, control, snapshot, &filled)?
        };
        let tables = empty.into_iter().map(|(_, table)| table).collect();
        let mut changed = copy_fitting(context, control, publisher, snapshot, tables, whole)?;
        changed.extend(again.into_iter().map(ChangedTable::compared));
        return Ok(changed);
    }
    let tables = published.into_iter().zip(subscribers).collect();
    copy_fitting(context, control, publisher, snapshot, tables, whole)
}

/// Compares added tables one by one, because only the tables that cannot be compared are blocked.
fn rebase_added(
    context: SyncContext<'_>,
    control: &mut Session,
    snapshot: &Snapshot,
    filled: &[PublishedTable],
) -> Result<Vec<Failure>> {
    let mut again = Vec::new();
    for table in filled {
        match rebase::tables(context, control, snapshot, std::slice::from_ref(table)) {
            Ok(changed) => again.extend(changed),
            Err(failure) if !is_of_its_tables(&failure) => return Err(failure),
            Err(failure) => {
                block(control, context.owner(), &[(table.name.clone(), failure)], None)?;
            }
        }
    }
    Ok(again)
}

/// Copies tables that fit.
fn copy_fitting(
    context: SyncContext<'_>,
    control: &mut Session,
    publisher: &mut Session,
    snapshot: &Snapshot,
    tables: Vec<(PublishedTable, SubscriberTable)>,
    whole: &FxHashSet<TableName>,
) -> Result<Vec<ChangedTable>> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let subscribers: Vec<_> = tables.iter().map(|(_, subscriber)| subscriber.clone()).collect();
    let mut empty_now = vec![true; subscribers.len()];
    match context.options.if_not_empty {
        IfNotEmpty::Refuse | IfNotEmpty::Truncate | IfNotEmpty::Rebase => {}
        IfNotEmpty::Keep => {
            subscriber_tables::filled(control, &subscribers)?
                .into_iter()
                .for_each(|i| empty_now[i] = false);
        }
    }
    let keys: Vec<_> = subscribers.iter().map(|table| table.name.clone()).collect();
    let shared = other_subscriptions::read(control, context.subscription, &keys)?;
    let mut items =
        plan::items(publisher, tables, context.options.binary, Servers::of(publisher, control))?;
    if context.indexes_after {
        indexes::choose(control, context.id, &mut items, |index| empty_now[index])?;
    }
    // With keep, each table is copied in one transaction, also an empty one, and always a table that another
    // subscription changes. After an interruption, rows of a part could not be distinguished from rows that others
    // have written.
    let order = foreign_keys::read(control, &items)?;
    let is_split = |index| {
        !context.options.keeps_rows()
            && !shared.contains_key(&index)
            && !whole.contains(&keys[index])
            && !order.refers_to_itself(index)
    };
    for (_, item) in items.iter_mut().enumerate().filter(|(index, _)| is_split(*index)) {
        item.split(context.options.split_size);
    }
    let copy_pool::CopyOutcome { changed, failed } =
        copy_pool::copy(context, control, publisher, snapshot, items, &order)?;
    block(control, context.owner(), &failed, None)?;
    Ok(changed)
}

/// Returns the tables if all of them can be copied. Removes rows of an earlier copy.
fn all(
    control: &mut Session,
    context: SyncContext<'_>,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
) -> Result<(Vec<PublishedTable>, Vec<SubscriberTable>)> {
    let (published, states): (Vec<_>, Vec<_>) = pending.into_iter().unzip();
    let subscribers = subscriber_tables::fitting(control, &published)?;
    let tables = subscribers.iter().zip(states.iter().map(Option::as_ref));
    let left: Vec<_> = tables
        .filter(|(subscriber, state)| state.is_some_and(|state| subscriber.is_partly_copied(state)))
        .collect();
    if !left.is_empty() {
        emptying::empty(control, context, &left)?;
    }
    if context.options.if_not_empty.refuses() {
        refuse_filled(control, context.subscription, &subscribers)?;
    }
    Ok((published, subscribers))
}

/// The same for the tables that can be copied; the others are blocked.
fn only_possible(
    control: &mut Session,
    context: SyncContext<'_>,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
) -> Result<(Vec<PublishedTable>, Vec<SubscriberTable>)> {
    let owner = context.owner();
    let refuse = context.options.if_not_empty.refuses();
    let states: FxHashMap<_, _> = pending
        .iter()
        .filter_map(|(table, state)| Some((table.name.clone(), state.clone()?)))
        .collect();
    let emptied = |table: &PublishedTable, subscriber: &SubscriberTable| {
        states.get(&table.name).filter(|state| subscriber.is_partly_copied(state))
    };
    let tables: Vec<_> = pending.into_iter().map(|(table, _)| table).collect();
    let found = subscriber_tables::fit(control, &tables, |table, subscriber| {
        refuse && emptied(table, subscriber).is_none()
    })?;
    let (mut published, mut subscribers, mut blocked) = (Vec::new(), Vec::new(), Vec::new());
    let to_empty: Vec<_> = tables
        .iter()
        .zip(&found)
        .filter_map(|(table, found)| {
            let subscriber = found.as_ref().ok()?;
            Some((subscriber, Some(emptied(table, subscriber)?)))
        })
        .collect();
    // Together, because TRUNCATE wants tables that are linked by foreign keys together. If that fails, one by one,
    // to find those that cannot be emptied.
    let together = to_empty.is_empty()
        || match emptying::empty(control, context, &to_empty) {
            Err(failure) if !is_of_its_tables(&failure) => return Err(failure),
            emptied => emptied.is_ok(),
        };
    for (table, found) in tables.into_iter().zip(found) {
        let subscriber = match found {
            Err(obstacle) => Err(obstacle.failure(&table)),
            Ok(subscriber) => match emptied(&table, &subscriber) {
                Some(state) if !together => {
                    match emptying::empty(control, context, &[(&subscriber, Some(state))]) {
                        Err(failure) if !is_of_its_tables(&failure) => return Err(failure),
                        emptied => emptied.map(|()| subscriber),
                    }
                }
                _ => Ok(subscriber),
            },
        };
        match subscriber {
            Ok(subscriber) => {
                published.push(table);
                subscribers.push(subscriber);
            }
            Err(failure) => blocked.push((table.name, failure)),
        }
    }
    block(control, owner, &blocked, None)?;
    Ok((published, subscribers))
}

/// Whether a failure of a copy beside the stream is one of its tables: they are blocked and copied again later, also if
/// the failure may pass, and all others stream on. Otherwise the run ends: the process is to stop, does not own the
/// subscription, or has lost a server. A server that has no room for one more session is not lost.
fn is_of_its_tables(failure: &Failure) -> bool {
    let of_the_run = matches!(
        failure.class,
        Class::Stopped
            | Class::HandedOver
            | Class::Busy
            | Class::Disabled
            | Class::Slot
            | Class::History
    );
    // A refusal of the operating system is Internal too, but transient.
    let bug = failure.class == Class::Internal && !failure.is_transient();
    let full = failure.sqlstate.as_deref() == Some(sqlstate::TOO_MANY_CONNECTIONS);
    !of_the_run && !bug && (full || !failure.is_connection_lost())
}

/// Blocks tables and logs it. `lacks_from` is where their changes begin, if no copy follows.
fn block(
    control: &mut Session,
    owner: OwnedEpoch,
    tables: &[(TableName, Failure)],
    lacks_from: Option<Lsn>,
) -> Result<()> {
    let until = if lacks_from.is_some() { "pgapace resync" } else { "its obstacle is gone" };
    for (table, failure) in tables {
        error_detail::write(control, owner.id, &table.to_string(), failure)?;
        let reason = error_detail::public_text(failure);
        table_state::block(control, owner, table, &reason, lacks_from)?;
        tracing::warn!(
            event = "table_blocked",
            table = table.to_string(),
            sqlstate = failure.sqlstate,
            until,
            error = %failure,
            "table cannot be copied; other tables continue"
        );
    }
    Ok(())
}

/// Deletes the state of tables that are no longer published, if nothing of them is here, or if the publisher has
/// `dropped` them: a later table of the name is new. The state of all others is kept: if such a table is published
/// again, changes in between are not in the stream, and [`compare`](crate::subscriber::state::published::compare) finds
/// the gap. A copy that was wanted is made then. What verifications found is deleted: nothing keeps the rows equal.
///
/// If `copies_added` is false, no copy would follow for a table whose state is deleted. So it is kept for every table
/// that has joined, and for one with a wanted copy also if it was dropped. The changes of a dropped table must have been
/// applied, because they would be applied to a later one: the publications were read as without it, and all changes up
/// to there are applied.
///
/// Within a run this cannot be detected, so it is done when a run starts. `states` are the tables of the
/// subscription, `recorded` is how they were published. Returns whether any was deleted.
pub(crate) fn forget_unpublished(
    control: &mut Session,
    id: SubscriptionId,
    published: &[PublishedTable],
    (states, recorded): (&FxHashMap<TableName, RelationState>, &PreviousReading),
    copies_added: bool,
    dropped: impl FnOnce(&[u32]) -> Result<FxHashSet<u32>>,
) -> Result<bool> {
    let published: FxHashSet<_> = published.iter().map(|table| &table.name).collect();
    let (known, oids) = (recorded.unpublished(), recorded.oids());
    let is_here = |relation: &RelationState| {
        if copies_added { relation.holds_rows() } else { relation.has_joined() }
    };
    let gone = states.iter().filter(|(key, _)| !published.contains(key));
    let (kept, mut forgotten): (Vec<_>, Vec<_>) =
        gone.map(|(_, relation)| relation).partition(|relation| is_here(relation));
    let oid = |relation: &RelationState| {
        let key = &relation.name;
        let is_wanted = relation.copy_wanted || relation.requested.is_some();
        let may_be_forgotten = copies_added || known.contains(key) && !is_wanted;
        oids.get(key).copied().filter(|_| may_be_forgotten)
    };
    let asked: Vec<_> = kept.iter().filter_map(|relation| oid(relation)).collect();
    let dropped = if asked.is_empty() { FxHashSet::default() } else { dropped(&asked)? };
    let (lost, kept): (Vec<_>, Vec<_>) = kept
        .into_iter()
        .partition(|relation| oid(relation).is_some_and(|oid| dropped.contains(&oid)));
    forgotten.extend(lost);
    for table in forgotten.iter().map(|relation| &relation.name) {
        tracing::warn!(
            event = "table_unpublished",
            table = table.to_string(),
            "table is no longer published and was removed from the subscription"
        );
        state::forget_relation(control, id, table)?;
    }
    state::forget_verifications(control, id, kept.iter().copied())?;
    for table in kept.iter().map(|relation| &relation.name) {
        if !known.contains(table) {
            tracing::warn!(
                event = "table_unpublished",
                table = table.to_string(),
                "table is no longer published; it will lack changes if it is published again"
            );
        }
    }
    Ok(!forgotten.is_empty())
}

#[cfg(test)]
mod tests {
    use super::is_of_its_tables;
    use crate::error::{Class, Failure};

    #[test]
    fn failures_of_the_run_are_not_those_of_a_table() {
        let failure = |class| Failure::new(class, "failed");
        let of = |class, code: &str| Failure {
            sqlstate: Some(code.to_owned()),
            ..failure(class).not_serving()
        };
        for class in [Class::Publisher, Class::Subscriber, Class::Apply, Class::Mismatch] {
            assert!(is_of_its_tables(&failure(class)));
            assert!(is_of_its_tables(&failure(class).transient(true)));
            assert!(is_of_its_tables(&of(class, "53300")), "no room for one more session");
            assert!(!is_of_its_tables(&failure(class).not_serving()));
            assert!(!is_of_its_tables(&of(class, "57P01")));
        }
        for class in [Class::Stopped, Class::HandedOver, Class::Busy, Class::Slot] {
            assert!(!is_of_its_tables(&failure(class).transient(true)));
            assert!(!is_of_its_tables(&of(class, "53300")));
        }
        assert!(!is_of_its_tables(&Failure::internal("a bug")));
        let refused = std::io::Error::other("no thread");
        assert!(is_of_its_tables(&Failure::refused_by_system("start a thread", &refused)));
    }
}
