//! The changes of a group, folded into the steps that a worker executes.

use std::sync::Arc;

use engine::net::{ChangeAt, Folder, Step, TableRules};
use engine::transaction::Touched;
use pgoutput::Message;

use crate::apply::work::Group;
use crate::error::{Failure, Result};
use crate::subscriber::mapping::TableMap;

/// Which changes of a group are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// Those that depend on no other group.
    Independent,
    /// The others.
    Dependent,
}

impl Which {
    fn has(self, dependent: bool) -> bool {
        match self {
            Self::All => true,
            Self::Independent => !dependent,
            Self::Dependent => dependent,
        }
    }
}

/// The distinct table versions of a group.
pub(crate) struct GroupTables {
    pub(crate) maps: Vec<Arc<TableMap>>,
    pub(crate) rules: Vec<TableRules>,
    /// The index of each part's relations in them.
    slots: Vec<Vec<Option<usize>>>,
}

impl GroupTables {
    pub(crate) fn of(group: &Group) -> Self {
        let (mut maps, mut rules) = (Vec::<Arc<TableMap>>::new(), Vec::new());
        let slots = group.works.iter().map(|work| {
            let of_work = work.tables.iter().map(|table| {
                let table = table.as_ref()?;
                // A group touches few tables, and mostly the same ones again: search backwards.
                let known = maps.iter().rposition(|map| Arc::ptr_eq(map, table));
                Some(known.unwrap_or_else(|| {
                    maps.push(Arc::clone(table));
                    rules.push(table.rules.clone());
                    maps.len() - 1
                }))
            });
            of_work.collect()
        });
        let slots = slots.collect();
        Self { maps, rules, slots }
    }

    /// The steps of these changes. `applied` gets each change of a table that is applied, and the table unless it is a
    /// TRUNCATE.
    pub(crate) fn fold<'g>(
        &self,
        group: &'g Group,
        which: Which,
        mut applied: impl FnMut(&Message<'_>, Option<&TableMap>),
    ) -> Result<Vec<Step<'g>>> {
        let mut folder = Folder::new(&self.rules);
        let mut truncated = Vec::new();
        let mut dependent = group.dependent.changes.iter();
        for (index, (work, slots)) in group.works.iter().zip(&self.slots).enumerate() {
            for change in 0..work.part.len() {
                if !which.has(dependent.next().copied().unwrap_or_default()) {
                    continue;
                }
                let at = ChangeAt { part: number(index)?, change: number(change)? };
                let (message, touched) =
                    work.part.change(change).map_err(|e| Failure::internal(e.to_string()))?;
                match touched {
                    Touched::One(relation, _) => {
                        if let Some(slot) = slots[relation] {
                            applied(&message, Some(&self.maps[slot]));
                            folder.push(at, slot, &message);
                        }
                    }
                    Touched::Many(relations) => {
                        truncated.clear();
                        truncated.extend(relations.iter().filter_map(|r| slots[*r as usize]));
                        if !truncated.is_empty() {
                            applied(&message, None);
                            folder.push_truncate(at, &truncated, &message);
                        }
                    }
                }
            }
        }
        Ok(folder.finish())
    }
}

/// The table of an [`Expected::Net`](crate::apply::expected::Expected::Net).
pub(crate) fn table_of(group: &Group, table: u32) -> Option<Arc<TableMap>> {
    GroupTables::of(group).maps.get(table as usize).cloned()
}

/// Groups have far fewer than 2^32 parts, parts far fewer changes.
pub(super) fn number(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|_| Failure::internal("a group is too large"))
}
