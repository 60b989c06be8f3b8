//! How tables are applied, as it is recorded, and what changes that: a serialized period, another definition.

use std::collections::BTreeSet;

use engine::dispatch::{Serialization, SerializationChange};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Resolved, Tables};
use crate::subscriber::state::RelationMode;

/// Shown in `status` as the reason, while it lasts.
fn serialized_because(serialization: Serialization) -> Option<&'static str> {
    match serialization {
        Serialization::Ended => None,
        Serialization::ForLocks => Some(
            "its transactions are applied one after the other for a while: they often held locks that \
             earlier ones needed",
        ),
        Serialization::ForUniqueValues => Some(
            "its transactions are applied one after the other for a while: unique values move between \
             its rows",
        ),
    }
}

/// The first of these tables by name, and how many there are: one event tells of all partitions of a table.
fn shown(modes: &[RelationMode]) -> (String, usize) {
    let names: BTreeSet<_> = modes.iter().map(|mode| &mode.name).collect();
    let first = names.first().map(|name| name.to_string());
    (first.unwrap_or_default(), names.len())
}

impl Tables {
    /// Modes that are not recorded yet.
    pub(crate) fn take_modes(&mut self) -> Vec<RelationMode> {
        std::mem::take(&mut self.modes)
    }

    /// Oids of the subscriber tables that are mapped, each once: several versions of a published table may have the same one.
    pub(crate) fn watched(&self) -> Vec<u32> {
        let mut oids: Vec<u32> = self.maps().map(|map| map.table.oid).collect();
        oids.sort_unstable();
        oids.dedup();
        oids
    }

    /// Records that transactions of tables are applied one at a time from now on, or not any more.
    pub(crate) fn record_serialization(&mut self, change: &SerializationChange) {
        let because = serialized_because(change.serialization);
        for root in &change.roots {
            let maps: Vec<_> = self.maps().filter(|map| map.table.root == *root).collect();
            if change.serialization == Serialization::Ended {
                maps.iter().for_each(|map| map.unique.end_moving());
            }
            let modes: Vec<_> = maps
                .iter()
                .map(|map| RelationMode {
                    name: map.remote.name.clone(),
                    mode: map.mode.name().to_owned(),
                    reason: because.or_else(|| map.mode.reason()).map(str::to_owned),
                })
                .collect();
            if modes.is_empty() {
                continue;
            }
            let (table, tables) = shown(&modes);
            if let Some(reason) = because {
                tracing::info!(
                    event = "table_serialized",
                    table,
                    tables,
                    reason,
                    "transactions of the table are applied one at a time for a while"
                );
            } else {
                tracing::debug!(table, tables, "its transactions are applied side by side again");
            }
            // Modes of the same table that are not recorded yet are out of date.
            let new: FxHashSet<_> = modes.iter().map(|new| &new.name).collect();
            self.modes.retain(|mode| !new.contains(&&mode.name));
            self.modes.extend(modes);
        }
    }

    /// Forgets the maps of tables that look otherwise now: the next change of each loads it again. Returns whether
    /// there are some.
    pub(crate) fn compare(&mut self, now: &FxHashMap<u32, Option<String>>) -> bool {
        let before = self.resolved.len();
        self.keep(|_, resolved| match resolved {
            Resolved::Ignored => true,
            Resolved::Table { map, .. } => {
                // One that was mapped since the look is not in it.
                let same = now
                    .get(&map.table.oid)
                    .is_none_or(|found| found.as_ref() == Some(&map.table.fingerprint));
                if !same {
                    tracing::info!(
                        event = "table_definition_changed",
                        table = map.table.name.to_string(),
                        "table definition has changed on the subscriber"
                    );
                    map.definition.end();
                }
                same
            }
        });
        let changed = self.resolved.len() < before;
        if changed {
            self.definitions.count();
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use engine::table_name::TableName;

    use super::{RelationMode, shown};

    #[test]
    fn an_event_names_the_first_of_many_partitions() {
        let mode = |number: usize| RelationMode {
            name: TableName {
                schema: "public".to_owned(),
                name: format!("part_{:02}", number % 20),
            },
            mode: "set".to_owned(),
            reason: None,
        };
        // Each has two versions.
        let modes: Vec<_> = (0..40).rev().map(mode).collect();
        assert_eq!(shown(&modes), ("public.part_00".to_owned(), 20));
    }
}
