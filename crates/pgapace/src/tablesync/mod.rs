//! Table sync: the initial content of tables, from a snapshot that goes with a slot.
//!
//! A table is copied together with its sync LSN: the LSN from which its changes in the stream are to be
//! applied, which is that of the snapshot it was copied under. All workers import one snapshot;
//! what an interrupted copy has left undone is copied under another one, with its own sync LSNs. So the
//! stream may start at the slot's own position, whatever happened meanwhile.

mod added_tables;
mod copy_pool;
pub(crate) mod copy_progress;
mod copy_worker;
pub(crate) mod deferred;
pub(crate) mod emptying;
mod indexes;
mod plan;
mod progress;
mod queue;
mod scaling;
pub(crate) mod schema;
mod snapshot;
pub(crate) mod subscriber_tables;
pub(crate) mod table_state;

use pgoutput::Lsn;
use rustc_hash::FxHashMap;
use wire::Session;

pub(crate) use added_tables::{Added, Adder, Copying, Name};
pub(crate) use snapshot::Snapshot;

use crate::config::{CopyOptions, Filled};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::sequences::{self, Chosen, SetOptions};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::format::Servers;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::{self, RelationState, SubscriptionId};
use crate::tablesync::emptying::{Emptied, TruncateDecision};
use crate::tablesync::subscriber_tables::SubscriberTable;
use crate::tablesync::table_state::Owner;

/// Snapshots that are tried for tables that change on the publisher while they are copied.
const SNAPSHOTS: usize = 10;

/// What copying needs to know of the subscription.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SyncContext<'a> {
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    pub(crate) id: SubscriptionId,
    /// Of this run; nothing may be committed under another.
    pub(crate) epoch: i64,
    pub(crate) publications: &'a [String],
    pub(crate) slot: &'a str,
    pub(crate) copy_data: bool,
    pub(crate) options: &'a CopyOptions,
    /// Whether indexes of empty tables may be built after the rows, which locks the tables until then.
    pub(crate) indexes_after: bool,
    /// Whether the tables join while others stream, instead of being the first ones.
    pub(crate) joins: bool,
    /// A copy ends as soon as it is asked to.
    pub(crate) shutdown: &'a Shutdown,
}

impl SyncContext<'_> {
    pub(crate) fn owner(&self) -> Owner {
        Owner { id: self.id, epoch: self.epoch }
    }
}

/// Checks that every table can be copied into, before anything is created on the publisher.
pub(crate) fn check_subscribers(
    session: &mut Session,
    tables: &[PublishedTable],
    copy_data: bool,
    policy: Filled,
) -> Result<()> {
    let subscribers = subscriber_tables::fitting(session, tables)?;
    if copy_data && policy == Filled::Refuse {
        refuse_filled(session, &subscribers)?;
    }
    Ok(())
}

/// The same before the first start, for which the user may have decided about tables that hold rows.
/// Returns those that are to be emptied.
pub(crate) fn check_first_subscribers(
    session: &mut Session,
    tables: &[PublishedTable],
    copy_data: bool,
    policy: Filled,
    decisions: &[TruncateDecision],
) -> Result<Vec<Emptied>> {
    let subscribers = subscriber_tables::fitting(session, tables)?;
    if copy_data && policy == Filled::Refuse {
        emptying::decide(session, tables, &subscribers, decisions)
    } else {
        Ok(Vec::new())
    }
}

/// Checks that the subscriber has none of the tables: `--schema` is to make them.
pub(crate) fn check_absent(session: &mut Session, tables: &[PublishedTable]) -> Result<()> {
    let found = subscriber_tables::read(session, tables)?;
    let there: Vec<_> = found.iter().flatten().map(SubscriberTable::display_name).collect();
    if there.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Mismatch,
        format!("the subscriber has published tables already: {}", there.join(", ")),
    )
    .hint("--schema is for a subscriber without them: leave it out, or drop them."))
}

fn refuse_filled(session: &mut Session, subscribers: &[SubscriberTable]) -> Result<()> {
    let filled = subscriber_tables::filled(session, subscribers)?;
    let filled: Vec<_> = filled.iter().map(|index| &subscribers[*index]).collect();
    emptying::refuse(session, &filled)
}

/// Copies the published tables that `wanted` takes and that are not copied yet, under `first` (with
/// the session that holds it, and lets it go) and, for those that it does not suffice for, under
/// other snapshots. Returns what is published.
///
/// What is published is read after the snapshot was made: to make it, the publisher waits for
/// running transactions, and a column that one of them adds and fills belongs to the copy.
pub(crate) fn copy_tables(
    context: SyncContext<'_>,
    control: &mut Session,
    mut first: Option<(Snapshot, &mut Session)>,
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<PublishedTable>> {
    let mut reasons = Vec::new();
    for _ in 0..SNAPSHOTS {
        let mut holder = None;
        let (snapshot, source) = match first.take() {
            Some(first) => first,
            None => {
                let (id, shutdown) = (context.id, context.shutdown);
                let (snapshot, session) = Snapshot::temporary(context.publisher, id, shutdown)?;
                (snapshot, holder.insert(session))
            }
        };
        let sessions = [source.cancel_handle(), control.cancel_handle()];
        let mut published = Vec::new();
        reasons = interruptible(context.shutdown, &sessions, "table sync", || {
            published = publication::tables(source, context.publications)?;
            let pending = pending(control, context, &published, wanted)?;
            copy_pending(context, control, source, &snapshot, pending)
        })?;
        if reasons.is_empty() {
            set_sequences(context, control, source, &published, wanted)?;
            snapshot.release(source)?;
            return Ok(published);
        }
        for reason in &reasons {
            tracing::info!(
                event = "table_copy_repeated",
                reason = reason.message,
                "table is copied again under another snapshot"
            );
        }
        snapshot.release(source)?;
    }
    let last = reasons.into_iter().next();
    Err(last.unwrap_or_else(|| Failure::internal("nothing was left to copy")).hint(
        "The publisher's tables change again and again while they are copied. What is copied so far \
         stays: start pgapace again when they do not.",
    ))
}

/// The values of now, not of the snapshot: sequences know no transactions.
fn set_sequences(
    context: SyncContext<'_>,
    control: &mut Session,
    source: &mut Session,
    published: &[PublishedTable],
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<()> {
    let tables: Vec<_> = published.iter().filter(|table| wanted(table)).cloned().collect();
    let chosen = if context.joins { Chosen::OfTables } else { Chosen::All };
    let sessions = [source.cancel_handle(), control.cancel_handle()];
    let report = interruptible(context.shutdown, &sessions, "table sync", || {
        let found = sequences::read(source, context.publications, &tables, chosen)?;
        sequences::set(control, &found, &SetOptions::default())
    })?;
    report.log();
    Ok(())
}

/// Published tables that are to be copied, with what is recorded of them.
fn pending(
    control: &mut Session,
    context: SyncContext<'_>,
    published: &[PublishedTable],
    wanted: &dyn Fn(&PublishedTable) -> bool,
) -> Result<Vec<(PublishedTable, Option<RelationState>)>> {
    let mut states = state::relations_by_name(control, context.id)?;
    let pending = published.iter().filter(|table| wanted(table)).filter_map(|table| {
        let state = states.remove(&table.key());
        let is_to_copy = state.as_ref().is_none_or(|state| state.state.is_to_copy());
        is_to_copy.then(|| (table.clone(), state))
    });
    Ok(pending.collect())
}

fn copy_pending(
    context: SyncContext<'_>,
    control: &mut Session,
    source: &mut Session,
    snapshot: &Snapshot,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
) -> Result<Vec<Failure>> {
    if pending.is_empty() {
        return Ok(Vec::new());
    }
    let (published, subscribers) = if context.joins {
        only_possible(control, context, pending)?
    } else {
        all(control, context, pending)?
    };
    if published.is_empty() {
        return Ok(Vec::new());
    }
    let mut empty_now = vec![true; subscribers.len()];
    match context.options.filled {
        Filled::Refuse => {}
        // All of such a table in one transaction: what is left of a part could not be told from
        // the rows that are to be kept.
        Filled::Keep => {
            subscriber_tables::filled(control, &subscribers)?
                .into_iter()
                .for_each(|i| empty_now[i] = false);
        }
    }
    let tables = published.into_iter().zip(subscribers).collect();
    let mut items =
        plan::items(source, tables, context.options.binary, Servers::of(source, control))?;
    if context.indexes_after {
        indexes::choose(control, context.id, &mut items, |index| empty_now[index])?;
    }
    for (item, _) in items.iter_mut().zip(empty_now).filter(|(_, empty)| *empty) {
        item.split(context.options.split_size);
    }
    let copy_pool::Ended { again, failed } =
        copy_pool::copy(context, control, source, snapshot, items)?;
    block(control, context.owner(), &failed, None)?;
    Ok(again)
}

/// Whether an earlier copy has left rows in it, which are removed first.
fn partly(state: &Option<RelationState>) -> bool {
    state.as_ref().is_some_and(RelationState::is_partly_copied)
}

/// The tables, if all of them can be copied. Rows of an earlier copy are removed.
fn all(
    control: &mut Session,
    context: SyncContext<'_>,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
) -> Result<(Vec<PublishedTable>, Vec<SubscriberTable>)> {
    let (published, states): (Vec<_>, Vec<_>) = pending.into_iter().unzip();
    let subscribers = subscriber_tables::fitting(control, &published)?;
    let left: Vec<_> = (0..published.len()).filter(|index| partly(&states[*index])).collect();
    if !left.is_empty() {
        let tables: Vec<_> =
            left.iter().map(|index| (&subscribers[*index], states[*index].as_ref())).collect();
        emptying::empty(control, context.owner(), &tables)?;
    }
    if context.options.filled == Filled::Refuse {
        refuse_filled(control, &subscribers)?;
    }
    Ok((published, subscribers))
}

/// The same for those that can be copied; the others are blocked.
fn only_possible(
    control: &mut Session,
    context: SyncContext<'_>,
    pending: Vec<(PublishedTable, Option<RelationState>)>,
) -> Result<(Vec<PublishedTable>, Vec<SubscriberTable>)> {
    let owner = context.owner();
    let refuse = context.options.filled == Filled::Refuse;
    let emptied: FxHashMap<_, _> = pending
        .iter()
        .filter(|(_, state)| partly(state))
        .filter_map(|(table, state)| Some((table.key(), state.clone()?)))
        .collect();
    let tables: Vec<_> = pending.into_iter().map(|(table, _)| table).collect();
    let found = subscriber_tables::fit(control, &tables, |table| {
        refuse && !emptied.contains_key(&table.key())
    })?;
    let (mut published, mut subscribers, mut blocked) = (Vec::new(), Vec::new(), Vec::new());
    for (table, found) in tables.into_iter().zip(found) {
        let subscriber = match (found, emptied.get(&table.key())) {
            (Err(obstacle), _) => Err(obstacle.failure(&table)),
            (Ok(subscriber), Some(state)) => {
                match emptying::empty(control, owner, &[(&subscriber, Some(state))]) {
                    Err(failure) if failure.transient => return Err(failure),
                    emptied => emptied.map(|()| subscriber),
                }
            }
            (Ok(subscriber), None) => Ok(subscriber),
        };
        match subscriber {
            Ok(subscriber) => {
                published.push(table);
                subscribers.push(subscriber);
            }
            Err(failure) => blocked.push((table.key(), failure)),
        }
    }
    block(control, owner, &blocked, None)?;
    Ok((published, subscribers))
}

/// Blocks tables, and says so. `lacks_from` is where their changes begin, if no copy is to follow.
fn block(
    control: &mut Session,
    owner: Owner,
    tables: &[(Name, Failure)],
    lacks_from: Option<Lsn>,
) -> Result<()> {
    let until = if lacks_from.is_some() { "pgapace resync" } else { "its obstacle is gone" };
    for ((schema, name), failure) in tables {
        table_state::block(control, owner, (schema, name), &failure.to_string(), lacks_from)?;
        tracing::warn!(
            event = "table_blocked",
            table = format!("{schema}.{name}"),
            sqlstate = failure.sqlstate,
            until,
            error = %failure,
            "table cannot be copied; other tables continue"
        );
    }
    Ok(())
}

/// Forgets tables that are not published any more. Should one be published again, what was written
/// in between is not in the stream: it is then a table that was added, and has to be copied.
///
/// Within one run this cannot be seen; it is looked at when a run starts.
pub(crate) fn forget_unpublished(
    control: &mut Session,
    id: SubscriptionId,
    published: &[PublishedTable],
) -> Result<()> {
    let mut states = state::relations_by_name(control, id)?;
    for table in published {
        states.remove(&table.key());
    }
    for relation in states.into_values() {
        tracing::warn!(
            event = "table_unpublished",
            table = format!("{}.{}", relation.schema, relation.name),
            "table is no longer published and was removed from the subscription"
        );
        state::forget_relation(control, id, &relation.schema, &relation.name)?;
    }
    Ok(())
}
