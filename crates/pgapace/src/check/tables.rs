//! Checks of every published table against its subscriber table.

mod changes;
mod columns;
mod declared;
mod shared;
mod summary;

use engine::table_name::TableName;
use wire::{Session, quote_ident};

use crate::check::asked::Asked;
use crate::check::report::{Reporter, Side};
use crate::check::{SubscriptionState, failed, types};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::subscriber::catalogue::{CatalogueReader, TableFacts};
use crate::subscriber::storage::{self, TableStorage};
use crate::tablesync::check_absent;
use declared::Lacking;
use shared::Shared;

const SIDE: Side = Side::Subscriber;

/// Tables that are read together. Some memory is needed for each.
const TABLES_AT_ONCE: usize = 1000;

const TOPICS: [&str; 9] = [
    "schema",
    "table",
    "columns",
    "types",
    "privileges",
    "row_security",
    "rows",
    "search",
    "triggers",
];

struct Checker<'a, 'r> {
    publisher: &'a mut Session,
    session: &'a mut Session,
    config: &'a Config,
    known: &'a SubscriptionState,
    reporter: &'a mut Reporter<'r>,
    /// Tables that a run would copy, but that are not empty: the name, and the name as SQL.
    filled: Vec<(TableName, String)>,
    /// Published tables that do not exist.
    missing: Vec<TableName>,
    shared: Shared,
    asked: Asked,
    /// Columns that the subscriber lacks.
    lacking: Lacking,
}

/// Checks all tables.
pub(super) fn check(
    (publisher, session): (&mut Session, &mut Session),
    config: &Config,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) {
    if known.creates_tables(config) {
        created(session, known, published, reporter);
        return;
    }
    let shared = reporter.group("shared", |reporter| {
        shared::report((&mut *publisher, &mut *session), (config, known), published, reporter)
    });
    let mut checker = Checker {
        publisher,
        session,
        config,
        known,
        reporter,
        filled: Vec::new(),
        missing: Vec::new(),
        shared: shared.unwrap_or_default(),
        asked: Asked::default(),
        lacking: Lacking::default(),
    };
    let before = checker.reporter.report.findings.len();
    let (publisher, session) = (&mut *checker.publisher, &mut *checker.session);
    let reporter = &mut *checker.reporter;
    reporter.group("schema", |reporter| schemas(session, known, published, reporter));
    reporter.group("types", |reporter| types::missing(publisher, session, published, reporter));
    reporter.group("storage", |reporter| storage(session, published, reporter));
    let mut catalogue = CatalogueReader::default();
    for some in published.chunks(TABLES_AT_ONCE) {
        checker.tables(&mut catalogue, some);
    }
    checker.report_missing(published);
    if let Err(failure) = checker.report_filled() {
        checker.reporter.failure("rows", &failure);
    }
    let found = &checker.reporter.report.findings[before..];
    if !published.is_empty() && !found.iter().any(|f| TOPICS.contains(&f.topic)) {
        let count = published.len();
        checker.reporter.ok("table", format!("tables that fit the published ones: {count}"));
    }
}

/// Checks that the subscriber has none of the tables that a run creates with `--copy-schema`.
fn created(
    session: &mut Session,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) {
    // An interrupted first run may have created some of them, and creates the others.
    let absent = match known.settled() {
        Some(_) => Some(()),
        None => reporter.group("table", |_| check_absent(session, published)),
    };
    if absent.is_some() && !published.is_empty() {
        let count = published.len();
        reporter.ok("table", format!("tables that a run creates: {count}"));
    }
}

/// Reports unlogged tables, and tables with an access method that is not tested.
fn storage(
    session: &mut Session,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    for TableStorage { table, unlogged, access_method } in storage::read(session, published)? {
        let name = table.name.to_string();
        if unlogged {
            reporter
                .warn(
                    "storage",
                    format!(
                        "table {name} is unlogged: after a crash of the server, and on standbys, \
                         it is empty"
                    ),
                )
                .on(&name)
                .sql(format!("ALTER TABLE {} SET LOGGED;", table.sql_name()));
        }
        if let Some(method) = access_method {
            reporter
                .warn(
                    "storage",
                    format!(
                        "table {name} uses access method {method}: pgapace is tested with heap \
                         only"
                    ),
                )
                .on(&name);
        }
    }
    Ok(())
}

/// Reports missing schemas, and schemas that the role may not use.
fn schemas(
    session: &mut Session,
    known: &SubscriptionState,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let mut names: Vec<&str> = published.iter().map(|table| table.name.schema.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let rows = session
            .query(
                "SELECT pg_catalog.has_schema_privilege(oid, 'USAGE') \
                 FROM pg_catalog.pg_namespace WHERE nspname = $1",
                &[Some(name)],
            )
            .map_err(|e| failed(SIDE, &e, "reading the schemas"))?;
        let quoted = quote_ident(name);
        let role = &known.role;
        match rows.first().map(|row| row.get(0) == Some("t")) {
            None => {
                reporter
                    .block("schema", format!("schema {name} does not exist"))
                    .on(name)
                    .sql(format!("CREATE SCHEMA {quoted};"));
            }
            Some(false) => {
                reporter
                    .block("privileges", format!("role {role} may not use schema {name}"))
                    .on(name)
                    .sql(format!("GRANT USAGE ON SCHEMA {quoted} TO {role};"));
            }
            Some(true) => {}
        }
    }
    Ok(())
}

impl Checker<'_, '_> {
    fn tables(&mut self, catalogue: &mut CatalogueReader, published: &[PublishedTable]) {
        let names: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
        let read = catalogue.read(self.session, &names).and_then(|found| {
            let tables = found.iter().filter_map(|found| found.as_ref().ok()?.as_ref());
            let tables: Vec<_> = tables.map(|found| &found.table).collect();
            self.asked = Asked::read(self.session, &tables)?;
            let pairs = published.iter().zip(&found);
            let pairs =
                pairs.filter_map(|(one, found)| Some((one, &found.as_ref().ok()?.as_ref()?.table)));
            self.lacking = Lacking::read((&mut *self.publisher, &mut *self.session), pairs)?;
            Ok(found)
        });
        let found = match read {
            Ok(found) => found,
            Err(failure) => {
                self.reporter.failure("table", &failure);
                return;
            }
        };
        for (table, found) in published.iter().zip(found) {
            if let Err(failure) = found.and_then(|found| self.table(table, found)) {
                self.reporter.failure("table", &failure).on(table.name.to_string());
            }
        }
    }

    fn table(&mut self, published: &PublishedTable, found: Option<TableFacts>) -> Result<()> {
        let name = published.name.to_string();
        let Some(table) = found.map(|found| found.table) else {
            self.missing.push(published.name.clone());
            return Ok(());
        };
        let fits = self.columns(published, &table)?;
        self.required_columns(published, &table)?;
        if table.row_security {
            let role = &self.known.role;
            self.reporter
                .block(
                    "row_security",
                    format!("row-level security is active for role {role} on table {name}"),
                )
                .on(&name)
                .fix(self.known.service.bypass_row_security(role));
        }
        let readable = self.privileges(published, &table);
        if readable
            && self.known.refuses_rows(self.config)
            && self.known.to_copy(self.config, published)
            && !self.known.is_emptied(published, table.oid)
            && !self.known.is_judged(published)
        {
            let sql = format!("SELECT 1 FROM {} LIMIT 1", table.sql_only());
            let rows = self
                .session
                .query(&sql, &[])
                .map_err(|e| failed(SIDE, &e, &format!("checking whether {name} is empty")))?;
            if !rows.is_empty() {
                self.filled.push((published.name.clone(), table.sql_only()));
            }
        }
        self.triggers(&table);
        if fits && !table.row_security {
            self.search(published, table)?;
        }
        Ok(())
    }
}
