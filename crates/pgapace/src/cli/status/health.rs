//! The state of all subscriptions as an exit code, for monitoring.

use std::str::FromStr;
use std::time::Duration;

use crate::cli::status::collect::{NO_PUBLISHER, SlotProblem, Status, Table};
use crate::cli::status::values::lag_line;
use crate::error::{Class, Failure, Result};
use crate::subscriber::state::Phase;

/// The most lag of a healthy subscription.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum MaxLag {
    Bytes(u64),
    Seconds(f64),
}

impl FromStr for MaxLag {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let number: f64 =
            number.parse().map_err(|_| format!("{text:?} is no number with a unit"))?;
        let bytes = |power: i32| {
            let bytes = number * 1024_f64.powi(power);
            // Larger sizes are as good as no bound.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            let whole = bytes as u64;
            Ok(Self::Bytes(whole))
        };
        match unit.trim() {
            "ms" => Ok(Self::Seconds(number / 1000.0)),
            "s" => Ok(Self::Seconds(number)),
            "min" => Ok(Self::Seconds(number * 60.0)),
            "h" => Ok(Self::Seconds(number * 3600.0)),
            "d" => Ok(Self::Seconds(number * 86400.0)),
            "B" => bytes(0),
            "kB" => bytes(1),
            "MB" => bytes(2),
            "GB" => bytes(3),
            "TB" => bytes(4),
            _ => Err("give a unit: ms, s, min, h, d, or B, kB, MB, GB, TB".to_owned()),
        }
    }
}

/// Figures that are due for longer than this, in seconds, say nothing about the WAL that is not applied now.
const SAYS_BYTES: f64 = 30.0;

/// A flush that waits longer than this, in seconds, for a synchronous standby.
const LONG_FLUSH: f64 = 10.0;

/// A problem of a subscription, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Trouble {
    Stopped,
    SwitchedOver,
    Disabled,
    Retrying,
    Blocked,
    /// Nothing is acknowledged.
    AwaitsStandby,
    Behind,
    Unknown,
}

const OVERDUE_HINT: &str = "Its process does not write its figures any more: it may hang or be suspended, or the \
    subscriber may not answer it. See its log.";

/// The worst of all subscriptions as a failure; there is at least one. `missing` are names of which the subscriber has none.
pub(super) fn check(all: &[Status], missing: &[String], most: Option<MaxLag>) -> Result<()> {
    let troubles = all.iter().filter_map(|status| Some((trouble(status, most)?, status)));
    match troubles.min_by_key(|(trouble, _)| *trouble) {
        Some((worse, status)) if missing.is_empty() || worse < Trouble::Unknown => {
            Err(failure(worse, status))
        }
        None if missing.is_empty() => Ok(()),
        _ => {
            let names: String = missing.iter().map(|name| format!(" \"{name}\"")).collect();
            let message = format!("there is no subscription{names} on the subscriber");
            Err(Failure::new(Class::Unknown, message))
        }
    }
}

fn trouble(status: &Status, most: Option<MaxLag>) -> Option<Trouble> {
    match status.state {
        "switched over" => return Some(Trouble::SwitchedOver),
        "disabled" => return Some(Trouble::Disabled),
        "retrying" => return Some(Trouble::Retrying),
        "running" => {}
        _ => return Some(Trouble::Stopped),
    }
    if status.tables.iter().any(Table::lacks_changes) {
        return Some(Trouble::Blocked);
    }
    if status.standby_wait.is_some_and(|waited| waited >= LONG_FLUSH) {
        return Some(Trouble::AwaitsStandby);
    }
    most.and_then(|most| judge(is_behind(status, most)))
}

/// Whether the lag of a subscription is more than `most`; `None` if it is not known.
pub(crate) fn is_behind(status: &Status, most: MaxLag) -> Option<bool> {
    let (bytes, seconds) = lag(status);
    match most {
        MaxLag::Bytes(most) => bytes.map(|bytes| bytes > most),
        MaxLag::Seconds(most) => seconds.map(|seconds| seconds > most),
    }
}

/// Whether the run of a subscription has begun within this time. Until a keepalive has come, its figures show the time when
/// none ran as lag, too.
pub(super) fn has_just_begun(status: &Status, within: Duration) -> bool {
    let age = status.owner.as_ref().and_then(|owner| owner.age);
    age.is_some_and(|age| age < within.as_secs_f64())
}

fn judge(behind: Option<bool>) -> Option<Trouble> {
    match behind {
        Some(true) => Some(Trouble::Behind),
        Some(false) => None,
        None => Some(Trouble::Unknown),
    }
}

/// Bytes and seconds: as the publisher says, or as the running process says.
fn lag(status: &Status) -> (Option<u64>, Option<f64>) {
    if status.lag_bytes.is_some() {
        return (status.lag_bytes, status.lag_seconds);
    }
    let committed = status.figures.as_ref().and_then(|figures| figures.stage("committed"));
    let Some(stage) = committed else { return (None, None) };
    let overdue = status.overdue();
    let bytes = stage.lag_bytes.filter(|_| overdue < SAYS_BYTES);
    (bytes, stage.lag_seconds.map(|seconds| seconds + overdue))
}

fn failure(trouble: Trouble, status: &Status) -> Failure {
    let name = &status.name;
    let of = |class, what: &str| Failure::new(class, format!("subscription \"{name}\" {what}"));
    match trouble {
        Trouble::Stopped => match &status.slot_problem {
            Some(SlotProblem { message, hint }) => {
                of(Class::NotRunning, &format!("does not run, and cannot go on: {message}"))
                    .hint(hint)
            }
            None if status.in_recovery => of(Class::NotRunning, "does not run")
                .hint("The subscriber is a standby, to which nothing can be applied. A process of the subscription that waits \
                    for its promotion is not seen here: see its log."),
            None => of(Class::NotRunning, "does not run")
                .hint("Start pgapace run. The log, and last error above, say why it stopped."),
        },
        Trouble::SwitchedOver => {
            let ended = status.switched_over.as_ref();
            of(Class::Disabled, "was switched over")
                .hint(ended.and_then(|ended| ended.hint.as_deref()).unwrap_or_default())
        }
        Trouble::Disabled => of(Class::Disabled, "was disabled because of an error")
            .hint("When the cause is mended: pgapace enable."),
        Trouble::Retrying => of(Class::Retrying, "is retrying after an error"),
        Trouble::Blocked => of(Class::Mismatch, "has tables that are blocked or may lack changes")
            .hint("pgapace status lists them. pgapace resync copies a table again."),
        Trouble::AwaitsStandby => of(
            Class::Behind,
            "acknowledges nothing: a synchronous standby of the subscriber does not answer",
        )
        .hint("Bring it back, or change synchronous_standby_names of the subscriber."),
        Trouble::Behind => {
            let lag = lag_line(status);
            let failure = of(Class::Behind, &format!("is behind --max-lag: {lag}"));
            let limit = status.figures.as_ref().map(|figures| figures.limited_by.replace('_', " "));
            if status.overdue() > 0.0 {
                return failure.hint(OVERDUE_HINT);
            }
            failure.hint(match limit {
                Some(limit) if limit != "none" => {
                    format!("It is limited by the {limit}. pgapace top shows more.")
                }
                _ => "pgapace top shows what its threads wait for.".to_owned(),
            })
        }
        Trouble::Unknown if status.overdue() > 0.0 => {
            of(Class::Unknown, "runs, but its lag is not known").hint(OVERDUE_HINT)
        }
        Trouble::Unknown => {
            of(Class::Unknown, "runs, but its lag is not known").hint(unknown_hint(status))
        }
    }
}

/// What a first run waits for, or how the lag becomes known.
fn unknown_hint(status: &Status) -> String {
    let told = |name: &str| status.events.iter().find(|event| event.event == name);
    let commits =
        || told("commits_wait_for_copy").filter(|_| status.phase != Phase::Streaming.name());
    let slot = || told("slot_waits").filter(|_| status.phase == Phase::Creating.name());
    match (commits().or_else(slot), &status.lag_unknown) {
        (Some(waits), _) => format!("{}: {}", waits.message, waits.fields),
        (_, None) => "Look again in a minute. Its log says what it does.".to_owned(),
        (_, Some(reason)) if reason == NO_PUBLISHER => {
            "Give --publisher, or look again in a minute.".to_owned()
        }
        (_, Some(reason)) => format!("Look again in a minute. Of the publisher: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::MaxLag;

    #[test]
    fn bounds_have_the_units_of_postgresql() {
        let parse = |text: &str| text.parse::<MaxLag>();
        assert_eq!(parse("30s"), Ok(MaxLag::Seconds(30.0)));
        assert_eq!(parse("500ms"), Ok(MaxLag::Seconds(0.5)));
        assert_eq!(parse("1.5min"), Ok(MaxLag::Seconds(90.0)));
        assert_eq!(parse("2 h"), Ok(MaxLag::Seconds(7200.0)));
        assert_eq!(parse("100MB"), Ok(MaxLag::Bytes(100 << 20)));
        assert_eq!(parse("0B"), Ok(MaxLag::Bytes(0)));
        for bad in ["", "10", "s", "10 parsecs", "1.2.3s", "-1s"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }
}
