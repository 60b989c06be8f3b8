//! Definitions of types that both sides have under one name: what the subscriber's enums lack, and types of other kinds that
//! are defined in another way. The first value that the subscriber's type does not accept stops the subscription.

use std::collections::HashMap;

use wire::{Rows, Session, quote_literal};

use crate::check::failed;
use crate::check::report::{Reporter, Side};
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{field, oid_array, parse_name_array};
use crate::subscriber::oid::FIRST_USER_OID;
use crate::subscriber::state::name_array;

/// The parts of a type's definition: labels, attributes, or the type below. Row types of tables are no types of their own.
macro_rules! definitions {
    ($with:literal, $from:literal) => {
        concat!(
            $with,
            " SELECT n.nspname, t.typname, pg_catalog.format_type(t.oid, NULL), t.typtype, coalesce(CASE t.typtype
  WHEN 'e' THEN (SELECT pg_catalog.array_agg(l.enumlabel::pg_catalog.text ORDER BY l.enumsortorder)
    FROM pg_catalog.pg_enum l WHERE l.enumtypid = t.oid)
  WHEN 'c' THEN (SELECT pg_catalog.array_agg(pg_catalog.quote_ident(a.attname) || ' ' ||
      pg_catalog.format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum)
    FROM pg_catalog.pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)
  WHEN 'd' THEN ARRAY[pg_catalog.format_type(t.typbasetype, t.typtypmod)]
  WHEN 'r' THEN (SELECT ARRAY[pg_catalog.format_type(r.rngsubtype, NULL)]
    FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid) END, '{}')
FROM ",
            $from,
            " JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
WHERE t.typtype IN ('c', 'd', 'e', 'r') AND (c.relkind = 'c') IS NOT FALSE ORDER BY 1, 2"
        )
    };
}

/// The types of columns, and all types that these are made of.
const USED: &str = definitions!(
    "WITH RECURSIVE used (oid) AS (
  SELECT pg_catalog.unnest($1::pg_catalog.oid[])
  UNION
  SELECT x.oid FROM used u JOIN pg_catalog.pg_type t ON t.oid = u.oid CROSS JOIN LATERAL (
    SELECT e FROM pg_catalog.unnest(ARRAY[t.typelem, t.typbasetype]) AS e
    UNION ALL SELECT a.atttypid FROM pg_catalog.pg_attribute a
      WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE r.rngtypid = t.oid
    UNION ALL SELECT r.rngtypid FROM pg_catalog.pg_range r WHERE r.rngmultitypid = t.oid) x (oid)
  WHERE x.oid >= 16384)",
    "used u JOIN pg_catalog.pg_type t ON t.oid = u.oid"
);

const NAMED: &str = definitions!(
    "",
    "ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    AS w (schema_name, type_name)
  JOIN pg_catalog.pg_type t ON t.typname = w.type_name
    AND t.typnamespace = (SELECT s.oid FROM pg_catalog.pg_namespace s WHERE s.nspname = w.schema_name)"
);

#[derive(Debug)]
struct Definition {
    schema: String,
    type_name: String,
    /// For SQL.
    name: String,
    /// `pg_type.typtype`.
    kind: char,
    parts: Vec<String>,
}

fn definitions(rows: &Rows) -> Result<Vec<Definition>> {
    let one = |row: wire::Row<'_>| {
        Ok(Definition {
            schema: field(&row, 0)?,
            type_name: field(&row, 1)?,
            name: field(&row, 2)?,
            kind: field(&row, 3)?,
            parts: parse_name_array(row.get(4).unwrap_or("{}"))?,
        })
    };
    rows.iter().map(one).collect()
}

/// Compares the types of published columns. One that the subscriber lacks is reported with its columns.
pub(super) fn check(
    publisher_session: &mut Session,
    subscriber_session: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let columns = published.iter().flat_map(|table| &table.columns);
    let mut oids: Vec<_> = columns.map(|column| column.declared_type).collect();
    oids.retain(|oid| *oid >= FIRST_USER_OID);
    oids.sort_unstable();
    oids.dedup();
    if oids.is_empty() {
        return Ok(());
    }
    let doing = "reading the definitions of types";
    let rows = publisher_session
        .query(USED, &[Some(&oid_array(&oids))])
        .map_err(|e| failed(Side::Publisher, &e, doing))?;
    let theirs = definitions(&rows)?;
    let names =
        |part: fn(&Definition) -> &str| name_array(&theirs.iter().map(part).collect::<Vec<_>>());
    let rows = subscriber_session
        .query(NAMED, &[Some(&names(|one| &one.schema)), Some(&names(|one| &one.type_name))])
        .map_err(|e| failed(Side::Subscriber, &e, doing))?;
    let ours: HashMap<_, _> =
        definitions(&rows)?.into_iter().map(|one| (one.name.clone(), one)).collect();
    for one in &theirs {
        match ours.get(&one.name) {
            Some(other) if (one.kind, other.kind) == ('e', 'e') => {
                enums(&one.name, &one.parts, &other.parts, reporter);
            }
            Some(other) if one.kind == other.kind && one.parts != other.parts => {
                differ(one, other, reporter);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Reports labels that the subscriber's enum lacks, and labels in another order.
fn enums(name: &str, theirs: &[String], ours: &[String], reporter: &mut Reporter<'_>) {
    for (label, before) in missing_labels(theirs, ours) {
        let before = before.map(|next| format!(" BEFORE {}", quote_literal(next)));
        reporter
            .warn("types", format!("enum {name} lacks label {label:?}, which the publisher has"))
            .on(name)
            .sql(format!(
                "ALTER TYPE {name} ADD VALUE {}{};",
                quote_literal(label),
                before.unwrap_or_default()
            ));
    }
    let common = |of: &[String], other: &[String]| -> Vec<String> {
        of.iter().filter(|label| other.contains(label)).cloned().collect()
    };
    let (theirs, ours) = (common(theirs, ours), common(ours, theirs));
    if theirs != ours {
        let message = format!(
            "the labels of enum {name} have another order on the subscriber ({}) than on the publisher ({}): its values \
             compare and sort in another way. The order cannot be changed: create a type with that of the publisher, and \
             ALTER TABLE … ALTER COLUMN … TYPE … USING …::text::…",
            ours.join(", "),
            theirs.join(", ")
        );
        reporter.warn("types", message).on(name);
    }
}

/// The labels that an enum lacks, each with the label before which it belongs; `None` for the end. They are added in this order.
fn missing_labels<'l>(theirs: &'l [String], ours: &'l [String]) -> Vec<(&'l str, Option<&'l str>)> {
    let mut order: Vec<&str> = ours.iter().map(String::as_str).collect();
    let mut missing = Vec::new();
    let mut place = 0;
    for label in theirs {
        if let Some(found) = order.iter().position(|one| one == label) {
            place = found + 1;
            continue;
        }
        missing.push((label.as_str(), order.get(place).copied()));
        order.insert(place, label);
        place += 1;
    }
    missing
}

/// Reports a type that is defined in another way.
fn differ(theirs: &Definition, ours: &Definition, reporter: &mut Reporter<'_>) {
    let name = &theirs.name;
    let (kind, of) = match theirs.kind {
        'c' => ("composite type", "has the attributes"),
        'd' => ("domain", "is over"),
        _ => ("range type", "is a range of"),
    };
    let message = format!(
        "{kind} {name} {of} {} on the publisher and {} on the subscriber: a value that this does not accept stops the \
         subscription",
        theirs.parts.join(", "),
        ours.parts.join(", ")
    );
    let finding = reporter.warn("types", message).on(name);
    // ALTER TYPE can add attributes at the end.
    if theirs.kind == 'c'
        && let Some(added @ [_, ..]) = theirs.parts.strip_prefix(&*ours.parts)
    {
        let added: Vec<_> = added.iter().map(|one| format!("ADD ATTRIBUTE {one}")).collect();
        finding.sql(format!("ALTER TYPE {name} {};", added.join(", ")));
    }
}

#[cfg(test)]
mod tests {
    use super::missing_labels;

    #[test]
    fn labels_are_added_where_the_publisher_has_them() {
        let labels = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let missing = |theirs: &str, ours: &str| {
            let (theirs, ours) = (labels(theirs), labels(ours));
            let found = missing_labels(&theirs, &ours);
            found
                .iter()
                .map(|(label, next)| format!("{label}<{}", next.unwrap_or("-")))
                .collect::<Vec<_>>()
        };
        assert_eq!(missing("new packed sent", "new sent"), ["packed<sent"]);
        assert_eq!(missing("a b c d e", "c"), ["a<c", "b<c", "d<-", "e<-"]);
        assert_eq!(missing("a b", "a own"), ["b<own"]);
        assert!(missing("a b", "b a").is_empty());
    }
}
