//! Copying tables under one snapshot after the other, until none of them has changed while it was copied.

use engine::table_name::TableName;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::Session;

use crate::check::opposite;
use crate::config::IfNotEmpty;
use crate::error::{Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::stopping::interrupt::interruptible;
use crate::subscriber::format::Servers;
use crate::subscriber::other_subscriptions;
use crate::subscriber::state::{self, RelationState};
use crate::tablesync::blocked::{block, is_of_its_tables};
use crate::tablesync::copy_events::CopyEvent;
use crate::tablesync::fitness::{leave_out_new, refuse_filled};
use crate::tablesync::plan::Item;
use crate::tablesync::published_before::PublishedBefore;
use crate::tablesync::sequences::set_sequences;
use crate::tablesync::subscriber_tables::{self, SubscriberTable};
use crate::tablesync::truncated::{self, ChangedTable};
use crate::tablesync::{
    Snapshot, SyncContext, claim, copy_pool, emptying, foreign_keys, indexes, plan, rebase,
};

/// How many snapshots are tried for tables that change while they are copied.
const SNAPSHOTS: usize = 10;

/// Copies the published tables that `wanted` selects and that are not copied yet. Uses the snapshot
/// `first`, whose session holds it and is released, and other snapshots for tables that changed
/// since. Returns the published tables.
///
/// First tables that have changed under all of these snapshots do not stop the others: they are copied beside the
/// stream, as tables that are added.
///
/// The publications are read after the snapshot was created. Creating it waits for running
/// transactions on the publisher, and a column that one of them adds and fills belongs to the copy. Tables whose publication
/// has changed meanwhile are copied under the next snapshot ([`PublishedBefore`]).
pub(crate) fn copy_tables(
    context: SyncContext<'_>,
    control: &mut Session,
    mut first: Option<(Snapshot, &mut Session)>,
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<PublishedTable>> {
    let mut changed = Vec::new();
    let mut whole = FxHashSet::default();
    // The leader may have them copied anew.
    let mut complete = FxHashSet::default();
    for snapshots in 1..=SNAPSHOTS {
        let mut holder = None;
        let (snapshot, publisher, before) = match first.take() {
            Some((snapshot, session)) => (snapshot, session, None),
            None => {
                let (snapshot, session, before) = Snapshot::temporary(context)?;
                (snapshot, holder.insert(session), Some(before))
            }
        };
        let sessions = [publisher.cancel_handle(), control.cancel_handle()];
        let mut published = Vec::new();
        changed = interruptible(context.shutdown, &sessions, "table sync", || {
            published = publication::tables(publisher, context.publications)?;
            let wanted = |table: &PublishedTable| wanted(table) && !complete.contains(&table.name);
            let mut pending = pending(control, context, &published, &wanted)?;
            let later = before.map_or_else(Vec::new, |before| {
                leave_out_published_otherwise(context, &before, &mut pending)
            });
            let mut changed =
                copy_pending(context, control, publisher, &snapshot, pending, &whole)?;
            changed.extend(later);
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
        if let Some(reports) = context.reports {
            complete.extend(copied(control, context, &published, wanted)?);
            published.retain(wanted);
            reports.tell(CopyEvent::Repeated(published));
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
        "Tables were truncated, rewritten, replaced or altered, or their publications were, each time that they were \
         copied. Copied tables stay: start pgapace again when the others no longer change.",
    ))
}

/// Whether first tables that have changed may be copied beside the stream. One that was compared may not: a rebase is over
/// with the first tables.
fn may_be_added_later(context: SyncContext<'_>, changed: &[ChangedTable]) -> bool {
    !context.is_beside_stream() && changed.iter().all(|changed| changed.copy.is_some())
}

/// The names of the published tables whose copies are complete.
fn copied(
    control: &mut Session,
    context: SyncContext<'_>,
    published: &[PublishedTable],
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<TableName>> {
    let states = state::relations_by_name(control, context.id)?;
    let is_copied = |name: &TableName| states.get(name).is_some_and(|it| it.state.is_copied());
    let names = published.iter().filter(|table| wanted(table)).map(|table| &table.name);
    Ok(names.filter(|name| is_copied(name)).cloned().collect())
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

/// Leaves out the tables that were published in another way before the slot of the snapshot was created, and returns them.
fn leave_out_published_otherwise(
    context: SyncContext<'_>,
    before: &PublishedBefore,
    pending: &mut Vec<(PublishedTable, Option<RelationState>)>,
) -> Vec<ChangedTable> {
    let mut left_out = Vec::new();
    pending.retain(|(table, _)| {
        let Some(failure) = before.change(table) else { return true };
        left_out.push(if context.options.if_not_empty == IfNotEmpty::Rebase {
            ChangedTable::compared(failure)
        } else {
            ChangedTable::not_begun(failure, table.clone())
        });
        false
    });
    left_out
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
    let refused = copy_pool::begin(context, control, publisher, snapshot, &mut items)?;
    if !refused.is_empty() {
        block(control, context.owner(), &refused, None)?;
        let is_left = |item: &Item| refused.iter().all(|(name, _)| *name != item.published.name);
        let left = items.into_iter().filter(is_left).map(|item| (item.published, item.subscriber));
        return copy_fitting(context, control, publisher, snapshot, left.collect(), whole);
    }
    let copy_pool::CopyOutcome { changed, failed } =
        copy_pool::copy(context, control, publisher, snapshot, &items, &order)?;
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
