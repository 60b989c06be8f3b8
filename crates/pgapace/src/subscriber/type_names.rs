//! The publisher's types as SQL, for the statements in hints.

use rustc_hash::FxHashMap;
use wire::Session;

use engine::relation::RemoteColumn;

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::field;

/// Types with smaller OIDs have the same OID on all servers (`FirstGenbkiObjectId` in `transam.h`).
const FIRST_OF_A_SERVER: u32 = 10_000;

/// Names of declared types, by OID and modifier; `None` for a type that is not known.
#[derive(Debug, Clone, Default)]
pub(crate) struct TypeNames {
    /// Built-in types that the subscriber was asked for.
    built_in: FxHashMap<(u32, i32), Option<String>>,
    /// Other types, as the publisher's catalogue had them when it was read. The stream names them in messages of
    /// their own, which only hints would need.
    others: FxHashMap<u32, String>,
}

impl TypeNames {
    /// Takes the types of a published table.
    pub(crate) fn add(&mut self, table: &PublishedTable) {
        let others = table.columns.iter().filter(|column| {
            // A name with a modifier is that of one column only.
            column.declared_type >= FIRST_OF_A_SERVER && !column.type_name.contains('(')
        });
        self.others.extend(others.map(|column| (column.declared_type, column.type_name.clone())));
    }

    /// Whether a column's type is one of those that have another OID on each server, and this is its name.
    pub(crate) fn is_named(&self, column: &RemoteColumn, name: &str) -> bool {
        self.others.get(&column.type_oid.0).is_some_and(|known| known == name)
    }

    /// The name of each column's type.
    pub(crate) fn of(
        &mut self,
        session: &mut Session,
        columns: &[&RemoteColumn],
    ) -> Result<Vec<Option<String>>> {
        let key = |column: &RemoteColumn| (column.type_oid.0, column.type_modifier);
        let mut unknown: Vec<_> = columns.iter().map(|column| key(column)).collect();
        unknown.retain(|key| key.0 < FIRST_OF_A_SERVER && !self.built_in.contains_key(key));
        if !unknown.is_empty() {
            let list = |part: &dyn Fn(&(u32, i32)) -> String| {
                format!("{{{}}}", unknown.iter().map(part).collect::<Vec<_>>().join(","))
            };
            let (oids, modifiers) =
                (list(&|key| key.0.to_string()), list(&|key| key.1.to_string()));
            let rows = session
                .query(
                    "SELECT pg_catalog.format_type(t.oid, t.modifier) \
                     FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.oid[]), \
                       pg_catalog.unnest($2::pg_catalog.int4[])) \
                       WITH ORDINALITY AS t (oid, modifier, ord) ORDER BY t.ord",
                    &[Some(&oids), Some(&modifiers)],
                )
                .map_err(|e| Failure::subscriber(&e, "reading the names of types"))?;
            for (key, row) in unknown.into_iter().zip(rows.iter()) {
                // A type of a newer version.
                let name = Some(field::<String>(&row, 0)?).filter(|name| !name.starts_with("???"));
                self.built_in.insert(key, name);
            }
        }
        let name = |column: &&RemoteColumn| match self.built_in.get(&key(column)) {
            Some(name) => name.clone(),
            None => self.others.get(&column.type_oid.0).cloned(),
        };
        Ok(columns.iter().map(name).collect())
    }
}
