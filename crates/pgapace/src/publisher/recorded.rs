//! The publisher's database that a subscription of pgapace has recorded.
//!
//! Two subscriptions of any servers may have the same name, and so may their slots: in a cascade that uses one name for
//! each hop, the slot of the next hop has the name of a subscription of the publisher. So a slot alone does not tell where
//! a subscription reads from.

use wire::{Row, Session};

use crate::error::{Failure, Result};
use crate::publisher::publication::DATABASE;
use crate::publisher::session::system_identifier;
use crate::subscriber::catalogue::{field, first_row};

/// A database of a server. A part is `None` if it is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RecordedPublisher {
    system_identifier: Option<String>,
    database: Option<u32>,
}

impl RecordedPublisher {
    /// The columns of `pgapace.subscription s` for [`Self::read`].
    pub(crate) const COLUMNS: &str = "s.system_identifier, s.publisher_database";

    /// Reads [`Self::COLUMNS`], of which the first one is `at`.
    pub(crate) fn read(row: &Row<'_>, at: usize) -> Result<Self> {
        Ok(Self {
            system_identifier: row.get(at).map(str::to_owned),
            database: row.get(at + 1).map(|_| field(row, at + 1)).transpose()?,
        })
    }

    /// The database of a session; `failed` makes an error of the side to which the session belongs.
    pub(crate) fn of(
        session: &mut Session,
        failed: impl FnOnce(&wire::Error) -> Failure,
    ) -> Result<Self> {
        let results = session.simple(&format!("SELECT {DATABASE}")).map_err(|e| failed(&e))?;
        let database = field(&first_row(&results, "a database")?, 0)?;
        Ok(Self { system_identifier: system_identifier(session), database: Some(database) })
    }

    /// Whether both are the same database; `None` if that is not known.
    pub(crate) fn is(&self, other: &Self) -> Option<bool> {
        let differ = |same: Option<bool>| same == Some(false);
        let system = same(self.system_identifier.as_ref(), other.system_identifier.as_ref());
        let database = same(self.database, other.database);
        if differ(system) || differ(database) { Some(false) } else { system.and(database) }
    }
}

fn same<T: PartialEq>(one: Option<T>, other: Option<T>) -> Option<bool> {
    Some(one? == other?)
}

#[cfg(test)]
mod tests {
    use super::RecordedPublisher;

    #[test]
    fn one_part_that_differs_is_enough_and_all_must_be_known_to_be_equal() {
        let of = |system: Option<&str>, database| RecordedPublisher {
            system_identifier: system.map(str::to_owned),
            database,
        };
        let own = of(Some("7"), Some(5));
        assert_eq!(own.is(&own.clone()), Some(true));
        assert_eq!(of(Some("8"), None).is(&own), Some(false));
        assert_eq!(of(None, Some(6)).is(&own), Some(false));
        assert_eq!(of(Some("7"), None).is(&own), None);
        assert_eq!(of(None, Some(5)).is(&own), None);
    }
}
