//! A publisher's database that was dropped, and created again under the same name.
//!
//! The server goes on, so its system identifier, timeline and LSNs show no other history. The slot and every table are
//! gone with the old database, and the new one has tables with other OIDs: OIDs come from one counter of the server.
//! Nothing tells such a database from one whose slot was dropped, and whose published tables were all created again.
//! A run refuses both.

use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::publisher::{publication, slot};
use crate::subscriber::state::Subscription;

/// Refuses a database that has neither the slot nor any table with one of these OIDs, those of the published tables as
/// recorded.
pub(crate) fn check(session: &mut Session, row: &Subscription, oids: &[u32]) -> Result<()> {
    let (name, slot) = (&row.name, &row.slot_name);
    if oids.is_empty()
        || slot::find(session, slot)?.is_some()
        || oids.len() > publication::dropped(session, oids)?.len()
    {
        return Ok(());
    }
    Err(Failure::new(
        Class::History,
        format!(
            "the publisher's database was dropped and created again, or restored: slot \"{slot}\" does not exist, nor \
             does any table that subscription {name} follows"
        ),
    )
    .detail(
        "The tables of these names are other ones. They may lack rows that the subscriber has, which a rebase would \
         delete.",
    )
    .hint(
        "Check the database in --publisher. Decide which side is right; if it is the publisher: pgapace drop, then \
         pgapace run --if-not-empty rebase.",
    ))
}
