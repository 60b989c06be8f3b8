//! The publications of a table, and whether it was published without a gap.
//!
//! The walsender decodes each change with the publications as they were at that time. A table that
//! was removed from a publication and added again lost the changes in between, and the stream does
//! not report that. pgapace therefore reads the catalog of the publisher now and then, and compares
//! each reading with the one before. If both find the same rows, everything in between was
//! published in the same way:
//!
//! * A row of `pg_publication`, `pg_publication_rel` or `pg_publication_namespace` that was dropped
//!   and created again has another oid. Oids are not reused within any relevant time.
//! * ALTER PUBLICATION updates a row in place, which changes its `xmin`.
//! * ALTER PUBLICATION … OWNER TO changes `xmin` too, but not what is published. So a new owner
//!   hides options that were changed and changed back between the same two readings.
//!
//! Changes carry the name of the table at the time of the change, so the table itself is compared
//! as well:
//!
//! * Another oid is another table.
//! * ALTER TABLE … RENAME and SET SCHEMA update the row type of the table (its `pg_type.xmin`).
//!   Only a new owner does so too, which hides another name; the stream may show that ([`crate::other_table`]).
//! * A partition is published through its partitioned table only while it is attached, and each
//!   ATTACH inserts a row in `pg_inherits`. If its rows are published under the name of the root,
//!   the rows that it held before it was attached are never sent. A partition that was created as
//!   one held none: the transaction that attached it also wrote its first catalog rows.

use std::fmt::{self, Display};
use std::str::FromStr;

use pgoutput::Lsn;

/// One way in which a publication includes a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// `pg_publication.oid`.
    pub publication: u32,
    /// `pg_publication.xmin`: the transaction that wrote the row.
    pub written: u32,
    /// `pg_publication.pubowner`. ALTER PUBLICATION … OWNER TO updates the row too, and changes
    /// nothing else.
    pub owner: u32,
    /// One letter for each option: i, u, d, t for the published operations, v for
    /// `publish_via_partition_root`, g for generated columns.
    pub options: String,
    /// The catalog row that adds the table to the publication.
    pub by: By,
    /// A hash of the row filter.
    pub filter: Option<String>,
    /// The numbers of the columns in the column list.
    pub columns: Option<String>,
    /// If the publication includes a table above this one: the transactions (`pg_inherits.xmin`)
    /// that attached each level in between.
    pub path: Option<String>,
    /// If the publication includes the schema of a table above this one: the name of that table.
    pub above: Option<Above>,
}

/// The row type of a table above another one, which changes with its name and its schema. Earlier versions have not
/// recorded it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Above {
    /// As [`Relation::named`].
    pub named: u32,
    /// As [`Relation::owner`].
    pub owner: u32,
}

impl Above {
    /// Whether it has had the same name since.
    fn is_still(self, now: Self) -> bool {
        self.named == now.named || self.owner != now.owner
    }
}

/// Identity and name of the table itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relation {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_type.xmin` of its row type: the transaction that named the table.
    pub named: u32,
    /// `pg_type.typowner`. A new owner updates the row too.
    pub owner: u32,
    /// Partitions that are published under its name and existed before they were attached.
    pub attached: Vec<Attached>,
}

/// A partition that existed before it was attached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// `pg_class.oid`.
    pub oid: u32,
    /// `pg_inherits.xmin`: the transaction that attached it.
    pub by: u32,
    /// Whether it has no rows now.
    pub empty: bool,
}

/// The catalog row that adds a table, or one of the partitioned tables above it, to a publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// FOR ALL TABLES.
    All,
    /// The row of `pg_publication_namespace` with this oid.
    Schema(u32),
    /// The row of `pg_publication_rel` with this oid.
    Table(u32),
}

/// Everything that publishes a table at one moment. Its text form can be stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishedBy {
    relation: Option<Relation>,
    entries: Vec<Entry>,
    unpublished: Option<Unpublished>,
}

/// The readings between which a table ceased to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unpublished {
    /// The position of the last reading that found it published.
    since: Lsn,
    /// The end of WAL after the first reading that did not. Earlier versions have not recorded it.
    by: Option<Lsn>,
}

/// Why a table may lack changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// The publication has another oid.
    PublicationMadeAnew,
    /// The options of the publication were changed.
    PublicationAltered,
    /// The row filter of the table was changed.
    FilterChanged,
    /// The column list of the table was changed.
    ColumnsChanged,
    /// The table was removed from the publication, and perhaps added again.
    TakenOut,
    /// One more publication includes the table, with other rows, columns or operations.
    PublishedByMore,
    /// The table has another oid: it is another table of the same name.
    MadeAnew,
    /// The table had another name or schema in between.
    Renamed,
    /// The same of a partitioned table above it, whose schema is published.
    RenamedAbove,
    /// The table was detached from the published partitioned table, and attached again.
    Detached,
    /// A partition was attached that may have held rows.
    PartitionAttached,
    /// The catalog shows none of these, but the stream has changes of another table under the name
    /// ([`crate::other_table`]).
    OtherTableInStream,
    /// The catalog shows none of these, but the stream has changes of the table under another name.
    OtherNameInStream,
}

impl Gap {
    /// Whether another table has, or had, the name.
    #[must_use]
    pub fn is_of_another_table(self) -> bool {
        matches!(self, Self::MadeAnew | Self::OtherTableInStream)
    }
}

impl Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PublicationMadeAnew => "its publication was dropped and created again",
            Self::PublicationAltered => "the options of its publication were changed",
            Self::FilterChanged => "its row filter was changed",
            Self::ColumnsChanged => "its column list was changed",
            Self::TakenOut => "it was removed from a publication",
            Self::PublishedByMore => "another publication includes it with other rows or columns",
            Self::MadeAnew => "it was dropped and created again, or another table took its name",
            Self::Renamed => "it had another name or schema in between",
            Self::RenamedAbove => "a table above it had another name or schema in between",
            Self::Detached => "it was detached from its partitioned table",
            Self::PartitionAttached => "a partition was attached that may already have held rows",
            Self::OtherTableInStream => "changes of another table came under its name",
            Self::OtherNameInStream => "its changes came under another name",
        })
    }
}

impl Entry {
    /// Whether this is the same row, unchanged since.
    fn is_still(&self, now: &Self) -> bool {
        let Self { publication, options, by, filter, columns, path, .. } = self;
        let same = (publication, options, by, filter, columns, path)
            == (&now.publication, &now.options, &now.by, &now.filter, &now.columns, &now.path);
        same && self.is_below_the_same(now)
            && (self.written == now.written || self.owner != now.owner)
    }

    /// Whether the table above it has had the same name since, as far as is known.
    fn is_below_the_same(&self, now: &Self) -> bool {
        self.above.zip(now.above).is_none_or(|(old, new)| old.is_still(new))
    }

    /// Whether this entry alone publishes every change of the table.
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
    /// Whether one catalog row publishes both: the same rows of the same table.
    #[must_use]
    pub fn has_entry_of(&self, other: &Self) -> bool {
        self.entries.iter().any(|entry| other.entries.contains(entry))
    }

    /// Whether any publication publishes inserts of the table.
    #[must_use]
    pub fn includes_inserts(&self) -> bool {
        self.entries.iter().any(|entry| entry.options.contains('i'))
    }

    /// Everything that publishes a table; `entries` may be in any order.
    #[must_use]
    pub fn new(relation: Relation, mut entries: Vec<Entry>) -> Self {
        entries.sort();
        Self { relation: Some(relation), entries, unpublished: None }
    }

    /// The same, after a reading that found the table unpublished. `since` is the position of the
    /// reading before that one, `by` the end of WAL after this one.
    #[must_use]
    pub fn unpublished(&self, since: Lsn, by: Lsn) -> Self {
        let unpublished = self.unpublished.or(Some(Unpublished { since, by: Some(by) }));
        Self { unpublished, ..self.clone() }
    }

    /// The position from which on the table was unpublished, if a reading found that.
    #[must_use]
    pub fn unpublished_since(&self) -> Option<Lsn> {
        self.unpublished.map(|unpublished| unpublished.since)
    }

    /// Whether changes of this operation are published: i, u, d or t, as in [`Entry::options`].
    #[must_use]
    pub fn publishes(&self, operation: char) -> bool {
        self.entries.iter().any(|entry| entry.options.contains(operation))
    }

    /// `pg_class.oid` of the table, if a reading found it.
    #[must_use]
    pub fn oid(&self) -> Option<u32> {
        self.relation.as_ref().map(|relation| relation.oid)
    }

    /// Compares this earlier reading with a later one. Returns `None` if every change in between
    /// was published as before.
    #[must_use]
    pub fn gap_until(&self, now: &Self) -> Option<Gap> {
        let itself = self.relation.as_ref().zip(now.relation.as_ref());
        if let Some(gap) = itself.and_then(|(old, new)| old.gap_until(new)) {
            return Some(gap);
        }
        // An unlogged table is not published, whatever the catalog rows of publications say.
        if self.unpublished.is_some() {
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
        } else if !old.is_below_the_same(new) {
            Gap::RenamedAbove
        } else {
            Gap::PublicationAltered
        }
    }
}

/// A stored text is not the text form of [`PublishedBy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cannot parse the recorded publications of a table")]
pub struct Unreadable;

impl Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { publication, written, owner, options, by, filter, columns, path, above } = self;
        let options = if options.is_empty() { "-" } else { options };
        write!(f, "{publication} {written} {owner} {options} ")?;
        match by {
            By::All => f.write_str("all")?,
            By::Schema(oid) => write!(f, "schema:{oid}")?,
            By::Table(oid) => write!(f, "table:{oid}")?,
        }
        let none = "-";
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| none.to_owned());
        write!(f, " {} {} {} ", or_none(filter), or_none(columns), or_none(path))?;
        match above {
            Some(Above { named, owner }) => write!(f, "{named}:{owner}"),
            None => f.write_str(none),
        }
    }
}

impl FromStr for Entry {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let fields: Vec<_> = text.split(' ').collect();
        let [publication, written, owner, options, by, filter, columns, path, ref above @ ..] =
            fields[..]
        else {
            return Err(Unreadable);
        };
        let above = match *above {
            [] | ["-"] => None,
            [above] => {
                let (named, owner) = above.split_once(':').ok_or(Unreadable)?;
                Some(Above { named: number(named)?, owner: number(owner)? })
            }
            _ => return Err(Unreadable),
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
            above,
        })
    }
}

/// Prefixes of the lines that are not entries.
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
        if let Some(Unpublished { since, by }) = self.unpublished {
            let by = by.map(|lsn| format!(" {lsn}")).unwrap_or_default();
            writeln!(f, "{UNPUBLISHED}{since}{by}")?;
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
            } else if let Some(lsns) = line.strip_prefix(UNPUBLISHED) {
                let mut lsns = lsns.split(' ').map(|lsn| lsn.parse().map_err(|_| Unreadable));
                let since = lsns.next().ok_or(Unreadable)??;
                read.unpublished = Some(Unpublished { since, by: lsns.next().transpose()? });
            } else {
                read.entries.push(line.parse()?);
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::{Above, Attached, By, Entry, Gap, Lsn, PublishedBy, Relation};
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
            above: None,
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
    fn another_oid_or_name_is_a_gap() {
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
    fn another_name_of_the_root_is_a_gap_of_a_partition_that_its_schema_publishes() {
        let below =
            |named, owner| Entry { above: Some(Above { named, owner }), ..entry(1, By::Schema(5)) };
        let gap =
            |old: &Entry, new: &Entry| gap(std::slice::from_ref(old), std::slice::from_ref(new));
        assert_eq!(gap(&below(7, 10), &below(7, 10)), None);
        assert_eq!(gap(&below(7, 10), &below(8, 10)), Some(Gap::RenamedAbove));
        assert_eq!(gap(&below(7, 10), &below(8, 11)), None, "a new owner");
        // Recorded by an earlier version.
        let earlier: Entry = below(7, 10).to_string().replace(" 7:10", "").parse().unwrap();
        assert_eq!(earlier, entry(1, By::Schema(5)));
        assert_eq!(gap(&earlier, &below(8, 10)), None);
    }

    #[test]
    fn recreated_catalog_rows_are_a_gap() {
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
    fn altered_catalog_rows_are_a_gap_unless_only_the_owner_changed() {
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

    /// If one publication publishes the whole table all the time, the others do not matter.
    #[test]
    fn one_publication_of_the_whole_table_is_enough() {
        let whole = entry(1, By::Schema(9));
        let part = Entry { filter: Some("f".to_owned()), ..entry(2, By::Table(5)) };
        let both = [whole.clone(), part.clone()];
        assert_eq!(gap(&both, std::slice::from_ref(&whole)), None);
        assert_eq!(gap(std::slice::from_ref(&whole), &both), None);
        assert_eq!(gap(&both, std::slice::from_ref(&part)), Some(Gap::PublicationMadeAnew));
        assert_eq!(gap(&[part], &both), Some(Gap::PublishedByMore));
    }

    #[test]
    fn a_record_of_an_earlier_version_has_only_the_last_reading_that_found_the_table() {
        let with_both = PublishedBy::new(relation(), Vec::new()).unpublished(Lsn(7), Lsn(8));
        let text = with_both.to_string();
        assert!(text.ends_with("unpublished 0/7 0/8\n"), "{text}");
        let earlier: PublishedBy = text.replace(" 0/8", "").parse().unwrap();
        assert_eq!(earlier.unpublished_since(), Some(Lsn(7)));
        assert_ne!(earlier, with_both);
        assert!(text.replace("0/8", "soon").parse::<PublishedBy>().is_err());
    }

    fn entries() -> impl Strategy<Value = Entry> {
        let by = prop_oneof![
            Just(By::All),
            (0u32..4).prop_map(By::Schema),
            (0u32..4).prop_map(By::Table)
        ];
        let optional = || proptest::option::of("[a-f0-9,]{1,4}");
        let above = (0u32..3, 0u32..2).prop_map(|(named, owner)| Above { named, owner });
        let above = proptest::option::of(above);
        let texts = (optional(), optional(), optional());
        (0u32..4, 0u32..3, 0u32..2, "[iudt]{0,4}", by, texts, above).prop_map(
            |(publication, written, owner, options, by, (filter, columns, path), above)| Entry {
                publication,
                written,
                owner,
                options,
                by,
                filter,
                columns,
                path,
                above,
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
        fn a_recorded_publication_is_read_back(
            relation in relations(),
            entries in proptest::collection::vec(entries(), 0..4),
        ) {
            let published = PublishedBy::new(relation, entries);
            prop_assert_eq!(published.to_string().parse(), Ok(published.clone()));
            prop_assert_eq!(published.gap_until(&published), None);
            let unpublished = published.unpublished(Lsn(7), Lsn(8)).unpublished(Lsn(9), Lsn(10));
            prop_assert_eq!(unpublished.unpublished_since(), Some(Lsn(7)));
            prop_assert_eq!(unpublished.to_string().parse(), Ok(unpublished.clone()));
            prop_assert_eq!(unpublished.gap_until(&published), Some(Gap::TakenOut));
        }
    }
}
