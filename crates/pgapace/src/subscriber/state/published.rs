//! The record of how each table was published, with which pgapace detects changes that the
//! publisher never sent ([`engine::published`]).
//!
//! Each time pgapace reads the publications, it compares them with the previous reading. For a
//! table to be copied, it compares with the publications as of the copy's snapshot. The position of
//! the last reading without a difference is recorded: from there on, a table may lack changes.

use engine::other_table::{NamedTable, gap_in_stream};
use engine::published::{Gap, PublishedBy};
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use rustc_hash::{FxHashMap, FxHashSet};
use wire::{Session, quote_literal};

use crate::config::{CopyOptions, OnMissedChanges};
use crate::error::{Failure, Result};
use crate::publisher::publication::{PublicationContents, PublishedTable};
use crate::publisher::recreated::FollowedDatabase;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::state::{SubscriptionId, name_array, table_name_arrays};
use crate::tablesync::table_state;

/// A table that may lack changes.
#[derive(Debug)]
struct StaleTable {
    name: TableName,
    gap: Gap,
    from: Lsn,
    /// The LSN of the reading that found the gap: transactions that commit from there on are sent.
    through: Lsn,
    state: TableSyncState,
}

/// The previous reading of the publications.
pub(crate) struct PreviousReading {
    looked_at: Option<Lsn>,
    /// The OID of the publisher's database. Earlier versions have not recorded it.
    database: Option<u32>,
    tables: Vec<RecordedTable>,
}

struct RecordedTable {
    name: TableName,
    state: TableSyncState,
    sync_lsn: Option<Lsn>,
    /// The table is already known to lack changes.
    stale: bool,
    by: Option<PublishedBy>,
}

impl RecordedTable {
    /// The fields that a copy or a comparison writes.
    fn written(&self) -> (Option<&PublishedBy>, Option<Lsn>) {
        (self.by.as_ref(), self.sync_lsn)
    }

    /// Why the table may lack changes, and from which LSN on, as a look at the publications at LSN `now` shows.
    fn gap(
        &self,
        published: &PublishedTable,
        looked_at: Option<Lsn>,
        now: Lsn,
    ) -> Option<(Gap, Lsn)> {
        // A table that was never copied lacks nothing.
        let holds_rows = match self.state {
            TableSyncState::Init => false,
            TableSyncState::Blocked => self.stale,
            TableSyncState::DataSync | TableSyncState::CatchUp | TableSyncState::Ready => true,
        };
        let by = self.by.as_ref().filter(|_| holds_rows)?;
        let gap = by.gap_until(&published.published_by)?;
        let seen = by.unpublished_since().or(looked_at);
        Some((gap, self.sync_lsn.into_iter().chain(seen).max().unwrap_or(now)))
    }

    /// The same, as the stream shows.
    fn gap_in_stream(
        &self,
        published: &PublishedTable,
        others: &[NamedTable],
        decision: Decision,
    ) -> Option<(Gap, Lsn)> {
        let is_ignored = self.stale && decision.on_missed_changes == OnMissedChanges::Ignore;
        if is_ignored || !self.state.is_copied() {
            return None;
        }
        gap_in_stream(others, &self.name, published.oid, self.sync_lsn.map(SyncLsn))
    }
}

impl PreviousReading {
    /// Only the tables whose record is the same as in `before`, a reading from before the look at
    /// the publications. The record of any other table was written meanwhile, mostly by a copy, and
    /// may be newer than the look: compared with it, a table that was just created would seem to be
    /// no longer published.
    pub(crate) fn unchanged_since(mut self, before: &Self) -> Self {
        let before: FxHashMap<_, _> =
            before.tables.iter().map(|table| (&table.name, table.written())).collect();
        self.tables.retain(|table| before.get(&table.name) == Some(&table.written()));
        self
    }
}

impl PreviousReading {
    /// The tables that are recorded as unpublished.
    pub(crate) fn unpublished(&self) -> FxHashSet<&TableName> {
        let is_unpublished = |table: &&RecordedTable| {
            table.by.as_ref().is_some_and(|by| by.unpublished_since().is_some())
        };
        self.tables.iter().filter(is_unpublished).map(|table| &table.name).collect()
    }

    /// The oids on the publisher of the tables, as far as they are recorded.
    pub(crate) fn oids(&self) -> FxHashMap<&TableName, u32> {
        let oid = |table: &RecordedTable| table.by.as_ref().and_then(PublishedBy::oid);
        self.tables.iter().filter_map(|table| Some((&table.name, oid(table)?))).collect()
    }

    /// By what another database of the same name is recognised.
    pub(crate) fn database(&self) -> FollowedDatabase {
        FollowedDatabase { oid: self.database, tables: self.oids().into_values().collect() }
    }

    /// The tables in whose place the publisher has another one.
    pub(crate) fn made_anew(&self, contents: &PublicationContents) -> FxHashSet<TableName> {
        let oids = self.oids();
        let is_another = |table: &&PublishedTable| {
            oids.get(&table.name).is_some_and(|recorded| *recorded != table.oid)
        };
        contents.tables.iter().filter(is_another).map(|table| table.name.clone()).collect()
    }

    /// Whether everything is applied up to this reading.
    pub(crate) fn is_applied(&self, through: Lsn) -> bool {
        self.looked_at.is_some_and(|looked_at| looked_at <= through)
    }
}

/// Whether a recorded table is not published, or is published in another way than recorded, or the database is another
/// one.
pub(crate) fn differs(recorded: &PreviousReading, contents: &PublicationContents) -> bool {
    recorded.database.is_some_and(|database| database != contents.database)
        || !differing(recorded, contents, |_| true).is_empty()
}

/// The tables of which [`compare`] has not judged yet whether they lack changes: they are published in another way
/// than recorded, or no longer, which is not recorded.
pub(crate) fn unjudged(recorded: &PreviousReading, contents: &PublicationContents) -> Vec<String> {
    differing(recorded, contents, |table| {
        table.by.as_ref().is_none_or(|by| by.unpublished_since().is_none())
    })
}

/// The recorded tables that are published in another way than recorded, and those that are not published for which
/// `counts` is true.
fn differing(
    recorded: &PreviousReading,
    contents: &PublicationContents,
    counts: impl Fn(&RecordedTable) -> bool,
) -> Vec<String> {
    let published: FxHashMap<_, _> =
        contents.tables.iter().map(|table| (&table.name, table)).collect();
    let differs = |table: &&RecordedTable| {
        let found = published.get(&table.name);
        found.map_or_else(|| counts(table), |found| table.by.as_ref() != Some(&found.published_by))
    };
    let differing = recorded.tables.iter().filter(differs);
    differing.map(|table| table.name.to_string()).collect()
}

/// Compares the publications with the previous reading and records them. Tables that may lack
/// changes are marked and treated as `--on-missed-changes` says. Returns whether there were any.
///
/// `recorded` was read after tables were last removed from the subscription. No record in it is newer
/// than `contents`.
///
/// A table that is no longer published is recorded as such. It may lack changes if it is published
/// again.
///
/// The stream has named tables (`others`) like others. Where the publications do not explain that, the tables of these
/// names are treated in the same way.
///
/// Where added tables are copied (`copies_added`), a new table in place of an old one is treated as one of them, so that
/// nobody has to ask for its copy if it was created again on both servers.
pub(crate) fn compare(
    control: &mut Session,
    owner: OwnedEpoch,
    recorded: PreviousReading,
    (contents, others): (&PublicationContents, &[NamedTable]),
    options: CopyOptions,
    copies_added: bool,
) -> Result<bool> {
    let PreviousReading { looked_at, tables: recorded, .. } = recorded;
    let decision = Decision::of(options, copies_added);
    let mut stale = Vec::new();
    let (mut names, mut seen) = (Vec::new(), Vec::new());
    let published: FxHashMap<_, _> =
        contents.tables.iter().map(|table| (&table.name, table)).collect();
    for table in recorded {
        let Some(published) = published.get(&table.name) else {
            let by = table.by.unwrap_or_default();
            if by.unpublished_since().is_none() {
                names.push(table.name);
                let since = looked_at.unwrap_or(contents.lsn);
                seen.push(by.unpublished(since, contents.end).to_string());
            }
            continue;
        };
        if table.by.as_ref() != Some(&published.published_by) {
            names.push(table.name.clone());
            seen.push(published.published_by.to_string());
        }
        let found = table.gap(published, looked_at, contents.lsn);
        let Some((gap, from)) = found.or_else(|| table.gap_in_stream(published, others, decision))
        else {
            continue;
        };
        let (through, state) = (contents.lsn.max(from), table.state);
        stale.push(StaleTable { name: table.name, gap, from, through, state });
    }
    let decided: String = stale.iter().map(|table| table.decide(owner, decision)).collect();
    let sql = format!(
        "UPDATE pgapace.relation r SET published_by = c.published_by \
         FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), \
                         pg_catalog.unnest($2::pg_catalog.text[]), \
                         pg_catalog.unnest($3::pg_catalog.text[])) \
           AS c (schema_name, table_name, published_by) \
         WHERE r.subscription = {} AND r.schema_name = c.schema_name \
           AND r.table_name = c.table_name",
        owner.sql()
    );
    let looked = format!(
        "UPDATE pgapace.subscription SET published_lsn = '{}', publisher_database = {} WHERE id = {}",
        contents.lsn,
        contents.database,
        owner.sql()
    );
    let [schemas, tables] = table_name_arrays(&names);
    let arguments = [schemas, tables, name_array(&seen)];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    if stale.is_empty() && names.is_empty() {
        control.simple(&looked).map_err(|e| writing(&e))?;
        return Ok(false);
    }
    // One transaction: a difference is either recorded and acted on, or found again.
    control.simple(&format!("BEGIN; {decided}{looked}")).map_err(|e| writing(&e))?;
    if decision.on_missed_changes == OnMissedChanges::Stop {
        for table in stale.iter().filter(|table| table.state.is_copied()) {
            let gap = table.gap.to_string();
            let reason = format!("it may lack changes since {}: {gap}", table.from);
            table_state::block_member(
                control,
                owner,
                &table.name,
                (&reason, Some(&gap)),
                table.from,
            )?;
            if decision.adds(table) {
                table_state::add_blocked(control, owner, &table.name)?;
            }
        }
    }
    if !names.is_empty() {
        control.execute(&sql, &arguments).map_err(|e| writing(&e))?;
    }
    control.simple("COMMIT").map_err(|e| writing(&e))?;
    stale.iter().for_each(|table| table.log(decision));
    Ok(!stale.is_empty())
}

/// The settings that decide whether stale tables are copied again, blocked or left.
#[derive(Debug, Clone, Copy)]
struct Decision {
    on_missed_changes: OnMissedChanges,
    /// Another copy would remove rows that are to be kept.
    keeps_rows: bool,
    /// A new table in place of an old one is treated as an added one, which must be empty.
    adds: bool,
}

impl Decision {
    fn of(options: CopyOptions, copies_added: bool) -> Self {
        let keeps_rows = options.keeps_rows();
        let on_missed_changes = match options.on_missed_changes {
            OnMissedChanges::Resync if keeps_rows => OnMissedChanges::Stop,
            wanted => wanted,
        };
        Self { on_missed_changes, keeps_rows, adds: copies_added && options.if_not_empty.refuses() }
    }

    /// Whether another copy follows. The copy in progress may lack changes too.
    fn copies_again(self, state: TableSyncState) -> bool {
        match self.on_missed_changes {
            OnMissedChanges::Resync => true,
            OnMissedChanges::Stop => state == TableSyncState::DataSync && !self.keeps_rows,
            OnMissedChanges::Ignore => false,
        }
    }

    /// Whether a table that is blocked is copied as an added one, when the subscriber's is empty.
    fn adds(self, table: &StaleTable) -> bool {
        self.adds && table.gap.is_of_another_table()
    }
}

impl StaleTable {
    /// The SQL that marks the table as stale. `compare` also blocks a copied table.
    fn decide(&self, owner: OwnedEpoch, decision: Decision) -> String {
        let Self { name, gap, from, through, state } = self;
        let again = decision.copies_again(*state);
        let then = if again { ", requested = pg_catalog.now()" } else { "" };
        format!(
            "UPDATE pgapace.relation r SET stale_lsn = coalesce(r.stale_lsn, '{from}'), \
               stale_through = greatest(r.stale_through, '{through}'), stale_reason = {reason}{then} \
             WHERE r.subscription = {owner} AND r.schema_name = {schema} AND r.table_name = {name}; ",
            reason = quote_literal(&gap.to_string()),
            owner = owner.sql(),
            schema = quote_literal(&name.schema),
            name = quote_literal(&name.name)
        )
    }

    fn log(&self, decision: Decision) {
        let Self { name, gap, from, state, .. } = self;
        let stops = decision.on_missed_changes == OnMissedChanges::Stop;
        let decision = if decision.copies_again(*state) {
            "it is copied again"
        } else if stops && *state != TableSyncState::DataSync {
            if decision.adds(self) {
                "it is copied when the subscriber's table is empty, or by pgapace resync"
            } else {
                "it is not applied until it is copied again: pgapace resync"
            }
        } else {
            "it is applied all the same"
        };
        tracing::warn!(
            event = "table_stale",
            table = name.to_string(),
            since = %from,
            reason = %gap,
            decision,
            "table may lack changes that were not published"
        );
    }
}

/// The query for [`previous`], of the subscription `$1`.
pub(crate) const PREVIOUS: &str = "\
    SELECT s.published_lsn, r.schema_name, r.table_name, r.state, r.sync_lsn, \
      r.published_by, r.stale_lsn IS NOT NULL, s.publisher_database \
    FROM pgapace.subscription s JOIN pgapace.relation r ON r.subscription = s.id \
    WHERE s.id = $1::pg_catalog.int4 ORDER BY r.schema_name, r.table_name";

/// Reads the position of the last reading of the publications, and the record of each table.
pub(crate) fn read(control: &mut Session, id: SubscriptionId) -> Result<PreviousReading> {
    let rows = control
        .query(PREVIOUS, &[Some(&id.0.to_string())])
        .map_err(|e| Failure::subscriber(&e, "reading how tables were published"))?;
    previous(&rows)
}

/// From the rows of [`PREVIOUS`].
pub(crate) fn previous(rows: &wire::Rows) -> Result<PreviousReading> {
    let (mut looked_at, mut database) = (None, None);
    let mut tables = Vec::with_capacity(rows.len());
    for row in rows.iter() {
        looked_at = row.get(0).map(|_| field(&row, 0)).transpose()?;
        database = row.get(7).map(|_| field(&row, 7)).transpose()?;
        let by = row.get(5).map(|text| {
            text.parse()
                .map_err(|e: engine::published::Unreadable| Failure::internal(e.to_string()))
        });
        tables.push(RecordedTable {
            name: TableName { schema: field(&row, 1)?, name: field(&row, 2)? },
            state: super::relations::state_of(&row, 3)?,
            sync_lsn: row.get(4).map(|_| field(&row, 4)).transpose()?,
            stale: boolean(&row, 6)?,
            by: by.transpose()?,
        });
    }
    Ok(PreviousReading { looked_at, database, tables })
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "recording how tables are published in schema pgapace")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, by: Option<PublishedBy>, sync_lsn: Option<u64>) -> RecordedTable {
        RecordedTable {
            name: TableName { schema: "public".to_owned(), name: name.to_owned() },
            state: TableSyncState::Ready,
            sync_lsn: sync_lsn.map(Lsn),
            stale: false,
            by,
        }
    }

    #[test]
    fn a_table_that_is_known_to_be_unpublished_is_judged() {
        let tables = Vec::new();
        let contents = PublicationContents { lsn: Lsn(9), end: Lsn(9), database: 5, tables };
        let unpublished = PublishedBy::default().unpublished(Lsn(5), Lsn(6));
        let tables = vec![
            table("known", Some(unpublished), Some(1)),
            table("new", Some(PublishedBy::default()), Some(1)),
            table("unknown", None, Some(1)),
        ];
        let recorded = PreviousReading { looked_at: None, database: None, tables };
        assert_eq!(unjudged(&recorded, &contents), ["public.new", "public.unknown"]);
        assert!(differs(&recorded, &contents));
        let recorded =
            PreviousReading { tables: recorded.tables.into_iter().take(1).collect(), ..recorded };
        assert_eq!(unjudged(&recorded, &contents), Vec::<String>::new());
        assert!(differs(&recorded, &contents));
    }

    /// A table that was added, copied again or recorded anew during a look is left to the next one.
    #[test]
    fn records_that_are_newer_than_the_look_are_left_out() {
        let by = || Some(PublishedBy::default());
        let reading = |tables| PreviousReading { looked_at: None, database: None, tables };
        let before = reading(vec![
            table("same", by(), Some(1)),
            table("copied_again", by(), Some(1)),
            table("copy_begun", by(), Some(1)),
            table("recorded", None, Some(1)),
            table("dropped", by(), Some(1)),
        ]);
        let now = reading(vec![
            table("added", by(), Some(2)),
            table("same", by(), Some(1)),
            table("copied_again", by(), Some(2)),
            table("copy_begun", by(), None),
            table("recorded", by(), Some(1)),
        ]);
        let kept = now.unchanged_since(&before);
        let names: Vec<_> = kept.tables.iter().map(|table| table.name.name.as_str()).collect();
        assert_eq!(names, ["same"]);
    }
}
