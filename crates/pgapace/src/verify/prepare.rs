//! Checks everything that would make a comparison wrong or impossible, and plans the others. Nothing
//! is compared before all checks have passed.

use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::{Session, quote_ident, quote_literal};

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::history::check_system;
use crate::publisher::publication::{self, PublishedTable};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, describe_kind, field};
use crate::subscriber::mapping::place_columns;
use crate::subscriber::state::Subscription;
use crate::subscriber::state::verification::ALL_ROWS;
use crate::verify::columns::{self, ComparedColumn};
use crate::verify::facts::{self, SideTable};
use crate::verify::key::{self, Side};
use crate::verify::plan::{Method, TablePlan};
use crate::verify::reading::Reading;
use crate::verify::requirements::{
    check_condition, check_hashes, check_names, check_primary, managed_by_citus, not_all_published,
    not_ready,
};
use crate::verify::sql::{Parts, TableSql};

/// The tables, columns and rows that the user wants to compare.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scope {
    /// The tables; all if empty.
    pub(crate) tables: Vec<TableName>,
    /// Table and column.
    pub(crate) except: Vec<(TableName, String)>,
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
        tables: &[TableName],
    ) -> Result<Self> {
        let mut published = publication::tables(publisher, publications)?;
        if !tables.is_empty() {
            published.retain(|table| tables.contains(&table.name));
        }
        let names: Vec<_> = published.iter().map(|table| table.name.clone()).collect();
        Ok(Self {
            published,
            publisher: facts::read(publisher, &names, Failure::publisher)?,
            subscriber: facts::read(subscriber, &names, Failure::subscriber)?,
        })
    }

    /// The first of these tables that is defined otherwise now, in a way that matters to a comparison. Tables
    /// that were published meanwhile do not matter.
    pub(crate) fn changed(&self, now: &Self) -> Option<String> {
        let known: FxHashMap<_, _> =
            now.published.iter().enumerate().map(|(place, table)| (&table.name, place)).collect();
        let same = |place: usize, before: &PublishedTable| {
            let Some(&other) = known.get(&before.name) else { return false };
            let published = |name: &str| before.columns.iter().any(|column| column.name == name);
            let alike = |one: &Option<SideTable>, other: &Option<SideTable>| match (one, other) {
                (Some(one), Some(other)) => one.is_as(other, published),
                (one, other) => one.is_none() && other.is_none(),
            };
            is_published_alike(before, &now.published[other])
                && alike(&self.publisher[place], &now.publisher[other])
                && alike(&self.subscriber[place], &now.subscriber[other])
        };
        let mut tables = self.published.iter().enumerate();
        tables.find(|(place, table)| !same(*place, table)).map(|(_, table)| table.name.to_string())
    }
}

/// Whether the same columns and rows are published.
fn is_published_alike(one: &PublishedTable, other: &PublishedTable) -> bool {
    (one.oid, one.partitioned) == (other.oid, other.partitioned)
        && one.columns == other.columns
        && one.filters == other.filters
}

/// One table that cannot be compared.
pub(crate) struct Problem {
    class: Class,
    message: String,
    hint: String,
    sqlstate: Option<&'static str>,
}

impl Problem {
    pub(super) fn new(message: String, hint: impl Into<String>) -> Self {
        Self { class: Class::Mismatch, message, hint: hint.into(), sqlstate: None }
    }

    /// The same with another next step.
    pub(crate) fn with_hint(self, hint: &str) -> Self {
        Self { hint: hint.to_owned(), ..self }
    }

    /// The message with the next step.
    pub(crate) fn line(&self) -> String {
        format!("{}: {}", self.message, self.hint)
    }

    /// The same for a comparison of several tables, which can go on without this one.
    fn or_leave_it_out(self) -> Self {
        let hint = format!("{}; or leave it out: name the other tables with --table", self.hint);
        Self { hint, ..self }
    }

    pub(super) fn failure(self) -> Failure {
        let mut failure = Failure::new(self.class, self.message).hint(self.hint);
        failure.sqlstate = self.sqlstate.map(str::to_owned);
        failure
    }
}

/// Most problems that a failure names.
const SHOWN: usize = 10;

/// One failure for all problems.
pub(crate) fn refuse(mut problems: Vec<Problem>) -> Result<()> {
    if problems.len() <= 1 {
        return problems.pop().map_or(Ok(()), |problem| Err(problem.failure()));
    }
    let shown = problems.iter().take(SHOWN);
    let mut lines: Vec<_> =
        shown.map(|problem| format!("{} ({})", problem.message, problem.hint)).collect();
    if problems.len() > SHOWN {
        lines.push(format!("and {} more", problems.len() - SHOWN));
    }
    let message = format!("{} tables cannot be compared", problems.len());
    let class = problems.swap_remove(0).class;
    Err(Failure::new(class, message)
        .detail(lines.join("\n         "))
        .hint("Act on each. pgapace verify compares only the tables that --table names."))
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
    check_system(publisher, row)?;
    publication::check_exist(publisher, &config.publications)?;
    let published = publication::tables(publisher, &config.publications)?;
    let wanted =
        |table: &&PublishedTable| scope.tables.is_empty() || scope.tables.contains(&table.name);
    let not_ready = not_ready(subscriber, row, published.iter().filter(wanted))?;
    refuse(not_ready.into_iter().map(Problem::or_leave_it_out).collect())?;
    let users = [config.publisher.user(), config.subscriber.user()];
    let prepared = plan(publisher, subscriber, (&config.publications, users), scope)?;
    refuse(prepared.plans.iter().filter_map(nothing_compared).collect())?;
    Ok(prepared)
}

/// A table whose columns are all left. Rows of a table without columns are equal: their number is compared.
fn nothing_compared(plan: &TablePlan) -> Option<Problem> {
    if !plan.columns.is_empty() || plan.columns_left().is_empty() {
        return None;
    }
    let mut message = format!("table {} has no comparable columns", plan.name);
    if !plan.not_comparable.is_empty() {
        let reason = |(name, reason): &(String, String)| format!("{name}: {reason}");
        let reasons: Vec<_> = plan.not_comparable.iter().map(reason).collect();
        message.push_str(&format!(" ({})", reasons.join("; ")));
    }
    Some(Problem::new(message, "Leave it out: name the other tables with --table"))
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
        reading: Reading::find(publisher, subscriber)?,
        // With SQL_ASCII, the bound of a range may not be UTF-8.
        same_encoding: encoding(publisher) == encoding(subscriber)
            && encoding(publisher) != "SQL_ASCII",
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

struct Context<'a> {
    /// On publisher and subscriber.
    users: [&'a str; 2],
    scope: &'a Scope,
    types: &'a FxHashMap<String, bool>,
    reading: Reading,
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
        let name = published.name.to_string();
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
            self.scope.except.iter().any(|(table, one)| *table == published.name && one == column)
        };
        let names = published.columns.iter().map(|column| column.name.as_str());
        let names: Vec<_> = names.filter(|name| !excepted(name)).collect();
        let find = |name: &str| {
            let index = ours.columns.iter().position(|column| column.name == name)?;
            Some((index, ours.columns[index].generated))
        };
        let sql_name = published.sql_name();
        let named = published.columns.iter().filter(|column| names.contains(&column.name.as_str()));
        place_columns(
            named.map(publication::PublishedColumn::named),
            (&name, &sql_name),
            ours.row_security,
            find,
        )
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
            match columns::compare(&theirs, &ours, known, &self.reading) {
                Ok(column) => compared.push(column),
                Err(reason) => not_comparable.push(((*column).to_owned(), reason)),
            }
        }
        let sides = (side(theirs), side(ours));
        let key = key::choose(sides.0, sides.1, &compared);
        let ranges = key::has_ranges(&key, sides.0, sides.1, self.same_encoding);
        let method = if ranges { Method::Ranges } else { Method::Buckets };
        let left_out = published.columns.iter().map(|column| column.name.clone());
        let left_out: Vec<_> = left_out.filter(|name| excepted(name)).collect();
        let left = not_comparable.iter().map(|(name, _)| name).chain(&left_out);
        let left: Vec<_> = left.cloned().collect();
        let left_of_key = key::left_out(sides.0, sides.1, (&key, &compared, &left));
        Ok(TablePlan {
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
            left_out,
            left_of_key,
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
            name: &published.name,
            partitioned: table.kind == "p",
            filters,
            condition: self.scope.condition.as_deref(),
            share: self.scope.share.filter(|_| method == Method::Buckets),
            converts: self.converts,
        };
        let type_of = |name: &String| {
            let column = table.columns.iter().find(|column| column.name == *name)?;
            let own = compared.iter().find(|one| one.name == *name).is_some_and(|one| of(one).own);
            // The search path does not have the operators of an extension. The text of a converted value is
            // one of the other server's type, and several values may have it. Where there are ranges, it is
            // the same value.
            let by_value = method == Method::Ranges || own && !column.of_extension();
            Some((name.clone(), by_value.then(|| column.literals())))
        };
        let key: Vec<_> = key.iter().filter_map(type_of).collect();
        TableSql::new(&parts, compared, &of, &key)
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
                    message: format!("{side}: permission denied for table {}", published.name),
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
