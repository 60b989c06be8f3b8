//! Compares what a COPY reads on the publisher with what was planned.
//!
//! The COPY runs under the snapshot of the plan, but it finds tables and columns by the names that they have now, and
//! reads the files that they have now. So all of it is locked first, and compared with the catalogue under the snapshot:
//! the file nodes; and of each column the table, the number and the type. A Parse describes them as the COPY will see them,
//! and is not planned or executed. The messages share the round trip of the LOCK.

use rustc_hash::FxHashMap;
use wire::{DescribedColumn, Reply, RowDescription, Session};

use crate::error::{Class, Failure};
use crate::tablesync::plan::{Item, Part, ReadRelations};

/// Relations that one transaction of the publisher copies.
pub(super) struct CopySource<'i> {
    read: Vec<(&'i Item, ReadRelations<'i>)>,
}

/// Names and numbers of columns under the snapshot, for each place in [`CopySource::read`].
type PlannedColumns = Vec<Vec<(Vec<u8>, i16)>>;

impl<'i> CopySource<'i> {
    pub(super) fn new(parts: impl IntoIterator<Item = (&'i Item, &'i Part)>) -> Self {
        Self { read: parts.into_iter().map(|(item, part)| (item, item.read_by(part))).collect() }
    }

    /// Queues a lock of all that is read, and the questions of [`Self::read_change`].
    pub(super) fn queue_lock(&self, publisher: &mut Session) {
        publisher.queue_simple(&self.lock_sql());
        for (_, read) in &self.read {
            let only = if read.only { "ONLY " } else { "" };
            publisher.queue_parse("", &format!("SELECT * FROM {only}{}", read.name), &[]);
            publisher.queue_describe_statement("");
        }
        publisher.queue_sync();
    }

    /// Reads the replies to [`Self::queue_lock`]. Returns the failure if anything has changed since the snapshot. `what`
    /// names the tables. After an error, more replies may follow.
    pub(super) fn read_change(
        &self,
        publisher: &mut Session,
        what: &str,
    ) -> wire::Result<Option<Failure>> {
        let (filenodes, planned) = self.read_locked(publisher)?;
        let mut described = self.read.iter().zip(&planned);
        let mut altered = false;
        loop {
            match publisher.next_reply()? {
                Reply::RowDescription(description) => {
                    let Some(((item, read), planned)) = described.next() else { continue };
                    altered |= !is_as_planned(item, read.oid, planned, description);
                }
                Reply::Ready(_) => break,
                Reply::Error(error) => return Err(wire::Error::Server(error)),
                _ => {}
            }
        }
        let relations = self.read.iter().flat_map(|(_, read)| read.relations);
        let rewritten = !relations.map(|relation| relation.filenode).eq(filenodes);
        Ok(match (rewritten, altered) {
            (true, _) => Some(changed(what, "truncated or rewritten")),
            (false, true) => Some(changed(what, "replaced, or its columns were altered,")),
            (false, false) => None,
        })
    }

    /// The replies to [`Self::lock_sql`]: file nodes, and columns.
    fn read_locked(&self, publisher: &mut Session) -> wire::Result<(Vec<u32>, PlannedColumns)> {
        let mut filenodes = Vec::new();
        let mut columns = vec![Vec::new(); self.read.len()];
        loop {
            match publisher.next_reply()? {
                Reply::DataRow(row) => match row.get(1) {
                    None => filenodes.push(number(row.get(0)).unwrap_or(0)),
                    Some(name) => {
                        let place =
                            number(row.get(0)).and_then(|place: usize| place.checked_sub(1));
                        if let Some(columns) = place.and_then(|place| columns.get_mut(place)) {
                            columns.push((name.to_vec(), number(row.get(2)).unwrap_or(0)));
                        }
                    }
                },
                Reply::Ready(_) => return Ok((filenodes, columns)),
                Reply::Error(error) => return Err(wire::Error::Server(error)),
                _ => {}
            }
        }
    }

    /// SQL of statements that lock relations, and read their current file nodes and, under the snapshot, their columns.
    /// Under the lock, no session can rewrite them, or give their name or that of a column to another one.
    fn lock_sql(&self) -> String {
        let (mut locks, mut relations, mut named) = (Vec::new(), Vec::new(), Vec::new());
        for (_, ReadRelations { oid, name, only, relations: of }) in &self.read {
            named.push(oid.to_string());
            if *only {
                locks.push(format!("ONLY {name}"));
                relations.push(format!("pg_catalog.to_regclass({})", wire::quote_literal(name)));
            } else {
                locks.push(name.clone());
                let regclass = |oid: u32| format!("'{oid}'::pg_catalog.regclass");
                relations.extend(of.iter().map(|one| regclass(one.oid)));
            }
        }
        format!(
            "LOCK TABLE {} IN ACCESS SHARE MODE; \
             SELECT coalesce(pg_catalog.pg_relation_filenode(r.oid), 0) \
             FROM pg_catalog.unnest(ARRAY[{}]::pg_catalog.regclass[]) WITH ORDINALITY AS r (oid, ord) \
             ORDER BY r.ord; \
             SELECT r.ord, a.attname, a.attnum \
             FROM pg_catalog.unnest('{{{}}}'::pg_catalog.oid[]) WITH ORDINALITY AS r (oid, ord) \
             JOIN pg_catalog.pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped",
            locks.join(", "),
            relations.join(", "),
            named.join(",")
        )
    }
}

/// Whether the columns that a COPY names are those of the plan. A row filter may name any of the table, which has the same
/// type as long as a publication uses it.
fn is_as_planned(
    item: &Item,
    table_oid: u32,
    planned: &[(Vec<u8>, i16)],
    now: RowDescription<'_>,
) -> bool {
    let now: FxHashMap<&[u8], DescribedColumn<'_>> =
        now.columns().map(|column| (column.name, column)).collect();
    let types: FxHashMap<&[u8], u32> =
        item.published.columns.iter().map(|c| (c.name.as_bytes(), c.base_type)).collect();
    let filtered = !item.published.filters.is_empty();
    planned.iter().map(|(name, attnum)| (name.as_slice(), *attnum)).all(|(name, attnum)| {
        let planned_type = types.get(name).copied();
        if planned_type.is_none() && !filtered {
            return true;
        }
        now.get(name).is_some_and(|now| {
            (now.table_oid, now.attnum) == (table_oid, attnum)
                && planned_type.is_none_or(|planned| planned == now.type_oid)
        })
    })
}

fn changed(what: &str, how: &str) -> Failure {
    let message = format!("{what} was {how} on the publisher since the snapshot");
    Failure::new(Class::Publisher, message)
}

fn number<T: std::str::FromStr>(text: Option<&[u8]>) -> Option<T> {
    std::str::from_utf8(text?).ok()?.parse().ok()
}
