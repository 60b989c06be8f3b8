//! Which published tables fit those of the subscriber, so that they can be copied or applied.

use wire::Session;

use crate::config::IfNotEmpty;
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::state::RelationsByName;
use crate::tablesync::emptying::{self, Emptied, TruncateDecision};
use crate::tablesync::subscriber_tables::{self, Obstacle, SubscriberTable};

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
pub(super) fn leave_out_new(
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

pub(super) fn refuse_filled(
    session: &mut Session,
    subscription: &str,
    subscribers: &[SubscriberTable],
) -> Result<()> {
    let filled = subscriber_tables::filled(session, subscribers)?;
    let filled: Vec<_> = filled.iter().map(|index| &subscribers[*index]).collect();
    emptying::refuse(session, subscription, &filled, false)
}
