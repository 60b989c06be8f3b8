//! The subscriber's tables as far as copying needs to know them. That is much less than applying
//! changes needs, and a constant number of queries reads it for all tables.

use engine::table_name::TableName;
use wire::{Session, quote_ident, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::dump_command::dump_command;
use crate::publisher::publication::{PublishedColumn, PublishedTable};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field, not_a_table};
use crate::subscriber::citus::{self, FoundPlacement, Placements};
use crate::subscriber::elsewhere::{self, elsewhere};
use crate::subscriber::format::{MisreadColumn, Servers, agree, misread_columns};
use crate::subscriber::mapping::place_columns;
use crate::subscriber::named::named;
use crate::subscriber::state::{RelationState, table_name_arrays};
use crate::subscriber::statement::copy::CopiedColumns;
use crate::table_name::sql_name;

/// Maximum number of tables in one statement, where the statement's text grows with each.
const TABLES_AT_ONCE: usize = 200;

/// Maximum number of missing tables that a hint names.
const NAMED: usize = 10;

/// SQL for whether one of these tables has triggers that fire for replicated rows.
macro_rules! fires_triggers {
    ($oids:literal) => {
        concat!(
            "EXISTS (SELECT FROM pg_catalog.pg_trigger g WHERE g.tgenabled IN ('A', 'R') AND g.tgrelid = ANY (ARRAY",
            $oids,
            "))"
        )
    };
}

/// A subscriber table to copy into.
#[derive(Debug, Clone)]
pub(crate) struct SubscriberTable {
    pub(super) oid: u32,
    pub(super) name: TableName,
    kind: String,
    row_security: bool,
    /// Whether the role may read the table and copy into it.
    permitted: bool,
    /// Why the rows of the table are stored elsewhere, if they are.
    elsewhere: Option<String>,
    /// The placement of the table according to Citus; `None` if Citus does not manage it.
    by_citus: Option<FoundPlacement>,
    /// Whether the files of the table or its partitions are not empty, so that it may hold rows.
    has_storage: bool,
    /// Whether triggers fire for the rows of a copy.
    pub(super) fires_triggers: bool,
    columns: Vec<SubscriberColumn>,
}

#[derive(Debug, Clone)]
struct SubscriberColumn {
    name: String,
    generated: bool,
    base_type: u32,
    type_kind: char,
    attnum: i16,
    declared_type: u32,
}

impl SubscriberTable {
    fn partitioned(&self) -> bool {
        self.kind == "p"
    }

    /// The quoted, schema-qualified name.
    pub(crate) fn sql_name(&self) -> String {
        sql_name(&self.name)
    }

    /// The name for a search or DML statement.
    pub(crate) fn sql_only(&self) -> String {
        if self.partitioned() { self.sql_name() } else { format!("ONLY {}", self.sql_name()) }
    }

    /// An expression for its OID.
    pub(crate) fn sql_oid(&self) -> String {
        format!("{}::pg_catalog.regclass", quote_literal(&self.sql_name()))
    }

    /// Whether Citus manages the table.
    pub(crate) fn is_managed_by_citus(&self) -> bool {
        self.by_citus.is_some()
    }

    /// Base type and `typtype` of a column.
    fn type_of(&self, column: &str) -> Option<(u32, char)> {
        let local = self.columns.iter().find(|local| local.name == column)?;
        Some((local.base_type, local.type_kind))
    }

    /// Whether the subscriber reads the binary form of every published column as the same value.
    pub(crate) fn takes_binary(&self, published: &PublishedTable, servers: Servers) -> bool {
        let version = servers.subscriber();
        published.columns.iter().all(|column| {
            self.type_of(&column.name)
                .is_some_and(|local| agree((column.base_type, column.type_kind), local, version))
        })
    }

    /// Whether the table has rows of an incomplete copy, which must be removed before the next one.
    pub(super) fn is_partly_copied(&self, state: &RelationState) -> bool {
        state.is_partly_copied_into(self.oid)
    }

    /// Adds the columns that are copied into.
    pub(super) fn add_copied(&self, published: &PublishedTable, copied: &mut CopiedColumns) {
        let name = self.sql_name();
        let is_copied = |local: &&SubscriberColumn| {
            published.columns.iter().any(|column| column.name == local.name)
        };
        for column in self.columns.iter().filter(is_copied) {
            copied.push((self.oid, &name), &column.name, column.attnum, column.declared_type);
        }
    }

    /// The columns whose values the subscriber may misread.
    pub(super) fn misread_columns(
        &self,
        published: &PublishedTable,
        servers: Servers,
        binary: bool,
    ) -> Vec<MisreadColumn> {
        misread_columns(published, servers, binary, |column| self.type_of(column))
    }

    /// Checks that the table can store the published columns.
    pub(super) fn check(&self, published: &PublishedTable) -> Result<()> {
        if !matches!(self.kind.as_str(), "r" | "p") {
            return Err(not_a_table(&self.name, &self.kind));
        }
        if let Some(found) = &self.elsewhere {
            elsewhere::placement(&self.name, found, self.by_citus.as_ref())?;
        }
        if !self.permitted {
            let (table, sql) = (&self.name.name, self.sql_name());
            let mut failure = Failure::new(
                Class::Subscriber,
                format!("subscriber: permission denied for table {table}"),
            )
            .hint(format!(
                "On the subscriber: GRANT USAGE ON SCHEMA {} TO …; GRANT SELECT, INSERT, UPDATE, \
                 DELETE, TRUNCATE ON {sql} TO …;",
                quote_ident(&self.name.schema)
            ));
            failure.sqlstate = Some(sqlstate::INSUFFICIENT_PRIVILEGE.to_owned());
            return Err(failure);
        }
        let names = published.columns.iter().map(PublishedColumn::named);
        let find = |name: &str| {
            let index = self.columns.iter().position(|column| column.name == name)?;
            Some((index, self.columns[index].generated))
        };
        place_columns(names, (&self.name.to_string(), &self.sql_name()), self.row_security, find)
            .map(|_| ())
    }
}

/// SQL condition: the role may read and insert. Privileges may also be granted by column.
macro_rules! permitted {
    ($table:literal) => {
        concat!(
            "pg_catalog.has_schema_privilege(",
            $table,
            ".relnamespace, 'USAGE') AND (pg_catalog.has_table_privilege(",
            $table,
            ".oid, 'SELECT') OR pg_catalog.has_any_column_privilege(",
            $table,
            ".oid, 'SELECT')) AND (pg_catalog.has_table_privilege(",
            $table,
            ".oid, 'INSERT') OR pg_catalog.has_any_column_privilege(",
            $table,
            ".oid, 'INSERT'))"
        )
    };
}

/// Partitions that are not plain tables have no files, so they count as filled until the query for
/// rows.
const TABLES_SQL: &str = concat!(
    "\
WITH RECURSIVE wanted AS (
  SELECT w.ord, c.oid, c.relkind, c.relnamespace
  FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, table_name, ord)
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
), tree AS (
  SELECT w.ord, w.oid, w.relkind FROM wanted w
  UNION ALL
  SELECT t.ord, p.oid, p.relkind FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND t.relkind = 'p' AND NOT i.inhdetachpending
  JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid
)
SELECT w.ord, w.relkind, pg_catalog.row_security_active(w.oid),
       ",
    permitted!("w"),
    ",
       (SELECT pg_catalog.bool_or(CASE t.relkind WHEN 'r' THEN pg_catalog.pg_relation_size(t.oid) > 0
                                                 ELSE t.relkind <> 'p' END)
        FROM tree t WHERE t.ord = w.ord),
       ",
    elsewhere!("(SELECT t.oid AS relid FROM tree t WHERE t.ord = w.ord)"),
    ", w.oid, ",
    fires_triggers!("(SELECT t.oid FROM tree t WHERE t.ord = w.ord)"),
    "
FROM wanted w"
);

/// Like [`TABLES_SQL`], for tables that are not partitioned. The recursive query costs more than
/// everything else.
const PLAIN_TABLES_SQL: &str = concat!(
    "\
SELECT w.ord, c.relkind, pg_catalog.row_security_active(c.oid),
       ",
    permitted!("c"),
    ",
       pg_catalog.pg_relation_size(c.oid) > 0,
       ",
    elsewhere!("(SELECT c.oid AS relid)"),
    ", c.oid, CASE WHEN c.relhastriggers THEN ",
    fires_triggers!("(SELECT c.oid)"),
    " ELSE false END
FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
  WITH ORDINALITY AS w (schema_name, table_name, ord)
JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name")
);

const COLUMNS_SQL: &str = concat!(
    "\
WITH RECURSIVE chain AS (
  SELECT w.ord, a.attnum, a.attname, a.attgenerated <> '' AS generated, a.atttypid AS declared,
         a.atttypid AS typ
  FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, table_name, ord)
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
  SELECT c.ord, c.attnum, c.attname, c.generated, c.declared, t.typbasetype
  FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ WHERE t.typtype = 'd'
)
SELECT c.ord, c.attname, c.generated, t.oid, t.typtype, c.attnum, c.declared
FROM chain c JOIN pg_catalog.pg_type t ON t.oid = c.typ
WHERE t.typtype <> 'd'
ORDER BY c.ord, c.attnum"
);

/// Reads the subscriber's tables with these names, in the same order; `None` for a table that does
/// not exist.
pub(crate) fn read(
    session: &mut Session,
    published: &[PublishedTable],
) -> Result<Vec<Option<SubscriberTable>>> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "reading the catalogue of the tables");
    let [schemas, names] = table_name_arrays(published.iter().map(|table| &table.name));
    let arguments = [Some(schemas.as_str()), Some(names.as_str())];
    let mut rows = session.query(PLAIN_TABLES_SQL, &arguments).map_err(|e| failed(&e))?;
    if rows.iter().any(|row| row.get(1) == Some("p")) {
        rows = session.query(TABLES_SQL, &arguments).map_err(|e| failed(&e))?;
    }
    let with_citus = rows.iter().any(|row| row.get(5) == Some(elsewhere::CITUS));
    let mut placements =
        if with_citus { citus::placements(session)? } else { Placements::default() };
    let mut tables: Vec<Option<SubscriberTable>> = vec![None; published.len()];
    for row in rows.iter() {
        // The privilege is NULL for a table that was dropped since the query began.
        if row.get(3).is_none() {
            continue;
        }
        let ordinal: usize = field(&row, 0)?;
        let named = &published[ordinal - 1];
        let by_citus = placements.remove(&named.name);
        tables[ordinal - 1] = Some(SubscriberTable {
            oid: field(&row, 6)?,
            name: named.name.clone(),
            kind: field(&row, 1)?,
            row_security: boolean(&row, 2)?,
            permitted: boolean(&row, 3)?,
            elsewhere: row.get(5).map(str::to_owned),
            // The files of a table that Citus distributes are empty.
            has_storage: row.get(4) == Some("t") || by_citus.is_some(),
            by_citus,
            fires_triggers: boolean(&row, 7)?,
            columns: Vec::new(),
        });
    }
    for row in session.query(COLUMNS_SQL, &arguments).map_err(|e| failed(&e))?.iter() {
        let ordinal: usize = field(&row, 0)?;
        if let Some(table) = &mut tables[ordinal - 1] {
            table.columns.push(SubscriberColumn {
                name: field(&row, 1)?,
                generated: boolean(&row, 2)?,
                base_type: field(&row, 3)?,
                type_kind: field(&row, 4)?,
                attnum: field(&row, 5)?,
                declared_type: field(&row, 6)?,
            });
        }
    }
    Ok(tables)
}

/// The reason why a table cannot be copied.
#[derive(Debug)]
pub(crate) enum Obstacle {
    /// The subscriber has no table with this name.
    Absent,
    /// The relation is not a table, its columns differ, or the role lacks a privilege.
    Unfit(Failure),
    /// The table holds rows.
    NotEmpty,
}

impl Obstacle {
    /// The error for one table.
    pub(crate) fn failure(self, table: &PublishedTable) -> Failure {
        match self {
            Self::Absent => absent(&[table], false),
            Self::Unfit(failure) => failure,
            Self::NotEmpty => not_empty(&table.name.to_string()),
        }
    }
}

/// The failure for missing tables. `at_first_start` tells whether `--copy-schema` could create them.
fn absent(tables: &[&PublishedTable], at_first_start: bool) -> Failure {
    let mut names: Vec<_> = tables.iter().take(NAMED).map(|table| table.name.to_string()).collect();
    if tables.len() > NAMED {
        names.push(format!("and {} more", tables.len() - NAMED));
    }
    let message = format!("the subscriber lacks published tables: {}", names.join(", "));
    let create = if tables.len() > NAMED {
        "pgapace check prints the command".to_owned()
    } else {
        let names: Vec<_> = tables.iter().map(|table| &table.name).collect();
        dump_command(&names, "PUBLISHER", "SUBSCRIBER")
    };
    let copy = if at_first_start { "or pass --copy-schema at the first start; " } else { "" };
    Failure::new(Class::Mismatch, message)
        .hint(format!("Create them: {create}; {copy}or remove them from the publication."))
}

fn not_empty(name: &str) -> Failure {
    let message = format!("subscriber table {name} is not empty");
    Failure::new(Class::Mismatch, message).hint(
        "If it holds the publisher's rows already, as after a rename on both servers, pass --if-not-empty rebase, which \
         compares them with the publisher's and makes them equal. If nothing else writes to it, TRUNCATE it on the \
         subscriber, and pgapace copies it; or let pgapace empty and copy it: pgapace resync. Or pass --if-not-empty \
         keep to copy into it and keep its rows.",
    )
}

/// Returns each subscriber table, or the reason why it cannot be copied. `must_be_empty` selects
/// the tables that may not hold rows.
pub(crate) fn fit(
    session: &mut Session,
    published: &[PublishedTable],
    must_be_empty: impl Fn(&PublishedTable, &SubscriberTable) -> bool,
) -> Result<Vec<std::result::Result<SubscriberTable, Obstacle>>> {
    let judge = |(table, found): (&PublishedTable, Option<SubscriberTable>)| match found {
        None => Err(Obstacle::Absent),
        Some(found) => match found.check(table) {
            Ok(()) => Ok(found),
            Err(failure) => Err(Obstacle::Unfit(failure)),
        },
    };
    let mut judged: Vec<_> = published.iter().zip(read(session, published)?).map(judge).collect();
    let (mut asked, mut subscribers) = (Vec::new(), Vec::new());
    for (index, found) in judged.iter().enumerate() {
        if let Ok(subscriber) = found
            && must_be_empty(&published[index], subscriber)
        {
            asked.push(index);
            subscribers.push(subscriber.clone());
        }
    }
    for index in filled(session, &subscribers)? {
        judged[asked[index]] = Err(Obstacle::NotEmpty);
    }
    Ok(judged)
}

/// Checks that the published tables exist and can be copied. An error lists all reasons.
pub(crate) fn fitting(
    session: &mut Session,
    published: &[PublishedTable],
) -> Result<Vec<SubscriberTable>> {
    let (mut missing, mut unfit, mut fits) = (Vec::new(), Vec::new(), Vec::new());
    for (table, found) in published.iter().zip(fit(session, published, |_, _| false)?) {
        match found {
            Ok(found) => fits.push(found),
            Err(Obstacle::Absent) => missing.push(table),
            Err(obstacle) => unfit.push(obstacle.failure(table)),
        }
    }
    if !missing.is_empty() {
        return Err(absent(&missing, true));
    }
    let reasons: Vec<_> = unfit.iter().map(|failure| failure.message.clone()).collect();
    match unfit.into_iter().next() {
        Some(first) => Err(Failure { message: reasons.join("; "), ..first }),
        None => Ok(fits),
    }
}

/// Returns the indexes of the tables that hold rows.
pub(crate) fn filled(session: &mut Session, tables: &[SubscriberTable]) -> Result<Vec<usize>> {
    let mut found = Vec::new();
    let asked: Vec<usize> = (0..tables.len()).filter(|index| tables[*index].has_storage).collect();
    let (placed, plain): (Vec<_>, Vec<_>) =
        asked.into_iter().partition(|index| tables[*index].is_managed_by_citus());
    // Citus may refuse one statement about several of its tables.
    let together = plain.chunks(TABLES_AT_ONCE).chain(placed.chunks(1));
    for some in together {
        let questions: Vec<_> = some
            .iter()
            .map(|index| {
                format!("SELECT {index} WHERE EXISTS (SELECT 1 FROM {})", tables[*index].sql_only())
            })
            .collect();
        let names = || match some {
            [one] => tables[*one].name.to_string(),
            _ => "tables".to_owned(),
        };
        let rows = session.query(&questions.join(" UNION ALL "), &[]).map_err(|e| {
            Failure::subscriber(&e, &format!("checking whether {} are empty", names()))
        })?;
        for row in rows.iter() {
            found.push(field(&row, 0)?);
        }
    }
    Ok(found)
}
