//! Publications that change, and catalog readings that must detect it.
//!
//! The model has one table and the catalog rows that publish it. Between writes, these rows are
//! dropped, recreated and altered. The walsender sends a write if a publication includes the table
//! at that time, with that operation. The process reads the catalog now and then, may be stopped
//! for long, and copies the table again. After a last reading, this must hold:
//!
//! * If a write is not in the copy and was not sent, but the publications at the time of the copy
//!   would have sent it, the table is stale from a position before that write.
//! * A table is not stale if nothing that publishes it has changed.

use engine::published::{By, Entry, PublishedBy, Relation};

use crate::simulation::rng::Rng;

/// A rule that a test breaks on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GapSabotage {
    /// Only whether the table is published is compared.
    NoIdentity,
    /// A row with another `xmin` counts as unchanged.
    NoWritten,
    /// The baseline is recorded at the end of the copy instead of at its snapshot.
    LateBaseline,
    /// The table is stale from the reading that detected the gap.
    LateStale,
    /// The last reading is left out.
    NoLastLook,
}

const OPERATIONS: [char; 4] = ['i', 'u', 'd', 't'];

fn sends(entries: &[Entry], operation: char) -> bool {
    entries.iter().any(|entry| entry.options.contains(operation) && entry.filter.is_none())
}

#[derive(Default)]
struct Publisher {
    /// The next LSN, oid and transaction.
    clock: u32,
    entries: Vec<Entry>,
    /// Writes that were not sent: their LSN and operation.
    unsent: Vec<(u32, char)>,
    /// Whether anything that publishes the table was changed, except for an owner.
    changed: bool,
    /// Publications that got another owner, and publications whose options were altered. The test
    /// never does both to one publication: between two readings, a new owner hides options that are
    /// changed and changed back.
    owned: Vec<u32>,
    altered: Vec<u32>,
}

impl Publisher {
    fn next(&mut self) -> u32 {
        self.clock += 1;
        self.clock
    }

    fn entry(&mut self, publication: u32, by: By) -> Entry {
        Entry {
            publication,
            written: self.next(),
            owner: 10,
            options: OPERATIONS.iter().collect(),
            by,
            filter: None,
            columns: None,
            path: None,
            above: None,
        }
    }

    fn published_by(&self) -> PublishedBy {
        let relation = Relation { oid: 1, named: 1, owner: 10, attached: Vec::new() };
        PublishedBy::new(relation, self.entries.clone())
    }

    fn write(&mut self, rng: &mut Rng) {
        let operation = OPERATIONS[rng.below(4)];
        let lsn = self.next();
        if !sends(&self.entries, operation) {
            self.unsent.push((lsn, operation));
        }
    }

    fn change(&mut self, rng: &mut Rng) {
        let (number, oid) = (self.entries.len(), self.next());
        let which = rng.below(number.max(1));
        let publication = self.entries.get(which).map_or(0, |entry| entry.publication);
        self.changed = true;
        match rng.below(6) {
            0 if number > 0 => drop(self.entries.remove(which)),
            // Add the table to an existing publication, or to a new one.
            1 | 2 if number < 3 => {
                let publication = if rng.below(2) == 0 { oid } else { 1 };
                self.entries.retain(|entry| entry.publication != publication);
                let by = if rng.below(2) == 0 { By::Table(oid) } else { By::Schema(oid) };
                let entry = self.entry(publication, by);
                self.entries.push(entry);
            }
            3 if number > 0 && !self.owned.contains(&publication) => {
                self.altered.push(publication);
                // Options that are changed back are written again all the same.
                let without = OPERATIONS[rng.below(4)];
                let had = self.entries[which].options.contains(without);
                let options = OPERATIONS.iter().filter(|one| **one != without || !had);
                self.entries[which].options = options.collect();
                self.entries[which].written = oid;
            }
            4 if number > 0 => {
                // Another filter comes with another row of `pg_publication_rel`.
                let filter = self.entries[which].filter.is_none().then(|| "f".to_owned());
                self.entries[which].filter = filter;
                self.entries[which].by = By::Table(oid);
            }
            5 if number > 0 && !self.altered.contains(&publication) => {
                self.owned.push(publication);
                self.entries[which].owner += 1;
                self.entries[which].written = oid;
                self.changed = false;
            }
            _ => self.changed = false,
        }
    }
}

/// The subscriber's knowledge about the table.
struct Subscriber {
    seen: PublishedBy,
    looked_at: u32,
    /// Position of the snapshot of its copy, and what published the table then.
    copied_at: u32,
    copied_with: Vec<Entry>,
    stale_from: Option<u32>,
}

impl Subscriber {
    fn look(&mut self, publisher: &mut Publisher, sabotage: Option<GapSabotage>) {
        let (now, published) = (publisher.next(), publisher.published_by());
        // A table that is not published keeps its last reading.
        if publisher.entries.is_empty() {
            return;
        }
        let gap = self.seen.gap_until(&published).is_some();
        let gap = match sabotage {
            Some(GapSabotage::NoIdentity) => false,
            Some(GapSabotage::NoWritten) => {
                gap && {
                    let as_seen = |entries: &str| {
                        let fields = entries.lines().map(|line| {
                            let mut fields: Vec<_> = line.split(' ').collect();
                            if !line.starts_with("relation") {
                                fields.remove(1);
                            }
                            fields.join(" ")
                        });
                        fields.collect::<Vec<_>>()
                    };
                    as_seen(&self.seen.to_string()) != as_seen(&published.to_string())
                }
            }
            _ => gap,
        };
        if gap {
            let since = self.looked_at.max(self.copied_at);
            let since = if sabotage == Some(GapSabotage::LateStale) { now } else { since };
            self.stale_from.get_or_insert(since);
        }
        self.seen = published;
        self.looked_at = now;
    }
}

/// Runs one seed.
///
/// # Errors
/// The property that does not hold.
pub(crate) fn run(seed: u64, sabotage: Option<GapSabotage>) -> Result<(), String> {
    let mut rng = Rng(seed);
    let mut publisher = Publisher { clock: 100, ..Publisher::default() };
    let entry = publisher.entry(1, By::All);
    publisher.entries.push(entry);
    let copied_at = publisher.next();
    let mut subscriber = Subscriber {
        seen: publisher.published_by(),
        looked_at: copied_at,
        copied_at,
        copied_with: publisher.entries.clone(),
        stale_from: None,
    };
    let mut changed = false;
    for _ in 0..rng.below(30) {
        match rng.below(10) {
            0..4 => publisher.write(&mut rng),
            4..7 => {
                publisher.change(&mut rng);
                changed |= publisher.changed;
            }
            7 | 8 => subscriber.look(&mut publisher, sabotage),
            _ if !publisher.entries.is_empty() => {
                // Copy the table again. During the copy, the table is written and the publications
                // change.
                let copied_at = publisher.next();
                let (snapshot, copied_with) = (publisher.published_by(), publisher.entries.clone());
                changed = false;
                for _ in 0..rng.below(4) {
                    publisher.write(&mut rng);
                    publisher.change(&mut rng);
                    changed |= publisher.changed;
                }
                let late =
                    sabotage == Some(GapSabotage::LateBaseline) && !publisher.entries.is_empty();
                subscriber = Subscriber {
                    seen: if late { publisher.published_by() } else { snapshot },
                    looked_at: subscriber.looked_at,
                    copied_at,
                    copied_with,
                    stale_from: None,
                };
            }
            _ => {}
        }
    }
    // Only a table that is published at the end is read again. An unpublished one is reported
    // anyway.
    if publisher.entries.is_empty() {
        return Ok(());
    }
    if sabotage != Some(GapSabotage::NoLastLook) {
        subscriber.look(&mut publisher, sabotage);
    }
    let missed = publisher.unsent.iter().find(|(lsn, operation)| {
        *lsn > subscriber.copied_at && sends(&subscriber.copied_with, *operation)
    });
    let missed = missed.map(|(lsn, _)| lsn);
    match (missed, subscriber.stale_from) {
        (Some(missed), None) => Err(format!("no gap was found for the write at {missed}")),
        (Some(missed), Some(stale)) if stale > *missed => {
            Err(format!("the write at {missed} was missed, and the table is stale from {stale} on"))
        }
        (None, Some(stale)) if !changed => Err(format!("stale from {stale} on without a gap")),
        _ => Ok(()),
    }
}
