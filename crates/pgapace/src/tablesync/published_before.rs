//! How tables were published right before the slot of a snapshot was created.
//!
//! The creation of a slot waits for the transactions that run, and again for those that began meanwhile. One that begins
//! behind the first of the two waits may commit behind the snapshot. The publisher sends each of its changes as the
//! publications were at that time, but the snapshot shows the publications as they are later. A change from before a
//! table was added, or from before a row filter was widened, would be neither in the snapshot nor in the stream.
//!
//! So the publications are read before the slot is created, and compared with those under the snapshot. A transaction that
//! is not in the snapshot has begun in between. A table that was published in another way meanwhile is copied under
//! another snapshot. The slot of the subscription needs no such look: it is created again whenever the catalogue changes
//! meanwhile ([`create_to_stream`](crate::publisher::slot::create_to_stream)).

use engine::published::PublishedBy;
use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};

/// By the names of the tables.
#[derive(Debug)]
pub(super) struct PublishedBefore(FxHashMap<TableName, PublishedBy>);

impl PublishedBefore {
    pub(super) fn read(session: &mut Session, publications: &[String]) -> Result<Self> {
        let tables = publication::read_contents(session, publications)?.tables;
        Ok(Self(tables.into_iter().map(|table| (table.name, table.published_by)).collect()))
    }

    /// The error that names the change, if the table, as it is under the snapshot, was published in another way before, or
    /// was not published.
    pub(super) fn change(&self, table: &PublishedTable) -> Option<Failure> {
        let name = &table.name;
        let message = match self.0.get(name) {
            Some(before) => {
                let gap = before.gap_until(&table.published_by)?;
                format!("the publication of table {name} changed while a slot was created: {gap}")
            }
            None => format!("table {name} was published while a slot was created"),
        };
        Some(Failure::new(Class::Publisher, message))
    }
}
