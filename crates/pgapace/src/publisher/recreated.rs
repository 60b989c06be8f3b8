//! A publisher's database that was dropped, and created again under the same name.
//!
//! The server goes on, so its system identifier, timeline and LSNs show no other history. The slot is gone with the old
//! database, and the new one has another OID: OIDs come from one counter of the server. Unless it is a copy of a template,
//! every table has another OID, too. The tables show such a database if an earlier version did not record its own OID. They
//! also show a database whose slot and published tables were all dropped. A run refuses both.

use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::publisher::{publication, slot};
use crate::subscriber::state::Subscription;

/// The database that a subscription follows, as recorded.
#[derive(Debug, Default)]
pub(crate) struct FollowedDatabase {
    /// `None` of an earlier version.
    pub(crate) oid: Option<u32>,
    /// The OIDs of the published tables.
    pub(crate) tables: Vec<u32>,
}

/// Refuses another database than the one that a subscription follows, and one that has neither the slot nor any table that
/// it follows. A slot of yet another database is refused in its own words.
pub(crate) fn check(
    session: &mut Session,
    row: &Subscription,
    followed: &FollowedDatabase,
) -> Result<()> {
    let (name, slot) = (&row.name, &row.slot_name);
    let found = slot::find(session, slot)?;
    if let Some(found) = &found {
        slot::check_kind(slot, found)?;
    }
    let database = publication::database(session)?;
    let FollowedDatabase { oid, tables } = followed;
    let what = if let Some(oid) = oid.filter(|oid| *oid != database) {
        format!("subscription {name} follows one with OID {oid}, and this one has {database}")
    } else if found.is_none()
        && !tables.is_empty()
        && tables.len() == publication::dropped(session, tables)?.len()
    {
        format!(
            "slot \"{slot}\" does not exist, nor does any table that subscription {name} follows"
        )
    } else {
        return Ok(());
    };
    let message =
        format!("the publisher's database was dropped and created again, or restored: {what}");
    Err(Failure::new(Class::History, message)
        .detail(
            "Its tables are other ones. They may lack rows that the subscriber has, which a rebase would delete.",
        )
        .hint(
            "Check the database in --publisher. Decide which side is right; if it is the publisher: pgapace drop, then \
             pgapace run --if-not-empty rebase.",
        ))
}
