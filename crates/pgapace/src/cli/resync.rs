//! `pgapace resync` and `pgapace refresh`: requests to copy tables. The running process copies them, or
//! the next one.

use clap::Args;
use wire::Session;

use crate::check::opposite;
use crate::cli::failures::Failures;
use crate::cli::table_name::split;
use crate::cli::{Selection, output};
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::same_database;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::{
    self, Phase, RelationState, RelationsByName, Subscription, ownership,
};
use crate::switchover;
use crate::tablesync::{
    self, check_subscribers, copy_requests, emptying, subscriber_tables, table_state,
};

#[derive(Debug, Args)]
pub(crate) struct ResyncArgs {
    #[command(flatten)]
    selection: Selection,

    /// Tables to truncate and copy again, with their schema unless it is public
    #[arg(required = true, value_name = "TABLE")]
    tables: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RefreshArgs {
    #[command(flatten)]
    selection: Selection,
}

/// The next step for a table that another subscription changes, too.
const SHARED_HINT: &str = "\
pgapace verify and pgapace repair, without --delete-extra, make the rows of this subscription equal.";

/// A subscription and its published tables.
struct Site {
    control: Session,
    source: Session,
    row: Subscription,
    published: Vec<PublishedTable>,
}

fn open(config: &Config) -> Result<Site> {
    let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let mut control = subscriber.connect_first()?;
    let row = state::find_existing(&mut control, &config.name)?;
    switchover::refuse_ended(&mut control, &row)?;
    let publisher = Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
    let mut source = publisher.connect_to_look()?;
    same_database::refuse(&mut source, &mut control)?;
    publication::check_exist(&mut source, &config.publications)?;
    let published = publication::read_contents(&mut source, &config.publications)?.tables;
    Ok(Site { control, source, row, published })
}

/// Refuses a subscription that copies nothing at its first start before that is done: its tables have no sync LSN.
fn check_takes_requests(row: &Subscription) -> Result<()> {
    if row.copy_data || row.phase == Phase::Streaming {
        return Ok(());
    }
    Err(Failure::new(Class::Config, format!("subscription {} has not begun to stream", row.name))
        .hint("Start it first (pgapace run)."))
}

/// Requests new copies of tables.
pub(crate) fn resync(args: &ResyncArgs) -> Result<()> {
    let config = args.selection.one_existing()?;
    let mut site = open(&config)?;
    check_takes_requests(&site.row)?;
    let mut chosen = Vec::new();
    for name in &args.tables {
        let key = split(name);
        let found = site.published.iter().find(|table| table.name == key);
        let found = found.ok_or_else(|| {
            Failure::new(Class::Mismatch, format!("the publications have no table {name}"))
                .hint("A table is published under its own name, or under that of its root.")
        })?;
        // The table may be named twice, once with its schema.
        if !chosen.contains(found) {
            chosen.push(found.clone());
        }
    }
    let subscribers = subscriber_tables::fitting(&mut site.control, &chosen)?;
    let subscribers: Vec<_> = subscribers.iter().collect();
    emptying::refuse_shared(&mut site.control, &site.row.name, &subscribers, SHARED_HINT)?;
    let keys: Vec<_> = chosen.iter().map(|table| table.name.clone()).collect();
    opposite::warn(&mut site.source, &mut site.control, &keys)?;
    copy_requests::request_again(&mut site.control, site.row.id, &chosen)?;
    tell(&mut site, &chosen)
}

/// Requests copies of published tables that are not yet part of the subscription, and of those that are blocked
/// because they could not be copied. A subscription that fails does not stop the others.
pub(crate) fn refresh(args: &RefreshArgs) -> Result<()> {
    let subscriptions = args.selection.all_existing()?;
    let mut failures = Failures::default();
    for config in &subscriptions {
        if let Err(failure) = refresh_one(config) {
            if subscriptions.len() > 1 {
                output::line(&format!("{}: not refreshed: {}", config.name, failure.message));
            }
            failures.add_of_subscription(&config.name, failure);
        }
    }
    failures.into_result("refreshed", "Then refresh again.")
}

fn refresh_one(config: &Config) -> Result<()> {
    let mut site = open(config)?;
    let known = state::relations_by_name(&mut site.control, site.row.id)?;
    let is_new = |table: &&PublishedTable| !known.contains_key(&table.name);
    let new: Vec<_> = site.published.iter().filter(is_new).cloned().collect();
    let is_blocked =
        |table: &&PublishedTable| known.get(&table.name).is_some_and(RelationState::is_tried_again);
    let blocked: Vec<_> = site.published.iter().filter(is_blocked).cloned().collect();
    if new.is_empty() && blocked.is_empty() {
        output::line(&format!("{}: no new tables", config.name));
        return Ok(());
    }
    if !new.is_empty() {
        check_takes_requests(&site.row)?;
        let name = site.row.name.clone();
        check_subscribers(&mut site.control, (&name, &new), true, config.if_not_empty)?;
        copy_requests::request(&mut site.control, site.row.id, &new)?;
        tell(&mut site, &new)?;
    }
    unblock(&mut site, &blocked, &known, config.if_not_empty)
}

/// Requests copies of the blocked tables whose obstacle is gone. An error names the others.
fn unblock(
    site: &mut Site,
    blocked: &[PublishedTable],
    known: &RelationsByName,
    policy: IfNotEmpty,
) -> Result<()> {
    let obstacles = tablesync::obstacles(&mut site.control, blocked, known, policy)?;
    let (mut unblocked, mut left) = (Vec::new(), Vec::new());
    for (table, obstacle) in blocked.iter().zip(obstacles) {
        if let Some(failure) = obstacle {
            left.push(failure);
            continue;
        }
        let subscription = site.row.id.0.to_string();
        table_state::unblock(&mut site.control, &subscription, &table.name)?;
        unblocked.push(table.clone());
    }
    if !unblocked.is_empty() {
        tell(site, &unblocked)?;
    }
    let reasons: Vec<_> = left.iter().map(|failure| failure.message.clone()).collect();
    match left.into_iter().next() {
        Some(first) => Err(Failure { message: reasons.join("; "), ..first }),
        None => Ok(()),
    }
}

fn tell(site: &mut Site, tables: &[PublishedTable]) -> Result<()> {
    let names: Vec<_> = tables.iter().map(|table| table.name.to_string()).collect();
    let when = match ownership::owner(&mut site.control, site.row.id)? {
        Some(_) => "the process that runs it copies them within seconds",
        None => "the next run copies them",
    };
    output::line(&format!("{}: {}: {when}", site.row.name, names.join(", ")));
    Ok(())
}
