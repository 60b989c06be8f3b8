//! `pgapace status`: the state of subscriptions on the subscriber, and the lag behind the publisher.

pub(crate) mod collect;
pub(crate) mod found;
pub(crate) mod health;
pub(crate) mod text;
pub(crate) mod values;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm;

use crate::cli::time::time;
use crate::cli::{Selection, output};
use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;
use collect::StatusReader;
use found::Found;
use health::MaxLag;

/// Moves the cursor to the upper left corner, and clears what follows.
const CLEAR_SCREEN: &str = "\x1b[H\x1b[2J";

/// How long a process may take to record that its run has failed.
const RECORDED_WITHIN: Duration = Duration::from_secs(2);
/// How long a run may take to find out its lag.
const LAG_WITHIN: Duration = Duration::from_secs(5);
/// Between two looks for those.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    selection: Selection,

    /// Print a JSON array with one object per subscription
    #[arg(long)]
    json: bool,

    /// Print one line per subscription: who runs it, how many processes wait for it, and its lag
    #[arg(long, conflicts_with = "json")]
    brief: bool,

    /// Say by the exit code whether all subscriptions are healthy, for monitoring
    #[arg(long)]
    check: bool,

    /// With --check, which this implies: most lag of a healthy subscription, such as 30s or 100MB
    ///
    /// Units are those of PostgreSQL: ms, s, min, h, d for the age of what is not applied; B, kB, MB, GB,
    /// TB for WAL that is not applied.
    #[arg(long, value_name = "LAG")]
    max_lag: Option<MaxLag>,

    /// Print it again and again after this time, until interrupted
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "2s", value_parser = time(1..=3600))]
    watch: Option<Duration>,
}

pub(crate) fn run(args: &StatusArgs) -> Result<()> {
    let sites = args.selection.subscriber_only()?;
    let mut readers: Vec<_> = sites.into_iter().map(StatusReader::new).collect();
    let Some(pause) = args.watch else {
        let Looked { lines, result, .. } = look_again(args, &mut readers);
        output::lines(&lines);
        return result;
    };
    let shutdown = Shutdown::on_signals()?;
    let mut first = true;
    while !shutdown.requested() {
        let Looked { mut lines, result, .. } = look(args, &mut readers);
        if let Err(failure) = result {
            // A server that is away may come back.
            lines.splice(0..0, failure.to_string().lines().map(str::to_owned));
        }
        if std::io::stdout().is_terminal() {
            lines = fit(lines, crossterm::terminal::size().unwrap_or((80, 24)));
            output::text(CLEAR_SCREEN);
        } else if !std::mem::take(&mut first) {
            lines.insert(0, String::new());
        }
        if !output::lines(&lines) {
            // Nobody reads it any more.
            return Ok(());
        }
        shutdown.sleep(pause);
    }
    Ok(())
}

/// The part of `lines` that a terminal shows at once, from the top.
fn fit(mut lines: Vec<String>, (columns, rows): (u16, u16)) -> Vec<String> {
    let (columns, rows) = (usize::from(columns), usize::from(rows));
    // The cursor is in the row below.
    let room = rows.saturating_sub(1);
    if lines.len() > room {
        let left = lines.len() - room.saturating_sub(1);
        lines.truncate(room.saturating_sub(1));
        lines.push(format!("({left} more lines; see pgapace top)"));
    }
    for line in &mut lines {
        if let Some((end, _)) = line.char_indices().nth(columns) {
            line.truncate(end);
        }
    }
    lines
}

/// What a look at all subscriptions has found.
struct Looked {
    lines: Vec<String>,
    /// What the exit code is to say.
    result: Result<()>,
    /// How long a process may take to record what would decide otherwise.
    again_within: Duration,
}

impl Looked {
    fn new(lines: Vec<String>, result: Result<()>) -> Self {
        Self { lines, result, again_within: Duration::ZERO }
    }
}

/// Looks again for a while if that may be too early.
fn look_again(args: &StatusArgs, readers: &mut [StatusReader]) -> Looked {
    let begun = Instant::now();
    loop {
        let looked = look(args, readers);
        if begun.elapsed() >= looked.again_within {
            return looked;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn look(args: &StatusArgs, readers: &mut [StatusReader]) -> Looked {
    let mut found = Found::default();
    let mut failed = None::<Failure>;
    for reader in readers {
        // Those on other subscribers are shown.
        if let Err(failure) = found.read(reader) {
            failed = Some(first(failed, failure));
        }
    }
    let Found { all, missing, .. } = &found;
    if let Some(failure) = failed.take_if(|_| all.is_empty()) {
        return Looked::new(Vec::new(), Err(failure));
    }
    let checks = args.check || args.max_lag.is_some();
    if all.is_empty() {
        let lines = if args.json { vec!["[]".to_owned()] } else { Vec::new() };
        let none = found.none(checks);
        return match none.class {
            // A subscriber may have none.
            Class::Unknown if !checks && args.json => Looked::new(lines, Ok(())),
            Class::Unknown if !checks => Looked::new(vec![none.message], Ok(())),
            _ => Looked::new(lines, Err(none)),
        };
    }
    let lines = match lines_of(args, &found) {
        Ok(lines) => lines,
        Err(failure) => return Looked::new(Vec::new(), Err(failure)),
    };
    let result = match failed {
        Some(failure) => Err(failure),
        None if checks => health::check(all, missing, args.max_lag),
        None => Ok(()),
    };
    let again_within = match result.as_ref().map_err(|failure| failure.class) {
        // The run may have failed.
        Err(Class::NotRunning) => RECORDED_WITHIN,
        // The lag of a run that has just begun is only bounded by the age of what was applied before.
        Err(Class::Behind | Class::Unknown)
            if all.iter().any(|status| health::has_just_begun(status, LAG_WITHIN)) =>
        {
            LAG_WITHIN
        }
        _ => Duration::ZERO,
    };
    Looked { lines, result, again_within }
}

fn lines_of(args: &StatusArgs, found: &Found) -> Result<Vec<String>> {
    let Found { all, missing, .. } = found;
    if args.json {
        return Ok(vec![output::to_json(&all)?]);
    }
    let missing = missing.iter().map(|name| format!("{name}: no subscription on the subscriber"));
    if args.brief {
        return Ok(text::brief(all).into_iter().chain(missing).collect());
    }
    let texts = all.iter().map(text::lines).chain(missing.map(|line| vec![line]));
    Ok(texts.collect::<Vec<_>>().join(&String::new()))
}

/// The failure that ends the verb: the first one. A later one is only logged.
fn first(before: Option<Failure>, failure: Failure) -> Failure {
    let Some(before) = before else { return failure };
    tracing::debug!(%failure, "another subscriber cannot be read either");
    before
}

#[cfg(test)]
mod tests {
    use super::fit;

    #[test]
    fn a_terminal_shows_the_top_and_says_how_much_is_left() {
        let lines: Vec<String> = (0..30).map(|n| format!("{n:02} äöü and so on")).collect();
        let shown = fit(lines.clone(), (6, 10));
        assert_eq!(shown.len(), 9);
        assert_eq!((shown[0].as_str(), shown[7].as_str()), ("00 äöü", "07 äöü"));
        assert!(fit(lines.clone(), (80, 10))[8].starts_with("(22 more lines"));
        assert_eq!(fit(lines.clone(), (80, 31)), lines);
    }
}
