//! Whether the publications exist.

use wire::{Session, quote_ident};

use super::queries::literals;
use super::{query, query_each};
use crate::error::{Class, Failure, Result};

/// Checks that the publications exist; a missing one would later stop the stream.
pub(crate) fn check_exist(session: &mut Session, publications: &[String]) -> Result<()> {
    let found = query(session, &exist_sql(publications))?;
    check_missing(&found, publications)
}

/// The same. Returns the rows of another query, which runs in the same round trip.
pub(crate) fn check_exist_and(
    session: &mut Session,
    publications: &[String],
    other: &str,
) -> Result<wire::Rows> {
    let [found, rows] = query_each(session, [&exist_sql(publications), other])?;
    check_missing(&found, publications)?;
    Ok(rows)
}

fn check_missing(found: &wire::Rows, publications: &[String]) -> Result<()> {
    missing_failure(&missing_in(found, publications)).map_or(Ok(()), Err)
}

/// The failure of a run whose publications are `missing`, unless none is.
pub(crate) fn missing_failure(missing: &[&str]) -> Option<Failure> {
    let names: Vec<_> = missing.iter().map(|name| quote_ident(name)).collect();
    let message = format!("the publisher has no publication {}", names.join(", "));
    let create = format!(
        "In the database of --publisher: CREATE PUBLICATION {} FOR TABLE …;",
        quote_ident(missing.first()?)
    );
    // A running subscription waits until the publication is created again.
    Some(Failure::new(Class::Mismatch, message).transient(true).hint(create))
}

/// Returns the publications that do not exist.
pub(crate) fn missing<'a>(
    session: &mut Session,
    publications: &'a [String],
) -> Result<Vec<&'a str>> {
    let found = query(session, &exist_sql(publications))?;
    Ok(missing_in(&found, publications))
}

fn exist_sql(publications: &[String]) -> String {
    format!(
        "SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({})",
        literals(publications)
    )
}

fn missing_in<'a>(rows: &wire::Rows, publications: &'a [String]) -> Vec<&'a str> {
    let found: Vec<_> = rows.iter().filter_map(|row| row.get(0).map(str::to_owned)).collect();
    publications.iter().filter(|name| !found.contains(name)).map(String::as_str).collect()
}
