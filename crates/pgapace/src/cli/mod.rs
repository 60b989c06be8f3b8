//! The command line: verbs, flags, exit codes.

pub(crate) mod adopt;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod drop;
pub(crate) mod enable;
mod environment;
mod failures;
pub(crate) mod hand_over;
pub(crate) mod man;
mod opened;
pub(crate) mod output;
pub(crate) mod prepared;
mod printable_sql;
pub(crate) mod rebase;
pub(crate) mod record;
pub(crate) mod release;
pub(crate) mod reload;
pub(crate) mod repair;
pub(crate) mod replay;
pub(crate) mod report;
pub(crate) mod resync;
pub(crate) mod run;
mod selection;
pub(crate) mod sequences;
pub(crate) mod settings;
pub(crate) mod skip;
pub(crate) mod status;
pub(crate) mod switchover;
pub(crate) mod table_name;
mod time;
pub(crate) mod top;
pub(crate) mod verbs;
pub(crate) mod verify;
pub(crate) mod whatif;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::declarations::SETTINGS;
use crate::observe::logging::{self, LogFormat};
pub(crate) use selection::Selection;

const EXIT_CODES: &str = "\
Exit codes:
   0  the stated goal was reached
   1  internal error, or the operating system refused a thread, a file or memory
   2  wrong command line
   3  wrong configuration: file, connection string, --http address, combination of settings; a switchover that its plan refuses
   4  the publisher cannot be reached, is too old, or refuses
   5  the subscriber cannot be reached, is too old, or refuses
   6  publisher and subscriber do not fit together (tables, columns, identities), or only blocked tables are behind --until
   7  the replication slot is gone, invalidated, or ahead of the subscriber
   8  another process or session is in the way: it uses the subscription or its slot, holds a lock, or writes during a switchover
   9  a change cannot be applied; the message names LSN, transaction, table and key
  10  the publisher's history is not the one that the subscriber followed
  11  a signal stopped the process before it reached its goal: --until, or what the verb is to do
  12  the spool directory is full or cannot be used; nothing is lost
  13  an error disabled the subscription (--disable-on-error, pgapace enable), or it was switched over
  14  the subscriber is behind the publisher: too far for pgapace sequences, or more than --max-lag, or status --check found that a synchronous standby of it does not answer, or a switchover did not end within --deadline
  15  status --check: a subscription is retrying after an error
  16  no process runs the subscription (status --check, hand-over, switchover)
  17  status --check: there is no subscription, or its lag is not known; repair: the only verification of a table was interrupted
  18  rows differ (pgapace verify)
  19  the subscription was handed over to another process (pgapace hand-over)
  20  a recording cannot be written, is damaged or does not fit the subscriber";

const EXAMPLES: &str = "\
Examples:
  pgapace check --publisher 'host=a dbname=shop user=repl' --subscriber 'host=b dbname=shop' \\
                --publication shop --name shop
  pgapace run   --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \\
                --publication shop --name shop
  pgapace run   --config /etc/pgapace.toml --until current
  pgapace status --subscriber postgresql://b/shop";

const RUN_HELP: &str = r#"Example:
  pgapace run --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \
              --publication shop --name shop"#;

const CHECK_HELP: &str = r#"The exit code is 0 without blockers, 6 with blockers, 4 or 5 if publisher or subscriber cannot be reached.

Example:
  pgapace check --publisher postgresql://repl@a/shop --subscriber postgresql://b/shop \
                --publication shop --name shop"#;

const STATUS_HELP: &str = r#"It needs only --subscriber. With --publisher it also shows the lag and the WAL that the slot holds.

With --check the exit code is 0 if all subscriptions run, and lag no more than --max-lag; else that of the worst: 16 does not run, 13 is disabled or was switched over, 15 is retrying, 6 has blocked or stale tables, 14 is behind --max-lag, or has acknowledged nothing for 10 seconds because a synchronous standby of the subscriber does not answer, 17 does not exist, or its lag is not known.

Example:
  pgapace status --subscriber postgresql://b/shop --publisher postgresql://a/shop --json
  pgapace status --subscriber postgresql://b/shop --max-lag 30s"#;

const TOP_HELP: &str = r#"It needs only --subscriber. Keys are those of top: q quits, h shows the others.

Example:
  pgapace top --subscriber postgresql://b/shop
  pgapace top --subscriber postgresql://b/shop --once"#;

const REPORT_HELP: &str = r#"It needs only --subscriber. The file has no scripts and loads nothing. It has error messages, which may have keys of rows.

Example:
  pgapace report --subscriber postgresql://b/shop ticket-4711.html"#;

const DROP_HELP: &str = r#"It needs --subscriber and --name, and --publisher unless --keep-slot is given. It refuses another publisher than the one that the subscription follows (exit code 10): that one's slot would stay, and hold WAL. So it refuses a standby without the slot, another database of the publisher, and a slot that is ahead of what this database has applied, as on a copy of the subscriber (exit code 7).

Example:
  pgapace drop --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --name shop"#;

const ADOPT_HELP: &str = r#"It needs --subscriber and --subscription; --publisher unless a superuser runs it. The native subscription is disabled and loses its slot name, and pgapace run continues where it stopped, without another copy.

After an error the native subscription runs again. If pgapace adopt itself is killed, run it again, or undo it with --abort. --abort also undoes an adoption after which nothing has run.

Example:
  pgapace adopt --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --subscription shop --dry-run
  pgapace adopt --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --subscription shop"#;

const RELEASE_HELP: &str = r#"It needs --subscriber, --publisher and --name. Stop pgapace run before. The native subscription that was adopted continues where pgapace stopped. For a subscription that pgapace created, a native one is created without a copy, with --connection.

If it fails or is killed, nothing has changed for pgapace run.

Example:
  pgapace release --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --name shop
  pgapace release --subscriber postgresql://b/shop --publisher postgresql://repl@a/shop --name shop \
                  --connection 'host=a dbname=shop user=repl'"#;

const RESYNC_HELP: &str = r#"With a subscription in the opposite direction: first stop writes on the subscriber, and wait until that subscription has applied them. A copy would overwrite the changes that are on their way, and warns of that (opposite_direction).

Example:
  pgapace resync --config /etc/pgapace.toml --name shop public.orders"#;

const REFRESH_HELP: &str = r#"Example:
  pgapace refresh --config /etc/pgapace.toml --name shop"#;

const SEQUENCES_HELP: &str = r#"Run it after the last write on the publisher, before applications move to the subscriber. Or run it earlier, with a --margin for values that the publisher still assigns.

It sets the sequences of all schemas with published tables, and those of published schemas. With FOR ALL TABLES it sets all sequences of the database. A sequence never goes back without --allow-backwards. The output lists sequences that were not set, with the reason. The exit code is 6 if one of them should have been set.

It waits until the subscriber has applied what was committed before, because TRUNCATE … RESTART IDENTITY would set sequences back afterwards. If the subscriber stays behind, nothing is set, and the exit code is 14. It does not wait for blocked tables, and a warning names them. Without the subscription, as after pgapace drop, it sets them with --force only.

Where both servers write, each with sequence values of its own (INCREMENT 2), do not run it: both would produce the same values.

Example:
  pgapace sequences --config /etc/pgapace.toml --name shop
  pgapace sequences --config /etc/pgapace.toml --name shop --margin 10000 --json"#;

const VERIFY_HELP: &str = r#"It compares what is published, at one LSN: a difference is a difference, not a change on its way. Differences are in table pgapace.difference on the subscriber. The exit code is 18 if rows differ, and 6 if nothing differs but columns could not be compared. It is 0 only if everything was compared and is equal.

Tables are compared by ranges of their key if its order is the same on both servers: integers, numeric, uuid, date, timestamps, bytea, boolean, and strings with collation C. All other tables are compared in one pass.

With a subscription in the opposite direction, rows that the subscriber's clients changed differ until their changes are applied on the publisher.

Example:
  pgapace verify --config /etc/pgapace.toml --name shop
  pgapace verify --config /etc/pgapace.toml --name shop --table orders --where "created > '2026-01-01'" --max-rate 20MB"#;

const REBASE_HELP: &str = r#"For a subscription whose slot was lost, or whose subscriber was restored from a backup. It drops the slot, creates another, and compares all tables with the publisher's under the snapshot of that slot. Rows that differ are made equal: missing rows are inserted, others updated, and rows that only the subscriber has are deleted. Empty tables are copied. Then it applies what the publisher has committed meanwhile, and ends. If it is interrupted, run it again, or pgapace run.

The process that runs the subscription must be stopped. Another publisher than the one that the subscription follows is refused (exit code 10): a promoted standby is the same; a server after pg_upgrade is not, nor is one that a failover left behind. So is a publisher that was restored to an earlier state, because it lacks rows that would be deleted: decide which side is right, and if it is the publisher: pgapace drop, then pgapace run --if-not-empty rebase. To follow another one: pgapace drop --keep-slot; drop a slot of the same name there that nothing else needs; then pgapace run --if-not-empty rebase. After pg_upgrade from 17 or later, which carries the slot, pgapace check says when no comparison is needed.

With a subscription in the opposite direction: first stop writes on the subscriber, and wait until that subscription has applied them. A rebase would overwrite the changes that are on their way, and warns of that (opposite_direction).

The settings of pgapace run hold until the subscription has caught up: give the same --config, or the same flags, such as --on-missed-changes and --on-conflict. The new slot has two_phase if the old one had, unless --two-phase says otherwise.

If the settings have if-not-empty = keep, it is refused (exit code 3), because it would delete the rows that are kept. With --if-not-empty rebase as a flag they are deleted. To keep them: pgapace drop; pgapace run --copy-data=false --until current, which creates a slot and copies nothing; then pgapace verify, and pgapace repair without --delete-extra.

For a new subscription into tables that hold rows: pgapace run --if-not-empty rebase.

Example:
  pgapace rebase --config /etc/pgapace.toml --name shop"#;

const REPAIR_HELP: &str = r#"It repairs the differences that pgapace verify recorded in pgapace.difference. The rows are read again from both servers at a new LSN, while the stream waits for some milliseconds. What still differs is written in one transaction for each batch. A batch is repaired or untouched, whatever fails; run the verb again to go on. A table that cannot be repaired does not stop the others: the error names all of them, behind what was done. The exit code is 18 if differences are left: rows that only the subscriber has, without --delete-extra; or differences that verify counted and did not record (--max-differences), so that no repair finds them before the next verify.

With a subscription in the opposite direction: first stop writes on the subscriber, and wait until that subscription has applied them. A repair would overwrite the changes that are on their way, and warns of that (opposite_direction).

Example:
  pgapace repair --config /etc/pgapace.toml --name shop --dry-run
  pgapace repair --config /etc/pgapace.toml --name shop --delete-extra"#;

const SWITCHOVER_HELP: &str = r#"It needs --subscriber, --publisher and --name, and a pgapace run that applies the subscription. Before the subscription has ended, every failure undoes everything, and so does a signal: SIGINT, SIGTERM, or SIGHUP of a terminal that is gone. After that a signal does not stop it. If it is killed, or does not end after a second signal: --abort undoes, --go begins again. Afterwards the same pgapace run applies the way back. --back moves writes back; the sides are named as before.

Example:
  pgapace switchover --plan --subscriber postgresql://b/shop --publisher postgresql://a/shop --name shop
  pgapace switchover --go --subscriber postgresql://b/shop --publisher postgresql://a/shop --name shop \
                     --open 'move-clients-to-b'"#;

const HAND_OVER_HELP: &str = r#"It needs --subscriber and --name. The process that runs the subscription ends what is in flight, makes it durable, tells the publisher, and ends with exit code 19. In a process with several subscriptions only this one ends. A process that waits for the subscription (--busy-timeout) goes on at once. If no process does, the exit code is 16.

Example:
  pgapace hand-over --subscriber postgresql://b/shop --name shop"#;

const RECORD_HELP: &str = r#"It needs --publisher and --publication. It reads a temporary slot, which ends with it, and acknowledges what is in the file: the publisher keeps no WAL for it. With --subscriber, values are recorded in binary if that subscriber can read them so.

The file holds all changed rows: protect it as you protect the tables.

A clone for pgapace replay must have the state at the recording's start, which the log names: a physical copy recovered to that LSN, or pg_dump of the publisher under the snapshot of --hold-snapshot. SIGINT ends a recording; the file is whole.

Example:
  pgapace record --publisher postgresql://repl@a/shop --publication shop --minutes 10 shop.recording"#;

const REPLAY_HELP: &str = r#"It needs --subscriber: a clone with the state at the recording's start. It applies the changes as pgapace run does, as a subscription of its own (named replay, or --name), and ends when all of them are durable. It connects to no publisher. It refuses a subscriber where another subscription has one of the tables.

If it is interrupted, run it again. Before another replay of the same recording, restore the clone.

Example:
  pgapace replay shop.recording --subscriber postgresql://clone/shop --workers 4"#;

const WHATIF_HELP: &str = r#"It reads the recording and the definitions of the subscriber's tables, and writes nothing. The dispatcher of pgapace run takes the recorded transactions in virtual time. Rates are those of a backlog; the lag is that of the recorded pace. Without --measured and --cost, costs are typical ones. Give --measured twice, with replays of different numbers of workers, for the best forecast. Restore the clone between them.

Example:
  pgapace replay shop.recording --subscriber postgresql://clone/shop --workers 1 --json > one.json
  pgapace replay shop.recording --subscriber postgresql://clone/shop --workers 2 --json > two.json
  pgapace whatif shop.recording --subscriber postgresql://clone/shop \
                 --measured one.json --measured two.json --workers 1,4,16,64 --round-trip 20ms"#;

const SKIP_HELP: &str = r#"It needs --subscriber and --name. pgapace applies nothing of the transaction and does not keep its changes: make them by hand. A commit LSN is not the position behind the COMMIT: if no transaction has it, the next run clears the request with a warning (skip_request_cleared). An error at a PREPARE has its LSN instead: the transaction is skipped whether it comes as prepared or with its COMMIT PREPARED.

Example:
  pgapace skip --subscriber postgresql://b/shop --name shop --lsn 16/B374D848"#;

const PREPARED_HELP: &str = r#"It needs --subscriber and --name. COMMIT PREPARED and ROLLBACK PREPARED on the publisher resolve these transactions too: use this verb only if they never will. A transaction that is absent, because it waits for a place, can be rolled back only while no process runs the subscription.

Example:
  pgapace prepared --subscriber postgresql://b/shop --name shop
  pgapace prepared --subscriber postgresql://b/shop --name shop --rollback order-17"#;

const ENABLE_HELP: &str = r#"It needs --subscriber and --name.

Example:
  pgapace enable --subscriber postgresql://b/shop --name shop"#;

const COMPLETIONS_HELP: &str = r#"Example:
  pgapace completions bash > /etc/bash_completion.d/pgapace"#;

const MAN_HELP: &str = r#"Example:
  pgapace man run | man -l -"#;

const SETTINGS_HELP: &str = r#"Example:
  pgapace settings > docs/settings.md"#;

/// Applies PostgreSQL logical replication from outside the servers.
///
/// pgapace reads publications of a publisher over the replication protocol and applies them to a
/// subscriber database. Nothing is installed in either server. All state is in schema pgapace of the
/// subscriber.
#[derive(Debug, Parser)]
#[command(name = "pgapace", version, long_version = env!("PGAPACE_VERSION"), after_help = EXIT_CODES, after_long_help = format!("{EXAMPLES}{}\n\n{EXIT_CODES}", demo::EXAMPLE))]
pub(crate) struct Cli {
    /// Form of log lines
    #[arg(long, global = true, value_enum, env = "PGAPACE_LOG_FORMAT", default_value = "human")]
    log_format: LogFormat,

    /// Level of log lines: error, warn, info, debug, trace, or a filter such as pgapace=debug
    ///
    /// The default is info, or `log-level` of the configuration file (pgapace run).
    #[arg(long, global = true, value_name = "LEVEL", env = "PGAPACE_LOG")]
    log_level: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Copy the tables at the first start, then apply changes until stopped
    #[command(after_help = RUN_HELP)]
    Run(run::RunArgs),
    /// Check a subscription on both sides, and print the SQL that removes what blocks it
    #[command(after_help = CHECK_HELP)]
    Check(check::CheckArgs),
    /// Take over a native subscription where it stands, without another copy
    #[command(after_help = ADOPT_HELP)]
    Adopt(adopt::AdoptArgs),
    /// Hand a subscription to a native one, which continues where pgapace stopped
    #[command(after_help = RELEASE_HELP)]
    Release(release::ReleaseArgs),
    /// Show the state of subscriptions
    #[command(after_help = STATUS_HELP)]
    Status(status::StatusArgs),
    /// Show what subscriptions do now, on a terminal
    #[command(after_help = TOP_HELP)]
    Top(top::TopArgs),
    /// Write one HTML file about subscriptions: curves of the last day, tables, errors
    #[command(after_help = REPORT_HELP)]
    Report(report::ReportArgs),
    /// Truncate tables and copy them again, while other tables continue
    #[command(after_help = RESYNC_HELP)]
    Resync(resync::ResyncArgs),
    /// Copy tables that were added to the publication, before their first change arrives, and blocked ones whose
    /// obstacle is gone
    #[command(after_help = REFRESH_HELP)]
    Refresh(resync::RefreshArgs),
    /// Set the subscriber's sequences to the publisher's values, which are not replicated
    #[command(after_help = SEQUENCES_HELP)]
    Sequences(sequences::SequencesArgs),
    /// Compare the tables of both servers at one LSN
    #[command(after_help = VERIFY_HELP)]
    Verify(verify::VerifyArgs),
    /// Go on with a new slot after the old one was lost: compare the tables instead of copying them
    #[command(after_help = REBASE_HELP)]
    Rebase(rebase::RebaseArgs),
    /// Make the rows equal that pgapace verify found to differ
    #[command(after_help = REPAIR_HELP)]
    Repair(repair::RepairArgs),
    /// Move writes from the publisher to the subscriber
    #[command(after_help = SWITCHOVER_HELP)]
    Switchover(switchover::SwitchoverArgs),
    /// Let another process continue a subscription, in order
    #[command(after_help = HAND_OVER_HELP)]
    HandOver(hand_over::HandOverArgs),
    /// Record the stream of a publisher in a file, without applying anything
    #[command(after_help = RECORD_HELP)]
    Record(record::RecordArgs),
    /// Apply a recording to a clone of the subscriber
    #[command(after_help = REPLAY_HELP)]
    Replay(replay::ReplayArgs),
    /// Forecast what a recording would need with other numbers of workers
    #[command(after_help = WHATIF_HELP)]
    Whatif(whatif::WhatifArgs),
    /// Skip one transaction of the publisher that cannot be applied
    #[command(after_help = SKIP_HELP)]
    Skip(skip::SkipArgs),
    /// List transactions that are prepared on the subscriber, or resolve one by hand
    #[command(after_help = PREPARED_HELP)]
    Prepared(prepared::PreparedArgs),
    /// Enable a subscription that was disabled because of an error
    #[command(after_help = ENABLE_HELP)]
    Enable(enable::EnableArgs),
    /// Drop a subscription: its slot, its origins and its state, but not its tables
    #[command(after_help = DROP_HELP)]
    Drop(drop::DropArgs),
    /// Start two servers in a temporary directory, replicate a live load and compare
    #[command(after_help = demo::HELP, hide = cfg!(not(feature = "demo")))]
    Demo(demo::DemoArgs),
    /// Write the completion script of a shell to standard output
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(completions::CompletionsArgs),
    /// Write a manual page to standard output
    #[command(after_help = MAN_HELP)]
    Man(man::ManArgs),
    /// Write the reference of all settings (docs/settings.md) to standard output
    #[command(after_help = SETTINGS_HELP)]
    Settings,
    /// Write the reference of all verbs (docs/verbs.md) to standard output
    #[command(hide = true)]
    Verbs,
}

impl Command {
    /// Whether the verb is for what it does on the servers or in a file, and not for what it prints.
    fn changes_something(&self) -> bool {
        match self {
            Self::Adopt(args) => !args.dry_run,
            Self::Release(args) => !args.dry_run,
            Self::Switchover(args) => !args.plan,
            Self::Report(args) => args.file.as_os_str() != "-",
            Self::Prepared(args) => args.commit.is_some() || args.rollback.is_some(),
            Self::Run(_)
            | Self::Resync(_)
            | Self::Refresh(_)
            | Self::Sequences(_)
            | Self::Rebase(_)
            | Self::HandOver(_)
            | Self::Record(_)
            | Self::Replay(_)
            | Self::Skip(_)
            | Self::Enable(_)
            | Self::Drop(_)
            | Self::Demo(_) => true,
            // The statements of a repair are a result of their own, and quote rows.
            Self::Repair(_)
            | Self::Check(_)
            | Self::Status(_)
            | Self::Top(_)
            | Self::Verify(_)
            | Self::Whatif(_)
            | Self::Completions(_)
            | Self::Man(_)
            | Self::Settings
            | Self::Verbs => false,
        }
    }
}

/// The whole command line, with the flags of each verb that it uses.
pub(crate) fn command() -> clap::Command {
    let mut command = Cli::command();
    let verbs: Vec<_> = command.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    for verb in &verbs {
        command = command.mut_subcommand(verb, |mut found| {
            let unused: Vec<_> = SETTINGS
                .iter()
                .filter(|setting| !setting.verbs.contains(&verb.as_str()))
                .filter(|setting| found.get_arguments().any(|arg| arg.get_id() == setting.name))
                .collect();
            for setting in unused {
                found = found.mut_arg(setting.name, |arg| arg.hide(true));
            }
            found
        });
    }
    command
}

/// The error without an argument that may be a connection string, or a part of one that was not quoted.
fn without_secrets(mut error: clap::Error) -> clap::Error {
    const QUOTE: &str = "give a connection string to --publisher or --subscriber, in quotes";
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.to_lowercase(),
        _ => String::new(),
    };
    if matches!(error.kind(), ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand) {
        for kind in [ContextKind::InvalidArg, ContextKind::InvalidSubcommand] {
            let text = text(&error, kind);
            if ["://", "=", "@"].iter().any(|mark| text.contains(mark)) {
                error.insert(kind, ContextValue::String("…".to_owned()));
                // The suggestion repeats the argument.
                error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![QUOTE.into()]));
            }
        }
    } else if may_have_password(&text(&error, ContextKind::InvalidValue)) {
        let of = error.get(ContextKind::InvalidArg);
        let of = of.map_or_else(String::new, |argument| format!(" for '{argument}'"));
        // The cause repeats the value.
        let message = format!("invalid value{of}: it is not shown, as it may have a password\n");
        return clap::Error::raw(error.kind(), message);
    }
    error
}

/// Whether a value, in lower case, may be a connection string or a part of one. The `@` of a TABLE@SNAPSHOT follows no
/// password.
fn may_have_password(value: &str) -> bool {
    let before_host = value.rsplit_once('@').map_or("", |(before, _)| before);
    value.contains("://") || value.contains("password") || before_host.contains(':')
}

/// Runs the verb of the command line.
pub(crate) fn main() -> ExitCode {
    let code = run_verb();
    output::end();
    code
}

fn run_verb() -> ExitCode {
    let matches = environment::without_empty(command()).try_get_matches();
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return output::usage(&without_secrets(error)),
    };
    let level = cli.log_level.as_deref().filter(|level| !level.trim().is_empty());
    if let Err(failure) = logging::start(cli.log_format, level.unwrap_or(logging::DEFAULT_LEVEL)) {
        return output::fail(&failure);
    }
    if cli.command.changes_something() {
        output::tells_of_work();
    }
    let result = match cli.command {
        Command::Run(args) => run::run(&args, level.is_some()),
        Command::Check(args) => check::run(&args),
        Command::Adopt(args) => adopt::run(&args),
        Command::Release(args) => release::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Resync(args) => resync::resync(&args),
        Command::Refresh(args) => resync::refresh(&args),
        Command::Sequences(args) => sequences::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Rebase(args) => rebase::run(&args),
        Command::Repair(args) => repair::run(&args),
        Command::Switchover(args) => switchover::run(&args),
        Command::HandOver(args) => hand_over::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Whatif(args) => whatif::run(&args),
        Command::Skip(args) => skip::run(&args),
        Command::Prepared(args) => prepared::run(&args),
        Command::Enable(args) => enable::run(&args),
        Command::Drop(args) => drop::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Completions(args) => {
            completions::run(&args);
            Ok(())
        }
        Command::Man(args) => man::run(&args),
        Command::Settings => {
            settings::run();
            Ok(())
        }
        Command::Verbs => {
            verbs::run();
            Ok(())
        }
    };
    match result.and_then(|()| output::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => output::fail(&failure),
    }
}
