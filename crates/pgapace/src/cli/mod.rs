//! The command line: verbs, flags, exit codes.

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod drop;
pub(crate) mod enable;
pub(crate) mod output;
pub(crate) mod prepared;
pub(crate) mod resync;
pub(crate) mod run;
pub(crate) mod sequences;
pub(crate) mod skip;
pub(crate) mod status;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use wire::Session;

use crate::config::{Settings, Site, Subscription, sites, subscriptions};
use crate::error::{Class, Failure, Result};
use crate::observe::logging::{self, LogFormat};
#[cfg(feature = "demo")]
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state;

const EXIT_CODES: &str = "\
Exit codes:
   0  the stated goal was reached
   1  internal error
   2  wrong command line
   3  wrong configuration: file, connection string, combination of settings
   4  the publisher cannot be reached, is too old, or refuses
   5  the subscriber cannot be reached, is too old, or refuses
   6  publisher and subscriber do not fit together (tables, columns, identities)
   7  the replication slot is gone, invalidated, or ahead of the subscriber
   8  the subscription or its slot is used by somebody else
   9  a change could not be applied
  10  the publisher's history is not the one the subscriber has followed
  11  stopped by a signal before the goal of --until was reached
  12  the spool directory is full or cannot be used
  13  the subscription was disabled because of an error (--disable-on-error, pgapace enable)
  14  the subscriber is behind the publisher, and the verb needs it not to be (pgapace sequences)";

const EXAMPLES: &str = "\
Examples:
  pgapace check --publisher 'host=a dbname=shop user=repl' --subscriber 'host=b dbname=shop' \\
                --publication shop --name shop
  pgapace run   --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \\
                --publication shop --name shop
  pgapace run   --config /etc/pgapace.toml --until current
  pgapace status --subscriber postgresql://b/shop
  pgapace demo";

const RUN_HELP: &str = r#"Example:
  pgapace run --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \
              --publication shop --name shop"#;

const CHECK_HELP: &str = r#"Exits with 0 if nothing is in the way, 6 if something is, 4 or 5 if publisher or subscriber cannot be reached.

Example:
  pgapace check --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \
                --publication shop --name shop"#;

const STATUS_HELP: &str = r#"Needs no more than --subscriber. With --publisher it also shows the lag and what the slot keeps.

Example:
  pgapace status --subscriber postgresql://b/shop --publisher postgresql://a/shop --json"#;

const DROP_HELP: &str = r#"Needs --subscriber and --name, and --publisher unless --keep-slot is given.

Example:
  pgapace drop --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --name shop"#;

const RESYNC_HELP: &str = r#"Example:
  pgapace resync --config /etc/pgapace.toml --name shop public.orders"#;

const REFRESH_HELP: &str = r#"Example:
  pgapace refresh --config /etc/pgapace.toml --name shop"#;

const SEQUENCES_HELP: &str = r#"Run it when nothing more is written on the publisher, before the subscriber takes over; or before that, with a margin for the values that the publisher still hands out.

All sequences are set of the schemas that have published tables or are published (FOR TABLES IN SCHEMA), and all of the database with FOR ALL TABLES. A sequence never goes back unless --allow-backwards is given. Sequences that are left as they are, are listed with the reason; exit code 6 if one should have been set.

It waits until everything is applied that was committed before: a TRUNCATE … RESTART IDENTITY that is still in the stream would set sequences back afterwards. It exits with 14, and nothing is set, if the subscriber stays behind.

Example:
  pgapace sequences --config /etc/pgapace.toml --name shop
  pgapace sequences --config /etc/pgapace.toml --name shop --margin 10000 --json"#;

const SKIP_HELP: &str = r#"Needs --subscriber and --name. Nothing of the transaction is applied, and it is not known any more afterwards: what it would have changed has to be mended by hand.

Example:
  pgapace skip --subscriber postgresql://b/shop --name shop --lsn 16/B374D848"#;

const PREPARED_HELP: &str = r#"Needs --subscriber and --name. The publisher resolves them by itself: this is for those that it never will.

Example:
  pgapace prepared --subscriber postgresql://b/shop --name shop
  pgapace prepared --subscriber postgresql://b/shop --name shop --rollback order-17"#;

const ENABLE_HELP: &str = r#"Needs --subscriber and --name.

Example:
  pgapace enable --subscriber postgresql://b/shop --name shop"#;

#[cfg(feature = "demo")]
const DEMO_HELP: &str = r#"Example:
  pgapace demo --duration 30 --clients 8 --publisher-version 15 --subscriber-version 18"#;

const COMPLETIONS_HELP: &str = r#"Example:
  pgapace completions bash > /etc/bash_completion.d/pgapace"#;

/// Applies PostgreSQL logical replication from outside the servers.
///
/// pgapace reads publications of a publisher over the replication protocol and applies them to a
/// subscriber database. Nothing is installed in either server; all state is kept on the subscriber, in
/// schema pgapace.
#[derive(Debug, Parser)]
#[command(name = "pgapace", version, after_help = EXIT_CODES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"))]
pub(crate) struct Cli {
    /// How log lines look [default: human on a terminal, else text without colour]
    #[arg(long, global = true, value_enum, env = "PGAPACE_LOG_FORMAT", default_value = "human")]
    log_format: LogFormat,

    /// What is logged: error, warn, info, debug, trace, or a filter such as pgapace=debug
    #[arg(long, global = true, value_name = "LEVEL", env = "PGAPACE_LOG", default_value = "info")]
    log_level: String,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Copy the tables on the first run, then apply changes until stopped
    #[command(after_help = RUN_HELP)]
    Run(run::RunArgs),
    /// Look for everything that would keep a subscription from working, with the SQL that mends it
    #[command(after_help = CHECK_HELP)]
    Check(check::CheckArgs),
    /// Show the state of subscriptions
    #[command(after_help = STATUS_HELP)]
    Status(status::StatusArgs),
    /// Empty tables and copy them again, while the others go on
    #[command(after_help = RESYNC_HELP)]
    Resync(resync::ResyncArgs),
    /// Copy tables that were added to the publication, before their first change comes
    #[command(after_help = REFRESH_HELP)]
    Refresh(resync::RefreshArgs),
    /// Set the subscriber's sequences to the publisher's values: the stream does not carry them
    #[command(after_help = SEQUENCES_HELP)]
    Sequences(sequences::SequencesArgs),
    /// Leave out one transaction of the publisher that cannot be applied
    #[command(after_help = SKIP_HELP)]
    Skip(skip::SkipArgs),
    /// List, or resolve by hand, transactions that are prepared on the subscriber
    #[command(after_help = PREPARED_HELP)]
    Prepared(prepared::PreparedArgs),
    /// Let a subscription run again that an error has disabled
    #[command(after_help = ENABLE_HELP)]
    Enable(enable::EnableArgs),
    /// Remove a subscription: its slot, its origins and its state; tables are left as they are
    #[command(after_help = DROP_HELP)]
    Drop(drop::DropArgs),
    /// Start two servers in a temporary directory, replicate a live load and compare
    #[cfg(feature = "demo")]
    #[command(after_help = DEMO_HELP)]
    Demo(demo::DemoArgs),
    /// Write the completion script of a shell to standard output
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(completions::CompletionsArgs),
}

/// Which subscriptions a verb works on.
#[derive(Debug, Args)]
pub(crate) struct Selection {
    /// Configuration file (TOML) with one or several subscriptions
    #[arg(long, value_name = "FILE", env = "PGAPACE_CONFIG")]
    config: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,
}

impl Selection {
    fn subscriptions(&self) -> Result<Vec<Subscription>> {
        subscriptions(self.config.as_deref(), &self.settings)
    }

    /// For verbs that need no more than the subscriber.
    fn subscriber_only(&self) -> Result<Vec<Site>> {
        sites(self.config.as_deref(), &self.settings)
    }

    /// For verbs that work on one subscription and need no more than the subscriber.
    fn one_by_name(&self) -> Result<(String, Site)> {
        let mut all = self.subscriber_only()?;
        let site = all.pop().filter(|_| all.is_empty()).ok_or_else(|| {
            Failure::new(Class::Config, "the configuration file has several subscriptions")
                .hint("Name one with --name.")
        })?;
        let name = site.name.clone().ok_or_else(|| {
            Failure::new(Class::Config, "--name is not given")
                .hint("pgapace status lists the subscriptions of a subscriber.")
        })?;
        Ok((name, site))
    }
}

impl Selection {
    /// For verbs that change what is recorded of one subscription.
    fn existing(&self) -> Result<(Session, state::Subscription)> {
        let (name, site) = self.one_by_name()?;
        let mut control = Subscriber::new(site.subscriber.clone(), &name).connect_first()?;
        let row = state::find_in_any(&mut control, &name)?.ok_or_else(|| {
            Failure::new(Class::Config, format!("the subscriber has no subscription {name:?}"))
        })?;
        Ok((control, row))
    }
}

/// Parses the command line and runs the verb.
pub(crate) fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(failure) = logging::start(cli.log_format, &cli.log_level) {
        return output::fail(&failure);
    }
    let result = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Resync(args) => resync::resync(&args),
        Command::Refresh(args) => resync::refresh(&args),
        Command::Sequences(args) => sequences::run(&args),
        Command::Skip(args) => skip::run(&args),
        Command::Prepared(args) => prepared::run(&args),
        Command::Enable(args) => enable::run(&args),
        Command::Drop(args) => drop::run(&args),
        #[cfg(feature = "demo")]
        Command::Demo(args) => run_demo(&args),
        Command::Completions(args) => {
            completions::run(&args);
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output::fail(&failure),
    }
}

#[cfg(feature = "demo")]
fn run_demo(args: &demo::DemoArgs) -> Result<()> {
    let shutdown = Shutdown::on_signals()?;
    let program = std::env::current_exe()
        .map_err(|e| Failure::internal(format!("cannot find the program itself: {e}")))?;
    demo::run(args, &program, &|| shutdown.requested()).map_err(|error| {
        let class = match error {
            demo::DemoError::TablesDiffer | demo::DemoError::Stuck { .. } => Class::Apply,
            _ => Class::Internal,
        };
        Failure::new(class, error.to_string())
    })
}
