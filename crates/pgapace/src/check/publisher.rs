//! Checks of the publisher: the requirements of a slot and its stream.

use pgoutput::Lsn;
use wire::{Session, quote_ident, quote_literal};

use crate::check::report::{Reporter, Side};
use crate::check::service::Service;
use crate::check::{
    REPLICATION, SubscriptionState, failed, genuine, one, password_expiry, publisher_settings,
    row_filters, service,
};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::{
    OLDEST_MAJOR, Publisher, SystemIdentity, identify, is_standby, system_identifier,
};
use crate::publisher::{history, recreated, slot};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, oid_array};
use crate::subscriber::state::Phase;
use crate::tablesync::rebase::or_keep;
use crate::verify::facts::HAS_NO_NULL;

const SIDE: Side = Side::Publisher;

/// Functions that sessions of pgapace call on the publisher.
const FUNCTIONS: [&str; 10] = [
    "pg_backend_pid",
    "pg_current_wal_flush_lsn",
    "pg_current_wal_insert_lsn",
    "pg_export_snapshot",
    "pg_get_publication_tables",
    "pg_logical_emit_message",
    "pg_logical_slot_peek_binary_changes",
    "pg_partition_ancestors",
    "pg_relation_size",
    "pg_stat_get_activity",
];

/// Checks the publisher. Returns the published tables, or `None` if they cannot be read.
pub(super) fn check(
    session: &mut Session,
    publisher: &Publisher,
    config: &Config,
    known: &SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Option<Vec<PublishedTable>> {
    let version = session.server_version();
    if !reporter.supports(version, OLDEST_MAJOR) {
        return None;
    }
    reporter.group("product", |reporter| genuine(session, SIDE, &FUNCTIONS, reporter));
    if config.origin_none() && version.major() < 16 {
        reporter.block(
            "origin",
            format!(
                "--origin none needs PostgreSQL 16 on the publisher: version {} sends the changes \
                 of all origins",
                version.major()
            ),
        );
    }
    if config.two_phase == Some(true) && version.major() < 15 {
        reporter.block("two_phase", "--two-phase needs PostgreSQL 15 on the publisher");
    }
    let role = reporter.group("role", |reporter| {
        password_expiry::check(session, SIDE, reporter)?;
        let sql = "SELECT pg_catalog.quote_ident(current_user::pg_catalog.text)";
        one(session, SIDE, sql, "reading its role")
    })?;
    let service = reporter.group("service", |reporter| service(session, SIDE, reporter));
    let service = service.unwrap_or_default();
    let about = (role.as_str(), service);
    reporter.group("settings", |reporter| {
        publisher_settings::check(session, config, known, about, reporter)
    });
    let system =
        reporter.group(REPLICATION, |reporter| walsender(publisher, known, about, reporter));
    let identifier = system.flatten().map(|system| system.system_identifier);
    let identifier = identifier.or_else(|| system_identifier(session));
    let is_another = known.follows_another(identifier.as_deref());
    reporter.group("slot", |reporter| check_slot(session, config, known, is_another, reporter));
    reporter.group("publication", |reporter| {
        let missing = publication::missing(session, &config.publications)?;
        for name in &missing {
            reporter
                .block("publication", format!("publication {name} does not exist"))
                .on(*name)
                .sql(format!("CREATE PUBLICATION {} FOR ALL TABLES;", quote_ident(name)));
        }
        let tables = publication::tables(session, &config.publications)?;
        if missing.is_empty() {
            let names = config.publications.join(", ");
            let count = tables.len();
            if tables.is_empty() {
                reporter.warn("publication", format!("no tables are published by {names}"));
            } else {
                reporter.ok("publication", format!("tables published by {names}: {count}"));
            }
        }
        for table in config.on_conflict.unpublished(&tables) {
            reporter
                .warn("on-conflict", format!("rule for {table}: no such table is published"))
                .on(table);
        }
        unlogged(session, config, reporter)?;
        check_tables(session, config, known, about, &tables, reporter)?;
        Ok(tables)
    })
}

/// Connects to a walsender, because managed services have rules of their own for the role. Returns the publisher's
/// identity.
fn walsender(
    publisher: &Publisher,
    known: &SubscriptionState,
    (role, service): (&str, Service),
    reporter: &mut Reporter<'_>,
) -> Result<Option<SystemIdentity>> {
    let mut walsender = match publisher.connect() {
        Ok(walsender) => walsender,
        Err(failure) if failure.sqlstate.as_deref() == Some(sqlstate::INSUFFICIENT_PRIVILEGE) => {
            reporter
                .block(REPLICATION, format!("role {role} may not replicate"))
                .fix(service.replication(role));
            return Ok(None);
        }
        // Already reported.
        Err(_) if !reporter.report.fine(&["max_wal_senders"]) => return Ok(None),
        Err(failure) => return Err(failure),
    };
    reporter.ok(REPLICATION, format!("role {role} may replicate"));
    let system = identify(&mut walsender)?;
    if let (Some(row), Some(followed)) = (&known.row, &known.followed) {
        match history::check_identified(&mut walsender, &system, row, followed) {
            Ok(()) => match &known.other_history {
                // Only a stream shows which transactions the publisher sends again.
                Some(error) => {
                    reporter.block("history", format!("the last run found another history: {error}"));
                }
                None => reporter.ok(
                    "history",
                    "system identifier, timeline and end of WAL continue the history that the subscriber \
                     followed; a run compares the transactions, too",
                ),
            },
            Err(failure) => {
                reporter.failure("history", &failure);
            }
        }
    }
    Ok(Some(system))
}

fn check_slot(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    is_another: bool,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let name = &config.slot;
    let (found, recovers) = (slot::find(session, name)?, is_standby(session)?);
    // The slot may be the one of this subscription, whose changes would be lost with it.
    let not_judged = match (known.is_read, is_another) {
        (false, _) => Some("the state of the subscription on the subscriber could not be read"),
        (true, true) => Some("the publisher is not the one that the subscription follows"),
        (true, false) => known
            .has_ended
            .then_some("a switchover has ended the subscription, which needs it no more"),
    };
    if let Some(reason) = not_judged {
        let exists = if found.is_some() { "exists" } else { "does not exist" };
        let message = format!("slot {name} {exists}. It is not judged, because {reason}");
        reporter.note("slot", message).on(name);
        return Ok(());
    }
    let literal = quote_literal(name);
    match &known.row {
        // It may exist or not: a run is refused in the same words.
        None if known.native.is_some() && (found.is_some() || !config.create_slot) => {
            if let Some(failure) = &known.native {
                reporter.failure("slot", failure).on(name);
            }
        }
        // Once its creation is recorded, the slot is never created again.
        Some(row) if row.phase != Phase::Creating => {
            // A process that runs the subscription may have gone on since its progress was read.
            let runs = known.owner.is_some()
                && found.as_ref().is_some_and(|slot| slot.active_pid.is_some());
            let applied = if runs { Lsn(u64::MAX) } else { known.applied.unwrap_or(Lsn::INVALID) };
            let same = match &known.moved {
                Some(failure) => Err(failure.like()),
                None => recreated::check(session, row, &known.publisher_database),
            };
            let checked = same.and_then(|()| {
                slot::check_resume(&row.slot_name, found.as_ref(), recovers, applied)
                    .map_err(|failure| or_keep(config, failure))
            });
            match checked {
                Ok(lsn) => reporter.ok("slot", format!("slot {name} can continue from {lsn}")),
                Err(failure) => {
                    reporter.failure("slot", &failure).on(name);
                }
            }
        }
        // An interrupted first run creates its slot again, or goes on with it.
        Some(row) if row.owns_slot => match &found {
            Some(slot) if known.owner.is_none() && !slot::is_ours(slot, row.slot_made_at) => {
                reporter.failure("slot", &slot::not_ours(name)).on(name);
            }
            Some(_) => reporter.ok("slot", format!("a run goes on with slot {name}")),
            None => reporter.ok("slot", format!("a run creates slot {name} again")),
        },
        None if config.create_slot => match &found {
            None => reporter.ok("slot", format!("slot name {name} is available")),
            Some(slot) => {
                let free = slot.active_pid.is_none();
                let message = format!(
                    "slot {name} already exists{}. Choose another name with --slot, or drop it if \
                     nothing uses it",
                    if free { "" } else { " and is in use" }
                );
                let finding = reporter.block("slot", message).on(name);
                if free {
                    finding.sql(format!("SELECT pg_catalog.pg_drop_replication_slot({literal});"));
                }
            }
        },
        _ => {
            match slot::check_resume(name, found.as_ref(), recovers, Lsn(u64::MAX)) {
                Ok(lsn) => reporter.ok("slot", format!("slot {name} starts at {lsn}")),
                Err(failure) => {
                    let finding = reporter.failure("slot", &failure).on(name);
                    if found.is_none() {
                        finding.message = format!(
                            "slot {name} does not exist, but --create-slot=false requires it"
                        );
                        finding.sql(format!(
                            "SELECT pg_catalog.pg_create_logical_replication_slot({literal}, \
                             'pgoutput');"
                        ));
                    }
                }
            };
        }
    }
    if let (Some(pid), None) = (found.and_then(|slot| slot.active_pid), &known.owner) {
        reporter
            .warn("slot", format!("slot {name} is in use by walsender {pid}; a run waits for it"))
            .on(name);
    }
    Ok(())
}

fn unlogged(session: &mut Session, config: &Config, reporter: &mut Reporter<'_>) -> Result<()> {
    let names: Vec<_> = config.publications.iter().map(|name| quote_literal(name)).collect();
    let by_schema = if session.server_version().major() >= 15 {
        format!(
            " OR c.relnamespace IN (SELECT pn.pnnspid FROM pg_catalog.pg_publication_namespace pn \
               JOIN pg_catalog.pg_publication p ON p.oid = pn.pnpubid \
               WHERE p.pubname IN ({}))",
            names.join(", ")
        )
    } else {
        String::new()
    };
    let rows = session
        .query(
            &format!(
                "SELECT c.oid::pg_catalog.regclass FROM pg_catalog.pg_class c \
                 WHERE c.relpersistence = 'u' AND c.relkind = 'r' AND c.oid >= 16384 \
                   AND (EXISTS (SELECT 1 FROM pg_catalog.pg_publication p \
                          WHERE p.puballtables AND p.pubname IN ({})){by_schema}) ORDER BY 1",
                names.join(", ")
            ),
            &[],
        )
        .map_err(|e| failed(SIDE, &e, "reading unlogged tables"))?;
    for row in rows.iter() {
        let name: String = field(&row, 0)?;
        reporter
            .note("unlogged", format!("table {name} is unlogged and therefore not published"))
            .on(name);
    }
    Ok(())
}

fn check_tables(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    (role, service): (&str, Service),
    tables: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let copied: Vec<_> = tables.iter().filter(|table| known.to_copy(config, table)).collect();
    let mut schemas: Vec<&str> = copied.iter().map(|table| table.name.schema.as_str()).collect();
    schemas.dedup();
    for schema in schemas {
        let rows = session
            .query("SELECT pg_catalog.has_schema_privilege($1, 'USAGE')", &[Some(schema)])
            .map_err(|e| failed(SIDE, &e, "reading privileges"))?;
        if rows.first().is_some_and(|row| row.get(0) == Some("f")) {
            reporter
                .block("privileges", format!("role {role} may not use schema {schema}"))
                .on(schema)
                .sql(format!("GRANT USAGE ON SCHEMA {} TO {role};", quote_ident(schema)));
        }
    }
    for table in &copied {
        let name = table.name.to_string();
        if !table.readable {
            reporter
                .block("privileges", format!("role {role} may not read table {name} to copy it"))
                .on(&name)
                .sql(format!("GRANT SELECT ON TABLE {} TO {role};", table.sql_name()));
        }
        if table.row_security {
            reporter
                .block(
                    "row_security",
                    format!("row-level security hides rows of table {name} from role {role}"),
                )
                .on(&name)
                .fix(service.bypass_row_security(role));
        }
    }
    if reporter.report.fine(&["privileges", "row_security"]) && !copied.is_empty() {
        reporter.ok("privileges", format!("tables that can be copied: {}", copied.len()));
    }
    row_filters::unsent_values(session, &config.publications, tables, reporter)?;
    let complete = identities(session, tables, reporter)?;
    if complete && !tables.is_empty() {
        reporter.ok("replica_identity", "updates and deletes can be published for every table");
    }
    Ok(())
}

/// Reports tables without a replica identity, whose updates and deletes the publisher refuses.
fn identities(
    session: &mut Session,
    tables: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<bool> {
    let tables: Vec<_> = tables.iter().filter(|table| table.updates_or_deletes).collect();
    let oids: Vec<_> = tables.iter().map(|table| table.oid).collect();
    let rows = session
        .query(
            &format!(
                "SELECT c.oid::pg_catalog.regclass, \
               (SELECT pg_catalog.quote_ident(ic.relname) FROM pg_catalog.pg_index i \
                JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid \
                WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid \
                  AND i.indpred IS NULL AND i.indexprs IS NULL \
                  AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_attribute a \
                    WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey) AND NOT {HAS_NO_NULL}) \
                ORDER BY i.indisprimary DESC, ic.relname LIMIT 1), w.ord, c.relkind = 'p' \
             FROM pg_catalog.unnest($1::pg_catalog.oid[]) WITH ORDINALITY AS w (oid, ord) \
             CROSS JOIN LATERAL (SELECT w.oid AS relid \
                   UNION SELECT relid FROM pg_catalog.pg_partition_tree(w.oid::pg_catalog.regclass)) tree \
             CROSS JOIN LATERAL (SELECT * FROM pg_catalog.pg_class c WHERE c.oid = tree.relid OFFSET 0) c \
             WHERE (c.relkind = 'r' OR c.relkind = 'p' AND c.oid = w.oid) AND c.relreplident <> 'f' \
               AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid \
                 AND CASE c.relreplident WHEN 'i' THEN i.indisreplident \
                     WHEN 'd' THEN i.indisprimary AND i.indimmediate ELSE false END) \
             ORDER BY w.ord, 1"
            ),
            &[Some(&oid_array(&oids))],
        )
        .map_err(|e| failed(SIDE, &e, "reading replica identities"))?;
    for row in rows.iter() {
        let name: String = field(&row, 0)?;
        let identity = match row.get(1) {
            Some(index) => format!("USING INDEX {index}"),
            None => "FULL".to_owned(),
        };
        let ord: usize = field(&row, 2)?;
        let table = tables[ord - 1].name.to_string();
        // The publisher looks at the identity of the partition, and sends that of the table which is published.
        let consequence = match boolean(&row, 3)? {
            true => "the first one of a partition that has one stops the subscription",
            false => "the publisher refuses them",
        };
        reporter
            .warn(
                "replica_identity",
                format!(
                    "table {name} has no replica identity: because its updates and deletes are \
                     published, {consequence}. Add a primary key, or set a replica identity"
                ),
            )
            .on(table)
            .sql(format!("ALTER TABLE {name} REPLICA IDENTITY {identity};"));
    }
    Ok(rows.is_empty())
}
