//! `pgapace repair`: makes the rows equal that `pgapace verify` found to differ.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wire::Session;

use crate::barrier::taker::{BarrierManner, BarrierTaker};
use crate::check::opposite;
use crate::cli::table_name::split;
use crate::cli::{Selection, output, seconds};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::publisher::history::check_system;
use crate::publisher::publication;
use crate::publisher::session::Publisher;
use crate::repair::{RecordedDifferences, RepairOptions, Repaired, Repairer, recorded, rounds};
use crate::same_database;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::other_subscriptions;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{self, Subscription};
use crate::subscriber::writer_tag::TagRules;
use crate::verify::exclusive;
use crate::verify::prepare::{Scope, prepare};

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

    /// Seconds to wait for transactions of the publisher that keep a snapshot from being taken
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    barrier_timeout: u64,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The repaired rows of one table.
#[derive(Debug, Serialize)]
struct TableReport {
    schema: String,
    name: String,
    #[serde(flatten)]
    repaired: Repaired,
}

#[derive(Debug, Serialize)]
struct Outcome {
    subscription: String,
    dry_run: bool,
    tables: Vec<TableReport>,
}

impl Outcome {
    fn add(&mut self, report: TableReport) {
        let same = |other: &&mut TableReport| {
            (&other.schema, &other.name) == (&report.schema, &report.name)
        };
        match self.tables.iter_mut().find(same) {
            Some(other) => other.repaired.add(report.repaired),
            None => self.tables.push(report),
        }
    }
}

/// Repairs all subscriptions, then fails if extra rows were left.
pub(crate) fn run(args: &RepairArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals()?;
    let mut outcomes = Vec::new();
    for config in args.selection.subscriptions()? {
        let outcome = one(args, &config, &shutdown)?;
        if !args.json {
            print(&outcome);
        }
        outcomes.push(outcome);
    }
    if args.json {
        output::json(&outcomes)?;
    }
    let tables = outcomes.iter().flat_map(|outcome| &outcome.tables);
    let extra: u64 = tables.map(|table| table.repaired.extra).sum();
    if extra == 0 {
        return Ok(());
    }
    Err(Failure::new(
        Class::Different,
        format!("{extra} rows that only the subscriber has were left"),
    )
    .hint("Look at them, then repair with --delete-extra."))
}

fn one(args: &RepairArgs, config: &Config, shutdown: &Shutdown) -> Result<Outcome> {
    let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let mut control = subscriber.connect_first()?;
    let row = state::find_existing(&mut control, &config.name)?;
    exclusive::begin_verb(&mut control, row.id)?;
    let mut found = recorded(&mut control, row.id)?;
    let wanted: Vec<_> = args.table.iter().map(|name| split(name)).collect();
    found.retain(|one| wanted.is_empty() || wanted.contains(&key(one)));
    let mut outcome =
        Outcome { subscription: config.name.clone(), dry_run: args.dry_run, tables: Vec::new() };
    if found.is_empty() {
        tracing::info!(
            event = "nothing_to_repair",
            subscription = config.name,
            "no differences are recorded; pgapace verify records them"
        );
        return Ok(outcome);
    }
    let publisher = Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
    let mut look = publisher.connect_to_look()?;
    same_database::refuse(&mut look, &mut control)?;
    let found = published_ones(&mut look, config, &row, found)?;
    let tables: Vec<_> = found.iter().map(key).collect();
    opposite::warn(&mut look, &mut control, &tables)?;
    drop(look);
    if args.delete_extra {
        other_subscriptions::refuse(&mut control, &config.name, &tables, SHARED)?;
    }
    for recorded in rounds(found) {
        let servers = (&publisher, &subscriber);
        round(args, config, shutdown, (&mut control, &row), servers, &recorded, &mut outcome)?;
    }
    Ok(outcome)
}

/// Leaves out tables and columns that are no longer published: nothing makes them equal.
fn published_ones(
    look: &mut Session,
    config: &Config,
    row: &Subscription,
    found: Vec<RecordedDifferences>,
) -> Result<Vec<RecordedDifferences>> {
    check_system(look, row)?;
    publication::check_exist(look, &config.publications)?;
    let published = publication::tables(look, &config.publications)?;
    let mut kept = Vec::new();
    for mut one in found {
        let Some(table) = published.iter().find(|table| table.key() == key(&one)) else {
            tracing::warn!(
                event = "table_not_repaired",
                subscription = config.name,
                table = format!("{}.{}", one.schema, one.name),
                "table is no longer published, and was not repaired"
            );
            continue;
        };
        one.columns_left.retain(|name| table.columns.iter().any(|column| column.name == *name));
        kept.push(one);
    }
    Ok(kept)
}

fn key(recorded: &RecordedDifferences) -> (String, String) {
    (recorded.schema.clone(), recorded.name.clone())
}

/// Repairs differences of several tables, each once.
fn round(
    args: &RepairArgs,
    config: &Config,
    shutdown: &Shutdown,
    (control, row): (&mut Session, &Subscription),
    (publisher, subscriber): (&Publisher, &Subscriber),
    recorded: &[RecordedDifferences],
    outcome: &mut Outcome,
) -> Result<()> {
    let except = |one: &RecordedDifferences| -> Vec<_> {
        one.columns_left.iter().map(|column| (key(one), column.clone())).collect()
    };
    let scope = Scope {
        tables: recorded.iter().map(key).collect(),
        except: recorded.iter().flat_map(except).collect(),
        share: None,
        condition: None,
    };
    let mut look = publisher.connect_to_look()?;
    let mut local = subscriber.connect(Purpose::Verify)?;
    let prepared = prepare(&mut look, &mut local, config, row, &scope)?;
    drop((look, local));
    let mut repairer = Repairer {
        taker: BarrierTaker {
            tables: &scope.tables,
            config,
            publisher,
            subscriber,
            row,
            manner: BarrierManner::of_verb(Duration::from_secs(args.barrier_timeout)),
            shutdown,
            runner: None,
        },
        publisher,
        subscriber,
        id: row.id,
        options: RepairOptions {
            dry_run: args.dry_run,
            tags: TagRules::of(config),
            delete_extra: args.delete_extra,
            batch: args.batch as usize,
        },
        shutdown,
    };
    for plan in &prepared.plans {
        let (schema, name) = (plan.schema.clone(), plan.name.clone());
        let of_plan = |one: &&RecordedDifferences| one.schema == schema && one.name == name;
        let Some(one) = recorded.iter().find(of_plan) else { continue };
        let repaired = repairer.table(control, (plan, &one.found_by), &mut |sql| {
            if !args.json {
                output::line(sql);
            }
        })?;
        outcome.add(TableReport { schema, name, repaired });
    }
    Ok(())
}

fn print(outcome: &Outcome) {
    for TableReport { schema, name, repaired } in &outcome.tables {
        let Repaired { inserted, updated, deleted, gone, extra } = repaired;
        let would = if outcome.dry_run { "-- would be: " } else { "" };
        output::line(&format!(
            "{would}{schema}.{name}: {inserted} inserted, {updated} updated, {deleted} deleted, \
             {extra} extra left, {gone} differ no more"
        ));
    }
}
