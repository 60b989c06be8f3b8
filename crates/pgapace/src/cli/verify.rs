//! `pgapace verify`: compares the tables of both servers.

use std::sync::Mutex;
use std::time::Duration;

use clap::Args;
use engine::table_name::TableName;
use serde::Serialize;
use wire::Session;

use crate::barrier::taker::{BarrierManner, BarrierTaker};
use crate::cli::failures::Failures;
use crate::cli::opened::Opened;
use crate::cli::table_name::{split, split_column};
use crate::cli::time::{LONGEST, time};
use crate::cli::{Selection, output};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::history::check_to_read;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::other_subscriptions;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::verification::{self, Counts, Verifier};
use crate::table_name::TableNameFields;
use crate::verify::exclusive;
use crate::verify::keeper::Servers;
use crate::verify::plan::TablePlan;
use crate::verify::prepare::{Scope, prepare};
use crate::verify::progress::Progress;
use crate::verify::rate::{Pace, Rate, share};
use crate::verify::record::{self, Recorder, TableRecord};
use crate::verify::requirements::check_primary;
use crate::verify::run::{Manner, Verification};
use crate::verify::whole::Passes;
use crate::verify::work::{TableWork, Work};

/// The next step after an interruption.
const GO_ON: &str = "pgapace verify --resume goes on from here.";

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    selection: Selection,

    /// Only this table, with its schema unless it is public; repeat it
    #[arg(long, value_name = "TABLE")]
    table: Vec<String>,

    /// Do not compare this column; repeat it
    #[arg(long, value_name = "TABLE.COLUMN")]
    except_column: Vec<String>,

    /// Compare only this share of the rows
    #[arg(long, value_name = "SHARE%", value_parser = share)]
    sample: Option<f64>,

    /// Compare only rows for which this SQL condition is true, on both servers
    #[arg(long = "where", value_name = "CONDITION")]
    condition: Option<String>,

    /// Compare no more than this per second on each server: rows (50000) or bytes of text (20MB)
    #[arg(long, value_name = "RATE")]
    max_rate: Option<Rate>,

    /// Number of sessions on each server
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    jobs: u16,

    /// Age at which snapshots are renewed, because they hold back VACUUM
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = time(1..=LONGEST))]
    snapshot_lifetime: Duration,

    /// Time to wait for transactions of the publisher that keep a snapshot from being taken
    ///
    /// Also the time after which the verb ends with the error of the subscription, if its runs fail and apply nothing.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time(0..=LONGEST))]
    barrier_timeout: Duration,

    /// Go on where the last verification of these tables was interrupted
    #[arg(long)]
    resume: bool,

    /// Number of differences of each table that are recorded; all are counted
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_differences: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result for one table.
#[derive(Debug, Serialize)]
struct TableReport {
    #[serde(flatten, with = "TableNameFields")]
    name: TableName,
    /// `equal` or `different`.
    result: &'static str,
    #[serde(flatten)]
    counts: Counts,
    key: Vec<String>,
    not_comparable: Vec<NotComparable>,
    left_out: Vec<String>,
    /// Other subscriptions that change the table, if it has extra rows.
    #[serde(skip)]
    shared_with: Option<String>,
}

#[derive(Debug, Serialize)]
struct NotComparable {
    column: String,
    reason: String,
}

/// The result for one subscription.
#[derive(Debug, Serialize)]
struct Outcome {
    subscription: String,
    scope: String,
    tables: Vec<TableReport>,
    /// Why its tables were not, or not all, compared.
    error: Option<String>,
}

impl Outcome {
    fn differences(&self) -> u64 {
        self.tables.iter().map(|table| table.counts.differences()).sum()
    }

    /// Whether rows differ, or columns could not be compared.
    fn has_findings(&self) -> bool {
        let mut tables = self.tables.iter();
        self.differences() > 0 || tables.any(|table| !table.not_comparable.is_empty())
    }
}

/// Verifies all subscriptions, then fails if anything differs. A subscription that fails does not stop the others.
pub(crate) fn run(args: &VerifyArgs) -> Result<()> {
    let scope = scope(args)?;
    let shutdown = Shutdown::on_signals()?;
    let (mut outcomes, mut failures) = (Vec::new(), Failures::default());
    for config in args.selection.all_existing()? {
        match one(args, &config, &scope, &shutdown) {
            Ok(outcome) => outcomes.push(outcome),
            Err(failure) => {
                let stopped = failure.class == Class::Stopped;
                outcomes.push(Outcome {
                    subscription: config.name.clone(),
                    scope: scope.text(),
                    tables: Vec::new(),
                    error: Some(failure.message.clone()),
                });
                failures.add_of_subscription(&config.name, failure);
                if stopped {
                    break;
                }
            }
        }
    }
    if args.json {
        output::json(&outcomes)?;
    } else {
        let shown = |one: &&Outcome| one.error.is_none() || outcomes.len() > 1;
        outcomes.iter().filter(shown).for_each(print);
    }
    let judged = judge(&outcomes);
    if failures.is_empty() {
        return judged;
    }
    if let Err(failure) = judged {
        let compared = outcomes.iter().filter(|outcome| outcome.has_findings());
        compared.for_each(|one| failures.add_of_subscription(&one.subscription, failure.like()));
    }
    failures.into_result("compared and equal", "Then verify again.")
}

fn judge(outcomes: &[Outcome]) -> Result<()> {
    let tables = || outcomes.iter().flat_map(|outcome| &outcome.tables);
    let differences: u64 = outcomes.iter().map(Outcome::differences).sum();
    if differences > 0 {
        let rows =
            if differences == 1 { "1 row differs" } else { &format!("{differences} rows differ") };
        let shared = tables()
            .filter_map(|table| Some((table.name.to_string(), table.shared_with.as_deref()?)));
        let shared: Vec<_> = shared.collect();
        let mut hint = "On the subscriber: SELECT * FROM pgapace.difference;".to_owned();
        if !shared.is_empty() {
            hint = format!("{hint} {}", other_subscriptions::extra_rows_hint(&shared));
        }
        return Err(Failure::new(
            Class::Different,
            format!("{rows}, in {}", differing_tables(outcomes).join(", ")),
        )
        .hint(hint));
    }
    let left: Vec<_> = tables()
        .flat_map(|table| {
            let name = table.name.to_string();
            table
                .not_comparable
                .iter()
                .map(move |one| format!("{name}.{} ({})", one.column, one.reason))
        })
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Mismatch,
        format!("nothing differs, but columns could not be compared: {}", left.join("; ")),
    )
    .hint("Leave them out with --except-column TABLE.COLUMN."))
}

/// With the subscription, if there are several: each may have the same table.
fn differing_tables(outcomes: &[Outcome]) -> Vec<String> {
    let each = outcomes.iter().flat_map(|outcome| {
        let differing = outcome.tables.iter().filter(|table| table.counts.differences() > 0);
        differing.map(move |table| match outcomes.len() {
            1 => table.name.to_string(),
            _ => format!("{} (subscription {})", table.name, outcome.subscription),
        })
    });
    each.collect()
}

fn scope(args: &VerifyArgs) -> Result<Scope> {
    let except = |text: &String| {
        split_column(text).ok_or_else(|| {
            Failure::new(
                Class::Config,
                format!("--except-column {text:?} does not name a table and a column"),
            )
            .hint("Write TABLE.COLUMN, with the schema before it unless it is public.")
        })
    };
    Ok(Scope {
        tables: args.table.iter().map(|name| split(name)).collect(),
        except: args.except_column.iter().map(except).collect::<Result<_>>()?,
        share: args.sample,
        condition: args.condition.clone(),
    })
}

fn one(args: &VerifyArgs, config: &Config, scope: &Scope, shutdown: &Shutdown) -> Result<Outcome> {
    let opened = Opened::open(config, shutdown)?;
    let (mut look, mut local) = opened.connect_to_look(shutdown)?;
    let Opened { mut control, row, subscriber, publisher } = opened;
    let sessions = [&control, &look, &local].map(Session::cancel_handle);
    let (prepared, (tables, records)) = interruptible(shutdown, &sessions, "verification", || {
        check_primary(&mut look)?;
        check_to_read(&publisher, (&mut control, &mut look), &row)?;
        let prepared = prepare(&mut look, &mut local, config, &row, scope)?;
        exclusive::begin_verb(&mut control, row.id, &|| shutdown.requested())?;
        let begun = begin(args, &mut control, row.id, &prepared.plans, scope)?;
        Ok((prepared, begun))
    })?;
    drop((look, local));
    let plans = &prepared.plans;
    let manner = Manner {
        jobs: args.jobs.into(),
        rate: args.max_rate,
        lifetime: args.snapshot_lifetime,
        go_on: Some(GO_ON),
    };
    let verification = Verification {
        plans,
        manner: &manner,
        scope,
        shutdown,
        recorder: Recorder::new(control, row.id, args.max_differences, records),
        progress: Progress::new(prepared.rows),
        work: Mutex::new(Work::new(tables, scope.share)),
        pace: Mutex::new(Pace::new(manner.rate)),
        passes: Passes::default(),
        entrance: Mutex::default(),
    };
    let servers = Servers {
        publisher: &publisher,
        subscriber: &subscriber,
        publications: &config.publications,
    };
    let tables: Vec<_> = plans.iter().map(|plan| plan.name.clone()).collect();
    let mut source = BarrierTaker {
        tables: &tables,
        config,
        publisher: &publisher,
        subscriber: &subscriber,
        row: &row,
        manner: BarrierManner::of_verb(args.barrier_timeout),
        shutdown,
        runner: None,
    };
    let counts = verification.run(&servers, &mut source, &prepared.definitions);
    let counts = counts.map_err(|failure| of_condition(failure, scope))?;
    let reports = plans.iter().zip(counts).map(|(plan, counts)| report(plan, counts));
    let mut reports: Vec<_> = reports.collect();
    find_owners_of_extra(&subscriber, config, &mut reports, shutdown)?;
    Ok(Outcome {
        subscription: config.name.clone(),
        scope: scope.text(),
        tables: reports,
        error: None,
    })
}

/// An error about a value (SQLSTATE class 22) is of the condition of `--where`, or of a column.
fn of_condition(failure: Failure, scope: &Scope) -> Failure {
    let of_value = failure.sqlstate.as_deref().is_some_and(|code| code.starts_with("22"));
    let Some(condition) = scope.condition.as_deref().filter(|_| of_value) else { return failure };
    let or = failure.hint.as_deref().map_or(String::new(), |hint| format!(" Otherwise: {hint}"));
    let hint =
        format!("The condition of --where may fail for a row: {condition}. Then correct it.{or}");
    failure.hint(hint)
}

/// Notes which other subscriptions may have the extra rows.
fn find_owners_of_extra(
    subscriber: &Subscriber,
    config: &Config,
    reports: &mut [TableReport],
    shutdown: &Shutdown,
) -> Result<()> {
    let mut extra: Vec<_> = reports.iter_mut().filter(|table| table.counts.extra > 0).collect();
    if extra.is_empty() {
        return Ok(());
    }
    let tables: Vec<_> = extra.iter().map(|table| table.name.clone()).collect();
    let mut session = subscriber.connect(Purpose::Verify)?;
    let sessions = [session.cancel_handle()];
    let found = interruptible(shutdown, &sessions, "verification", || {
        other_subscriptions::read(&mut session, &config.name, &tables)
    })?;
    for (place, others) in found {
        extra[place].shared_with = Some(others);
    }
    Ok(())
}

/// Records the beginning, or where an interrupted verification goes on. Returns the work of each
/// table, and its record.
fn begin(
    args: &VerifyArgs,
    control: &mut Session,
    id: SubscriptionId,
    plans: &[TablePlan],
    scope: &Scope,
) -> Result<(Vec<TableWork>, Vec<TableRecord>)> {
    if args.resume {
        return resume(control, id, plans, scope);
    }
    let rows: Vec<_> = plans.iter().map(TablePlan::record).collect();
    let begun = verification::begin(control, id, Verifier::Verb, &rows, &scope.text())?;
    let tables = plans.iter().map(|plan| TableWork::new(plan.method)).collect();
    Ok((tables, plans.iter().map(|plan| TableRecord::begun(&begun, plan)).collect()))
}

fn resume(
    control: &mut Session,
    id: SubscriptionId,
    plans: &[TablePlan],
    scope: &Scope,
) -> Result<(Vec<TableWork>, Vec<TableRecord>)> {
    let mut last = verification::read(control, id)?;
    last.retain(|one| one.kind.is_of_verb());
    let number = last.iter().map(|one| one.number).max();
    let (mut tables, mut records) = (Vec::new(), Vec::new());
    for plan in plans {
        let found = last.iter().find(|one| {
            one.name == plan.name
                && Some(one.number) == number
                && one.scope == scope.text()
                && one.columns_left == plan.columns_left()
        });
        let Some(found) = found else {
            return Err(Failure::new(
                Class::Config,
                format!(
                    "the last verification was not one of table {} with the same options",
                    plan.name
                ),
            )
            .hint("Start it without --resume."));
        };
        let (work, record) = record::resume(control, id, plan, found)?;
        tables.push(work);
        records.push(record);
    }
    Ok((tables, records))
}

fn report(plan: &TablePlan, counts: Counts) -> TableReport {
    TableReport {
        name: plan.name.clone(),
        result: if counts.differences() == 0 { "equal" } else { "different" },
        counts,
        key: plan.key.clone(),
        not_comparable: plan
            .not_comparable
            .iter()
            .map(|(column, reason)| NotComparable {
                column: column.clone(),
                reason: reason.clone(),
            })
            .collect(),
        left_out: plan.left_out.clone(),
        shared_with: None,
    }
}

fn print(outcome: &Outcome) {
    let Outcome { subscription, scope, tables, error } = outcome;
    if let Some(error) = error {
        output::line(&format!("{subscription}: not compared: {error}"));
        return;
    }
    let count = match tables.len() {
        1 => "1 table".to_owned(),
        count => format!("{count} tables"),
    };
    output::line(&format!("{subscription}: {count}, {scope}"));
    let name = |table: &TableReport| table.name.to_string();
    let width = tables.iter().map(|table| name(table).chars().count()).max().unwrap_or(0).max(5);
    output::line(&format!(
        "  {:<width$}  {:<9}  {:>12}  {:>9}  {:>9}  {:>9}  {:>9}",
        "table", "result", "rows", "size", "missing", "extra", "different"
    ));
    for table in tables {
        let Counts { rows, bytes, missing, extra, different, .. } = table.counts;
        let size = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
        output::line(&format!(
            "  {:<width$}  {:<9}  {rows:>12}  {size:>9}  {missing:>9}  {extra:>9}  {different:>9}",
            name(table),
            table.result
        ));
        for one in &table.not_comparable {
            output::line(&format!("    {} was not compared: {}", one.column, one.reason));
        }
        if !table.left_out.is_empty() {
            output::line(&format!("    left out: {}", table.left_out.join(", ")));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::table_name::TableName;

    use super::{Outcome, TableReport, judge};
    use crate::subscriber::state::verification::Counts;

    fn outcome(subscription: &str, different: u64) -> Outcome {
        let table = TableReport {
            name: TableName { schema: "public".to_owned(), name: "t".to_owned() },
            result: "different",
            counts: Counts { different, ..Counts::default() },
            key: Vec::new(),
            not_comparable: Vec::new(),
            left_out: Vec::new(),
            shared_with: None,
        };
        let (subscription, scope) = (subscription.to_owned(), "all rows".to_owned());
        Outcome { subscription, scope, tables: vec![table], error: None }
    }

    fn said(outcomes: &[Outcome]) -> String {
        judge(outcomes).expect_err("rows differ").message
    }

    #[test]
    fn a_table_that_several_subscriptions_have_is_named_with_each() {
        assert_eq!(said(&[outcome("a", 1)]), "1 row differs, in public.t");
        let both = said(&[outcome("a", 1), outcome("b", 2)]);
        assert_eq!(both, "3 rows differ, in public.t (subscription a), public.t (subscription b)");
    }
}
