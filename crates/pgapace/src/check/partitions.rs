//! Published tables that are partitions on the publisher. Unless the publications have `publish_via_partition_root`, the
//! stream names the partitions alone. A subscriber without their partitioned table replicates well, and lacks the name
//! that applications use.

use std::collections::HashMap;

use engine::table_name::TableName;
use wire::{Session, quote_literal};

use crate::check::report::{Fix, Reporter, Side};
use crate::check::{failed, listed, shown_conninfo};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::dump_command::dump_command;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{field, oid_array};
use crate::subscriber::named::named;
use crate::subscriber::state::table_name_arrays;
use crate::table_name::sql_name;

/// The partitioned tables above published partitions, the nearest first.
const ABOVE: &str = "\
WITH RECURSIVE above (partition, parent, distance) AS (
  SELECT i.inhrelid, i.inhparent, 1 FROM pg_catalog.pg_inherits i
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid AND c.relispartition
    WHERE i.inhrelid = ANY ($1::pg_catalog.oid[])
  UNION ALL
  SELECT a.partition, i.inhparent, a.distance + 1 FROM above a
    JOIN pg_catalog.pg_inherits i ON i.inhrelid = a.parent)
SELECT a.partition, n.nspname, c.relname FROM above a
JOIN pg_catalog.pg_class c ON c.oid = a.parent JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY a.partition, a.distance";

/// Of tables with these names, which of them exist, and whether as a partition.
const EXISTING: &str = concat!(
    "SELECT w.ord, c.relispartition \
     FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[])) \
       WITH ORDINALITY AS w (schema_name, table_name, ord) \
     JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name")
);

/// Published tables that are partitions of one table on the publisher, and none on the subscriber.
#[derive(Debug)]
pub(crate) struct Detached<'p> {
    partitions: Vec<&'p PublishedTable>,
    /// The partitioned table, and those above it.
    above: Vec<TableName>,
    /// Those that the subscriber lacks.
    lacking: Vec<TableName>,
}

/// The partitioned tables above each of the published tables that has any, by its oid.
fn above(
    publisher: &mut Session,
    published: &[&PublishedTable],
) -> Result<HashMap<u32, Vec<TableName>>> {
    let oids: Vec<_> = published.iter().map(|table| table.oid).collect();
    let rows = publisher
        .query(ABOVE, &[Some(&oid_array(&oids))])
        .map_err(|e| failed(Side::Publisher, &e, "reading the parents of partitions"))?;
    let mut above: HashMap<_, Vec<_>> = HashMap::new();
    for row in rows.iter() {
        let name = TableName { schema: field(&row, 1)?, name: field(&row, 2)? };
        above.entry(field(&row, 0)?).or_default().push(name);
    }
    Ok(above)
}

/// Those of the tables that the subscriber has, and whether they are partitions there.
fn existing<'n>(
    subscriber: &mut Session,
    names: &[&'n TableName],
) -> Result<HashMap<&'n TableName, bool>> {
    let [schemas, tables] = table_name_arrays(names.iter().copied());
    let rows = subscriber
        .query(EXISTING, &[Some(&schemas), Some(&tables)])
        .map_err(|e| failed(Side::Subscriber, &e, "looking for partitioned tables"))?;
    let one =
        |row: wire::Row<'_>| Ok((names[field::<usize>(&row, 0)? - 1], row.get(1) == Some("t")));
    rows.iter().map(one).collect()
}

/// The partitioned tables above these published tables which the subscriber lacks, without repetition.
pub(super) fn lacking_above(
    (publisher, subscriber): (&mut Session, &mut Session),
    published: &[&PublishedTable],
) -> Result<Vec<TableName>> {
    let mut names: Vec<_> = above(publisher, published)?.into_values().flatten().collect();
    names.sort_unstable();
    names.dedup();
    let existing = existing(subscriber, &names.iter().collect::<Vec<_>>())?;
    let lacking: Vec<_> =
        names.iter().filter(|name| !existing.contains_key(name)).cloned().collect();
    Ok(lacking)
}

/// Looks for them, one for each partitioned table.
pub(crate) fn detached<'p>(
    (publisher, subscriber): (&mut Session, &mut Session),
    published: &'p [PublishedTable],
) -> Result<Vec<Detached<'p>>> {
    let all: Vec<_> = published.iter().collect();
    let above = above(publisher, &all)?;
    let partitions: Vec<_> =
        all.into_iter().filter(|table| above.contains_key(&table.oid)).collect();
    let mut names: Vec<_> = partitions.iter().map(|table| &table.name).collect();
    names.extend(above.values().flatten());
    let existing = existing(subscriber, &names)?;
    let mut found: Vec<Detached<'p>> = Vec::new();
    for table in partitions.into_iter().filter(|table| existing.get(&table.name) == Some(&false)) {
        let parents = &above[&table.oid];
        match found.iter_mut().find(|one| one.above[0] == parents[0]) {
            Some(one) => one.partitions.push(table),
            None => {
                let lacks = |name: &&TableName| !existing.contains_key(name);
                let lacking = parents.iter().filter(lacks).cloned().collect();
                found.push(Detached { partitions: vec![table], above: parents.clone(), lacking });
            }
        }
    }
    Ok(found)
}

impl Detached<'_> {
    pub(crate) fn message(&self) -> String {
        let names: Vec<_> = self.partitions.iter().map(|table| table.name.to_string()).collect();
        let parent = &self.above[0];
        let after = if self.lacking.contains(parent) {
            format!(
                "the subscriber lacks table {parent}. After a switchover, applications do not find it"
            )
        } else {
            "after a switchover, applications that use it do not find their rows".to_owned()
        };
        format!(
            "partitions of table {parent} of the publisher are no partitions on the subscriber ({}): {after}",
            listed(&names)
        )
    }

    /// Creates the partitioned tables, or attaches the partitions to them.
    fn fix(&self, publisher: &mut Session, config: &Config) -> Result<Fix> {
        if !self.lacking.is_empty() {
            let command = dump_command(
                &self.lacking.iter().collect::<Vec<_>>(),
                &shown_conninfo(&config.publisher),
                &shown_conninfo(&config.subscriber),
            );
            return Ok(Fix::Command(command));
        }
        let oids: Vec<_> = self.partitions.iter().map(|table| table.oid).collect();
        let sql = format!(
            "SELECT pg_catalog.format('ALTER TABLE %s ATTACH PARTITION %I.%I %s;', {}, n.nspname, c.relname, \
               pg_catalog.pg_get_expr(c.relpartbound, c.oid)) \
             FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.oid = ANY ($1::pg_catalog.oid[]) ORDER BY n.nspname, c.relname",
            quote_literal(&sql_name(&self.above[0]))
        );
        let rows = publisher
            .query(&sql, &[Some(&oid_array(&oids))])
            .map_err(|e| failed(Side::Publisher, &e, "reading the bounds of partitions"))?;
        let statements = rows.iter().map(|row| field(&row, 0)).collect::<Result<Vec<String>>>()?;
        Ok(Fix::Sql(statements.join(" ")))
    }
}

/// Reports them.
pub(super) fn check(
    (publisher, subscriber): (&mut Session, &mut Session),
    config: &Config,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    for one in detached((&mut *publisher, subscriber), published)? {
        let fix = one.fix(publisher, config)?;
        reporter.warn("partitions", one.message()).on(one.above[0].to_string()).fix(fix);
    }
    Ok(())
}
