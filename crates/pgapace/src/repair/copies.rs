//! A batch of rows without a key. Rows with all values alike are copies of one row, of which a table may have millions.
//!
//! So each server counts them. Only as many copies are read as are missing or extra, and those that are missing
//! are inserted by one statement.

use rustc_hash::FxHashMap;
use wire::{Row, Session};

use super::batch::{BatchQueries, FoundRepairs, Identity, condition, size, texts};
use super::row::{PublisherRow, RowRepair};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;
use crate::verify::sessions::Read;
use crate::verify::sql::TableSql;

/// Rows that are read at once, at most.
const ROWS: usize = 10_000;
/// Bytes of rows that are read at once.
const BYTES: usize = 16 << 20;

/// How many copies of each row are still to be read.
type Wanted = FxHashMap<Identity, u64>;

impl BatchQueries<'_> {
    /// The repairs of rows without a key.
    pub(super) fn copies(
        &self,
        theirs: &mut Session,
        ours: &mut Session,
    ) -> Result<Read<FoundRepairs>> {
        let counted = self.ask_both(
            (&mut *theirs, &self.count(&self.plan.publisher, &self.publisher_texts)),
            (&mut *ours, &self.count(&self.plan.subscriber, &self.subscriber_texts)),
        );
        let Read::Rows(of_publisher) = counted.0? else { return Ok(Read::Rewritten) };
        let mut counts: FxHashMap<Identity, [u64; 2]> = FxHashMap::default();
        for (side, rows) in [of_publisher, counted.1?].iter().enumerate() {
            for row in rows.iter() {
                let width = self.publisher_texts.len();
                counts.entry(texts(&row, 0, width)).or_default()[side] = field(&row, width)?;
            }
        }
        let (mut missing, mut extra) = (Wanted::default(), Wanted::default());
        let mut found = FxHashMap::default();
        let mut bytes = 0;
        for identity in &self.identities {
            let Some([theirs, ours]) = counts.get(identity) else { continue };
            found.insert(identity.clone(), Vec::new());
            bytes += size(identity);
            if theirs != ours {
                self.check_told_apart([*theirs, *ours])?;
            }
            match theirs.checked_sub(*ours) {
                Some(0) => {}
                Some(more) => drop(missing.insert(identity.clone(), more)),
                None => drop(extra.insert(identity.clone(), ours - theirs)),
            }
        }
        let mut repaired = |identity: Identity, repair| {
            found.entry(identity).or_default().push(repair);
        };
        if self.sent.is_empty() {
            for (identity, copies) in missing {
                let row = PublisherRow { compared: identity.clone(), sent: Vec::new() };
                repaired(identity, RowRepair::Insert { row, copies });
            }
        } else {
            let sql = |identities: &[Identity]| self.of_publisher(identities);
            let explained = |e: &wire::Error| self.explained(e, Failure::publisher);
            read_copies(theirs, missing, &sql, &explained, |identity, row| {
                let row = self.publisher_row(row);
                repaired(identity, RowRepair::Insert { row, copies: 1 });
                Ok(())
            })?;
        }
        let sql = |identities: &[Identity]| self.of_subscriber(identities, &[]);
        let explained = |e: &wire::Error| self.explained(e, Failure::subscriber);
        read_copies(ours, extra, &sql, &explained, |identity, row| {
            let mut row = self.subscriber_row(row, &[])?;
            // Its place is enough to delete it.
            row.compared = Vec::new();
            repaired(identity, RowRepair::Delete(row));
            Ok(())
        })?;
        Ok(Read::Rows((found, bytes)))
    }

    /// A query for the number of rows of each identity, and perhaps of others. Texts of a collation that is not
    /// deterministic may be equal and differ.
    fn count(&self, side: &TableSql, texts: &[String]) -> String {
        let exact = texts.iter().map(|text| format!("({text}) COLLATE pg_catalog.\"C\", "));
        let places: Vec<_> = (1..=texts.len()).map(|place| place.to_string()).collect();
        let group = match places.is_empty() {
            true => " HAVING pg_catalog.count(*) > 0".to_owned(),
            false => format!(" GROUP BY {}", places.join(", ")),
        };
        format!(
            "SELECT {}pg_catalog.count(*) FROM {}{}{group}",
            exact.collect::<String>(),
            side.relation,
            side.filter(&condition(self.plan, side, texts, &self.identities)),
        )
    }
}

/// Reads so many copies of each row that is wanted, and passes them on. `sql` selects all copies of some rows, and
/// perhaps other rows; the first columns are the identity.
fn read_copies(
    session: &mut Session,
    mut wanted: Wanted,
    sql: &dyn Fn(&[Identity]) -> String,
    explained: &dyn Fn(&wire::Error) -> Failure,
    mut found: impl FnMut(Identity, &Row<'_>) -> Result<()>,
) -> Result<()> {
    let Some((largest, width)) = wanted.keys().map(|row| (size(row), row.len())).max() else {
        return Ok(());
    };
    let identities: Vec<_> = wanted.keys().cloned().collect();
    let mut left: u64 = wanted.values().sum();
    let most = (BYTES / largest.max(1)).clamp(1, ROWS);
    let mut at_once = usize::try_from(left).unwrap_or(ROWS).min(most);
    let mut ask = |sql: &str| session.simple(sql).map_err(|e| explained(&e));
    ask(&format!("DECLARE pgapace_copies NO SCROLL CURSOR FOR {}", sql(&identities)))?;
    while left > 0 {
        let results = ask(&format!("FETCH {at_once} FROM pgapace_copies"))?;
        let Some(rows) = results.last().filter(|rows| !rows.is_empty()) else { break };
        for row in rows.iter() {
            let identity = texts(&row, 0, width);
            if let Some(more) = wanted.get_mut(&identity).filter(|more| **more > 0) {
                *more -= 1;
                left -= 1;
                found(identity, &row)?;
            }
        }
        // Few are read, and locked, where the first ones are enough.
        at_once = (at_once * 2).min(most);
    }
    ask("CLOSE pgapace_copies")?;
    Ok(())
}
