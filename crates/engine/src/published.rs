//! What publishes a table, and whether it was published without a gap.
//!
//! The walsender decodes each change with the publications as they were at that time. A table that was
//! taken out of a publication and put back lost what was written in between, and nothing in the stream
//! says so. But catalogue rows that are made anew have other oids: pg_publication, pg_publication_rel
//! and pg_publication_namespace never reuse one within any time that matters, and an ALTER PUBLICATION
//! that changes a row in place writes it again (its xmin).
//!
//! So two looks that find the same rows have seen everything between them published in the same way.

use std::fmt::{self, Display, Write as _};
use std::str::FromStr;

/// One way in which a publication has a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// `pg_publication.oid`.
    pub publication: u32,
    /// `pg_publication.xmin`: the transaction that has written the row.
    pub written: u32,
    /// `pg_publication.pubowner`. A new owner writes the row too, and changes nothing else.
    pub owner: u32,
    /// One letter each: i, u, d, t for operations, v for publish_via_partition_root, g for generated
    /// columns.
    pub options: String,
    /// By which row the publication has the table.
    pub by: By,
    /// A hash of the row filter.
    pub filter: Option<String>,
    /// The numbers of the columns in the list.
    pub columns: Option<String>,
}

/// The row by which a publication has a table, or one of the partitioned tables above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// FOR ALL TABLES.
    All,
    /// This one of pg_publication_namespace.
    Schema(u32),
    /// This one of pg_publication_rel.
    Table(u32),
}

/// Everything that publishes a table, as of one moment. Its text form can be recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishedBy(Vec<Entry>);

/// Why a table may lack changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// The publication has another oid.
    PublicationMadeAnew,
    /// Its options were changed.
    PublicationAltered,
    /// The row filter of the table is another one.
    FilterChanged,
    /// The column list is another one.
    ColumnsChanged,
    /// It was taken out of the publication, and put back if it is there.
    TakenOut,
    /// One more publication has it, with other rows, columns or operations.
    PublishedByMore,
}

impl Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PublicationMadeAnew => "its publication was dropped and created again",
            Self::PublicationAltered => "the options of its publication were changed",
            Self::FilterChanged => "its row filter was changed",
            Self::ColumnsChanged => "its column list was changed",
            Self::TakenOut => "it was taken out of a publication",
            Self::PublishedByMore => "another publication has it with other rows or columns",
        })
    }
}

impl Entry {
    /// Whether this is the same row, and nothing was changed since.
    fn is_still(&self, now: &Self) -> bool {
        let Self { publication, options, by, filter, columns, .. } = self;
        let same = (publication, options, by, filter, columns)
            == (&now.publication, &now.options, &now.by, &now.filter, &now.columns);
        same && (self.written == now.written || self.owner != now.owner)
    }

    /// Whether every change of the table is published by it alone.
    fn is_whole(&self) -> bool {
        self.filter.is_none()
            && self.columns.is_none()
            && "iudt".chars().all(|operation| self.options.contains(operation))
    }
}

impl PublishedBy {
    /// Of these entries, in any order.
    #[must_use]
    pub fn new(mut entries: Vec<Entry>) -> Self {
        entries.sort();
        Self(entries)
    }

    /// Whether nothing publishes the table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Compares this earlier look with a later one: `None` if every change between them was published
    /// as before.
    #[must_use]
    pub fn gap_until(&self, now: &Self) -> Option<Gap> {
        let stays = |old: &&Entry| now.0.iter().any(|new| old.is_still(new));
        if self.0.iter().any(|old| old.is_whole() && stays(&old)) {
            return None;
        }
        match self.0.iter().find(|old| !stays(old)) {
            Some(old) => Some(Self::why(old, now)),
            None if self.0.len() < now.0.len() => Some(Gap::PublishedByMore),
            None => None,
        }
    }

    fn why(old: &Entry, now: &Self) -> Gap {
        let of_publication: Vec<_> =
            now.0.iter().filter(|new| new.publication == old.publication).collect();
        let Some(first) = of_publication.first() else {
            return if now.0.is_empty() { Gap::TakenOut } else { Gap::PublicationMadeAnew };
        };
        let new = of_publication.iter().find(|new| new.by == old.by).unwrap_or(first);
        if new.filter != old.filter {
            Gap::FilterChanged
        } else if new.columns != old.columns {
            Gap::ColumnsChanged
        } else if new.by != old.by {
            Gap::TakenOut
        } else {
            Gap::PublicationAltered
        }
    }
}

/// A recorded text is not one of [`PublishedBy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("what published a table is recorded in a form that is not known")]
pub struct Unreadable;

impl Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { publication, written, owner, options, by, filter, columns } = self;
        let options = if options.is_empty() { "-" } else { options };
        write!(f, "{publication} {written} {owner} {options} ")?;
        match by {
            By::All => f.write_str("all")?,
            By::Schema(oid) => write!(f, "schema:{oid}")?,
            By::Table(oid) => write!(f, "table:{oid}")?,
        }
        let none = "-";
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| none.to_owned());
        write!(f, " {} {}", or_none(filter), or_none(columns))
    }
}

impl FromStr for Entry {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let fields: Vec<_> = text.split(' ').collect();
        let [publication, written, owner, options, by, filter, columns] = fields[..] else {
            return Err(Unreadable);
        };
        let number = |text: &str| text.parse::<u32>().map_err(|_| Unreadable);
        let optional = |text: &str| (text != "-").then(|| text.to_owned());
        let by = match by.split_once(':') {
            None if by == "all" => By::All,
            Some(("schema", oid)) => By::Schema(number(oid)?),
            Some(("table", oid)) => By::Table(number(oid)?),
            _ => return Err(Unreadable),
        };
        Ok(Self {
            publication: number(publication)?,
            written: number(written)?,
            owner: number(owner)?,
            options: optional(options).unwrap_or_default(),
            by,
            filter: optional(filter),
            columns: optional(columns),
        })
    }
}

impl Display for PublishedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, entry) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_char('\n')?;
            }
            write!(f, "{entry}")?;
        }
        Ok(())
    }
}

impl FromStr for PublishedBy {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        Ok(Self::new(text.lines().map(str::parse).collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::{By, Entry, Gap, PublishedBy};
    use proptest::prelude::*;

    fn entry(publication: u32, by: By) -> Entry {
        Entry {
            publication,
            written: 7,
            owner: 10,
            options: "iudt".to_owned(),
            by,
            filter: None,
            columns: None,
        }
    }

    fn gap(old: &[Entry], new: &[Entry]) -> Option<Gap> {
        PublishedBy::new(old.to_vec()).gap_until(&PublishedBy::new(new.to_vec()))
    }

    #[test]
    fn rows_made_anew_are_a_gap() {
        let old = entry(1, By::Table(5));
        assert_eq!(gap(std::slice::from_ref(&old), std::slice::from_ref(&old)), None);
        assert_eq!(
            gap(std::slice::from_ref(&old), &[entry(2, By::Table(6))]),
            Some(Gap::PublicationMadeAnew)
        );
        assert_eq!(gap(std::slice::from_ref(&old), &[entry(1, By::Table(6))]), Some(Gap::TakenOut));
        assert_eq!(gap(&[old], &[]), Some(Gap::TakenOut));
    }

    #[test]
    fn changes_in_place_are_seen_and_another_owner_is_none() {
        let old = entry(1, By::All);
        let altered = Entry { written: 8, ..old.clone() };
        assert_eq!(gap(std::slice::from_ref(&old), &[altered]), Some(Gap::PublicationAltered));
        let owner = Entry { written: 8, owner: 11, ..old.clone() };
        assert_eq!(gap(std::slice::from_ref(&old), &[owner]), None);
        let filtered = Entry { filter: Some("f".to_owned()), by: By::Table(5), ..old.clone() };
        let another = Entry { filter: Some("g".to_owned()), by: By::Table(6), ..old.clone() };
        assert_eq!(gap(&[filtered], &[another]), Some(Gap::FilterChanged));
        let listed = Entry { columns: Some("1,2".to_owned()), by: By::Table(6), ..old.clone() };
        assert_eq!(gap(&[old], &[listed]), Some(Gap::ColumnsChanged));
    }

    /// What one publication has always published whole does not depend on the others.
    #[test]
    fn one_that_publishes_all_of_it_is_enough() {
        let whole = entry(1, By::Schema(9));
        let part = Entry { filter: Some("f".to_owned()), ..entry(2, By::Table(5)) };
        let both = [whole.clone(), part.clone()];
        assert_eq!(gap(&both, std::slice::from_ref(&whole)), None);
        assert_eq!(gap(std::slice::from_ref(&whole), &both), None);
        assert_eq!(gap(&both, std::slice::from_ref(&part)), Some(Gap::PublicationMadeAnew));
        assert_eq!(gap(&[part], &both), Some(Gap::PublishedByMore));
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let by = prop_oneof![
            Just(By::All),
            (0u32..4).prop_map(By::Schema),
            (0u32..4).prop_map(By::Table)
        ];
        let optional = || proptest::option::of("[a-f0-9,]{1,4}");
        (0u32..4, 0u32..3, 0u32..2, "[iudt]{0,4}", by, optional(), optional()).prop_map(
            |(publication, written, owner, options, by, filter, columns)| Entry {
                publication,
                written,
                owner,
                options,
                by,
                filter,
                columns,
            },
        )
    }

    proptest! {
        #[test]
        fn what_is_recorded_is_read_back(entries in proptest::collection::vec(entries(), 0..4)) {
            let published = PublishedBy::new(entries);
            prop_assert_eq!(published.to_string().parse(), Ok(published.clone()));
            prop_assert_eq!(published.gap_until(&published), None);
        }
    }
}
