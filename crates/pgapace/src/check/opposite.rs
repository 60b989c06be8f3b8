//! A subscription in the opposite direction: without origin = none on both sides, changes echo.
//!
//! It is recognized by its slot: a subscription on the publisher names a logical slot that exists in the
//! subscriber's database. The connection strings of subscriptions are not readable for every role. One of pgapace that has
//! recorded another publisher is none: its slot has the same name by chance, as in a cascade with one name for each hop.

use std::collections::HashSet;

use engine::table_name::TableName;
use wire::Session;

use crate::check::report::{Reporter, Side};
use crate::check::{failed, one};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::publisher::recorded::RecordedPublisher;
use crate::standby_names;
use crate::subscriber::catalogue::{boolean, field, parse_name_array};
use crate::subscriber::state::privileges;

/// A subscription on the publisher.
#[derive(Debug, PartialEq, Eq)]
struct Opposite {
    name: String,
    slot: String,
    origin_none: bool,
    by_pgapace: bool,
    /// A switchover has ended it.
    ended: bool,
    /// The tables that it changes, as `schema.table`.
    tables: Vec<String>,
    /// Where it reads from, as far as that is recorded.
    reads_from: RecordedPublisher,
}

pub(super) fn check(
    publisher: &mut Session,
    subscriber: &mut Session,
    config: &Config,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    for opposite in facing(publisher, subscriber)? {
        standbys((publisher, subscriber), config, &opposite, reporter)?;
        let common =
            published.iter().filter(|table| opposite.tables.contains(&table.name.to_string()));
        let common = common.count();
        match echo(config.origin_none(), &opposite, common) {
            Some(message) => {
                let finding = reporter.warn("opposite", message);
                if !opposite.origin_none && !opposite.by_pgapace {
                    let name = wire::quote_ident(&opposite.name);
                    finding.sql(format!(
                        "ALTER SUBSCRIPTION {name} SET (origin = none); -- on the publisher"
                    ));
                }
            }
            None => reporter.ok(
                "opposite",
                format!(
                    "subscription {} in the opposite direction sends nothing back",
                    opposite.name
                ),
            ),
        }
    }
    Ok(())
}

/// Warns if commits of both servers may wait for each other: each names the subscription that reads from it, and flushes
/// on the subscriber wait, because the setting there has other names too.
fn standbys(
    (publisher, subscriber): (&mut Session, &mut Session),
    config: &Config,
    opposite: &Opposite,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let sql = "SELECT pg_catalog.current_setting('synchronous_standby_names')";
    let doing = "reading synchronous_standby_names";
    let there = one(publisher, Side::Publisher, sql, doing)?;
    let here = one(subscriber, Side::Subscriber, sql, doing)?;
    let is_circle = opposite.by_pgapace
        && !opposite.ended
        && standby_names::names(&there, &config.name)
        && standby_names::may_be_awaited(&here, &opposite.name);
    if is_circle {
        let name = &opposite.name;
        reporter.warn(
            "opposite",
            format!(
                "commits of both servers may wait for each other for ever: synchronous_standby_names of the publisher names \
                 {}, and that of the subscriber {name} with other standbys. Name {name} alone, or behind standbys \
                 enough to answer without it",
                config.name
            ),
        );
    }
    Ok(())
}

/// Warns that rows of these tables are made equal to the publisher's while a subscription in the opposite
/// direction may have changes of them under way.
pub(crate) fn warn(
    publisher: &mut Session,
    subscriber: &mut Session,
    tables: &[TableName],
) -> Result<()> {
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    for opposite in facing(publisher, subscriber)? {
        let common = names.iter().filter(|name| opposite.tables.contains(name)).count();
        if common > 0 {
            tracing::warn!(
                event = "opposite_direction",
                opposite = opposite.name,
                tables = common,
                "a subscription in the opposite direction changes these tables: changes that it has not yet \
                 applied on the publisher are overwritten here, and the servers differ once it applies them"
            );
        }
    }
    Ok(())
}

/// The subscriptions of pgapace in the opposite direction that no switchover has ended, each with how many of these
/// tables it changes, unless there are none.
pub(crate) fn applied(
    publisher: &mut Session,
    subscriber: &mut Session,
    tables: &HashSet<TableName>,
) -> Result<Vec<(String, usize)>> {
    let names: Vec<_> = tables.iter().map(TableName::to_string).collect();
    let mut found = facing(publisher, subscriber)?;
    found.retain(|opposite| opposite.by_pgapace && !opposite.ended);
    let with_common = found.into_iter().map(|opposite| {
        let common = names.iter().filter(|name| opposite.tables.contains(name)).count();
        (opposite.name, common)
    });
    Ok(with_common.filter(|(_, common)| *common > 0).collect())
}

/// The first subscription in the opposite direction.
pub(crate) fn first(publisher: &mut Session, subscriber: &mut Session) -> Result<Option<String>> {
    Ok(facing(publisher, subscriber)?.into_iter().next().map(|opposite| opposite.name))
}

/// The subscriptions of the publisher's database whose slot is in the subscriber's. Only one that is known to read from
/// another database is left out.
fn facing(publisher: &mut Session, subscriber: &mut Session) -> Result<Vec<Opposite>> {
    let slots = subscriber
        .query(
            "SELECT slot_name FROM pg_catalog.pg_replication_slots \
             WHERE slot_type = 'logical' AND database = pg_catalog.current_database()",
            &[],
        )
        .map_err(|e| failed(Side::Subscriber, &e, "reading its replication slots"))?;
    let slots: Vec<String> = slots.iter().map(|row| field(&row, 0)).collect::<Result<_>>()?;
    if slots.is_empty() {
        return Ok(Vec::new());
    }
    let mut found = read(publisher)?;
    let own = RecordedPublisher::of(subscriber, |e| {
        failed(Side::Subscriber, e, "reading the identity of the database")
    })?;
    found.retain(|opposite| {
        slots.contains(&opposite.slot) && opposite.reads_from.is(&own) != Some(false)
    });
    Ok(found)
}

/// The warning about changes that return to their origin; `None` if none do.
fn echo(origin_none: bool, opposite: &Opposite, common: usize) -> Option<String> {
    if common == 0 || (origin_none && opposite.origin_none) {
        return None;
    }
    let Opposite { name, .. } = opposite;
    let both = format!(
        "subscription {name} of the publisher applies changes of {common} of these tables in the opposite \
         direction"
    );
    Some(match (origin_none, opposite.origin_none) {
        (false, false) => format!(
            "{both}, and both have origin = any: each change comes back, and conflicts or is applied again \
             without end. Both need origin = none (here --origin none)"
        ),
        (false, true) => {
            format!("{both}: what it applies to the publisher comes back here. Pass --origin none")
        }
        (true, _) => format!(
            "{both} with origin = any: what pgapace applies here goes back to the publisher. It needs \
             origin = none"
        ),
    })
}

/// The subscriptions of the publisher's database that this role can see. The session may be a walsender's.
fn read(publisher: &mut Session) -> Result<Vec<Opposite>> {
    let reading = |e: &wire::Error| failed(Side::Publisher, e, "reading its subscriptions");
    let origin =
        if publisher.server_version().major() >= 16 { "s.suborigin = 'none'" } else { "false" };
    let native = format!(
        "SELECT s.subname, s.subslotname, {origin}, false, false, \
           coalesce((SELECT pg_catalog.array_agg(n.nspname || '.' || c.relname) \
             FROM pg_catalog.pg_subscription_rel r JOIN pg_catalog.pg_class c ON c.oid = r.srrelid \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE r.srsubid = s.oid), '{{}}'), NULL, NULL \
         FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid \
         WHERE d.datname = pg_catalog.current_database() AND s.subslotname IS NOT NULL"
    );
    let tables = ["subscription", "relation", "switchover"];
    let readable = publisher
        .simple(&privileges::readable_sql(&tables, "has_any_column_privilege"))
        .map_err(|e| reading(&e))?;
    let ours = format!(
        "SELECT s.name, s.slot_name, coalesce(s.sent_as LIKE '%origin none', false), true, \
           EXISTS (SELECT FROM pgapace.switchover w \
             WHERE w.subscription = s.id AND w.step IN ('ended', 'opened')), \
           coalesce((SELECT pg_catalog.array_agg(r.schema_name || '.' || r.table_name) \
             FROM pgapace.relation r WHERE r.subscription = s.id), '{{}}'), {} \
         FROM pgapace.subscription s",
        RecordedPublisher::COLUMNS
    );
    let mut found = Vec::new();
    for sql in std::iter::once(native.as_str())
        .chain((readable.iter().flatten().count() > 0).then_some(ours.as_str()))
    {
        for row in publisher.simple(sql).map_err(|e| reading(&e))?.iter().flatten() {
            found.push(Opposite {
                name: field(&row, 0)?,
                slot: field(&row, 1)?,
                origin_none: boolean(&row, 2)?,
                by_pgapace: boolean(&row, 3)?,
                ended: boolean(&row, 4)?,
                tables: parse_name_array(&field::<String>(&row, 5)?)?,
                reads_from: RecordedPublisher::read(&row, 6)?,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{Opposite, echo};
    use crate::publisher::recorded::RecordedPublisher;

    fn opposite(origin_none: bool) -> Opposite {
        Opposite {
            name: "back".to_owned(),
            slot: "back".to_owned(),
            origin_none,
            by_pgapace: false,
            ended: false,
            tables: Vec::new(),
            reads_from: RecordedPublisher::default(),
        }
    }

    #[test]
    fn only_origin_none_on_both_sides_is_silent() {
        assert_eq!(echo(true, &opposite(true), 3), None);
        assert_eq!(echo(false, &opposite(false), 0), None);
        let said = |here, there| echo(here, &opposite(there), 3).unwrap_or_default();
        assert!(said(false, false).contains("without end"));
        assert!(said(false, true).contains("--origin none"));
        assert!(said(true, false).contains("goes back"));
    }
}
