//! What the publications of the way back carry: every table of the subscription, with the operations, rows and columns
//! that the subscription has. What they leave out would be lost when writes move back.

use std::collections::{BTreeMap, HashMap};

use engine::table_name::TableName;
use wire::{Session, quote_ident};

use super::procedure::Sides;
use super::way_back::WayBack;
use crate::error::{Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::subscriber::catalogue::field;
use crate::table_name::sql_name;

/// The operations that a publication publishes or not, by their letters in an entry.
const OPERATIONS: [(char, &str); 4] =
    [('i', "insert"), ('u', "update"), ('d', "delete"), ('t', "truncate")];
/// Completes a problem that ends with SQL.
const OR_NO_BACK: &str = "on the subscriber; or pass --no-back";

/// Finds what the way back would leave out. Returns the tables that it carries.
///
/// With `returns`, the way back is the first subscription again, whose publications leave out what they did before.
pub(super) fn left_out(
    sides: &mut Sides<'_>,
    tables: &[PublishedTable],
    (back, returns): (&WayBack, bool),
    problems: &mut Vec<String>,
) -> Result<Vec<TableName>> {
    let there = publication::read_contents(sides.control, &back.publications)?.tables;
    let carriers = carriers(sides.control, &there)?;
    let names: Vec<_> = back.publications.iter().map(|name| quote_ident(name)).collect();
    let publications = names.join(", ");
    let mut operations = BTreeMap::<_, Vec<String>>::new();
    for table in tables {
        let name = &table.name;
        let Some(carriers) = carriers.get(name) else {
            problems.push(format!(
                "the way back does not publish {name}: ALTER PUBLICATION {publications} ADD TABLE {}; {OR_NO_BACK}",
                sql_name(name)
            ));
            continue;
        };
        if returns {
            continue;
        }
        if let Some(lacking) = lacking_operations(table, carriers) {
            operations.entry(lacking).or_default().push(name.to_string());
        }
        let again = |problem: &str| {
            let carrier = carriers.first().map_or_else(|| sql_name(name), |one| one.sql_name());
            format!(
                "the way back {problem}: ALTER PUBLICATION {publications} DROP TABLE {carrier}; ALTER PUBLICATION \
                 {publications} ADD TABLE {carrier}; {OR_NO_BACK}"
            )
        };
        let columns = lacking_columns(table, carriers);
        if !columns.is_empty() {
            problems.push(again(&format!("does not publish {} of {name}", columns.join(", "))));
        }
        if lacks_rows(sides, table, carriers, back)? {
            problems.push(again(&format!(
                "has a row filter for {name} that leaves out rows of the subscription"
            )));
        }
    }
    for ((lacking, all), tables) in operations {
        problems.push(format!(
            "the way back does not publish {lacking} of {}: ALTER PUBLICATION {publications} SET (publish = '{all}'); \
             {OR_NO_BACK}",
            tables.join(", ")
        ));
    }
    Ok(there.into_iter().map(|table| table.name).collect())
}

/// The published tables that carry changes of each table. A partition counts with the table that it belongs to, and
/// the other way round.
fn carriers<'t>(
    control: &mut Session,
    there: &'t [PublishedTable],
) -> Result<HashMap<TableName, Vec<&'t PublishedTable>>> {
    let oids: Vec<_> = there.iter().map(|table| table.oid.to_string()).collect();
    let sql = format!(
        "WITH published AS (SELECT oid FROM pg_catalog.unnest('{{{}}}'::pg_catalog.oid[]) AS u (oid)), \
         family AS (SELECT oid AS by, oid FROM published \
           UNION SELECT oid, a.relid::pg_catalog.oid FROM published, pg_catalog.pg_partition_ancestors(oid) a \
           UNION SELECT oid, t.relid::pg_catalog.oid FROM published, pg_catalog.pg_partition_tree(oid) t) \
         SELECT f.by, n.nspname, c.relname FROM family f JOIN pg_catalog.pg_class c ON c.oid = f.oid \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace ORDER BY f.by <> f.oid",
        oids.join(",")
    );
    let results =
        control.simple(&sql).map_err(|e| Failure::subscriber(&e, "checking the way back"))?;
    let by_oid: HashMap<_, _> = there.iter().map(|table| (table.oid, table)).collect();
    let mut found = HashMap::<_, Vec<_>>::new();
    for row in results.first().into_iter().flat_map(wire::Rows::iter) {
        let name = TableName { schema: field(&row, 1)?, name: field(&row, 2)? };
        if let Some(table) = by_oid.get(&field(&row, 0)?) {
            found.entry(name).or_default().push(*table);
        }
    }
    Ok(found)
}

/// The operations of a table that one of its carriers leaves out, and all that it should publish.
fn lacking_operations(
    table: &PublishedTable,
    carriers: &[&PublishedTable],
) -> Option<(String, String)> {
    let listed = |is_listed: &dyn Fn(char) -> bool| {
        let listed = OPERATIONS.iter().filter(|(letter, _)| is_listed(*letter));
        listed.map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
    };
    let here = |letter| table.published_by.publishes(letter);
    let lacking = listed(&|letter| {
        here(letter) && carriers.iter().any(|one| !one.published_by.publishes(letter))
    });
    let all = listed(&|letter| {
        here(letter) || carriers.iter().any(|one| one.published_by.publishes(letter))
    });
    (!lacking.is_empty()).then_some((lacking, all))
}

/// The columns of a table that one of its carriers leaves out. The old side computes generated ones itself.
fn lacking_columns(table: &PublishedTable, carriers: &[&PublishedTable]) -> Vec<String> {
    let has = |carrier: &PublishedTable, name: &str| {
        carrier.columns.iter().any(|column| column.name == name)
    };
    let columns = table.columns.iter().filter(|column| !column.generated);
    columns
        .filter(|column| carriers.iter().any(|carrier| !has(carrier, &column.name)))
        .map(|column| column.name.clone())
        .collect()
}

/// Whether a row filter of the way back leaves out rows: any does, but that of the subscription.
fn lacks_rows(
    sides: &mut Sides<'_>,
    table: &PublishedTable,
    carriers: &[&PublishedTable],
    back: &WayBack,
) -> Result<bool> {
    if carriers.iter().all(|carrier| carrier.filters.is_empty()) {
        return Ok(false);
    }
    if table.filters.is_empty() {
        return Ok(true);
    }
    let here = publication::tables(sides.source, &sides.row.publications)?;
    let there = publication::tables(sides.control, &back.publications)?;
    let filters = here.iter().find(|one| one.oid == table.oid).map(|one| one.filters.as_slice());
    let filters = filters.unwrap_or_default();
    Ok(carriers.iter().any(|carrier| {
        let there = there.iter().find(|one| one.oid == carrier.oid);
        there.is_none_or(|there| {
            let covers = !filters.is_empty() && filters.iter().all(|f| there.filters.contains(f));
            !there.filters.is_empty() && !covers
        })
    }))
}
