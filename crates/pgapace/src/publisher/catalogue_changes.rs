//! Changes of the publisher's catalogue while a slot is created, which the slot may not know later.
//!
//! The creation of a slot with a snapshot waits for all transactions that run, and again for those that began meanwhile.
//! When the stream starts, the publisher decodes the WAL of that time once more, from the slot's restart_lsn. This time
//! it only notes transactions whose changes of the catalogue it can see, and it sees none before the first of the two
//! waits has ended (`heap2_decode` in `decode.c`). If another transaction writes between the waits, the publisher keeps a
//! snapshot of the catalogue that lacks these changes, until a later transaction changes the catalogue
//! (`SnapBuildCommitTxn` in `snapbuild.c`). A native subscription has the same flaw. A new column is then NULL in all
//! rows that are sent, and rows of a truncated table fail with "could not map filenumber".
//!
//! Such a transaction got its xid after the creation had begun, and has committed before its end: an older one ends
//! during the first wait, and is known to be committed by its xid. So its rows of the catalogue are visible under the
//! slot's snapshot, and their xmin is not below the xmax of a snapshot from before. Then the slot is dropped, and
//! created again. Most such transactions would do no harm: which ones do depends on others. A slot whose creation waits
//! for none is created in a moment, so that a second attempt usually finds no change. The same holds for the slot of the
//! way back of a switchover, which has no snapshot.
//!
//! A slot that others have created (`--create-slot=false`) is kept, because its position matters. Nothing tells whether an
//! object was changed while it was created, or shortly before or later, which would do no harm: a warning names it. The slot
//! of a native subscription (`adopt`) tells nothing as soon as it was read.
//!
//! Rows that were deleted are not found: of dropped tables and indexes, and of tables that were taken out of a
//! publication, whose changes may be sent for a while. Indexes other than that of the replica identity, views,
//! sequences, materialized views and temporary tables do not matter.

use wire::{Session, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row};

/// The query for the xmax of a snapshot: no transaction with this xid or a later one has ended.
pub(super) const BEFORE: &str =
    "SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())";

/// The result of [`BEFORE`].
pub(super) fn before(session: &mut Session) -> Result<u64> {
    let results = session
        .simple(BEFORE)
        .map_err(|e| Failure::publisher(&e, "reading the present snapshot"))?;
    field(&first_row(&results, "the present snapshot")?, 0)
}

/// The same as [`since`] for a slot that others have created, and that nothing has read yet: its catalog_xmin is no later
/// than the snapshot from before would be. It also shows the tables that were changed after the creation.
pub(super) fn since_slot(session: &mut Session, name: &str) -> Result<Option<Changed>> {
    let sql = format!(
        "SELECT n.next - ((n.next - s.catalog_xmin::pg_catalog.text::pg_catalog.int8) & 4294967295) \
         FROM pg_catalog.pg_replication_slots s CROSS JOIN (SELECT pg_catalog.pg_snapshot_xmax( \
           pg_catalog.pg_current_snapshot())::pg_catalog.text::pg_catalog.int8) n (next) \
         WHERE s.slot_name = {} AND s.catalog_xmin IS NOT NULL",
        quote_literal(name)
    );
    let results =
        session.simple(&sql).map_err(|e| Failure::publisher(&e, "reading the xmin of a slot"))?;
    match results.first().and_then(wire::Rows::first) {
        Some(row) => since(session, field(&row, 0)?),
        None => Ok(None),
    }
}

/// An object that was changed.
#[derive(Debug)]
pub(super) struct Changed {
    /// Its kind and name.
    pub(super) name: String,
    /// It may matter for tables of a publication. If not, the publisher at most fails to decode.
    pub(super) is_published: bool,
}

impl Changed {
    /// The failure of a slot that was created several times.
    pub(super) fn refused(&self) -> Failure {
        Failure::new(
            Class::Busy,
            format!(
                "each time that a slot was created, transactions changed the catalogue of its server meanwhile: {}",
                self.name
            ),
        )
        .detail("PostgreSQL could not decode such a slot: columns and tables would be missing.")
        .hint(
            "Try again while no session creates, alters or truncates tables, or while no transaction is open for \
             long: a slot is then created in a moment.",
        )
    }
}

/// An object whose rows of the catalogue were written by a transaction with xid `before` or later, under the snapshot of
/// the session; one that may matter most if there are several.
pub(super) fn since(session: &mut Session, before: u64) -> Result<Option<Changed>> {
    let sql = sql(session.server_version().major(), before);
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "looking for changes of its catalogue"))?;
    let Some(row) = results.first().and_then(wire::Rows::first) else { return Ok(None) };
    Ok(Some(Changed { name: field(&row, 0)?, is_published: boolean(&row, 1)? }))
}

fn sql(major: u32, before: u64) -> String {
    // An xmin has 32 bits. No row has an xid that is not below the snapshot's xmax.
    let is_new = |row: &str| {
        format!(
            "(({row}.xmin::pg_catalog.text::pg_catalog.int8 - {before}) % 4294967296 + 4294967296) \
               % 4294967296 < (SELECT span FROM recent)"
        )
    };
    let [new_class, new_column, new_index, new_member, new_label, new_schema, new_publication] =
        ["c", "a", "i", "r", "e", "n", "p"].map(is_new);
    let itself = "SELECT c.oid UNION ALL SELECT a.relid \
                  FROM pg_catalog.pg_partition_ancestors(c.oid) a (relid)";
    let (in_schema, schemas) = match major {
        15.. => (
            format!(
                " OR EXISTS (SELECT FROM pg_catalog.pg_publication_namespace s \
                   JOIN pg_catalog.pg_class t ON t.relnamespace = s.pnnspid WHERE t.oid IN ({itself}))"
            ),
            format!(
                "UNION ALL SELECT pg_catalog.format('schema %I of a publication', n.nspname), true \
                 FROM pg_catalog.pg_publication_namespace s \
                   JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid WHERE {} ",
                is_new("s")
            ),
        ),
        _ => (String::new(), String::new()),
    };
    // A composite type may be that of a column.
    format!(
        "WITH recent AS MATERIALIZED (SELECT pg_catalog.pg_snapshot_xmax( \
             pg_catalog.pg_current_snapshot())::pg_catalog.text::pg_catalog.int8 - {before} AS span), \
           relations AS MATERIALIZED ( \
             SELECT c.oid FROM pg_catalog.pg_class c WHERE {new_class} \
             UNION SELECT a.attrelid FROM pg_catalog.pg_attribute a WHERE {new_column} \
             UNION SELECT i.indrelid FROM pg_catalog.pg_index i \
               WHERE (i.indisprimary OR i.indisreplident) AND {new_index} \
             UNION SELECT r.prrelid FROM pg_catalog.pg_publication_rel r WHERE {new_member}) \
         SELECT pg_catalog.format(CASE c.relkind WHEN 'c' THEN 'type %I.%I' ELSE 'table %I.%I' END, \
             n.nspname, c.relname), \
           c.relkind = 'c' OR EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.puballtables) \
             OR EXISTS (SELECT FROM pg_catalog.pg_publication_rel r WHERE r.prrelid IN ({itself})) \
             {in_schema} AS is_published \
         FROM relations JOIN pg_catalog.pg_class c USING (oid) \
           JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE c.relkind IN ('r', 'p', 'c') AND c.relpersistence = 'p' AND c.oid >= 16384 \
         UNION ALL SELECT pg_catalog.format('type %I', t.typname), true \
           FROM pg_catalog.pg_enum e JOIN pg_catalog.pg_type t ON t.oid = e.enumtypid WHERE {new_label} \
         UNION ALL SELECT pg_catalog.format('schema %I', n.nspname), true \
           FROM pg_catalog.pg_namespace n WHERE n.nspname !~ '^pg_' AND {new_schema} \
         UNION ALL SELECT pg_catalog.format('publication %I', p.pubname), true \
           FROM pg_catalog.pg_publication p WHERE {new_publication} \
         {schemas}ORDER BY is_published DESC LIMIT 1"
    )
}
