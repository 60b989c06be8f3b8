//! The members of a group: the engine's own work, of which a sabotage can change the answers.

use std::ops::Deref;

use engine::dispatch::{Dispatchable, LockError, Locks, RowVersions, TableId};
use engine::group::Size;
use engine::worker::GroupMember;
use pgoutput::Lsn;

use crate::simulation::Sabotage;
use crate::simulation::run::TableMap;
use crate::simulation::subscriber::PreparedHere;
use crate::simulation::worker::Result;

/// The engine's own work, which a sabotage can make say something else.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) plain: PlainWork,
    pub(crate) sabotage: Sabotage,
}

/// A part of a transaction, or idle progress.
pub(crate) type PlainWork = engine::work::Work<TableMap, PreparedHere>;

impl Deref for Work {
    type Target = PlainWork;

    fn deref(&self) -> &PlainWork {
        &self.plain
    }
}

impl GroupMember for Work {
    fn end(&self) -> Option<Lsn> {
        self.plain.end()
    }

    fn begins(&self) -> bool {
        self.plain.begins()
    }

    fn length(&self) -> usize {
        self.plain.length()
    }

    fn is_whole(&self) -> bool {
        self.plain.is_whole()
    }

    fn runs_user_code(&self) -> bool {
        self.plain.runs_user_code()
    }

    fn is_alone(&self) -> bool {
        self.sabotage != Sabotage::SharedCommit && self.plain.is_alone()
    }

    fn is_under_rules(&self) -> bool {
        self.plain.is_under_rules()
    }

    fn is_step(&self) -> bool {
        self.plain.is_step()
    }

    fn follows_applied(&self) -> bool {
        self.plain.follows_applied()
    }

    fn is_prepared_at_once(&self) -> bool {
        self.plain.is_prepared_at_once()
    }
}

impl Dispatchable for Work {
    fn size(&self) -> Size {
        let size = self.plain.size();
        match self.sabotage {
            Sabotage::GroupedAlone => Size { by_rows: false, ..size },
            Sabotage::GapInGroup => Size { starts_group: false, ..size },
            _ => size,
        }
    }

    fn ends_prepared(&self) -> bool {
        self.plain.ends_prepared()
    }

    fn tables(&self) -> impl Iterator<Item = TableId> {
        let unmoved = self.sabotage == Sabotage::UnbarredMove;
        let tables = self.plain.tables();
        tables.map(move |id| if unmoved { TableId { root: id.oid, ..id } } else { id })
    }

    fn count_versions(&self, versions: &mut RowVersions) {
        if self.sabotage != Sabotage::UncountedVersions {
            self.plain.count_versions(versions);
        }
    }

    fn lock(&self, locks: &mut Locks<'_>) -> Result<(), LockError> {
        match self.sabotage {
            Sabotage::UnlockedChanges => Ok(()),
            _ => self.plain.lock(locks),
        }
    }
}

/// An apply group.
pub(crate) type Group = engine::worker::Group<Work>;
