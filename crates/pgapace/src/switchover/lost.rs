//! Traces of a switchover whose record on the subscriber is lost: the subscriber was restored to an earlier state, or a
//! standby of it that lacks the record was promoted.

use wire::{Session, quote_literal};

use super::procedure::Sides;
use super::publisher::{database_setting, is_on};
use super::{back, record, servers};
use crate::error::{Class, Failure, Result};
use crate::publisher::session::{CURRENT_LSN, system_identifier};
use crate::publisher::{recreated, slot};
use crate::subscriber::catalogue::field;
use crate::subscriber::state::{Subscription, privileges, published, schema};

/// The publisher's database is read-only by its setting, and no recorded switchover explains it.
pub(crate) struct ReadOnly {
    database: String,
}

impl ReadOnly {
    /// Looks for it. An administrator may have made the setting.
    pub(crate) fn find(
        control: &mut Session,
        source: &mut Session,
        row: &Subscription,
    ) -> Result<Option<Self>> {
        let (database, value) = database_setting(source)?;
        if !value.as_deref().is_some_and(is_on) || schema::version(control)? < schema::newest() {
            return Ok(None);
        }
        // A `--back` whose last steps are left has its record on the publisher.
        let explained = record::read(control, row.id)?.is_some()
            || !servers::switched_over(control, source, row, "true")?.is_empty()
            || back::returned(source, &row.name)?.is_some_and(|returned| !returned.opened);
        Ok((!explained).then_some(Self { database }))
    }

    fn sql(&self) -> String {
        format!("ALTER DATABASE {} RESET default_transaction_read_only;", self.database)
    }

    /// One line with its next step.
    pub(crate) fn line(&self) -> String {
        format!(
            "the publisher's database is read-only by its setting, which a switchover whose record is lost may have \
             left: if applications write there, on the publisher: {}",
            self.sql()
        )
    }

    fn failure(&self) -> Failure {
        Failure::new(
            Class::Config,
            "no switchover is recorded, but the publisher's database is read-only by its setting",
        )
        .detail(
            "A switchover whose record is lost may have left the setting, or an administrator has made it.",
        )
        .hint(format!("To let applications write on the publisher, there: {}", self.sql()))
    }
}

/// Refuses to say that no switchover was begun if there are traces of one.
pub(crate) fn refuse(sides: &mut Sides<'_>) -> Result<()> {
    let Sides { control, source, row, .. } = sides;
    if record::read(control, row.id)?.is_some() {
        return Ok(());
    }
    if slot::find(source, &row.slot_name)?.is_none() {
        check_not_moved(control, source, row)?;
    }
    match ReadOnly::find(control, source, row)? {
        Some(found) => Err(found.failure()),
        None => Ok(()),
    }
}

/// Refuses what [`check_not_moved`] refuses, and a publisher's database that was created again: for both, a rebase would
/// delete rows that only this database has. It is for a publisher that does not have the slot of the subscription.
pub(crate) fn check_without_slot(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
) -> Result<()> {
    recreated::check(source, row, &published::read(control, row.id)?.database())?;
    check_not_moved(control, source, row)
}

/// Refuses to follow a publisher without the slot of the subscription if the publisher itself has followed this
/// server: a subscription of pgapace there has recorded its system identifier, and its slot is gone here. Applications
/// may write here, and a rebase would delete their rows.
pub(crate) fn check_not_moved(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
) -> Result<()> {
    let Some(system) = system_identifier(control) else { return Ok(()) };
    for (name, slot, applied) in following(source, &system)? {
        let sql = format!(
            "SELECT {CURRENT_LSN}, EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {})",
            quote_literal(&slot)
        );
        let results = control
            .simple(&sql)
            .map_err(|e| Failure::subscriber(&e, "looking for the slot of the way back"))?;
        let Some(found) = results.first().and_then(wire::Rows::first) else { continue };
        // It is of another database of this server, or goes on.
        if found.get(1) == Some("t") {
            continue;
        }
        let (database, value) = database_setting(source)?;
        let open = match value.as_deref().is_some_and(is_on) {
            true => format!(
                ", and on the publisher ALTER DATABASE {database} RESET default_transaction_read_only; set its \
                 sequences beyond its rows, too."
            ),
            false => ".".to_owned(),
        };
        let shop = &row.name;
        let publications = row.publications.join(",");
        return Err(Failure::new(
            Class::History,
            format!(
                "slot \"{}\" does not exist on the publisher, where subscription {name} has followed this server \
                 up to {applied}",
                row.slot_name
            ),
        )
        .detail(format!(
            "Slot \"{slot}\" of {name} does not exist here, and the WAL of this server ends at {}. Probably a \
             switchover moved writes to this database, which was restored to an earlier state then. A rebase would \
             delete what applications have written here since.",
            found.get(0).unwrap_or("?")
        ))
        .hint(format!(
            "Stop applications, and decide which side is right. First: pgapace drop --keep-slot --name {shop}, and \
             pgapace drop --keep-slot --name {name} with the servers swapped. If the publisher is right: pgapace run \
             --if-not-empty rebase --name {shop} --publication {publications}{open} If this database is right: pgapace \
             run --if-not-empty rebase --name {name} with the servers swapped and the publication of this database."
        )));
    }
    Ok(())
}

/// The subscriptions of the publisher's database that follow this system, and that no switchover has ended: name, slot,
/// and the highest LSN that was applied. The session may be a walsender's.
fn following(source: &mut Session, system: &str) -> Result<Vec<(String, String, String)>> {
    let reading = |e: &wire::Error| Failure::publisher(e, "reading its subscriptions");
    let readable = privileges::readable_sql(
        &["subscription", "progress", "switchover"],
        "has_table_privilege",
    );
    if source.simple(&readable).map_err(|e| reading(&e))?.iter().flatten().count() == 0 {
        return Ok(Vec::new());
    }
    let sql = format!(
        "SELECT s.name, s.slot_name, coalesce((SELECT pg_catalog.max(p.lsn) FROM pgapace.progress p \
             WHERE p.subscription = s.id), '0/0') \
         FROM pgapace.subscription s WHERE s.system_identifier = {} \
           AND NOT EXISTS (SELECT FROM pgapace.switchover w \
             WHERE w.subscription = s.id AND w.step IN ('ended', 'opened')) \
         ORDER BY s.name",
        quote_literal(system)
    );
    let results = source.simple(&sql).map_err(|e| reading(&e))?;
    let rows = results.iter().flatten();
    rows.map(|row| Ok((field(&row, 0)?, field(&row, 1)?, field(&row, 2)?))).collect()
}
