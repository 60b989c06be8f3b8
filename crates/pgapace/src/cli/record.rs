//! `pgapace record`: the stream of a publisher in a file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use crate::cli::{Selection, output};
use crate::error::Result;
use crate::recording::recorder::{End, Recorded, record};
use crate::stopping::shutdown::Shutdown;
use crate::subscription::Until;

/// How long a recording lasts if nothing else ends it.
const USUAL_TIME: Duration = Duration::from_secs(600);

#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    selection: Selection,

    /// File to write; it must not exist
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Stop after this time [default: 10, or none with --until]
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    minutes: Option<Duration>,

    /// Stop when the publisher's current end of WAL, or this LSN, is recorded
    #[arg(long, value_name = "current|LSN", value_parser = super::run::parse_until)]
    until: Option<Until>,

    /// Keep the snapshot of the start while recording, for pg_dump --snapshot
    ///
    /// The log names it. While it is kept, VACUUM on the publisher removes no newer rows.
    #[arg(long)]
    hold_snapshot: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn minutes(text: &str) -> std::result::Result<Duration, String> {
    let minutes: f64 = text.parse().map_err(|_| format!("{text:?} is not a number"))?;
    let known = minutes > 0.0 && minutes <= 60.0 * 24.0 * 7.0;
    known
        .then(|| Duration::from_secs_f64(60.0 * minutes))
        .ok_or_else(|| "must be more than 0, and no more than a week (10080)".to_owned())
}

/// The output of the verb.
#[derive(Debug, Serialize)]
struct Summary {
    start_lsn: String,
    end_lsn: String,
    transactions: u64,
    changes: u64,
    seconds: f64,
    message_bytes: u64,
    file_bytes: u64,
}

pub(crate) fn run(args: &RecordArgs) -> Result<()> {
    let settings = args.selection.recorded()?;
    let shutdown = Shutdown::on_signals()?;
    let after = args.minutes.or_else(|| args.until.is_none().then_some(USUAL_TIME));
    let end = End { after, until: args.until };
    let recorded = record(&settings, &args.file, end, args.hold_snapshot, &shutdown)?;
    let summary = Summary::of(&recorded);
    if args.json {
        output::json(&summary)?;
    } else {
        output::line(&format!(
            "recorded {} transactions with {} changes in {:.1} s, from {} to {}: {} in {}",
            summary.transactions,
            summary.changes,
            summary.seconds,
            summary.start_lsn,
            summary.end_lsn,
            output::size(i64::try_from(summary.file_bytes).unwrap_or(i64::MAX)),
            args.file.display()
        ));
    }
    match recorded.failure {
        None => Ok(()),
        Some(failure) => Err(failure
            .hint(format!("What was recorded before can be replayed: {}", args.file.display()))),
    }
}

impl Summary {
    fn of(recorded: &Recorded) -> Self {
        let tail = &recorded.tail;
        Self {
            start_lsn: recorded.start.to_string(),
            end_lsn: pgoutput::Lsn(tail.end).to_string(),
            transactions: tail.transactions,
            changes: tail.changes,
            seconds: tail.milliseconds as f64 / 1000.0,
            message_bytes: tail.whole,
            file_bytes: recorded.size,
        }
    }
}
