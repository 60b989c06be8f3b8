//! The plan of a copy: the sizes of the published tables under the snapshot, and the jobs that
//! follow from them.

use std::collections::VecDeque;

use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::error::{Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::format::{MisreadColumn, Servers};
use crate::table_name::sql_name;
use crate::tablesync::subscriber_tables::SubscriberTable;

/// Tables up to this size, in bytes, share a round trip. A whole batch is in memory at once.
const SMALL_BYTES: u64 = 128 << 10;
const BATCH_BYTES: u64 = 1 << 20;
/// Relations of a batch, which are locked at once. A partitioned table may have more.
const BATCH_RELATIONS: usize = 100;
/// Assumed bytes of a row without TOAST, for a table without statistics.
const USUAL_ROW: f64 = 128.0;
/// Maximum number of empty tables that one statement records.
pub(super) const EMPTY_AT_ONCE: usize = 500;

/// A relation with storage that holds rows of a published table: the table itself, or a partition.
#[derive(Debug, Clone)]
pub(super) struct Relation {
    pub(super) oid: u32,
    name: TableName,
    /// `pg_class.relfilenode` as of the snapshot. If it is different later, the table was truncated
    /// or rewritten since, and may look empty under the snapshot although it was not.
    pub(super) filenode: u32,
    /// Whether the file node was still the same when the size was read.
    same_file: bool,
    /// Whether the relation is a plain table that can also be read directly, not only through its
    /// root.
    direct: bool,
    blocks: u64,
    bytes: u64,
    /// Estimated number of rows.
    rows: f64,
}

impl Relation {
    pub(super) fn sql_name(&self) -> String {
        sql_name(&self.name)
    }
}

/// A table to copy.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) published: PublishedTable,
    pub(super) subscriber: SubscriberTable,
    pub(super) binary: bool,
    /// Columns whose values the subscriber may misread.
    pub(super) misread: Vec<MisreadColumn>,
    pub(super) relations: Vec<Relation>,
    /// Size on the publisher, with TOAST.
    pub(super) bytes: u64,
    /// Estimated number of rows.
    pub(super) rows: f64,
    /// Whether the subscriber's indexes are built after the rows.
    pub(super) indexes_after: bool,
    /// The parts; a single part is the whole table.
    pub(super) parts: Vec<Part>,
    /// The generation of the copy, once it has begun.
    pub(super) generation: u32,
}

#[derive(Debug)]
pub(super) struct Part {
    /// The table or query of COPY … TO STDOUT.
    pub(super) source: String,
    /// The place of the only relation that it reads, if the table is split.
    pub(super) relation: Option<usize>,
    pub(super) bytes: u64,
}

impl Item {
    pub(super) fn is_split(&self) -> bool {
        self.parts.len() > 1
    }

    fn is_empty(&self) -> bool {
        self.relations.iter().all(|relation| relation.direct && relation.bytes == 0)
    }

    /// Whether all rows may be in memory at once. The size of a foreign table is not known.
    fn is_small(&self) -> bool {
        self.bytes <= SMALL_BYTES
            && self.relations.iter().all(|relation| relation.direct)
            && !self.published.columns.is_empty()
    }

    /// Splits a large table into parts, so that several workers copy it. If its indexes are built
    /// after the rows, it stays in one part, because one transaction must contain all rows.
    pub(super) fn split(&mut self, size: u64) {
        let splittable = self.relations.iter().all(|relation| relation.direct)
            && !self.published.columns.is_empty()
            && !self.indexes_after
            && self.bytes > size;
        if !splittable {
            return;
        }
        let mut parts = Vec::new();
        for place in 0..self.relations.len() {
            split(&self.published, place, &self.relations[place], size, &mut parts);
        }
        if parts.len() > 1 {
            self.parts = parts;
        }
    }

    /// Whether the files are those of the snapshot.
    pub(super) fn has_same_files(&self) -> bool {
        self.relations.iter().all(|relation| relation.same_file)
    }

    /// The relations that a part reads, and how.
    pub(super) fn read_by<'i>(&'i self, part: &Part) -> ReadRelations<'i> {
        match part.relation {
            Some(place) => {
                let relations = &self.relations[place..=place];
                ReadRelations {
                    oid: relations[0].oid,
                    name: relations[0].sql_name(),
                    only: true,
                    relations,
                }
            }
            None => ReadRelations {
                oid: self.published.oid,
                name: self.published.sql_name(),
                only: !self.published.partitioned,
                relations: &self.relations,
            },
        }
    }
}

/// The relations that a COPY reads, and the name by which it finds them.
#[derive(Debug)]
pub(super) struct ReadRelations<'i> {
    /// The OID of the one that is named.
    pub(super) oid: u32,
    pub(super) name: String,
    /// Whether the name is that of the only relation, not of a partitioned table.
    pub(super) only: bool,
    pub(super) relations: &'i [Relation],
}

/// The size is read before the file node. Reading the size waits for the lock of a session that
/// rewrites the table. So if the file node is still the same afterwards, the size belongs to that
/// file.
///
/// A partition that was dropped since the snapshot is listed, without a size. Its privileges are NULL. One whose DETACH
/// CONCURRENTLY is pending is none any more for queries of the root.
const SIZES_SQL: &str = "\
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid, c.relkind FROM pg_catalog.pg_class c
  WHERE c.oid = ANY ('{OIDS}'::pg_catalog.oid[])
  UNION ALL
  SELECT t.root, p.oid, p.relkind FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND t.relkind = 'p' AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid
)
SELECT t.root, c.oid, n.nspname, c.relname, c.relkind = 'r', c.relfilenode,
       coalesce(pg_catalog.pg_relation_size(c.oid), 0),
       coalesce(pg_catalog.pg_relation_size(nullif(c.reltoastrelid, 0)), 0),
       coalesce(pg_catalog.pg_relation_filenode(c.oid), 0),
       c.oid = t.root OR (coalesce(pg_catalog.has_table_privilege(c.oid, 'SELECT'), false)
                          AND NOT pg_catalog.row_security_active(c.oid)),
       pg_catalog.current_setting('block_size'), c.reltuples
FROM tree t
JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind <> 'p'
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY t.root, n.nspname, c.relname";

/// Reads the sizes under the session's snapshot. Each table starts as one part.
pub(super) fn items(
    publisher: &mut Session,
    tables: Vec<(PublishedTable, SubscriberTable)>,
    allow_binary: bool,
    servers: Servers,
) -> Result<Vec<Item>> {
    let oids: Vec<_> = tables.iter().map(|(published, _)| published.oid.to_string()).collect();
    let failed = |e: &wire::Error| Failure::publisher(e, "reading the sizes of its tables");
    let results =
        publisher.simple(&SIZES_SQL.replace("OIDS", &oids.join(","))).map_err(|e| failed(&e))?;
    let rows = results
        .first()
        .ok_or_else(|| Failure::internal("the query for table sizes returned no result"))?;
    let mut relations = FxHashMap::<u32, Vec<Relation>>::default();
    for row in rows.iter() {
        let (filenode, now): (u32, u32) = (field(&row, 5)?, field(&row, 8)?);
        let (main_bytes, toast_bytes): (u64, u64) = (field(&row, 6)?, field(&row, 7)?);
        let (block_size, tuples): (u64, f64) = (field(&row, 10)?, field(&row, 11)?);
        relations.entry(field(&row, 0)?).or_default().push(Relation {
            oid: field(&row, 1)?,
            name: TableName { schema: field(&row, 2)?, name: field(&row, 3)? },
            filenode,
            same_file: filenode == now,
            direct: boolean(&row, 4)? && boolean(&row, 9)?,
            blocks: main_bytes.div_ceil(block_size),
            bytes: main_bytes + toast_bytes,
            // -1 or 0 before the first VACUUM or ANALYZE.
            rows: if tuples > 0.0 { tuples } else { main_bytes as f64 / USUAL_ROW },
        });
    }
    let items = tables.into_iter().map(|(published, subscriber)| {
        let relations = relations.remove(&published.oid).unwrap_or_default();
        let bytes = relations.iter().map(|relation| relation.bytes).sum();
        let rows = relations.iter().map(|relation| relation.rows).sum();
        let parts = vec![Part { source: published.copy_source(), relation: None, bytes }];
        let binary = allow_binary && subscriber.takes_binary(&published, servers);
        let misread = subscriber.misread_columns(&published, servers, binary);
        Item {
            published,
            subscriber,
            binary,
            misread,
            relations,
            bytes,
            rows,
            indexes_after: false,
            parts,
            generation: 0,
        }
    });
    Ok(items.collect())
}

/// Splits a relation into ranges of blocks, each of about `split_size` bytes. The last range is
/// open.
fn split(
    published: &PublishedTable,
    place: usize,
    relation: &Relation,
    split_size: u64,
    parts: &mut Vec<Part>,
) {
    let blocks = relation.blocks;
    let ranges = relation.bytes.div_ceil(split_size.max(1)).clamp(1, blocks.max(1));
    let name = relation.sql_name();
    for range in 0..ranges {
        let (from, to) = (blocks * range / ranges, blocks * (range + 1) / ranges);
        let mut conditions = Vec::new();
        if range > 0 {
            conditions.push(format!("ctid >= '({from},0)'"));
        }
        if range + 1 < ranges {
            conditions.push(format!("ctid < '({to},0)'"));
        }
        parts.push(Part {
            source: published.copy_source_of(&name, &conditions),
            relation: Some(place),
            bytes: relation.bytes / ranges,
        });
    }
}

/// A job for one pair of sessions; tables are given by index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Job {
    /// Several small tables, without waiting between them.
    Batch(Vec<usize>),
    /// A whole table.
    Table(usize),
    /// One part of a table.
    Part(usize, usize),
    /// ANALYZE of copied tables.
    Analyze(Vec<usize>),
}

/// Returns the tables without rows, and the jobs for the others. The largest come first, so that
/// none is left to run alone at the end. Only tables that wait for no others (`is_free`) share a job.
pub(super) fn jobs(items: &[Item], is_free: impl Fn(usize) -> bool) -> (Vec<usize>, VecDeque<Job>) {
    let (mut empty, mut small, mut large) = (Vec::new(), Vec::new(), Vec::new());
    for (index, item) in items.iter().enumerate() {
        if item.is_empty() && item.has_same_files() {
            empty.push(index);
        } else if item.is_split() {
            let parts = 0..item.parts.len();
            large.extend(parts.map(|number| (item.bytes, Job::Part(index, number))));
        } else if item.is_small() && is_free(index) {
            small.push(index);
        } else {
            large.push((item.bytes, Job::Table(index)));
        }
    }
    // Stable: the parts of a table stay together, in block order.
    large.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let mut jobs: VecDeque<_> = large.into_iter().map(|(_, job)| job).collect();
    let mut batch = Vec::new();
    let (mut bytes, mut relations) = (0, 0);
    for index in small {
        let (more_bytes, more) = (items[index].bytes, items[index].relations.len());
        let full = relations + more > BATCH_RELATIONS || bytes + more_bytes > BATCH_BYTES;
        if full && !batch.is_empty() {
            jobs.push_back(of_small(std::mem::take(&mut batch)));
            (bytes, relations) = (0, 0);
        }
        (bytes, relations) = (bytes + more_bytes, relations + more);
        batch.push(index);
    }
    if !batch.is_empty() {
        jobs.push_back(of_small(batch));
    }
    (empty, jobs)
}

/// One small table is copied as a large one is.
fn of_small(tables: Vec<usize>) -> Job {
    match tables[..] {
        [table] => Job::Table(table),
        _ => Job::Batch(tables),
    }
}
