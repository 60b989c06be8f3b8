//! Versions of the publisher's table definitions.
//!
//! The publisher sends a Relation message again after every cache invalidation, mostly with the
//! same content. Only another content creates a new version. The identity of the `Arc` identifies
//! the version.

use std::sync::Arc;

use pgoutput::{RelId, Relation, ReplicaIdentity, TypeOid};
use rustc_hash::FxHashMap;

use crate::table_name::TableName;

/// One published column, in the order in which tuples carry it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RemoteColumn {
    /// Name on the publisher. Columns are mapped to the subscriber by name.
    pub name: String,
    /// Whether the column is part of the replica identity (every column under FULL).
    pub key: bool,
    /// The publisher's type. For types that are not built in, the oid is only valid on the
    /// publisher.
    pub type_oid: TypeOid,
    /// The publisher's `atttypmod`, -1 for none.
    pub type_modifier: i32,
}

/// One version of a published table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RemoteRelation {
    /// The publisher's oid of the table. It survives a rename, so it is never used for mapping.
    pub id: RelId,
    /// Its name; the schema is `pg_catalog` where the message has an empty string.
    pub name: TableName,
    /// `pg_class.relreplident` at the time of the change.
    pub replica_identity: ReplicaIdentity,
    /// Published columns.
    pub columns: Vec<RemoteColumn>,
}

impl RemoteRelation {
    /// Copies a Relation message out of the receive buffer.
    #[must_use]
    pub fn from_message(message: &Relation<'_>) -> Self {
        Self {
            id: message.id,
            name: TableName {
                schema: if message.schema.is_empty() { "pg_catalog" } else { message.schema }
                    .to_owned(),
                name: message.name.to_owned(),
            },
            replica_identity: message.replica_identity,
            columns: message
                .columns
                .iter()
                .map(|column| RemoteColumn {
                    name: column.name.to_owned(),
                    key: column.key,
                    type_oid: column.type_oid,
                    type_modifier: column.type_modifier,
                })
                .collect(),
        }
    }
}

/// The newest version of every relation on this connection.
///
/// On every connection, the publisher sends a Relation message before the first change that needs
/// it. So the cache starts empty, and a change without its relation is an error.
#[derive(Debug, Default)]
pub struct RelationCache {
    by_id: FxHashMap<RelId, Arc<RemoteRelation>>,
}

impl RelationCache {
    /// Takes a Relation message and returns its version. The same content keeps its version.
    pub fn update(&mut self, message: &Relation<'_>) -> Arc<RemoteRelation> {
        let relation = RemoteRelation::from_message(message);
        match self.by_id.get(&relation.id) {
            Some(known) if **known == relation => Arc::clone(known),
            _ => {
                let version = Arc::new(relation);
                self.by_id.insert(version.id, Arc::clone(&version));
                version
            }
        }
    }

    /// The newest version of a relation, if the publisher has sent one.
    #[must_use]
    pub fn get(&self, id: RelId) -> Option<&Arc<RemoteRelation>> {
        self.by_id.get(&id)
    }
}
