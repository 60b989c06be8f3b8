//! Another subscription of the subscriber that receives the same rows of the same publisher's database: each row is
//! there twice, or its key is. Parts of a table under disjoint row filters, and tables of other publishers, are fine.
//!
//! The other subscription is recognized by its slot: a logical slot of that name exists in the publisher's database. One
//! of pgapace has recorded the system identifier, too; of a native one, the running worker proves that it uses the slot.

use std::collections::{BTreeMap, HashMap, HashSet};

use engine::table_name::TableName;
use wire::{Session, quote_literal};

use crate::check::report::{Finding, Report, Severity, Side};
use crate::check::{SubscriptionState, one, server};
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::system_identifier;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::other_subscriptions::{self, OtherSubscription};

/// The next step for tables whose rows would be there twice.
pub(crate) const HINT: &str = "\
Each row would be there twice. A subscription cannot be renamed: keep its name; or pgapace drop the other one, then \
pgapace run --if-not-empty rebase. A native subscription is taken over with pgapace adopt. Where both are needed, take \
the table out of a publication, or give both disjoint row filters.";

/// Why a table that another subscription no longer receives cannot be copied yet.
const EARLIER: &str =
    "may still apply changes from before the table was removed from its publications";

/// Whether another subscription receives the same rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Overlap {
    /// If both row filters hold for a row, or if the other subscription is one of this publisher's database.
    Possible,
    Certain,
    /// The other subscription no longer publishes the table, but may still apply changes from before: later than a copy
    /// that is made now, which has newer rows.
    Earlier,
}

/// Another subscription that may receive the same rows of a table.
#[derive(Debug, Clone)]
pub(crate) struct SameRows {
    /// The place of the table among those that were asked for.
    pub(crate) place: usize,
    pub(crate) overlap: Overlap,
    /// The other subscription, in words.
    pub(crate) label: String,
    pub(crate) is_native: bool,
    /// Whether it has copied the rows, so that another copy has them twice.
    pub(crate) copies_data: bool,
}

impl SameRows {
    /// Whether no copy can be right, also if the user has decided to keep rows of both.
    pub(crate) fn is_earlier(&self) -> bool {
        self.overlap == Overlap::Earlier
    }
}

/// The other subscriptions that may receive the same rows of these tables. `name` is that of pgapace's subscription.
pub(crate) fn read(
    publisher: &mut Session,
    subscriber: &mut Session,
    (name, publications): (&str, &[String]),
    tables: &[PublishedTable],
) -> Result<Vec<SameRows>> {
    let names: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
    let others = other_subscriptions::list(subscriber, name, &names)?;
    among(publisher, others, publications, tables)
}

/// Those of the listed subscriptions.
pub(crate) fn among(
    publisher: &mut Session,
    mut others: Vec<OtherSubscription>,
    publications: &[String],
    tables: &[PublishedTable],
) -> Result<Vec<SameRows>> {
    others.retain(|other| other.is_copied);
    if others.is_empty() {
        return Ok(Vec::new());
    }
    let slots = slots(publisher, &others)?;
    // An error would end a transaction that holds the snapshot of a copy.
    let identifier = if may_identify(publisher)? { system_identifier(publisher) } else { None };
    let differ = |(one, other): (&String, &String)| one != other;
    others.retain(|other| {
        let other_system =
            other.system_identifier.as_ref().zip(identifier.as_ref()).is_some_and(differ);
        let is_used = slots.get(&other.slot).copied();
        !other_system && is_used.is_some_and(|is_used| is_used || !other.has_worker)
    });
    let with_inserts = with_inserts(publisher, publications, &others)?;
    let inserts_here = publications.iter().any(|name| with_inserts.contains(name));
    let mut contents: BTreeMap<Vec<String>, Vec<PublishedTable>> = BTreeMap::new();
    let mut found = Vec::new();
    for other in others {
        let mut theirs = other.publications.clone();
        theirs.retain(|name| with_inserts.contains(name));
        if !contents.contains_key(&theirs) {
            let tables = match publication::read_contents(publisher, &theirs) {
                Ok(read) => read.tables,
                // Their column lists contradict each other: nothing is sent.
                Err(failure) if failure.class == Class::Mismatch => Vec::new(),
                Err(failure) => return Err(failure),
            };
            contents.insert(theirs.clone(), tables);
        }
        let published = contents.get(&theirs).map_or(&[][..], Vec::as_slice);
        let overlap = overlap(&tables[other.place], &other, published);
        if let Some(overlap) = overlap.filter(|one| inserts_here || *one == Overlap::Earlier) {
            let OtherSubscription { place, label, is_native, copies_data, .. } = other;
            found.push(SameRows { place, overlap, label, is_native, copies_data });
        }
    }
    Ok(found)
}

/// Whether a table of this subscription has rows of the other one.
fn overlap(
    ours: &PublishedTable,
    other: &OtherSubscription,
    published: &[PublishedTable],
) -> Option<Overlap> {
    let Some(theirs) = published.iter().find(|table| table.name == other.table) else {
        let is_earlier = !other.is_native && other.system_identifier.is_some();
        return is_earlier.then_some(Overlap::Earlier);
    };
    let is_proven =
        if other.is_native { other.has_worker } else { other.system_identifier.is_some() };
    Some(if is_proven && share_rows(ours, theirs) { Overlap::Certain } else { Overlap::Possible })
}

/// Whether two subscriptions of one publisher's database receive the same rows of what they publish as a table.
pub(super) fn share_rows(one: &PublishedTable, other: &PublishedTable) -> bool {
    let is_whole = |table: &PublishedTable| table.filters.is_empty();
    let all_insert = [one, other].iter().all(|table| table.published_by.includes_inserts());
    one.oid == other.oid
        && all_insert
        && (is_whole(one) || is_whole(other) || one.published_by.has_entry_of(&other.published_by))
}

/// The slots of these subscriptions in the publisher's database, and whether each is in use.
fn slots(publisher: &mut Session, others: &[OtherSubscription]) -> Result<HashMap<String, bool>> {
    let names: Vec<_> = others.iter().map(|other| quote_literal(&other.slot)).collect();
    let sql = format!(
        "SELECT slot_name, active FROM pg_catalog.pg_replication_slots \
         WHERE slot_type = 'logical' AND plugin = 'pgoutput' \
           AND database = pg_catalog.current_database() AND slot_name IN ({})",
        names.join(", ")
    );
    let doing = "looking for the slots of other subscriptions";
    let rows = publisher.simple(&sql).map_err(|e| Failure::publisher(&e, doing))?;
    rows.iter().flatten().map(|row| Ok((field(&row, 0)?, boolean(&row, 1)?))).collect()
}

/// Whether the role may read the system identifier.
fn may_identify(publisher: &mut Session) -> Result<bool> {
    let sql =
        "SELECT pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')";
    let doing = "looking for the slots of other subscriptions";
    let results = publisher.simple(sql).map_err(|e| Failure::publisher(&e, doing))?;
    boolean(&first_row(&results, "has_function_privilege")?, 0)
}

/// The publications of this subscription and of the others that exist, and publish inserts.
fn with_inserts(
    publisher: &mut Session,
    publications: &[String],
    others: &[OtherSubscription],
) -> Result<HashSet<String>> {
    let all = publications.iter().chain(others.iter().flat_map(|other| &other.publications));
    let names: Vec<_> = all.map(|name| quote_literal(name)).collect();
    let sql = format!(
        "SELECT pubname FROM pg_catalog.pg_publication WHERE pubinsert AND pubname IN ({})",
        names.join(", ")
    );
    let doing = "reading the publications of other subscriptions";
    let rows = publisher.simple(&sql).map_err(|e| Failure::publisher(&e, doing))?;
    rows.iter().flatten().map(|row| field(&row, 0)).collect()
}

/// The databases and tables of a subscription. `check` compares them with those of the other subscriptions in the file.
#[derive(Debug)]
pub(super) struct Received {
    /// The publisher's database, and the subscriber's.
    databases: [String; 2],
    tables: Vec<PublishedTable>,
    /// The tables that a run refuses to copy if another subscription copies the same rows.
    to_copy: HashSet<TableName>,
}

impl Received {
    pub(super) fn read(
        (publisher, subscriber): (&mut Session, &mut Session),
        config: &Config,
        known: &SubscriptionState,
        published: &[PublishedTable],
    ) -> Result<Self> {
        let database = |session: &mut Session, side| {
            let name =
                one(session, side, "SELECT pg_catalog.current_database()", "reading its name")?;
            Ok::<_, Failure>(format!("{} {name}", server(session, side)?))
        };
        let databases =
            [database(publisher, Side::Publisher)?, database(subscriber, Side::Subscriber)?];
        let refused = |table: &&PublishedTable| {
            config.if_not_empty != IfNotEmpty::Keep && known.to_copy(config, table)
        };
        let to_copy = published.iter().filter(refused).map(|table| table.name.clone()).collect();
        Ok(Self { databases, tables: published.to_vec(), to_copy })
    }
}

/// Compares the subscriptions of a configuration: before their first run, the subscriber knows nothing of them. Each
/// finding is one of the later subscription, unless a finding on that table says it already.
pub(crate) fn compare(reports: &mut [Report]) {
    for later in 1..reports.len() {
        let (before, rest) = reports.split_at_mut(later);
        let Some(report) = rest.first_mut() else { continue };
        for other in before {
            let Some((theirs, ours)) = other.received.as_ref().zip(report.received.as_ref()) else {
                continue;
            };
            if theirs.databases != ours.databases {
                continue;
            }
            let by_oid: HashMap<_, _> =
                theirs.tables.iter().map(|table| (table.oid, table)).collect();
            let is_same = |table: &&PublishedTable| {
                by_oid.get(&table.oid).is_some_and(|other| share_rows(table, other))
            };
            let mut found = Vec::new();
            for table in ours.tables.iter().filter(is_same) {
                let refused = [ours, theirs].iter().all(|one| one.to_copy.contains(&table.name));
                found.push((table.name.to_string(), refused));
            }
            let said = |report: &Report, name: &String| {
                let about = |f: &Finding| f.topic == "shared" && f.object.as_ref() == Some(name);
                report.findings.iter().any(about)
            };
            found.retain(|(name, _)| !said(report, name) && !said(other, name));
            for (name, refused) in found {
                let severity = if refused { Severity::Blocker } else { Severity::Warning };
                let message = format!(
                    "table {name} is published to subscription {}, too: each row would be there twice, or conflict. \
                     Take it out of a publication, or give both disjoint row filters",
                    other.subscription
                );
                report.add(severity, Side::Subscriber, "shared", message).on(name);
            }
        }
    }
}

/// The message of `check` if another subscription receives the same rows of a table.
pub(super) fn message(table: &str, same: &SameRows) -> String {
    let label = &same.label;
    if same.is_earlier() {
        return format!("table {table}: {label} {EARLIER}. pgapace copies it afterwards");
    }
    let way_out = if same.is_native {
        "pgapace adopt takes the native subscription over, without a copy"
    } else {
        "A subscription cannot be renamed: keep its name; or pgapace drop the other one, then pgapace run \
         --if-not-empty rebase. Where both are needed, take the table out of a publication"
    };
    format!(
        "table {table}: {label} applies the same rows of this publisher's database. Each would be there twice, or \
         conflict. {way_out}"
    )
}

/// The sentence that `check` adds if another subscription may receive the same rows.
pub(super) fn message_of_possible(same: &SameRows) -> String {
    let adopted =
        if same.is_native { ". pgapace adopt takes the native subscription over" } else { "" };
    format!(
        ". The publisher's database has the slot of {}: rows that both receive are there twice{adopted}",
        same.label
    )
}

/// The failure for tables whose rows a copy would have twice, if there are any.
pub(crate) fn failure(found: &[SameRows], tables: &[PublishedTable]) -> Option<Failure> {
    let named = |same: &SameRows| format!("{} ({})", tables[same.place].name, same.label);
    let failure = |named: Vec<_>, what, hint| {
        let message = format!("another subscription {what}: {}", named.join(", "));
        (!named.is_empty()).then(|| Failure::new(Class::Mismatch, message).hint(hint))
    };
    let copied = certain(found).filter(|same| same.copies_data).map(named).collect();
    let earlier = found.iter().filter(|same| same.is_earlier()).map(named).collect();
    failure(copied, "copies the same rows of this publisher's database", HINT)
        .or_else(|| failure(earlier, EARLIER, other_subscriptions::EARLIER_HINT))
}

/// The same for each of the tables.
pub(crate) fn of_each(found: &[SameRows], tables: &[PublishedTable]) -> Vec<Option<Failure>> {
    let of = |place| {
        let found: Vec<_> = found.iter().filter(|same| same.place == place).cloned().collect();
        failure(&found, tables)
    };
    (0..tables.len()).map(of).collect()
}

/// Those that certainly receive the same rows.
fn certain(found: &[SameRows]) -> impl Iterator<Item = &SameRows> {
    found.iter().filter(|same| same.overlap == Overlap::Certain)
}

/// Warns of these tables.
pub(crate) fn warn(found: &[SameRows], tables: &[PublishedTable]) {
    for same in certain(found) {
        tracing::warn!(
            event = "same_rows",
            table = tables[same.place].name.to_string(),
            other = same.label,
            "another subscription applies the same rows of this publisher's database: each is there twice, or \
             conflicts"
        );
    }
}
