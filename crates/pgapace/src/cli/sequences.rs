//! `pgapace sequences`: sets the subscriber's sequences to the publisher's values.

use std::time::{Duration, Instant};

use clap::Args;
use engine::sequence::Rules;
use serde::Serialize;
use wire::Session;

use crate::cli::failures::Failures;
use crate::cli::table_name::split;
use crate::cli::time::{LONGEST, time};
use crate::cli::{Selection, output};
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::lag::{self, Lag};
use crate::publisher::history::check_to_read;
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::sequences::{self, Chosen, PublisherSequences, Report, SequenceState, SetOptions};
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::{self, Subscription};
use crate::switchover;

/// These complete "stopped during …".
const CONNECTING: &str = "connecting";
const READING: &str = "the reading of sequences";

/// Values older than this are read again.
const FRESH: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(crate) struct SequencesArgs {
    #[command(flatten)]
    selection: Selection,

    /// Only this sequence, with its schema unless it is public; repeat it
    #[arg(long, value_name = "SEQUENCE")]
    sequence: Vec<String>,

    /// Only sequences that this published table owns or uses in a default; repeat it
    #[arg(long, value_name = "TABLE", conflicts_with = "sequence")]
    table: Vec<String>,

    /// Do not set this sequence; repeat it
    #[arg(long, value_name = "SEQUENCE")]
    exclude: Vec<String>,

    /// Skip this number of values of each sequence, for those that the publisher still assigns
    #[arg(long, value_name = "VALUES", default_value_t = 0)]
    margin: u64,

    /// Also set sequences back that are ahead of the publisher
    #[arg(long)]
    allow_backwards: bool,

    /// Time to wait until the subscriber has applied what was committed before
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time(0..=LONGEST))]
    wait: Duration,

    /// Do not wait for the subscriber. A later TRUNCATE … RESTART IDENTITY sets sequences back
    #[arg(long, conflicts_with = "wait")]
    force: bool,

    /// Set nothing, and print what would be set
    #[arg(long)]
    dry_run: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result for one subscription.
#[derive(Debug, Serialize)]
struct Outcome {
    subscription: String,
    /// The lag of the subscriber, with `--force`.
    lag: Option<Lag>,
    /// Blocked tables, which lack changes also without a lag.
    blocked: Vec<String>,
    #[serde(flatten)]
    report: Report,
    /// Why its sequences were not, or not all, set.
    error: Option<String>,
}

/// Sets all sequences that can be set, then fails if others could not. A subscription that fails keeps the others from
/// nothing.
pub(crate) fn run(args: &SequencesArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals()?;
    let subscriptions = args.selection.all_existing()?;
    check_excluded(args, &subscriptions, &shutdown)?;
    let (mut outcomes, mut failures) = (Vec::new(), Failures::default());
    for config in subscriptions {
        match one(args, &config, &shutdown) {
            Ok(outcome) => outcomes.push(outcome),
            Err(failure) => {
                let stopped = failure.class == Class::Stopped;
                outcomes.push(Outcome {
                    subscription: config.name.clone(),
                    lag: None,
                    blocked: Vec::new(),
                    report: Report::default(),
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
        outcomes.iter().filter(shown).for_each(|outcome| print(outcome, args.dry_run));
    }
    judge(&outcomes, failures)
}

fn judge(outcomes: &[Outcome], mut failures: Failures) -> Result<()> {
    let mut reasons = Vec::new();
    for outcome in outcomes {
        let failed = outcome.report.sequences.iter().filter(|one| one.failed());
        reasons.extend(failed.filter_map(|one| Some((&outcome.subscription, one.reason()?))));
    }
    if !reasons.is_empty() {
        let texts: Vec<_> = reasons.iter().map(|(_, reason)| reason.as_str()).collect();
        let message = format!("sequences that could not be set: {}", texts.join("; "));
        let failure = Failure::new(Class::Mismatch, message)
            .hint("Exclude those that are not needed: --exclude SEQUENCE.");
        if failures.is_empty() {
            return Err(failure);
        }
        for (subscription, _) in reasons {
            failures.add_of_subscription(subscription, failure.like());
        }
    }
    failures.into_result("set", "Then set them again; nothing happens to those that are set.")
}

/// Refuses names of `--exclude` for which no subscription has a sequence, before any is set: the one that was meant would
/// be set.
fn check_excluded(
    args: &SequencesArgs,
    subscriptions: &[Config],
    shutdown: &Shutdown,
) -> Result<()> {
    let mut unknown: Vec<_> = args.exclude.iter().map(|name| split(name)).collect();
    for config in subscriptions {
        if unknown.is_empty() {
            break;
        }
        let publisher = Publisher::new(config.publisher.clone(), &config.name, "UTF8");
        let mut source = abandonable(shutdown, CONNECTING, move || publisher.connect_to_look())??;
        let sessions = [source.cancel_handle()];
        let left = interruptible(shutdown, &sessions, READING, || {
            let publications = &config.publications;
            publication::check_exist(&mut source, publications)?;
            let published = publication::tables(&mut source, publications)?;
            sequences::unknown(&mut source, publications, &published, &unknown)
        });
        unknown = left.map_err(|failure| stopped(failure, "No sequence was set."))?;
    }
    unknown.first().map_or(Ok(()), |name| Err(sequences::no_sequence(name)))
}

fn one(args: &SequencesArgs, config: &Config, shutdown: &Shutdown) -> Result<Outcome> {
    let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let (subscriber, mut control) = abandonable(shutdown, CONNECTING, move || {
        subscriber.connect_first().map(|control| (subscriber, control))
    })??;
    let sessions = [control.cancel_handle()];
    let row =
        interruptible(shutdown, &sessions, READING, || find(args, &mut control, &config.name))?;
    let publisher = Publisher::new(config.publisher.clone(), &config.name, subscriber.encoding());
    let (publisher, mut source) = abandonable(shutdown, CONNECTING, move || {
        publisher.connect_to_look().map(|source| (publisher, source))
    })??;
    let sessions = [&control, &source].map(Session::cancel_handle);
    let read = interruptible(shutdown, &sessions, READING, || {
        if let Some(row) = &row {
            check_to_read(&publisher, (&mut control, &mut source), row)?;
        }
        read(args, config, (&mut control, &mut source), row.as_ref(), shutdown)
    });
    let (found, lag, blocked) = read.map_err(|failure| stopped(failure, "No sequence was set."))?;
    let options = SetOptions {
        rules: Rules { margin: args.margin, allow_backwards: args.allow_backwards },
        excluded: args.exclude.iter().map(|name| split(name)).collect(),
        dry_run: args.dry_run,
    };
    let set = interruptible(shutdown, &sessions, "the setting of sequences", || {
        sequences::set(&mut control, &found, &options)
    });
    let again = "Some sequences may be set. pgapace sequences sets the others.";
    let report = set.map_err(|failure| stopped(failure, again))?;
    Ok(Outcome { subscription: config.name.clone(), lag, blocked, report, error: None })
}

/// Says what a request to stop has left.
fn stopped(failure: Failure, left: &'static str) -> Failure {
    match failure.class {
        Class::Stopped => failure.hint(left),
        _ => failure,
    }
}

/// The publisher's sequences at a position that is applied, the lag, and blocked tables.
fn read(
    args: &SequencesArgs,
    config: &Config,
    (control, source): (&mut Session, &mut Session),
    row: Option<&Subscription>,
    shutdown: &Shutdown,
) -> Result<(PublisherSequences, Option<Lag>, Vec<String>)> {
    publication::check_exist(source, &config.publications)?;
    let mut published = publication::tables(source, &config.publications)?;
    choose_tables(&mut published, &args.table)?;
    let named: Vec<_> = args.sequence.iter().map(|name| split(name)).collect();
    let chosen = match (named.is_empty(), args.table.is_empty()) {
        (false, _) => Chosen::Named(&named),
        (true, false) => Chosen::OfTables,
        (true, true) => Chosen::All,
    };
    let mut read =
        |source: &mut Session| sequences::read(source, &config.publications, &published, chosen);
    let (found, lag) = match row {
        Some(row) if !args.dry_run => {
            let stopping = || shutdown.requested();
            read_level(args, (control, source), row, &mut read, &stopping)?
        }
        _ => (read(source)?, None),
    };
    let blocked = match row {
        Some(row) => blocked(control, row, &published)?,
        None => Vec::new(),
    };
    Ok((found, lag, blocked))
}

/// The subscription. Without it, nothing tells whether changes are on their way, so the user has to say that.
fn find(args: &SequencesArgs, control: &mut Session, name: &str) -> Result<Option<Subscription>> {
    let row = state::find_in_any(control, name)?;
    match &row {
        Some(row) => switchover::refuse_ended(control, row)?,
        None if args.force => {}
        None => {
            return Err(state::missing(name).hint(
                "pgapace status lists the subscriptions of a subscriber. If it was dropped, and nothing is to be \
                 applied any more: --force.",
            ));
        }
    }
    Ok(row)
}

/// Blocked tables among these, of which a warning tells: nothing waits for them.
fn blocked(
    control: &mut Session,
    row: &Subscription,
    published: &[PublishedTable],
) -> Result<Vec<String>> {
    let blocked = lag::blocked(control, row)?;
    let of_these = published.iter().filter(|table| blocked.contains(&table.name));
    let names: Vec<_> = of_these.map(|table| table.name.to_string()).collect();
    if !names.is_empty() {
        output::remark(&format!(
            "pgapace: warning: blocked tables lack changes (see pgapace status): {}",
            names.join(", ")
        ));
    }
    Ok(names)
}

/// The publisher's values as of a position that is applied now.
fn read_level(
    args: &SequencesArgs,
    (control, source): (&mut Session, &mut Session),
    row: &Subscription,
    read: &mut dyn FnMut(&mut Session) -> Result<PublisherSequences>,
    stopping: &dyn Fn() -> bool,
) -> Result<(PublisherSequences, Option<Lag>)> {
    let deadline = Instant::now() + args.wait;
    loop {
        // In this order: changes that were committed when values were read lie before the end of WAL.
        let found = read(source)?;
        // A wait for a locked sequence makes no value older: all are read again after it.
        let at = Instant::now();
        let end = lag::end_of_wal(source)?;
        let patience =
            if args.force { Duration::ZERO } else { deadline.saturating_duration_since(at) };
        match lag::wait(control, source, row, end, patience, stopping)? {
            Some(lag) if args.force => {
                output::remark(&format!(
                    "pgapace: warning: the subscriber is behind the publisher: {lag}"
                ));
                return Ok((found, Some(lag)));
            }
            Some(lag) => return Err(lag::behind(&row.name, &lag, "no sequence was set")),
            None if at.elapsed() < FRESH || Instant::now() >= deadline => return Ok((found, None)),
            // The publisher has continued during the wait.
            None => {}
        }
    }
}

/// The tables that the user named, or all.
fn choose_tables(published: &mut Vec<PublishedTable>, names: &[String]) -> Result<()> {
    let names: Vec<_> = names.iter().map(|name| split(name)).collect();
    if let Some(name) =
        names.iter().find(|name| !published.iter().any(|table| table.name == **name))
    {
        return Err(Failure::new(
            Class::Mismatch,
            format!("the publications have no table {name}"),
        )
        .hint("A table is published under its own name, or under that of its root."));
    }
    if !names.is_empty() {
        published.retain(|table| names.contains(&table.name));
    }
    Ok(())
}

fn print(outcome: &Outcome, dry_run: bool) {
    let report = &outcome.report;
    if let Some(error) = &outcome.error {
        output::line(&format!("{}: not set: {error}", outcome.subscription));
        return;
    }
    let set = report.count(|state| matches!(state, SequenceState::Set { .. }));
    let same = report.count(|state| matches!(state, SequenceState::Unchanged { .. }));
    let left = report.sequences.len() - set - same;
    let to_be = if dry_run { " to be" } else { "" };
    output::line(&format!(
        "{}: {set} sequences{to_be} set, {same} had the value already, {left} left as they are",
        outcome.subscription
    ));
    for one in &report.sequences {
        match &one.state {
            SequenceState::Set { from, to, margin_cut } => {
                let cut =
                    if *margin_cut { " (its bounds leave no room for the margin)" } else { "" };
                output::line(&format!("  {one}: {from} -> {to}{cut}"));
            }
            _ => {
                if let Some(reason) = one.reason() {
                    output::line(&format!("  {reason}"));
                }
            }
        }
    }
}
