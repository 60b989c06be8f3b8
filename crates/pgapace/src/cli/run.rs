//! `pgapace run`: applies one or several subscriptions.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use clap::Args;
use crossbeam_channel::{Receiver, Sender, unbounded};
use pgoutput::Lsn;

use crate::apply::leader::Outcome;
use crate::apply::session_leases::Leaseholder;
use crate::cli::Selection;
use crate::cli::reload::{Member, Reloader};
use crate::config::given::Given;
use crate::config::live::LiveSettings;
use crate::config::setting::boolean;
use crate::config::{Configured, IfNotEmpty, Subscription, liveness};
use crate::error::{Class, Failure, Result};
use crate::http::HttpServer;
use crate::http::access::Access;
use crate::membership::Membership;
use crate::observe::board::{Board, Boards, RunPhase};
use crate::observe::{events, logging};
use crate::process::Process;
use crate::stopping::shutdown::Shutdown;
use crate::subscription::{self, RunOptions, Until};
use crate::systemd::ServiceManager;
use crate::tablesync::emptying::TruncateDecision;
use crate::verify::background::BackgroundVerification;

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    selection: Selection,

    /// Stop when the publisher's current end of WAL, or this LSN, is durable on the subscriber
    ///
    /// current is the end of WAL at the moment of the start. The publisher may have written more since,
    /// so this alone is no switchover: stop writes on the publisher first.
    #[arg(long, value_name = "current|LSN", value_parser = parse_until)]
    until: Option<Until>,

    /// Truncate this table once before its first copy; repeat it
    ///
    /// The error about tables that are not empty prints the values. The table is not truncated if a
    /// row of it was written after that snapshot of the subscriber. SCHEMA.*@SNAPSHOT stands for all
    /// published tables of a schema that are not named themselves.
    #[arg(long, value_name = "SCHEMA.TABLE@SNAPSHOT", help_heading = "Copying tables")]
    truncate: Vec<TruncateDecision>,

    /// Terminate the sessions of another process that runs this subscription
    #[arg(long)]
    take_over: bool,

    /// Wait while another process runs the subscription, and take it over when that process dies
    ///
    /// Start all processes with it, on several machines, with the same settings: the first runs the
    /// subscription. See docs/high-availability.md.
    #[arg(long, env = "PGAPACE_STANDBY", value_parser = boolean, conflicts_with_all = ["until", "take_over", "truncate"], help_heading = "Standby")]
    standby: bool,

    /// Serve metrics, probes, status and a page on this address, such as 127.0.0.1:9187
    ///
    /// Without it nothing listens. /metrics has the text format of Prometheus; /livez and /readyz are for
    /// probes; /api/v1/status is JSON; / is a page for people.
    #[arg(long, value_name = "ADDRESS:PORT", env = "PGAPACE_HTTP", help_heading = "HTTP")]
    http: Option<SocketAddr>,

    /// File whose first line is the token that --http asks for
    ///
    /// Needed for other addresses than loopback. Clients send `Authorization: Bearer TOKEN`; browsers ask
    /// for a user, which may be any, and a password, which is the token. /livez and /readyz need none.
    #[arg(
        long,
        value_name = "FILE",
        env = "PGAPACE_HTTP_TOKEN_FILE",
        help_heading = "HTTP",
        requires = "http"
    )]
    http_token_file: Option<PathBuf>,

    /// Stop all subscriptions when one fails, instead of retrying it while the others continue
    #[arg(long, env = "PGAPACE_FAIL_TOGETHER", value_parser = boolean)]
    fail_together: bool,
}

pub(super) fn parse_until(text: &str) -> std::result::Result<Until, String> {
    if text == "current" {
        return Ok(Until::Current);
    }
    text.parse::<Lsn>().map(Until::Lsn).map_err(|e| format!("{e}; an LSN looks like 16/B374D848"))
}

/// Starts the HTTP server, if one is wanted, with all subscriptions on their boards.
fn serve(args: &RunArgs, boards: &Boards) -> Result<Option<HttpServer>> {
    let Some(address) = args.http else { return Ok(None) };
    let access = match &args.http_token_file {
        Some(file) => Access::with_token_of(file)?,
        None => Access::local(),
    };
    HttpServer::start(address, access, boards.clone()).map(Some)
}

/// Runs until stopped, until all goals are reached, or until nothing runs any more.
///
/// A subscription that fails does not stop the others: it is logged at once and retried later. The
/// result is the first failure from which no subscription has recovered.
///
/// `has_log_level`: the command line or the environment has one, which overrides that of the file.
pub(crate) fn run(args: &RunArgs, has_log_level: bool) -> Result<()> {
    let Configured { mut subscriptions, log_level } = args.selection.configured()?;
    if let Some(level) = log_level.as_deref().filter(|_| !has_log_level) {
        logging::set_level(level)?;
    }
    if args.standby {
        for (_, subscription) in &mut subscriptions {
            liveness::for_standby(subscription)?;
        }
    }
    args.selection.warn_of_passwords()?;
    check_truncate(args, &subscriptions)?;
    let (givens, subscriptions): (Vec<_>, Vec<_>) = subscriptions.into_iter().unzip();
    let shutdown = Shutdown::on_signals_or_exit(Class::Stopped.exit_code())?;
    let together = args.fail_together;
    let options = RunOptions {
        until: args.until,
        truncate: args.truncate.clone(),
        take_over: args.take_over,
        // Waiting does not reach a goal that one has failed to reach.
        keep_trying: (subscriptions.len() > 1 || args.standby) && !together && args.until.is_none(),
        patience: None,
        process: Process::this()?,
        standby: None,
        rebases: false,
        supersedes: None,
        has_streamed: Arc::default(),
    };
    let several = subscriptions.len() > 1;
    let leaseholders = Leaseholder::of(&subscriptions);
    let boards = Boards::default();
    if let [subscription] = &subscriptions[..] {
        events::set_sole(&subscription.name);
    }
    for subscription in &subscriptions {
        boards.of(&subscription.name);
    }
    let _http = serve(args, &boards)?;
    let lives: Vec<_> = subscriptions.into_iter().map(LiveSettings::new).collect();
    let memberships = if args.standby {
        let all = Membership::of(&lives, &options.process, &shutdown)?;
        all.into_iter().map(Some).collect()
    } else {
        vec![None; lives.len()]
    };
    let members = givens.into_iter().zip(&lives);
    let members = members.map(|(given, live)| Member { given, live: Arc::clone(live) }).collect();
    let selection = args.selection.clone();
    let manager = ServiceManager::default();
    manager.keep_informed(boards.clone(), &shutdown)?;
    let reloader = Reloader {
        selection,
        has_log_level,
        standby: args.standby,
        members,
        manager: manager.clone(),
    };
    reloader.on_hangup()?;
    let (sender, ended) = unbounded();
    let mut threads = Vec::new();
    for ((live, leaseholder), standby) in lives.into_iter().zip(leaseholders).zip(memberships) {
        let board = boards.of(&live.newest().name);
        let options = RunOptions { standby, ..options.clone() };
        let one = Follower { live, options, shutdown: shutdown.clone(), leaseholder, board };
        threads.push(one.spawn(sender.clone())?);
    }
    drop(sender);
    let first = first_failure(&ended, several, || {
        if together {
            shutdown.end();
        }
    });
    manager.stopping();
    for thread in threads {
        // Its panic, if there was one, is reported above.
        drop(thread.join());
    }
    first.map_or(Ok(()), Err)
}

/// One subscription in a thread of its own.
struct Follower {
    live: Arc<LiveSettings>,
    options: RunOptions,
    shutdown: Shutdown,
    leaseholder: Arc<Leaseholder>,
    board: Board,
}

impl Follower {
    /// Starts the thread. It sends its name and its result at its end, also after a panic.
    fn spawn(self, ended: Sender<(String, Result<Outcome>)>) -> Result<JoinHandle<()>> {
        let name = self.live.newest().name.clone();
        let run = move || {
            let name = self.live.newest().name.clone();
            events::Concern::of(&name).enter();
            let result = catch_unwind(AssertUnwindSafe(|| self.follow())).unwrap_or_else(|_| {
                let failure = Failure::internal(format!("subscription {name} panicked"));
                self.board.failed(&failure, None);
                Err(failure)
            });
            if result.is_ok() {
                // A goal that was reached is no stream that stands still.
                self.board.enters(RunPhase::Stopped);
            }
            // The receiver ends when all have sent.
            drop(ended.send((name, result)));
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        thread.map_err(|e| Failure::refused_by_system("start a thread", &e))
    }

    fn follow(&self) -> Result<Outcome> {
        // A goal is reached before a table is due.
        let verification = |of: &Arc<LiveSettings>| match self.options.until {
            None => BackgroundVerification::start(of, &self.board),
            Some(_) => Ok(None),
        };
        let Self { live, options, shutdown, leaseholder, board } = self;
        subscription::follow(live, options, shutdown, leaseholder, board, verification)
    }
}

/// --truncate is a decision about the tables of one subscription.
fn check_truncate(args: &RunArgs, subscriptions: &[(Given, Subscription)]) -> Result<()> {
    if !args.truncate.is_empty() {
        if subscriptions.len() > 1 {
            return Err(Failure::new(Class::Config, "--truncate is for one subscription")
                .hint("Choose it with --name."));
        }
        if subscriptions.iter().any(|(_, one)| one.if_not_empty == IfNotEmpty::Keep) {
            let message = "--truncate and --if-not-empty keep exclude each other";
            return Err(Failure::new(Class::Config, message));
        }
    }
    Ok(())
}

/// Waits until all subscriptions have ended. Returns the first failure, after which `failed` is called; a hand-over
/// only if none has failed.
fn first_failure(
    ended: &Receiver<(String, Result<Outcome>)>,
    several: bool,
    failed: impl Fn(),
) -> Option<Failure> {
    let (mut first, mut handed_over) = (None, None);
    for (subscription, result) in ended {
        match result {
            Ok(outcome) => tracing::debug!(subscription, ?outcome, "ended"),
            Err(failure) if failure.class == Class::HandedOver => {
                handed_over.get_or_insert(failure);
            }
            Err(failure) => {
                if several {
                    let exit_code = failure.class.exit_code();
                    tracing::error!(
                        event = "subscription_ended",
                        subscription,
                        exit_code,
                        error = %failure,
                        "subscription ended with an error"
                    );
                }
                if first.is_none() {
                    failed();
                }
                first.get_or_insert(failure);
            }
        }
    }
    first.or(handed_over)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use crossbeam_channel::unbounded;

    use super::first_failure;
    use crate::apply::leader::Outcome;
    use crate::error::{Class, Failure, Result};

    #[test]
    fn a_hand_over_hides_no_failure() {
        let one = |class| Err(Failure::new(class, "it ended"));
        let ends = |results: Vec<Result<Outcome>>| {
            let (sender, ended) = unbounded();
            for result in results {
                sender.send((String::new(), result)).expect("the receiver is there");
            }
            drop(sender);
            let failed = Cell::new(0);
            let first = first_failure(&ended, true, || failed.set(failed.get() + 1));
            (first.map(|failure| failure.class), failed.get())
        };
        assert_eq!(ends(vec![one(Class::HandedOver)]), (Some(Class::HandedOver), 0));
        let both = vec![one(Class::HandedOver), one(Class::Apply), one(Class::Config)];
        assert_eq!(ends(both), (Some(Class::Apply), 1));
        let stopped = vec![one(Class::HandedOver), Ok(Outcome::Stopped)];
        assert_eq!(ends(stopped), (Some(Class::HandedOver), 0));
        assert_eq!(ends(vec![Ok(Outcome::Reached)]), (None, 0));
    }
}
