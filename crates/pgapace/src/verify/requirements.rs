//! Requirements of a comparison: servers, tables and publications.

use std::collections::HashMap;

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::citus;
use crate::subscriber::other_subscriptions;
use crate::subscriber::state::{self, Phase, RelationState, Subscription, ownership};
use crate::verify::facts;
use crate::verify::plan::TablePlan;
use crate::verify::prepare::{Problem, Scope};
use crate::verify::sql::{TableSql, probe};

pub(crate) fn check_primary(publisher: &mut Session) -> Result<()> {
    let theirs = publisher
        .simple("SELECT pg_catalog.pg_is_in_recovery()")
        .map_err(|e| Failure::publisher(&e, "asking whether it is a standby"))?;
    if boolean(&first_row(&theirs, "pg_is_in_recovery")?, 0)? {
        return Err(Failure::new(Class::Publisher, "the publisher is a standby")
            .hint("A snapshot with an LSN needs a slot on the primary: connect to that."));
    }
    Ok(())
}

pub(super) fn check_hashes(publisher: &mut Session, subscriber: &mut Session) -> Result<()> {
    let theirs =
        publisher.simple(&probe()).map_err(|e| Failure::publisher(&e, "asking for a hash"))?;
    let ours =
        subscriber.simple(&probe()).map_err(|e| Failure::subscriber(&e, "asking for a hash"))?;
    let (theirs, ours) = (first_row(&theirs, "a hash")?, first_row(&ours, "a hash")?);
    if (0..theirs.len()).any(|column| theirs.get(column) != ours.get(column)) {
        return Err(Failure::new(
            Class::Mismatch,
            "the hash functions return different hashes on the two servers",
        )
        .hint("Machines of different byte order cannot be compared by hashes."));
    }
    Ok(())
}

/// Tables whose rows are in shards: no snapshot of the coordinator shows all of them at one LSN.
pub(crate) fn managed_by_citus(
    subscriber: &mut Session,
    published: &[PublishedTable],
) -> Result<Vec<Problem>> {
    if !citus::is_present(subscriber)? {
        return Ok(Vec::new());
    }
    let placements = citus::placements(subscriber)?;
    let managed = published.iter().filter(|table| placements.contains_key(&table.name));
    let problem = |table: &PublishedTable| {
        let name = table.name.to_string();
        Problem::new(
            format!("subscriber table {name} is managed by Citus and cannot be compared"),
            "Name the other tables with --table.",
        )
    };
    Ok(managed.map(problem).collect())
}

/// Tables that another subscription changes too: its rows differ from the publisher's.
pub(crate) fn shared(
    subscriber: &mut Session,
    name: &str,
    published: &[PublishedTable],
) -> Result<Vec<Problem>> {
    let keys: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
    let others = other_subscriptions::read(subscriber, name, &keys)?;
    let problem = |(place, others): (usize, String)| {
        let table = published[place].name.to_string();
        Problem::new(
            format!("table {table} is changed by {others}, too"),
            "Name the other tables with --table",
        )
    };
    Ok(others.into_iter().map(problem).collect())
}

/// Names of the user that mean nothing.
pub(super) fn check_names(published: &[PublishedTable], scope: &Scope) -> Result<()> {
    let find = |name: &TableName| published.iter().find(|table| table.name == *name);
    if let Some(name) = scope.tables.iter().find(|key| find(key).is_none()) {
        return Err(not_published(name));
    }
    for (key, column) in &scope.except {
        let known =
            find(key).is_some_and(|table| table.columns.iter().any(|one| one.name == *column));
        if !known {
            return Err(Failure::new(
                Class::Config,
                format!("--except-column: no published column {key}.{column}"),
            )
            .hint("Write TABLE.COLUMN, with the schema before it unless it is public."));
        }
    }
    if published.is_empty() {
        return Err(Failure::new(Class::Mismatch, "the publications have no tables"));
    }
    Ok(())
}

/// The failure for a table that the user has named.
pub(crate) fn not_published(name: &TableName) -> Failure {
    Failure::new(Class::Mismatch, format!("the publications have no table {name}"))
        .hint("A table is published under its own name, or under that of its root.")
}

/// Refuses tables that are not ready, as the session's snapshot shows them.
pub(crate) fn check_ready(
    subscriber: &mut Session,
    row: &Subscription,
    tables: &[TableName],
) -> Result<()> {
    let states = state::relations_by_name(subscriber, row.id)?;
    for name in tables {
        let refused = match states.get(name) {
            None => Problem::new(
                format!("table {name} was taken out of the subscription"),
                "Leave it out: name the other tables with --table",
            ),
            Some(state) => match state.state {
                TableSyncState::Ready => continue,
                TableSyncState::Blocked => blocked(state),
                TableSyncState::Init | TableSyncState::DataSync | TableSyncState::CatchUp => {
                    Problem::new(format!("table {name} is copied again"), WAIT)
                }
            },
        };
        return Err(refused.failure());
    }
    Ok(())
}

/// The next step for a table that is copied, or catches up.
const WAIT: &str = "Wait until pgapace status shows it as ready";
/// The same if no process runs the subscription.
const START: &str = "No process runs the subscription: start pgapace run, and wait until pgapace status shows it as \
                     ready";
/// The same after a rebase that was interrupted.
const REBASE: &str =
    "A rebase was interrupted: start pgapace rebase again, or pgapace run, which completes it";

/// The reason without the hint that it may have, as the text of a failure, and the hint before the next step.
fn with_hint(reason: &str, next: String) -> (&str, String) {
    match reason.split_once("\nHINT:  ") {
        Some((reason, hint)) => (reason, format!("{} {next}", ended(hint))),
        None => (reason, next),
    }
}

/// The sentence with its full stop.
fn ended(sentence: &str) -> String {
    match sentence.ends_with(['.', ';']) {
        true => sentence.to_owned(),
        false => format!("{sentence}."),
    }
}

/// A blocked table does not become ready by waiting.
fn blocked(state: &RelationState) -> Problem {
    let name = state.name.to_string();
    let reason = state.reason.as_deref().unwrap_or("pgapace status shows why");
    let next = if state.copy_wanted {
        format!("pgapace copies it when the cause is gone; pgapace resync {name} requests that now")
    } else {
        format!("When the cause is gone, pgapace resync {name} empties it and copies it again")
    };
    let (reason, next) = with_hint(reason, next);
    Problem::new(format!("table {name} is blocked: {reason}"), next)
}

/// Tables whose rows are not yet those of the publisher.
pub(crate) fn not_ready<'t>(
    subscriber: &mut Session,
    row: &Subscription,
    published: impl Iterator<Item = &'t PublishedTable>,
) -> Result<Vec<Problem>> {
    let states = state::relations_by_name(subscriber, row.id)?;
    let runs = ownership::owner(subscriber, row.id)?.is_some();
    let next = match (runs, row.rebasing) {
        (true, _) => WAIT,
        (false, true) => REBASE,
        (false, false) => START,
    };
    let problem = |table: &PublishedTable| {
        let name = table.name.to_string();
        let Some(state) = states.get(&table.name) else {
            // The first tables are recorded one after the other.
            let added = row.phase == Phase::Streaming;
            return Some(Problem::new(
                format!("table {name} is not part of the subscription yet"),
                if added { "pgapace refresh adds it" } else { next },
            ));
        };
        let state = match (state.state, &state.requested) {
            (TableSyncState::Ready, None) => return None,
            (TableSyncState::Blocked, None) => return Some(blocked(state)),
            (TableSyncState::Ready | TableSyncState::Blocked, Some(_)) => {
                "waits for another copy (resync)".to_owned()
            }
            (state, _) => format!("is in state {}", state.name()),
        };
        Some(Problem::new(format!("table {name} {state}"), next))
    };
    Ok(published.filter_map(problem).collect())
}

/// Tables of which some changes are not published.
pub(crate) fn not_all_published(
    publisher: &mut Session,
    publications: &[String],
    published: &[PublishedTable],
) -> Result<Vec<Problem>> {
    let names: Vec<_> = publications.iter().map(|name| quote_literal(name)).collect();
    let sql = format!(
        "SELECT t.schemaname, t.tablename, pg_catalog.bool_or(p.pubinsert), \
           pg_catalog.bool_or(p.pubupdate), pg_catalog.bool_or(p.pubdelete), \
           pg_catalog.string_agg(p.pubname, ', ' ORDER BY p.pubname) \
         FROM pg_catalog.pg_publication p \
         JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname \
         WHERE p.pubname IN ({}) GROUP BY 1, 2",
        names.join(", ")
    );
    let results =
        publisher.simple(&sql).map_err(|e| Failure::publisher(&e, "reading the publications"))?;
    let mut actions = HashMap::new();
    for row in results.iter().flatten() {
        let key = TableName { schema: field(&row, 0)?, name: field(&row, 1)? };
        let all = [boolean(&row, 2)?, boolean(&row, 3)?, boolean(&row, 4)?];
        let lacks: Vec<_> = ["insert", "update", "delete"]
            .into_iter()
            .zip(all)
            .filter_map(|(name, published)| (!published).then_some(name))
            .collect();
        actions.insert(key, (lacks.join(", "), field::<String>(&row, 5)?));
    }
    let problem = |table: &PublishedTable| {
        let (lacks, publications) = actions.get(&table.name)?;
        let first = publications.split(", ").next().unwrap_or_default();
        (!lacks.is_empty()).then(|| {
            Problem::new(
                format!(
                    "publication {publications} does not publish {lacks} of table {}, so that its rows \
                     differ",
                    table.name
                ),
                format!(
                    "ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate'), or leave \
                     the table out",
                    quote_ident(first)
                ),
            )
        })
    };
    Ok(published.iter().filter_map(problem).collect())
}

/// The syntax of `--where`, and the columns that it names.
pub(super) fn check_condition(
    session: &mut Session,
    plan: &TablePlan,
    table: &TableSql,
    explain: facts::Explain,
) -> Result<()> {
    // One statement of the extended protocol: a condition cannot begin another one.
    session.query(&table.checks_condition(), &[]).map_err(|error| {
        let mut failure = explain(&error, &format!("checking --where for {}", plan.name));
        failure.class = Class::Config;
        failure.hint("The condition must be valid for every compared table on both servers. Name tables with --table.")
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::with_hint;

    #[test]
    fn the_hint_of_a_reason_stands_before_the_next_step() {
        let next = || "pgapace copies it again".to_owned();
        for (hint, first) in [("Wait.", "Wait."), ("restart it", "restart it."), ("A;", "A;")] {
            let shown = format!("no slot\nHINT:  {hint}");
            let expected = ("no slot", format!("{first} pgapace copies it again"));
            assert_eq!(with_hint(&shown, next()), expected);
        }
        assert_eq!(with_hint("no slot", next()), ("no slot", next()));
    }
}
