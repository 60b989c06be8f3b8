//! Checks everything that would make a comparison wrong or impossible, and plans the others. Nothing
//! is compared before all checks have passed.

use std::collections::HashMap;

use engine::table_sync::TableSyncState;
use rustc_hash::FxHashMap;
use wire::{Session, quote_ident, quote_literal};

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, describe_kind, field, first_row};
use crate::subscriber::citus;
use crate::subscriber::mapping::place_columns;
use crate::subscriber::state::verification::ALL_ROWS;
use crate::subscriber::state::{self, Subscription};
use crate::verify::columns::{self, ComparedColumn};
use crate::verify::facts::{self, SideTable};
use crate::verify::key::{self, Side};
use crate::verify::plan::{Method, TablePlan};
use crate::verify::sql::{Parts, TableSql, probe};

/// The tables, columns and rows that the user wants to compare.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scope {
    /// Schema and name of the tables; all if empty.
    pub(crate) tables: Vec<(String, String)>,
    /// Table and column.
    pub(crate) except: Vec<((String, String), String)>,
    pub(crate) share: Option<f64>,
    pub(crate) condition: Option<String>,
}

impl Scope {
    /// The scope as text, for the record.
    pub(crate) fn text(&self) -> String {
        let mut parts = Vec::new();
        if let Some(share) = self.share {
            parts.push(format!("{}% of the rows", share * 100.0));
        }
        if let Some(condition) = &self.condition {
            parts.push(format!("rows where {condition}"));
        }
        if parts.is_empty() { ALL_ROWS.to_owned() } else { parts.join(", ") }
    }
}

/// The plans, and the definitions that they rest on.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) plans: Vec<TablePlan>,
    pub(crate) definitions: Definitions,
    /// Rows on the publisher, as it estimates.
    pub(crate) rows: u64,
}

/// Definitions of the tables on both servers, and their publications.
#[derive(Debug)]
pub(crate) struct Definitions {
    pub(crate) published: Vec<PublishedTable>,
    pub(crate) publisher: Vec<Option<SideTable>>,
    pub(crate) subscriber: Vec<Option<SideTable>>,
}

impl Definitions {
    /// Reads those of the published tables with these names, or of all.
    pub(crate) fn read(
        publisher: &mut Session,
        subscriber: &mut Session,
        publications: &[String],
        tables: &[(String, String)],
    ) -> Result<Self> {
        let mut published = publication::tables(publisher, publications)?;
        if !tables.is_empty() {
            published.retain(|table| tables.contains(&table.key()));
        }
        let names: Vec<_> = published.iter().map(PublishedTable::key).collect();
        Ok(Self {
            published,
            publisher: facts::read(publisher, &names, Failure::publisher)?,
            subscriber: facts::read(subscriber, &names, Failure::subscriber)?,
        })
    }

    /// The first table whose definition is another one.
    pub(crate) fn changed(&self, now: &Self) -> Option<String> {
        let name = |table: &PublishedTable| table.display_name();
        if self.published.len() != now.published.len() {
            let missing = self
                .published
                .iter()
                .find(|table| !now.published.iter().any(|other| other.key() == table.key()));
            return Some(missing.map_or_else(|| "the set of tables".to_owned(), name));
        }
        let same = |before: &Option<SideTable>, now: &Option<SideTable>| match (before, now) {
            (Some(before), Some(now)) => before.is_as(now),
            (before, now) => before.is_none() && now.is_none(),
        };
        let place = (0..self.published.len()).find(|&place| {
            self.published[place] != now.published[place]
                || !same(&self.publisher[place], &now.publisher[place])
                || !same(&self.subscriber[place], &now.subscriber[place])
        });
        place.map(|place| name(&self.published[place]))
    }
}

/// One table that cannot be compared.
struct Problem {
    class: Class,
    message: String,
    hint: String,
    sqlstate: Option<&'static str>,
}

impl Problem {
    fn new(message: String, hint: impl Into<String>) -> Self {
        Self { class: Class::Mismatch, message, hint: hint.into(), sqlstate: None }
    }

    fn failure(self) -> Failure {
        let mut failure = Failure::new(self.class, self.message).hint(self.hint);
        failure.sqlstate = self.sqlstate.map(str::to_owned);
        failure
    }
}

/// One failure for all problems.
fn refuse(mut problems: Vec<Problem>) -> Result<()> {
    if problems.len() <= 1 {
        return problems.pop().map_or(Ok(()), |problem| Err(problem.failure()));
    }
    let lines: Vec<_> =
        problems.iter().map(|problem| format!("{} ({})", problem.message, problem.hint)).collect();
    let message = format!("{} tables cannot be compared", problems.len());
    let class = problems.swap_remove(0).class;
    Err(Failure::new(class, message)
        .detail(lines.join("\n         "))
        .hint("Act on each, or name the tables to compare with --table."))
}

/// Checks and plans. `publisher` and `subscriber` are ordinary sessions.
pub(crate) fn prepare(
    publisher: &mut Session,
    subscriber: &mut Session,
    config: &Config,
    row: &Subscription,
    scope: &Scope,
) -> Result<Prepared> {
    check_primary(publisher)?;
    publication::check_exist(publisher, &config.publications)?;
    let published = publication::tables(publisher, &config.publications)?;
    let wanted =
        |table: &&PublishedTable| scope.tables.is_empty() || scope.tables.contains(&table.key());
    refuse(not_ready(subscriber, row, published.iter().filter(wanted))?)?;
    let users = [config.publisher.user(), config.subscriber.user()];
    plan(publisher, subscriber, (&config.publications, users), scope)
}

/// Checks and plans tables in any state. `users` are the roles on publisher and subscriber.
pub(crate) fn plan(
    publisher: &mut Session,
    subscriber: &mut Session,
    (publications, users): (&[String], [&str; 2]),
    scope: &Scope,
) -> Result<Prepared> {
    check_hashes(publisher, subscriber)?;
    let definitions = Definitions::read(publisher, subscriber, publications, &scope.tables)?;
    check_names(&definitions.published, scope)?;
    let mut problems = not_all_published(publisher, publications, &definitions.published)?;
    problems.extend(managed_by_citus(subscriber, &definitions.published)?);
    refuse(std::mem::take(&mut problems))?;
    let types = known_types(publisher, &definitions)?;
    let context = Context {
        users,
        scope,
        types: &types,
        same_encoding: encoding(publisher) == encoding(subscriber),
        converts: encoding(publisher) != encoding(subscriber)
            && ![encoding(publisher), encoding(subscriber)].contains(&"SQL_ASCII"),
    };
    let mut plans = Vec::new();
    let sides = definitions.publisher.iter().zip(&definitions.subscriber);
    for (published, (theirs, ours)) in definitions.published.iter().zip(sides) {
        match context.plan(published, theirs.as_ref(), ours.as_ref()) {
            Ok(plan) => plans.push(plan),
            Err(problem) => problems.push(problem),
        }
    }
    refuse(problems)?;
    if scope.condition.is_some() {
        for plan in &plans {
            check_condition(publisher, plan, &plan.publisher, Failure::publisher)?;
            check_condition(subscriber, plan, &plan.subscriber, Failure::subscriber)?;
        }
    }
    let rows = definitions.publisher.iter().flatten().map(|table| table.rows).sum();
    Ok(Prepared { plans, definitions, rows })
}

fn encoding(session: &Session) -> &str {
    session.parameter("server_encoding").unwrap_or_default()
}

fn check_primary(publisher: &mut Session) -> Result<()> {
    let theirs = publisher
        .simple("SELECT pg_catalog.pg_is_in_recovery()")
        .map_err(|e| Failure::publisher(&e, "asking whether it is a standby"))?;
    if boolean(&first_row(&theirs, "pg_is_in_recovery")?, 0)? {
        return Err(Failure::new(Class::Publisher, "the publisher is a standby")
            .hint("A snapshot with an LSN needs a slot on the primary: connect to that."));
    }
    Ok(())
}

fn check_hashes(publisher: &mut Session, subscriber: &mut Session) -> Result<()> {
    let theirs =
        publisher.simple(&probe()).map_err(|e| Failure::publisher(&e, "asking for a hash"))?;
    let ours =
        subscriber.simple(&probe()).map_err(|e| Failure::subscriber(&e, "asking for a hash"))?;
    let (theirs, ours) = (first_row(&theirs, "a hash")?, first_row(&ours, "a hash")?);
    if (0..theirs.len()).any(|column| theirs.get(column) != ours.get(column)) {
        return Err(Failure::new(
            Class::Mismatch,
            "the hash functions return different hashes on the two servers",
        )
        .hint("Machines of different byte order cannot be compared by hashes."));
    }
    Ok(())
}

/// Tables whose rows are in shards: no snapshot of the coordinator shows all of them at one LSN.
fn managed_by_citus(
    subscriber: &mut Session,
    published: &[PublishedTable],
) -> Result<Vec<Problem>> {
    if !citus::is_present(subscriber)? {
        return Ok(Vec::new());
    }
    let placements = citus::placements(subscriber)?;
    let managed = published.iter().filter(|table| placements.contains_key(&table.key()));
    let problem = |table: &PublishedTable| {
        let name = table.display_name();
        Problem::new(
            format!("subscriber table {name} is managed by Citus and cannot be compared"),
            "Name the other tables with --table.",
        )
    };
    Ok(managed.map(problem).collect())
}

/// Names of the user that mean nothing.
fn check_names(published: &[PublishedTable], scope: &Scope) -> Result<()> {
    let find = |key: &(String, String)| published.iter().find(|table| table.key() == *key);
    if let Some((schema, name)) = scope.tables.iter().find(|key| find(key).is_none()) {
        return Err(Failure::new(
            Class::Mismatch,
            format!("the publications have no table {schema}.{name}"),
        )
        .hint("A table is published under its own name, or under that of its root."));
    }
    for (key, column) in &scope.except {
        let known =
            find(key).is_some_and(|table| table.columns.iter().any(|one| one.name == *column));
        if !known {
            return Err(Failure::new(
                Class::Config,
                format!("--except-column: no published column {}.{}.{column}", key.0, key.1),
            )
            .hint("Write TABLE.COLUMN, with the schema before it unless it is public."));
        }
    }
    if published.is_empty() {
        return Err(Failure::new(Class::Mismatch, "the publications have no tables"));
    }
    Ok(())
}

/// Refuses tables that are not ready, as the session's snapshot shows them.
pub(crate) fn check_ready(
    subscriber: &mut Session,
    row: &Subscription,
    tables: &[(String, String)],
) -> Result<()> {
    let states = state::relations_by_name(subscriber, row.id)?;
    let ready = |table: &&(String, String)| {
        states.get(*table).is_some_and(|state| state.state == TableSyncState::Ready)
    };
    match tables.iter().find(|table| !ready(table)) {
        None => Ok(()),
        Some((schema, name)) => Err(Failure::new(
            Class::Mismatch,
            format!("table {schema}.{name} is copied again, or was taken out of the subscription"),
        )
        .hint("Wait until pgapace status shows it as ready.")),
    }
}

/// Tables whose rows are not yet those of the publisher.
fn not_ready<'t>(
    subscriber: &mut Session,
    row: &Subscription,
    published: impl Iterator<Item = &'t PublishedTable>,
) -> Result<Vec<Problem>> {
    let states = state::relations_by_name(subscriber, row.id)?;
    let problem = |table: &PublishedTable| {
        let name = table.display_name();
        let Some(state) = states.get(&table.key()) else {
            return Some(Problem::new(
                format!("table {name} is not part of the subscription yet"),
                "pgapace refresh adds it",
            ));
        };
        let waits = "Wait until pgapace status shows it as ready";
        let state = match (state.state.name(), &state.requested) {
            ("ready", None) => return None,
            ("ready", Some(_)) => "waits for another copy (resync)".to_owned(),
            (state, _) => format!("is in state {state}"),
        };
        Some(Problem::new(format!("table {name} {state}"), waits))
    };
    Ok(published.filter_map(problem).collect())
}

/// Tables of which some changes are not published.
fn not_all_published(
    publisher: &mut Session,
    publications: &[String],
    published: &[PublishedTable],
) -> Result<Vec<Problem>> {
    let names: Vec<_> = publications.iter().map(|name| quote_literal(name)).collect();
    let sql = format!(
        "SELECT t.schemaname, t.tablename, pg_catalog.bool_or(p.pubinsert), \
           pg_catalog.bool_or(p.pubupdate), pg_catalog.bool_or(p.pubdelete), \
           pg_catalog.string_agg(p.pubname, ', ' ORDER BY p.pubname) \
         FROM pg_catalog.pg_publication p \
         JOIN pg_catalog.pg_publication_tables t ON t.pubname = p.pubname \
         WHERE p.pubname IN ({}) GROUP BY 1, 2",
        names.join(", ")
    );
    let results =
        publisher.simple(&sql).map_err(|e| Failure::publisher(&e, "reading the publications"))?;
    let mut actions = HashMap::new();
    for row in results.iter().flatten() {
        let key: (String, String) = (field(&row, 0)?, field(&row, 1)?);
        let all = [boolean(&row, 2)?, boolean(&row, 3)?, boolean(&row, 4)?];
        let lacks: Vec<_> = ["insert", "update", "delete"]
            .into_iter()
            .zip(all)
            .filter_map(|(name, published)| (!published).then_some(name))
            .collect();
        actions.insert(key, (lacks.join(", "), field::<String>(&row, 5)?));
    }
    let problem = |table: &PublishedTable| {
        let (lacks, publications) = actions.get(&table.key())?;
        let first = publications.split(", ").next().unwrap_or_default();
        (!lacks.is_empty()).then(|| {
            Problem::new(
                format!(
                    "publication {publications} does not publish {lacks} of table {}, so that its rows \
                     differ",
                    table.display_name()
                ),
                format!(
                    "ALTER PUBLICATION {} SET (publish = 'insert, update, delete, truncate'), or leave \
                     the table out",
                    quote_ident(first)
                ),
            )
        })
    };
    Ok(published.iter().filter_map(problem).collect())
}

/// Which types of the subscriber's columns the publisher has, by name.
fn known_types(
    publisher: &mut Session,
    definitions: &Definitions,
) -> Result<FxHashMap<String, bool>> {
    let columns = definitions.subscriber.iter().flatten().flat_map(|table| &table.columns);
    let mut names: Vec<&str> = columns.map(columns::SideColumn::needed_type).collect();
    names.sort_unstable();
    names.dedup();
    let values: Vec<_> = names
        .iter()
        .map(|name| {
            let name = quote_literal(name);
            format!("({name}, pg_catalog.to_regtype({name}) IS NOT NULL)")
        })
        .collect();
    if values.is_empty() {
        return Ok(FxHashMap::default());
    }
    let results = publisher
        .simple(&format!("VALUES {}", values.join(", ")))
        .map_err(|e| Failure::publisher(&e, "looking for types"))?;
    results.iter().flatten().map(|row| Ok((field(&row, 0)?, boolean(&row, 1)?))).collect()
}

/// The syntax of `--where`, and the columns that it names.
fn check_condition(
    session: &mut Session,
    plan: &TablePlan,
    table: &TableSql,
    explain: facts::Explain,
) -> Result<()> {
    // One statement of the extended protocol: a condition cannot begin another one.
    session.query(&table.checks_condition(), &[]).map_err(|error| {
        let mut failure = explain(&error, &format!("checking --where for {}", plan.display_name()));
        failure.class = Class::Config;
        failure.hint("The condition must be valid for every compared table on both servers. Name tables with --table.")
    })?;
    Ok(())
}

struct Context<'a> {
    /// On publisher and subscriber.
    users: [&'a str; 2],
    scope: &'a Scope,
    types: &'a FxHashMap<String, bool>,
    same_encoding: bool,
    converts: bool,
}

impl Context<'_> {
    fn plan(
        &self,
        published: &PublishedTable,
        theirs: Option<&SideTable>,
        ours: Option<&SideTable>,
    ) -> std::result::Result<TablePlan, Problem> {
        let name = published.display_name();
        let theirs = theirs.ok_or_else(|| {
            Problem::new(format!("table {name} was dropped on the publisher"), "Start again")
        })?;
        let ours = ours.ok_or_else(|| {
            Problem::new(format!("the subscriber has no table {name}"), "Create it there")
        })?;
        if !matches!(ours.kind.as_str(), "r" | "p") {
            let kind = describe_kind(&ours.kind);
            return Err(Problem::new(
                format!("subscriber relation {name} is {kind}"),
                "Use a plain or partitioned table",
            ));
        }
        let excepted = |column: &str| {
            self.scope.except.iter().any(|(table, one)| *table == published.key() && one == column)
        };
        let names = published.columns.iter().map(|column| column.name.as_str());
        let names: Vec<_> = names.filter(|name| !excepted(name)).collect();
        let find = |name: &str| {
            let index = ours.columns.iter().position(|column| column.name == name)?;
            Some((index, ours.columns[index].generated))
        };
        let sql_name = published.sql_name();
        place_columns(names.iter().copied(), (&name, &sql_name), ours.row_security, find)
            .map_err(|failure| Problem::new(failure.message, failure.hint.unwrap_or_default()))?;
        if theirs.row_security {
            return Err(Problem::new(
                format!("row-level security is active for this role on publisher table {name}"),
                "Use a role with BYPASSRLS, or the table's owner without FORCE",
            ));
        }
        self.check_privileges(published, &names, theirs, ours)?;
        let mut compared = Vec::new();
        let mut not_comparable = Vec::new();
        for column in &names {
            let of =
                |table: &SideTable| table.columns.iter().find(|one| one.name == **column).cloned();
            let (Some(theirs), Some(ours)) = (of(theirs), of(ours)) else {
                return Err(Problem::new(
                    format!("column {column} of table {name} was dropped on the publisher"),
                    "Start again",
                ));
            };
            let known = |name: &str| self.types.get(name).copied().unwrap_or_default();
            match columns::compare(&theirs, &ours, known) {
                Ok(column) => compared.push(column),
                Err(reason) => not_comparable.push(((*column).to_owned(), reason)),
            }
        }
        if compared.is_empty() {
            let reasons: Vec<_> =
                not_comparable.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
            let reasons = if reasons.is_empty() {
                String::new()
            } else {
                format!(" ({})", reasons.join("; "))
            };
            return Err(Problem::new(
                format!("table {name} has no comparable columns{reasons}"),
                "Leave it out: name the other tables with --table",
            ));
        }
        let sides = (side(theirs), side(ours));
        let key = key::choose(sides.0, sides.1, &compared);
        let ranges = key::has_ranges(&key, sides.0, sides.1, self.same_encoding);
        let method = if ranges { Method::Ranges } else { Method::Buckets };
        let left_out = published.columns.iter().map(|column| column.name.clone());
        Ok(TablePlan {
            schema: published.schema.clone(),
            name: published.name.clone(),
            publisher: self.sql(
                published,
                theirs,
                &published.filters,
                method,
                &compared,
                &key,
                |c| &c.publisher,
            ),
            subscriber: self.sql(published, ours, &[], method, &compared, &key, |c| &c.subscriber),
            columns: compared,
            key,
            method,
            not_comparable,
            left_out: left_out.filter(|name| excepted(name)).collect(),
        })
    }

    #[expect(clippy::too_many_arguments, reason = "one call for each server")]
    fn sql(
        &self,
        published: &PublishedTable,
        table: &SideTable,
        filters: &[String],
        method: Method,
        compared: &[ComparedColumn],
        key: &[String],
        of: impl Fn(&ComparedColumn) -> &columns::ColumnSql,
    ) -> TableSql {
        let parts = Parts {
            oid: table.oid,
            name: (&published.schema, &published.name),
            partitioned: table.kind == "p",
            filters,
            condition: self.scope.condition.as_deref(),
            share: self.scope.share.filter(|_| method == Method::Buckets),
            converts: self.converts,
        };
        let type_of = |name: &String| {
            let column = table.columns.iter().find(|column| column.name == *name)?;
            // The search path does not have the operators of an extension.
            let type_sql = (!column.of_extension()).then(|| column.type_sql.clone());
            Some((name.clone(), type_sql))
        };
        let key: Vec<_> = key.iter().filter_map(type_of).collect();
        TableSql::new(&parts, compared, of, &key)
    }

    fn check_privileges(
        &self,
        published: &PublishedTable,
        columns: &[&str],
        theirs: &SideTable,
        ours: &SideTable,
    ) -> std::result::Result<(), Problem> {
        let sides = [
            (theirs, "publisher", self.users[0], Class::Publisher),
            (ours, "subscriber", self.users[1], Class::Subscriber),
        ];
        for (table, side, user, class) in sides {
            let of = |name: &&str| table.columns.iter().find(|column| column.name == **name);
            if columns.iter().filter_map(of).any(|column| !column.readable) {
                return Err(Problem {
                    class,
                    message: format!(
                        "{side}: permission denied for table {}",
                        published.display_name()
                    ),
                    hint: format!(
                        "On the {side}: GRANT SELECT ON {} TO {};",
                        published.sql_name(),
                        quote_ident(user)
                    ),
                    sqlstate: Some(sqlstate::INSUFFICIENT_PRIVILEGE),
                });
            }
        }
        Ok(())
    }
}

fn side(table: &SideTable) -> Side<'_> {
    Side { exceeds_cache: table.exceeds_cache, columns: &table.columns, indexes: &table.indexes }
}
