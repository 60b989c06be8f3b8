//! `pgapace repair`: makes the rows equal that `pgapace verify` found to differ.

use std::time::Duration;

use clap::Args;
use engine::table_name::TableName;
use rustc_hash::FxHashSet;
use serde::Serialize;
use wire::Session;

use crate::barrier::taker::{BarrierManner, BarrierTaker};
use crate::check::opposite;
use crate::cli::failures::Failures;
use crate::cli::opened::Opened;
use crate::cli::table_name::split;
use crate::cli::time::{LONGEST, time};
use crate::cli::{Selection, output, printable_sql};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::history::check_to_read;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::repair::{
    DOING, RecordedDifferences, RepairFailure, RepairOptions, Repaired, Repairer, recorded, rounds,
};
use crate::same_database;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::other_subscriptions;
use crate::subscriber::session::{Purpose, Subscriber, refuse_unlike_bytes};
use crate::subscriber::state::verification::{
    self, TableVerification, VerificationKind, differences,
};
use crate::subscriber::state::{Subscription, SubscriptionId};
use crate::subscriber::writer_tag::TagRules;
use crate::table_name::TableNameFields;
use crate::verify::exclusive;
use crate::verify::prepare::{Prepared, Scope, prepare};
use crate::verify::requirements::not_published;

/// The error for `--delete-extra` and tables that other subscriptions change, too; and its next step.
const SHARED: (&str, &str) = (
    "rows are not deleted from tables with rows of other subscriptions",
    "Nothing tells the rows of this subscription from theirs. Name the other tables with --table; DELETE rows that no \
     publisher has by hand.",
);

#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    selection: Selection,

    /// Only this table, with its schema unless it is public; repeat it
    #[arg(long, value_name = "TABLE")]
    table: Vec<String>,

    /// Print the statements, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Delete rows that only the subscriber has
    #[arg(long)]
    delete_extra: bool,

    /// Number of differences that one transaction repairs
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    batch: u32,

    /// Time to wait for transactions of the publisher that keep a snapshot from being taken
    ///
    /// Also the time after which the verb ends with the error of the subscription, if its runs fail and apply nothing.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time(0..=LONGEST))]
    barrier_timeout: Duration,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The repaired rows of one table.
#[derive(Debug, Serialize)]
struct TableReport {
    #[serde(flatten, with = "TableNameFields")]
    name: TableName,
    #[serde(flatten)]
    repaired: Repaired,
    /// Differences that a verification has counted and not recorded.
    unrecorded: u64,
    /// Why the table, or the rest of it, was not repaired.
    error: Option<String>,
    /// Other subscriptions that change the table, if extra rows were left.
    #[serde(skip)]
    shared_with: Option<String>,
}

#[derive(Debug, Serialize)]
struct Outcome {
    subscription: String,
    dry_run: bool,
    tables: Vec<TableReport>,
    /// Why tables that are not named here were not repaired.
    error: Option<String>,
    #[serde(skip)]
    failures: Failures,
    /// Tables of `--table` that the publications do not have; `None` if they were not read.
    #[serde(skip)]
    unpublished: Option<Vec<TableName>>,
}

impl Outcome {
    fn new(subscription: &str, dry_run: bool) -> Self {
        Self {
            subscription: subscription.to_owned(),
            dry_run,
            tables: Vec::new(),
            error: None,
            failures: Failures::default(),
            unpublished: None,
        }
    }

    /// Adds what was repaired of a table, and the failure after it.
    fn add(&mut self, table: TableName, repaired: Repaired, failure: Option<Failure>) {
        let error = failure.as_ref().map(|failure| failure.message.clone());
        if let Some(failure) = failure {
            self.failures.add(table.to_string(), failure);
        }
        let same = |one: &&mut TableReport| one.name == table;
        match self.tables.iter_mut().find(same) {
            Some(one) => {
                one.repaired.add(repaired);
                one.error = one.error.take().or(error);
            }
            None => self.tables.push(TableReport {
                name: table,
                repaired,
                unrecorded: 0,
                error,
                shared_with: None,
            }),
        }
    }

    /// Notes the differences of tables that no repair finds.
    fn add_unrecorded(&mut self, found: Vec<(TableName, u64)>) {
        for (table, unrecorded) in found {
            self.add(table.clone(), Repaired::default(), None);
            let mut all = self.tables.iter_mut();
            if let Some(one) = all.find(|one| one.name == table) {
                one.unrecorded = unrecorded;
            }
        }
    }

    /// Notes which other subscriptions may have the extra rows that were left.
    fn find_owners_of_extra(&mut self, control: &mut Session) -> Result<()> {
        let mut left: Vec<_> =
            self.tables.iter_mut().filter(|table| table.repaired.extra > 0).collect();
        if left.is_empty() {
            return Ok(());
        }
        let tables: Vec<_> = left.iter().map(|table| table.name.clone()).collect();
        for (place, others) in other_subscriptions::read(control, &self.subscription, &tables)? {
            left[place].shared_with = Some(others);
        }
        Ok(())
    }

    /// Adds the failure that ended the repair of the subscription.
    fn end(&mut self, failure: Failure) {
        self.error = Some(failure.message.clone());
        self.failures.add_of_subscription(&self.subscription, failure);
    }
}

/// Repairs all subscriptions, then fails if tables could not be repaired or differences were left.
pub(crate) fn run(args: &RepairArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals()?;
    let mut outcomes = Vec::new();
    for config in args.selection.all_existing()? {
        let mut outcome = Outcome::new(&config.name, args.dry_run);
        let stopped = match one(args, &config, &shutdown, &mut outcome) {
            Ok(()) => false,
            Err(failure) => {
                let stopped = failure.class == Class::Stopped;
                outcome.end(failure);
                stopped
            }
        };
        if !args.json {
            print(&outcome);
        }
        outcomes.push(outcome);
        if stopped {
            break;
        }
    }
    if args.json {
        output::json(&outcomes)?;
    }
    judge(outcomes)
}

fn judge(outcomes: Vec<Outcome>) -> Result<()> {
    let left = || {
        let tables = outcomes.iter().flat_map(|outcome| &outcome.tables);
        tables.filter(|table| table.repaired.extra > 0)
    };
    let extra: u64 = left().map(|table| table.repaired.extra).sum();
    let of_others = |table: &TableReport| {
        let others = table.shared_with.clone()?;
        Some((table.name.to_string(), others))
    };
    let shared: Vec<_> = left().filter_map(of_others).collect();
    let shared: Vec<_> = shared.iter().map(|(table, of)| (table.clone(), of.as_str())).collect();
    let mut hints = Vec::new();
    if left().any(|table| table.shared_with.is_none()) {
        hints.push("Look at them, then repair with --delete-extra.".to_owned());
    }
    if !shared.is_empty() {
        hints.push(other_subscriptions::extra_rows_hint(&shared));
    }
    let unrecorded = unrecorded(&outcomes);
    if unrecorded.is_some() {
        hints.push(
            "pgapace verify counts the differences that are left, and records as many of each table as its \
             --max-differences says; then repair again."
                .to_owned(),
        );
    }
    let mut failures = Failures::default();
    // A table of --table belongs to one of the subscriptions.
    let read: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.unpublished.as_ref()).collect();
    let unpublished = read.first().into_iter().flat_map(|first| first.iter());
    for table in unpublished.filter(|key| read.iter().all(|all| all.contains(key))) {
        failures.add(table.to_string(), not_published(table));
    }
    for (of, failure) in outcomes.into_iter().flat_map(|outcome| outcome.failures) {
        of.into_iter().for_each(|of| failures.add(of, failure.like()));
    }
    failures.into_result("repaired", "Then repair again.")?;
    let extra = (extra > 0).then(|| format!("{extra} rows that only the subscriber has were left"));
    let left: Vec<_> = extra.into_iter().chain(unrecorded).collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(Failure::new(Class::Different, left.join("; ")).hint(hints.join(" ")))
}

/// Names the differences that were counted and not recorded, if there are any.
fn unrecorded(outcomes: &[Outcome]) -> Option<String> {
    let tables = outcomes.iter().flat_map(|outcome| &outcome.tables);
    let tables: Vec<_> = tables.filter(|table| table.unrecorded > 0).collect();
    let count: u64 = tables.iter().map(|table| table.unrecorded).sum();
    let names: Vec<_> = tables.iter().map(|table| table.name.to_string()).collect();
    (count > 0).then(|| {
        let names = output::some(&names);
        format!("{count} differences were counted and not recorded, so not repaired, in {names}")
    })
}

fn one(
    args: &RepairArgs,
    config: &Config,
    shutdown: &Shutdown,
    outcome: &mut Outcome,
) -> Result<()> {
    let Opened { mut control, row, subscriber, publisher } = Opened::open(config, shutdown)?;
    let wanted: Vec<_> = args.table.iter().map(|name| split(name)).collect();
    let sessions = [control.cancel_handle()];
    let never_compared = interruptible(shutdown, &sessions, DOING, || {
        exclusive::begin_verb(&mut control, row.id, &|| shutdown.requested())?;
        let Some(failure) = never_compared(&mut control, row.id, &wanted)? else { return Ok(None) };
        let slot = slot::find(&mut publisher.connect_to_look()?, &row.slot_name)?;
        Ok(Some(match slot::is_lost(slot.as_ref()) {
            true => failure.hint(slot::LOST_HINT),
            false => failure,
        }))
    })?;
    let site =
        Site { args, config, shutdown, row: &row, publisher: &publisher, subscriber: &subscriber };
    site.repair(&mut control, wanted.clone(), outcome)?;
    interruptible(shutdown, &sessions, DOING, || {
        outcome.find_owners_of_extra(&mut control)?;
        let mut unrecorded = differences::unrecorded(&mut control, row.id)?;
        unrecorded.retain(|(table, _)| wanted.is_empty() || wanted.contains(table));
        outcome.add_unrecorded(unrecorded);
        Ok(())
    })?;
    never_compared.map_or(Ok(()), Err)
}

/// The failure for tables of which nothing is known: the only verification of them was interrupted. `wanted` are the tables
/// that are repaired, or none for all.
fn never_compared(
    control: &mut Session,
    id: SubscriptionId,
    wanted: &[TableName],
) -> Result<Option<Failure>> {
    let verifications = verification::read(control, id)?;
    let of = |one: &TableVerification| one.name.clone();
    let complete: FxHashSet<_> =
        verifications.iter().filter(|one| one.result.is_some()).map(of).collect();
    let begun = verifications.iter().filter(|one| one.kind == VerificationKind::VerbBegun).map(of);
    let unknown = begun.filter(|table| !complete.contains(table));
    let unknown = unknown.filter(|table| wanted.is_empty() || wanted.contains(table));
    let names: Vec<_> = unknown.map(|name| name.to_string()).collect();
    if names.is_empty() {
        return Ok(None);
    }
    let message = format!(
        "the verification was interrupted, and tables were never compared to the end: {}",
        output::some(&names)
    );
    let failure = Failure::new(Class::Unknown, message);
    Ok(Some(failure.hint(
        "pgapace verify --resume with the same options (--table, …) goes on with it; pgapace verify begins another one. \
         Then repair again.",
    )))
}

/// Leaves out tables and columns that are no longer published: nothing makes them equal.
fn published_ones(
    config: &Config,
    published: &[PublishedTable],
    found: Vec<RecordedDifferences>,
) -> Vec<RecordedDifferences> {
    let mut kept = Vec::new();
    for mut one in found {
        let Some(table) = published.iter().find(|table| table.name == one.name) else {
            tracing::warn!(
                event = "table_not_repaired",
                subscription = config.name,
                table = one.name.to_string(),
                "table is no longer published, and was not repaired"
            );
            continue;
        };
        one.columns_left.retain(|name| table.columns.iter().any(|column| column.name == *name));
        kept.push(one);
    }
    kept
}

/// A subscription that is repaired.
struct Site<'a> {
    args: &'a RepairArgs,
    config: &'a Config,
    shutdown: &'a Shutdown,
    row: &'a Subscription,
    publisher: &'a Publisher,
    subscriber: &'a Subscriber,
}

impl Site<'_> {
    /// Repairs all recorded differences of these tables, or of all tables if there are none.
    fn repair(
        &self,
        control: &mut Session,
        wanted: Vec<TableName>,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let Site { config, shutdown, .. } = self;
        let sessions = [control.cancel_handle()];
        let mut found =
            interruptible(shutdown, &sessions, DOING, || recorded(control, self.row.id))?;
        found.retain(|one| wanted.is_empty() || wanted.contains(&one.name));
        if found.is_empty() {
            tracing::info!(
                event = "nothing_to_repair",
                subscription = config.name,
                "no differences are recorded; pgapace verify records them"
            );
            if wanted.is_empty() {
                return Ok(());
            }
        }
        let mut look = self.publisher.connect_to_look()?;
        let sessions = [look.cancel_handle(), control.cancel_handle()];
        let found = interruptible(shutdown, &sessions, DOING, || {
            self.repairable((&mut look, control), (wanted, found), outcome)
        })?;
        drop(look);
        rounds(found).iter().try_for_each(|recorded| self.round(control, recorded, outcome))
    }

    /// Those of the recorded differences that can be repaired, after the checks of both servers.
    fn repairable(
        &self,
        (look, control): (&mut Session, &mut Session),
        (wanted, found): (Vec<TableName>, Vec<RecordedDifferences>),
        outcome: &mut Outcome,
    ) -> Result<Vec<RecordedDifferences>> {
        let Site { config, .. } = self;
        same_database::refuse(look, control)?;
        refuse_unlike_bytes(look, control)?;
        check_to_read(self.publisher, (&mut *control, &mut *look), self.row)?;
        publication::check_exist(look, &config.publications)?;
        let published = publication::tables(look, &config.publications)?;
        let is_published = |name: &TableName| published.iter().any(|one| one.name == *name);
        outcome.unpublished = Some(wanted.into_iter().filter(|name| !is_published(name)).collect());
        let found = published_ones(config, &published, found);
        if found.is_empty() {
            return Ok(found);
        }
        let tables: Vec<_> = found.iter().map(|one| one.name.clone()).collect();
        opposite::warn(look, control, &tables)?;
        if self.args.delete_extra {
            other_subscriptions::refuse(control, &config.name, &tables, SHARED)?;
        }
        Ok(found)
    }

    /// Repairs differences of several tables, each once. A table that cannot be repaired does not stop the others.
    fn round(
        &self,
        control: &mut Session,
        recorded: &[RecordedDifferences],
        outcome: &mut Outcome,
    ) -> Result<()> {
        let except = |one: &RecordedDifferences| -> Vec<_> {
            one.columns_left.iter().map(|column| (one.name.clone(), column.clone())).collect()
        };
        let scope = Scope {
            tables: recorded.iter().map(|one| one.name.clone()).collect(),
            except: recorded.iter().flat_map(except).collect(),
            share: None,
            condition: None,
        };
        let plans = match self.prepare(&scope).map_err(RepairFailure::from) {
            Ok(prepared) => prepared.plans,
            Err(RepairFailure::OfAll(failure)) => return Err(failure),
            Err(RepairFailure::OfTable(failure)) => {
                if let [one] = recorded {
                    outcome.add(one.name.clone(), Repaired::default(), Some(failure));
                    return Ok(());
                }
                // It may be one of them.
                let mut each = recorded.chunks(1);
                return each.try_for_each(|one| self.round(control, one, outcome));
            }
        };
        let mut repairer = self.repairer(&scope);
        for plan in &plans {
            let table = plan.name.clone();
            let Some(one) = recorded.iter().find(|one| one.name == table) else { continue };
            let mut repaired = Repaired::default();
            let mut print = |sql: &str| {
                if !self.args.json {
                    output::line(&printable_sql::printable(sql));
                }
            };
            let done = repairer.table(control, (plan, &one.found_by), &mut print, &mut repaired);
            match done {
                Ok(()) => outcome.add(table, repaired, None),
                Err(RepairFailure::OfTable(failure)) => outcome.add(table, repaired, Some(failure)),
                Err(RepairFailure::OfAll(failure)) => {
                    outcome.add(table, repaired, None);
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    fn prepare(&self, scope: &Scope) -> Result<Prepared> {
        let mut look = self.publisher.connect_to_look()?;
        let mut local = self.subscriber.connect(Purpose::Verify)?;
        let sessions = [look.cancel_handle(), local.cancel_handle()];
        interruptible(self.shutdown, &sessions, DOING, || {
            prepare(&mut look, &mut local, self.config, self.row, scope)
        })
    }

    fn repairer<'s>(&'s self, scope: &'s Scope) -> Repairer<'s> {
        Repairer {
            taker: BarrierTaker {
                tables: &scope.tables,
                config: self.config,
                publisher: self.publisher,
                subscriber: self.subscriber,
                row: self.row,
                manner: BarrierManner::of_verb(self.args.barrier_timeout),
                shutdown: self.shutdown,
                runner: None,
            },
            publisher: self.publisher,
            subscriber: self.subscriber,
            id: self.row.id,
            options: RepairOptions {
                dry_run: self.args.dry_run,
                tags: TagRules::of(self.config),
                delete_extra: self.args.delete_extra,
                batch: self.args.batch as usize,
            },
            shutdown: self.shutdown,
        }
    }
}

fn print(outcome: &Outcome) {
    for TableReport { name, repaired, unrecorded, error, .. } in &outcome.tables {
        let Repaired { inserted, updated, deleted, gone, extra } = repaired;
        let would = if outcome.dry_run { "-- would be: " } else { "" };
        let unrecorded = match unrecorded {
            0 => String::new(),
            count => format!(", {count} not recorded"),
        };
        let failed = if error.is_some() { ", not all repaired" } else { "" };
        output::line(&format!(
            "{would}{name}: {inserted} inserted, {updated} updated, {deleted} deleted, \
             {extra} extra left, {gone} differ no more{unrecorded}{failed}"
        ));
    }
}
