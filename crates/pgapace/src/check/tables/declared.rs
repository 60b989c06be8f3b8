//! How a published column that the subscriber lacks is added to it.
//!
//! ADD COLUMN gives the rows that exist the default of that moment. The publisher's rows that its own ADD COLUMN met have
//! the value that its default had then: `attmissingval`, unless the table was rewritten since or the default was volatile.

use std::collections::HashMap;

use wire::{Row, Session, quote_ident, quote_literal};

use crate::check::failed;
use crate::check::report::Side;
use crate::error::Result;
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::subscriber::catalogue::{Table, field, oid_array};
use crate::subscriber::state::name_array;

/// The declaration of a column on the publisher, without its type.
#[derive(Debug, Default)]
pub(super) struct Declared {
    not_null: bool,
    /// `pg_attribute.attidentity`.
    identity: Option<char>,
    generated: bool,
    /// As SQL, if it is not that of the type.
    collation: Option<String>,
    /// The text of the value that rows have which are older than the column.
    missing: Option<String>,
    default: Option<String>,
    /// Whether the default names a function of a user, or a sequence, which the subscriber may lack.
    needs_objects: bool,
    /// Whether the default takes numbers from a sequence that belongs to the column.
    serial: bool,
}

/// The SQL that adds a column, and what it cannot do.
#[derive(Debug)]
pub(super) struct Addition {
    pub(super) sql: String,
    /// Whether rows that exist may get other values than the publisher's.
    pub(super) differs: bool,
    /// A sentence with the steps that the SQL leaves to the user.
    pub(super) left: Option<String>,
}

const DECLARED: &str = "\
SELECT w.ord, a.attnotnull, nullif(a.attidentity, ''), a.attgenerated <> '',
  (SELECT pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(k.collname)
    FROM pg_catalog.pg_collation k JOIN pg_catalog.pg_namespace n ON n.oid = k.collnamespace
    WHERE k.oid = a.attcollation AND a.attcollation <> t.typcollation),
  (SELECT pg_catalog.array_to_string(m.attmissingval, '') FROM pg_catalog.pg_attribute m
    WHERE m.attname = a.attname AND m.atthasmissing AND (m.attrelid = a.attrelid
      OR c.relkind = 'p' AND m.attrelid IN (SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid))
    ORDER BY m.attrelid <> a.attrelid LIMIT 1),
  pg_catalog.pg_get_expr(d.adbin, d.adrelid),
  EXISTS (SELECT FROM pg_catalog.pg_depend u WHERE u.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
    AND u.objid = d.oid AND (u.refclassid = 'pg_catalog.pg_proc'::pg_catalog.regclass
      OR u.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND u.refobjid <> d.adrelid)),
  EXISTS (SELECT FROM pg_catalog.pg_depend u JOIN pg_catalog.pg_depend o ON o.objid = u.refobjid
      AND o.classid = u.refclassid AND o.refclassid = u.refclassid AND o.refobjid = a.attrelid
      AND o.refobjsubid = a.attnum AND o.deptype = 'a'
    WHERE u.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass AND u.objid = d.oid
      AND u.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass)
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.oid[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (relation, column_name, ord)
JOIN pg_catalog.pg_class c ON c.oid = w.relation
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attname = w.column_name AND NOT a.attisdropped
JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum";

/// The published columns that the tables of the subscriber lack.
#[derive(Debug, Default)]
pub(super) struct Lacking {
    /// By the oid of the subscriber's table, and the name.
    columns: HashMap<(u32, String), Declared>,
    /// Partitions of the subscriber, which get a column with the root of their tree: its name for SQL.
    roots: HashMap<u32, String>,
}

impl Lacking {
    /// Asks nothing if the tables lack no column.
    pub(super) fn read<'t>(
        (publisher, session): (&mut Session, &mut Session),
        pairs: impl Iterator<Item = (&'t PublishedTable, &'t Table)>,
    ) -> Result<Self> {
        let lacks = |table: &Table, column: &PublishedColumn| table.column(&column.name).is_none();
        let columns: Vec<_> = pairs
            .flat_map(|(published, table)| {
                published.columns.iter().map(move |c| (published, table, c))
            })
            .filter(|(_, table, column)| lacks(table, column))
            .collect();
        let mut lacking = Self::default();
        if columns.is_empty() {
            return Ok(lacking);
        }
        let published: Vec<_> = columns.iter().map(|(published, ..)| published.oid).collect();
        let names: Vec<_> = columns.iter().map(|(.., column)| &column.name).collect();
        let rows = publisher
            .query(DECLARED, &[Some(&oid_array(&published)), Some(&name_array(&names))])
            .map_err(|e| failed(Side::Publisher, &e, "reading the declarations of columns"))?;
        for row in rows.iter() {
            let (_, table, column) = columns[field::<usize>(&row, 0)? - 1];
            lacking.columns.insert((table.oid, column.name.clone()), Declared::of(&row));
        }
        let tables: Vec<_> = columns.iter().map(|(_, table, _)| table.oid).collect();
        let sql = "SELECT w.oid, pg_catalog.pg_partition_root(w.oid) \
                   FROM pg_catalog.unnest($1::pg_catalog.oid[]) AS w (oid) \
                   JOIN pg_catalog.pg_class c ON c.oid = w.oid WHERE c.relispartition";
        let rows = session
            .query(sql, &[Some(&oid_array(&tables))])
            .map_err(|e| failed(Side::Subscriber, &e, "reading the roots of partitions"))?;
        for row in rows.iter() {
            lacking.roots.insert(field(&row, 0)?, field(&row, 1)?);
        }
        Ok(lacking)
    }

    /// How the column is added to the subscriber's table.
    pub(super) fn addition(&self, table: &Table, column: &PublishedColumn) -> Addition {
        let nothing = Declared::default();
        let declared = self.columns.get(&(table.oid, column.name.clone())).unwrap_or(&nothing);
        let name = quote_ident(&column.name);
        match self.roots.get(&table.oid) {
            // Each of the partitions lacks the column, and one statement adds it to all.
            Some(root) => declared.addition(root, &format!("IF NOT EXISTS {name}"), column),
            None => declared.addition(&table.sql_name(), &name, column),
        }
    }
}

impl Declared {
    fn of(row: &Row<'_>) -> Self {
        let text = |index| row.get(index).map(str::to_owned);
        let is = |index| row.get(index) == Some("t");
        Self {
            not_null: is(1),
            identity: row.get(2).and_then(|text| text.chars().next()),
            generated: is(3),
            collation: text(4),
            missing: text(5),
            default: text(6),
            needs_objects: is(7),
            serial: is(8),
        }
    }

    /// How the column is added to `table`, a name for SQL, as `added`.
    fn addition(&self, table: &str, added: &str, column: &PublishedColumn) -> Addition {
        let name = quote_ident(&column.name);
        let collate =
            self.collation.as_ref().map(|it| format!(" COLLATE {it}")).unwrap_or_default();
        let add = format!("ALTER TABLE {table} ADD COLUMN {added} {}{collate}", column.type_name);
        let not_null_later = || {
            format!(
                "It is NOT NULL there: once all rows have a value, ALTER TABLE {table} ALTER COLUMN {name} SET NOT NULL"
            )
        };
        if self.generated {
            // Its values are published, and the subscriber's column must take them.
            let left = self.not_null.then(not_null_later);
            return Addition { sql: format!("{add};"), differs: true, left };
        }
        if let Some(identity) = self.identity {
            let how = if identity == 'a' { "ALWAYS" } else { "BY DEFAULT" };
            let sql = format!("{add} GENERATED {how} AS IDENTITY;");
            return Addition { sql, differs: true, left: None };
        }
        if self.serial
            && let Some(serial) = serial(&column.type_name)
        {
            let sql = format!("ALTER TABLE {table} ADD COLUMN {added} {serial};");
            return Addition { sql, differs: true, left: None };
        }
        let lasting = self.default.as_deref().filter(|_| !self.needs_objects);
        let first = match (&self.missing, lasting) {
            (Some(value), Some(default)) if is_constant(default, value) => Some(default.to_owned()),
            (Some(value), _) => Some(quote_literal(value)),
            (None, default) => default.map(str::to_owned),
        };
        let mut sql = add;
        if let Some(first) = &first {
            sql = format!("{sql} DEFAULT {first}");
        }
        if self.not_null && first.is_some() {
            sql.push_str(" NOT NULL");
        }
        sql.push(';');
        if first.as_deref() != lasting {
            let last = lasting.map_or("DROP DEFAULT".to_owned(), |it| format!("SET DEFAULT {it}"));
            sql = format!("{sql} ALTER TABLE {table} ALTER COLUMN {name} {last};");
        }
        let mut left = Vec::new();
        if let Some(default) = self.default.as_ref().filter(|_| self.needs_objects) {
            left.push(format!(
                "Its default is {default}: create what that needs, and ALTER TABLE {table} ALTER COLUMN {name} SET \
                 DEFAULT {default}"
            ));
        }
        if self.not_null && first.is_none() {
            left.push(not_null_later());
        }
        Addition {
            sql,
            differs: self.missing.is_none() && self.default.is_some(),
            left: (!left.is_empty()).then(|| left.join(". ")),
        }
    }
}

/// The type that gives a column a sequence.
fn serial(type_name: &str) -> Option<&'static str> {
    match type_name {
        "smallint" => Some("smallserial"),
        "integer" => Some("serial"),
        "bigint" => Some("bigserial"),
        _ => None,
    }
}

/// Whether a default, as `pg_get_expr` writes it, is this value. False if that is not plain.
fn is_constant(default: &str, value: &str) -> bool {
    let boolean = matches!((default, value), ("true", "t") | ("false", "f"));
    let literal = || {
        let cast = default.strip_prefix(&quote_literal(value))?.strip_prefix("::")?;
        Some(cast.chars().all(|c| c.is_alphanumeric() || " _.\"[]".contains(c)))
    };
    boolean || default == value || literal() == Some(true)
}

#[cfg(test)]
mod tests {
    use super::is_constant;

    #[test]
    fn constants_are_those_of_the_catalogue() {
        for (default, value) in [
            ("false", "f"),
            ("0", "0"),
            ("'-1'::integer", "-1"),
            ("'it''s'::character varying", "it's"),
        ] {
            assert!(is_constant(default, value), "{default}");
        }
        for (default, value) in
            [("now()", "2026-12-01"), ("'a'::text || s.f()", "a"), ("true", "f")]
        {
            assert!(!is_constant(default, value), "{default}");
        }
    }
}
