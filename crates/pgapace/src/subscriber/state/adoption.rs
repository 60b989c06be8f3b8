//! Rows of `pgapace.adoption`: which native subscription a subscription was adopted from, and how far
//! that has come. See `native/mod.rs`.

use pgoutput::Lsn;
use wire::{Row, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};

/// How far an adoption has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The native subscription is disabled and has its slot.
    Disabled,
    /// The slot is pgapace's, and pgapace has the position.
    Adopted,
}

/// A row of `pgapace.adoption`.
#[derive(Debug, Clone)]
pub(crate) struct Adoption {
    /// Name of pgapace's subscription.
    pub(crate) name: String,
    /// OID of the native one.
    pub(crate) native: u32,
    /// Name of the native subscription when it was adopted.
    pub(crate) native_name: String,
    pub(crate) slot: String,
    /// Whether only changes without origin are applied.
    pub(crate) origin_none: bool,
    /// Whether the native subscription was enabled.
    pub(crate) enabled: bool,
    pub(crate) step: Step,
}

const COLUMNS: &str = "name, native, native_name, slot_name, origin_none, enabled, step";

/// All rows; there are few.
pub(crate) fn all(session: &mut Session) -> Result<Vec<Adoption>> {
    let sql = format!("SELECT {COLUMNS} FROM pgapace.adoption ORDER BY name");
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading what was adopted"))?;
    rows.iter().map(|row| adoption(&row)).collect()
}

fn adoption(row: &Row<'_>) -> Result<Adoption> {
    Ok(Adoption {
        name: field(row, 0)?,
        native: field(row, 1)?,
        native_name: field(row, 2)?,
        slot: field(row, 3)?,
        origin_none: boolean(row, 4)?,
        enabled: boolean(row, 5)?,
        step: match row.get(6) {
            Some("disabled") => Step::Disabled,
            Some("adopted") => Step::Adopted,
            other => return Err(Failure::internal(format!("unknown step {other:?}"))),
        },
    })
}

/// SQL that records that the native subscription is disabled. A repeated attempt remembers that it was
/// enabled before the first.
pub(crate) fn begin_sql(adoption: &Adoption) -> String {
    let Adoption { name, native, native_name, slot, origin_none, enabled, .. } = adoption;
    format!(
        "INSERT INTO pgapace.adoption AS a \
           (name, native, native_name, slot_name, origin_none, enabled, step) \
         VALUES ({}, {native}, {}, {}, {origin_none}, {enabled}, 'disabled') \
         ON CONFLICT (native) DO UPDATE SET native_name = excluded.native_name, \
           slot_name = excluded.slot_name, origin_none = excluded.origin_none, \
           enabled = a.enabled OR excluded.enabled",
        quote_literal(name),
        quote_literal(native_name),
        quote_literal(slot),
    )
}

/// SQL that records a native subscription that was created to hand the subscription to it.
pub(crate) fn created_sql(adoption: &Adoption) -> String {
    let Adoption { name, native_name, slot, origin_none, .. } = adoption;
    format!(
        "INSERT INTO pgapace.adoption \
           (name, native, native_name, slot_name, origin_none, enabled, step, adopted_at) \
         SELECT {}, s.oid, s.subname, {}, {origin_none}, true, 'adopted', pg_catalog.now() \
         FROM pg_catalog.pg_subscription s JOIN pg_catalog.pg_database d ON d.oid = s.subdbid \
         WHERE d.datname = pg_catalog.current_database() AND s.subname = {}",
        quote_literal(name),
        quote_literal(slot),
        quote_literal(native_name),
    )
}

/// SQL that records the end of the adoption.
pub(crate) fn end_sql(native: u32, start: Lsn) -> String {
    format!(
        "UPDATE pgapace.adoption SET step = 'adopted', start_lsn = '{start}', \
           adopted_at = pg_catalog.now() WHERE native = {native}"
    )
}

/// Whether no run has followed an adoption. The first thing that a run records is what the publisher is to send it.
pub(crate) fn never_ran(session: &mut Session, native: u32) -> Result<bool> {
    let sql = format!(
        "SELECT 1 FROM pgapace.adoption a JOIN pgapace.subscription s ON s.name = a.name \
         WHERE a.native = {native} AND s.phase = 'streaming' AND s.sent_as IS NULL AND s.format IS NULL \
           AND (SELECT pg_catalog.array_agg(p.lsn) FROM pgapace.progress p WHERE p.subscription = s.id) \
             = ARRAY[a.start_lsn]"
    );
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading what was adopted"))?;
    Ok(rows.first().is_some())
}

/// SQL that forgets an adoption.
pub(crate) fn forget_sql(native: u32) -> String {
    format!("DELETE FROM pgapace.adoption WHERE native = {native}")
}

/// The same for one that is not complete; it fails for one that is: its COMMIT may have succeeded although
/// its answer was lost.
pub(crate) fn undo_sql(native: u32) -> String {
    format!(
        "WITH forgotten AS ({} AND step = 'disabled' RETURNING native) \
         SELECT 1 / pg_catalog.count(*)::int4 FROM forgotten",
        forget_sql(native)
    )
}
