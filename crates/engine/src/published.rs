//! What publishes a table, and whether it was published without a gap.
//!
//! The walsender decodes each change with the publications as they were at that time. A table that was
//! taken out of a publication and put back lost what was written in between, and nothing in the stream
//! says so. But catalogue rows that are made anew have other oids: pg_publication, pg_publication_rel
//! and pg_publication_namespace never reuse one within any time that matters, and an ALTER PUBLICATION
//! that changes a row in place writes it again (its xmin).
//!
//! A new owner writes the row of a publication too, and is no change of what is published: so between two
//! looks a new owner would hide options that are changed and changed back.
//!
//! So two looks that find the same rows have seen everything between them published in the same way.
//!
//! Changes carry the name that the table has when they are written, so the same must be known of the
//! table itself. Another oid is another table. ALTER TABLE … RENAME and SET SCHEMA write the row type
//! of the table again (its `pg_type.xmin`), and nothing else does but a new owner. A partition is
//! published with the tables above it only while it is attached: each ATTACH writes a new row of
//! pg_inherits. If the rows of a partition arrive as those of its root, then those that it held before
//! it was attached never arrive. A partition that was created as one held none: its first catalogue
//! rows were written by the transaction that attached it.

use std::fmt::{self, Display};
use std::str::FromStr;

use pgoutput::Lsn;

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
    /// If the publication has a table above it: which transactions (xmin) attached it, and those between.
    pub path: Option<String>,
}

/// The table itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_type.xmin` of its row type: the transaction that has named it.
    pub named: u32,
    /// `pg_type.typowner`. A new owner writes the row too.
    pub owner: u32,
    /// Partitions that are published under its name, and existed before they were attached.
    pub attached: Vec<Attached>,
}

/// A partition that existed before it was attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_inherits.xmin`: the transaction that has attached it.
    pub by: u32,
    /// Whether it has no row now.
    pub empty: bool,
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
pub struct PublishedBy {
    relation: Option<Relation>,
    entries: Vec<Entry>,
    /// The latest look that found it published, if another did not since.
    unpublished_since: Option<Lsn>,
}

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
    /// It is another table, of the same name.
    MadeAnew,
    /// It had another name, or was in another schema.
    Renamed,
    /// It was no partition of the table that is published, and is one again.
    Detached,
    /// A partition was attached that may have held rows.
    PartitionAttached,
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
            Self::MadeAnew => "it was dropped and created again, or another table took its name",
            Self::Renamed => "it had another name or schema for a while",
            Self::Detached => "it was detached from its partitioned table",
            Self::PartitionAttached => "a partition was attached that may have held rows",
        })
    }
}

impl Entry {
    /// Whether this is the same row, and nothing was changed since.
    fn is_still(&self, now: &Self) -> bool {
        let Self { publication, options, by, filter, columns, path, .. } = self;
        let same = (publication, options, by, filter, columns, path)
            == (&now.publication, &now.options, &now.by, &now.filter, &now.columns, &now.path);
        same && (self.written == now.written || self.owner != now.owner)
    }

    /// Whether every change of the table is published by it alone.
    fn is_whole(&self) -> bool {
        self.filter.is_none()
            && self.columns.is_none()
            && "iudt".chars().all(|operation| self.options.contains(operation))
    }
}

impl Relation {
    fn gap_until(&self, now: &Self) -> Option<Gap> {
        let is_known = |new: &Attached| {
            new.empty || self.attached.iter().any(|old| (old.oid, old.by) == (new.oid, new.by))
        };
        if self.oid != now.oid {
            Some(Gap::MadeAnew)
        } else if self.named != now.named && self.owner == now.owner {
            Some(Gap::Renamed)
        } else if !now.attached.iter().all(is_known) {
            Some(Gap::PartitionAttached)
        } else {
            None
        }
    }
}

impl PublishedBy {
    /// What publishes a table, in any order.
    #[must_use]
    pub fn new(relation: Relation, mut entries: Vec<Entry>) -> Self {
        entries.sort();
        Self { relation: Some(relation), entries, unpublished_since: None }
    }

    /// The same after a look that found the table not published; `since` is the look before it.
    #[must_use]
    pub fn unpublished(&self, since: Lsn) -> Self {
        let unpublished_since = self.unpublished_since.or(Some(since));
        Self { unpublished_since, ..self.clone() }
    }

    /// From where on it was not published, if a look has found that.
    #[must_use]
    pub fn unpublished_since(&self) -> Option<Lsn> {
        self.unpublished_since
    }

    /// Compares this earlier look with a later one: `None` if every change between them was published
    /// as before.
    #[must_use]
    pub fn gap_until(&self, now: &Self) -> Option<Gap> {
        let itself = self.relation.as_ref().zip(now.relation.as_ref());
        if let Some(gap) = itself.and_then(|(old, new)| old.gap_until(new)) {
            return Some(gap);
        }
        // An unlogged table is not published, whatever the catalogue of publications says.
        if self.unpublished_since.is_some() {
            return Some(Gap::TakenOut);
        }
        let stays = |old: &&Entry| now.entries.iter().any(|new| old.is_still(new));
        if self.entries.iter().any(|old| old.is_whole() && stays(&old)) {
            return None;
        }
        match self.entries.iter().find(|old| !stays(old)) {
            Some(old) => Some(Self::why(old, now)),
            None if self.entries.len() < now.entries.len() => Some(Gap::PublishedByMore),
            None => None,
        }
    }

    fn why(old: &Entry, now: &Self) -> Gap {
        let of_publication: Vec<_> =
            now.entries.iter().filter(|new| new.publication == old.publication).collect();
        let Some(first) = of_publication.first() else {
            return if now.entries.is_empty() { Gap::TakenOut } else { Gap::PublicationMadeAnew };
        };
        let new = of_publication.iter().find(|new| new.by == old.by).unwrap_or(first);
        if new.filter != old.filter {
            Gap::FilterChanged
        } else if new.columns != old.columns {
            Gap::ColumnsChanged
        } else if new.by != old.by {
            Gap::TakenOut
        } else if new.path != old.path {
            Gap::Detached
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
        let Self { publication, written, owner, options, by, filter, columns, path } = self;
        let options = if options.is_empty() { "-" } else { options };
        write!(f, "{publication} {written} {owner} {options} ")?;
        match by {
            By::All => f.write_str("all")?,
            By::Schema(oid) => write!(f, "schema:{oid}")?,
            By::Table(oid) => write!(f, "table:{oid}")?,
        }
        let none = "-";
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| none.to_owned());
        write!(f, " {} {} {}", or_none(filter), or_none(columns), or_none(path))
    }
}

impl FromStr for Entry {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let fields: Vec<_> = text.split(' ').collect();
        let [publication, written, owner, options, by, filter, columns, path] = fields[..] else {
            return Err(Unreadable);
        };
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
            path: optional(path),
        })
    }
}

/// What the lines begin with that are no entries.
const RELATION: &str = "relation ";
const UNPUBLISHED: &str = "unpublished ";

impl Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oid, named, owner, attached } = self;
        write!(f, "{RELATION}{oid} {named} {owner}")?;
        attached.iter().try_for_each(|Attached { oid, by, empty }| {
            write!(f, " {oid}:{by}:{}", if *empty { "empty" } else { "filled" })
        })
    }
}

impl FromStr for Relation {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let fields: Vec<_> = text.strip_prefix(RELATION).ok_or(Unreadable)?.split(' ').collect();
        let [oid, named, owner, ref attached @ ..] = fields[..] else { return Err(Unreadable) };
        let attached = attached.iter().map(|text| {
            let fields: Vec<_> = text.split(':').collect();
            let [oid, by, empty] = fields[..] else { return Err(Unreadable) };
            Ok(Attached { oid: number(oid)?, by: number(by)?, empty: empty == "empty" })
        });
        Ok(Self {
            oid: number(oid)?,
            named: number(named)?,
            owner: number(owner)?,
            attached: attached.collect::<Result<_, _>>()?,
        })
    }
}

fn number(text: &str) -> Result<u32, Unreadable> {
    text.parse().map_err(|_| Unreadable)
}

impl Display for PublishedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(relation) = &self.relation {
            writeln!(f, "{relation}")?;
        }
        if let Some(lsn) = self.unpublished_since {
            writeln!(f, "{UNPUBLISHED}{lsn}")?;
        }
        self.entries.iter().try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

impl FromStr for PublishedBy {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let mut read = Self::default();
        for line in text.lines() {
            if line.starts_with(RELATION) {
                read.relation = Some(line.parse()?);
            } else if let Some(lsn) = line.strip_prefix(UNPUBLISHED) {
                read.unpublished_since = Some(lsn.parse().map_err(|_| Unreadable)?);
            } else {
                read.entries.push(line.parse()?);
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::{Attached, By, Entry, Gap, Lsn, PublishedBy, Relation};
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
            path: None,
        }
    }

    fn relation() -> Relation {
        Relation { oid: 50, named: 700, owner: 10, attached: Vec::new() }
    }

    fn gap(old: &[Entry], new: &[Entry]) -> Option<Gap> {
        let [old, new] = [old, new].map(|entries| PublishedBy::new(relation(), entries.to_vec()));
        old.gap_until(&new)
    }

    #[test]
    fn another_table_or_name_is_a_gap() {
        let old = relation();
        assert_eq!(old.gap_until(&old), None);
        assert_eq!(old.gap_until(&Relation { oid: 51, ..relation() }), Some(Gap::MadeAnew));
        assert_eq!(old.gap_until(&Relation { named: 701, ..relation() }), Some(Gap::Renamed));
        assert_eq!(old.gap_until(&Relation { named: 701, owner: 11, ..relation() }), None);
    }

    #[test]
    fn partitions_that_held_rows_before_they_were_attached_are_a_gap() {
        let with = |attached: &[(u32, u32, bool)]| {
            let attached = attached.iter().map(|(oid, by, empty)| Attached {
                oid: *oid,
                by: *by,
                empty: *empty,
            });
            Relation { attached: attached.collect(), ..relation() }
        };
        let attached = Some(Gap::PartitionAttached);
        assert_eq!(with(&[]).gap_until(&with(&[(1, 5, false)])), attached);
        assert_eq!(with(&[]).gap_until(&with(&[(1, 5, true)])), None);
        assert_eq!(with(&[(1, 5, true)]).gap_until(&with(&[(1, 5, false)])), None);
        assert_eq!(with(&[(1, 5, false)]).gap_until(&with(&[])), None);
        assert_eq!(with(&[(1, 5, false)]).gap_until(&with(&[(1, 6, false)])), attached);
        let path = |path: &str| Entry { path: Some(path.to_owned()), ..entry(1, By::Table(5)) };
        assert_eq!(gap(&[path("700")], &[path("701")]), Some(Gap::Detached));
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
        (0u32..4, 0u32..3, 0u32..2, "[iudt]{0,4}", by, optional(), optional(), optional()).prop_map(
            |(publication, written, owner, options, by, filter, columns, path)| Entry {
                publication,
                written,
                owner,
                options,
                by,
                filter,
                columns,
                path,
            },
        )
    }

    fn relations() -> impl Strategy<Value = Relation> {
        let attached = (0u32..4, 0u32..4, any::<bool>()).prop_map(|(oid, by, empty)| Attached {
            oid,
            by,
            empty,
        });
        (0u32..4, 0u32..3, 0u32..2, proptest::collection::vec(attached, 0..3))
            .prop_map(|(oid, named, owner, attached)| Relation { oid, named, owner, attached })
    }

    proptest! {
        #[test]
        fn what_is_recorded_is_read_back(
            relation in relations(),
            entries in proptest::collection::vec(entries(), 0..4),
        ) {
            let published = PublishedBy::new(relation, entries);
            prop_assert_eq!(published.to_string().parse(), Ok(published.clone()));
            prop_assert_eq!(published.gap_until(&published), None);
            let unpublished = published.unpublished(Lsn(7)).unpublished(Lsn(9));
            prop_assert_eq!(unpublished.unpublished_since(), Some(Lsn(7)));
            prop_assert_eq!(unpublished.to_string().parse(), Ok(unpublished.clone()));
            prop_assert_eq!(unpublished.gap_until(&published), Some(Gap::TakenOut));
        }
    }
}
