//! Publications of a database that carry its schema pgapace to others. pgapace leaves that schema out when it reads a
//! publication. A native subscription fails at its tables, which it does not have.

use wire::{Rows, Session};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;

/// Publications that carry schema pgapace, or will once it exists, and slots by which native subscriptions may read them.
#[derive(Debug)]
pub(crate) struct Exposed {
    publications: Vec<String>,
    slots: Vec<String>,
}

impl Exposed {
    pub(crate) fn message(&self) -> String {
        format!(
            "schema pgapace is part of publication {}. pgapace leaves it out; a native subscription that reads this \
             publication fails at the first of its tables, and its slot retains WAL (slots of this database: {})",
            self.publications.join(", "),
            self.slots.join(", ")
        )
    }

    /// The next step.
    pub(crate) fn hint(&self) -> &'static str {
        "have native subscriptions read a publication with a list of tables, or FOR TABLES IN SCHEMA from 15 on, \
         or FOR ALL TABLES EXCEPT those of schema pgapace from 19 on"
    }
}

/// Finds the publications and slots of this database. Slots of pgapace's subscriptions, which schema pgapace in `other`
/// lists, are left out.
pub(crate) fn find(session: &mut Session, other: &mut Session) -> Result<Option<Exposed>> {
    let publications = names(session, &publications_sql(session))?;
    if publications.is_empty() {
        return Ok(None);
    }
    let mut slots = names(
        session,
        "SELECT slot_name FROM pg_catalog.pg_replication_slots WHERE plugin = 'pgoutput' \
           AND database = pg_catalog.current_database() AND NOT temporary ORDER BY 1",
    )?;
    if !slots.is_empty() {
        let ours = slots_of_pgapace(other)?;
        slots.retain(|slot| !ours.contains(slot));
    }
    Ok((!slots.is_empty()).then_some(Exposed { publications, slots }))
}

/// Warns of [`find`], before or after schema pgapace is created.
pub(crate) fn warn(session: &mut Session, other: &mut Session, subscription: &str) -> Result<()> {
    if let Some(exposed) = find(session, other)? {
        tracing::warn!(
            event = "own_schema_published",
            subscription,
            publications = exposed.publications.join(", "),
            slots = exposed.slots.join(", "),
            "{}",
            exposed.message()
        );
    }
    Ok(())
}

/// A publication FOR ALL TABLES has rows in pg_publication_rel for the tables that it excepts.
fn publications_sql(session: &Session) -> String {
    let by_schema = match session.server_version().major() {
        15.. => {
            "EXISTS (SELECT FROM pg_catalog.pg_publication_namespace m \
               JOIN pg_catalog.pg_namespace n ON n.oid = m.pnnspid \
               WHERE m.pnpubid = p.oid AND n.nspname = 'pgapace')"
        }
        _ => "false",
    };
    format!(
        "WITH own AS (SELECT c.oid FROM pg_catalog.pg_class c \
           JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
           WHERE n.nspname = 'pgapace' AND c.relkind = 'r') \
         SELECT pg_catalog.quote_ident(p.pubname) FROM pg_catalog.pg_publication p \
         WHERE p.puballtables AND (NOT EXISTS (SELECT FROM own) OR EXISTS (SELECT FROM own \
             WHERE own.oid NOT IN (SELECT r.prrelid FROM pg_catalog.pg_publication_rel r \
               WHERE r.prpubid = p.oid))) \
           OR {by_schema} \
         ORDER BY 1"
    )
}

/// The slots of the subscriptions in schema pgapace, as far as this role may read it.
fn slots_of_pgapace(session: &mut Session) -> Result<Vec<String>> {
    let readable = names(
        session,
        "SELECT c.relname FROM pg_catalog.pg_class c \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = 'pgapace' AND c.relname = 'subscription' \
           AND pg_catalog.has_schema_privilege(n.oid, 'USAGE') \
           AND pg_catalog.has_table_privilege(c.oid, 'SELECT')",
    )?;
    if readable.is_empty() {
        return Ok(Vec::new());
    }
    names(session, "SELECT slot_name FROM pgapace.subscription")
}

/// The first column. A session on the publisher takes only simple queries.
fn names(session: &mut Session, sql: &str) -> Result<Vec<String>> {
    let results = session
        .simple(sql)
        .map_err(|e| Failure::subscriber(&e, "looking who reads publications of schema pgapace"))?;
    results.first().into_iter().flat_map(Rows::iter).map(|row| field(&row, 0)).collect()
}
