//! Values of a status as text: slot, lag, verifications, durations.

use crate::cli::output;
use crate::cli::status::collect::Status;
use crate::observe::board::wall;
use crate::observe::figures::Figures;
use crate::subscriber::state::verification::summary::VerificationSummary;
use crate::subscriber::state::verification::{TableVerification, VerificationKind};

/// All tables together.
pub(super) fn verified_tables(summary: &VerificationSummary) -> String {
    let VerificationSummary { tables_equal, tables_different, tables_unverified, .. } = summary;
    let in_part = match summary.tables_equal_in_part {
        0 => String::new(),
        number => format!("{number} equal without some columns, "),
    };
    let found = format!(
        "{tables_equal} tables equal, {in_part}{tables_different} different, {tables_unverified} not verified"
    );
    match (summary.lsn, summary.oldest_at) {
        (Some(lsn), Some(at)) => {
            let ago = duration((wall() - at).max(0.0));
            format!("{found}; all at {lsn} or later, at most {ago} ago")
        }
        _ => found,
    }
}

/// A verification of a table.
pub(super) fn verified(one: &TableVerification) -> String {
    let counts = &one.counts;
    let left = match one.columns_left.as_slice() {
        [] => String::new(),
        columns => format!(", without {}", columns.join(", ")),
    };
    let found = match counts.differences() {
        0 => String::new(),
        _ => format!(
            " ({} missing, {} extra, {} different)",
            counts.missing, counts.extra, counts.different
        ),
    };
    let rows = counts.rows;
    let scope = match one.kind {
        VerificationKind::Verb | VerificationKind::VerbBegun => one.scope.clone(),
        VerificationKind::Begun | VerificationKind::Background => {
            format!("{}, in the background", one.scope)
        }
    };
    match (&one.result, &one.finished_at) {
        (Some(result), Some(at)) => {
            let lsn = one.lsn.as_deref().unwrap_or("-");
            format!("{result}{found} at {lsn}, {at}: {rows} rows, {scope}{left}")
        }
        _ => {
            let began = one.started_at.as_deref().unwrap_or("not yet");
            format!("not finished, begun {began}: {rows} rows{found}, {scope}{left}")
        }
    }
}

pub(super) fn slot_line(status: &Status) -> String {
    let Some(slot) = &status.slot_state else {
        let seen = status.figures.as_ref().and_then(|figures| figures.slot.as_ref());
        if let Some(seen) = seen.filter(|_| status.lag_unknown.is_some()) {
            let mut line = status.slot.clone();
            if let Some(state) = &seen.wal_status {
                line.push_str(&format!(": WAL {state}"));
            }
            if let Some(bytes) = seen.retained_bytes {
                line.push_str(&format!(", keeps {}", output::size(bytes)));
            }
            if let Some(bytes) = seen.safe_wal_size {
                line.push_str(&format!(", lost after {} more", output::size(bytes)));
            }
            return line;
        }
        let Some(reason) = &status.lag_unknown else {
            return format!("{}: does not exist", status.slot);
        };
        let reason = reason.lines().next().unwrap_or_default();
        return format!("{}: state unknown: {reason}", status.slot);
    };
    let mut line = format!(
        "{}: {}, WAL {}",
        status.slot,
        if slot.active { "active" } else { "not active" },
        slot.wal_status.as_deref().unwrap_or("unknown"),
    );
    if slot.two_phase {
        line.push_str(", two_phase");
    }
    if let Some(bytes) = slot.retained_bytes {
        line.push_str(&format!(", keeps {}", output::size(bytes)));
    }
    if let Some(bytes) = slot.safe_wal_size {
        line.push_str(&format!(", lost after {} more", output::size(bytes)));
    }
    if let Some(reason) = &slot.invalid {
        line.push_str(&format!(", invalidated: {reason}"));
    }
    line
}

pub(super) fn lag_line(status: &Status) -> String {
    if status.switched_over.is_some() {
        return "none: everything up to its end is applied".to_owned();
    }
    // The process saw it a moment ago.
    let committed = status.figures.as_ref().and_then(|figures| figures.stage("committed"));
    if status.lag_bytes.is_none()
        && let Some(stage) = committed
        && let Some(bytes) = stage.lag_bytes
    {
        let size = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
        let lag = match stage.lag_seconds {
            _ if bytes == 0 => "none".to_owned(),
            Some(seconds) => format!("{size}, {seconds:.1} seconds"),
            None => size,
        };
        return match status.figures_age {
            Some(age) if status.overdue() > 0.0 => {
                format!("{lag} {} ago, and not known since", duration(age))
            }
            _ => lag,
        };
    }
    // A stream waits a moment for the first answer; a copy has no position.
    if status.lag_unknown.is_some() && committed.is_some() {
        return "unknown: the publisher has not answered lately".to_owned();
    }
    if let Some(reason) = &status.lag_unknown {
        return format!("unknown: {}", reason.lines().next().unwrap_or_default());
    }
    let Some(bytes) = status.lag_bytes else { return "unknown: nothing is applied yet".to_owned() };
    let size = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    match status.lag_seconds {
        Some(_) if bytes == 0 => "none".to_owned(),
        Some(seconds) => format!("{size}, {seconds:.1} seconds"),
        None => size,
    }
}

pub(crate) fn whole(value: f64) -> i64 {
    // Sizes and rates are far below the limits of the type.
    #[allow(clippy::cast_possible_truncation)]
    let whole = value as i64;
    whole
}

/// `90 s`, `25 min`, `7.5 h`, `3.0 d`.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        ..172_800.0 => format!("{:.1} h", seconds / 3600.0),
        _ => format!("{:.1} d", seconds / 86400.0),
    }
}

/// The lag of a subscription that keeps up: what comes is committed within this time.
const KEEPS_UP: f64 = 1.0;

/// When the lag will be zero; `None` if it is, or if it is not known.
pub(crate) fn estimate(figures: &Figures) -> Option<String> {
    let committed = figures.stage("committed")?;
    committed.lag_bytes?;
    let lag = committed.lag_seconds;
    match figures.seconds_to_zero {
        Some(0.0) => None,
        _ if lag.is_some_and(|lag| lag < KEEPS_UP) => Some("keeps up".to_owned()),
        Some(seconds) => Some(format!("caught up in {}", duration(seconds))),
        None => Some("not shrinking".to_owned()),
    }
}

/// A number with its noun.
pub(super) fn number(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A query on one line.
pub(crate) fn one_line(query: &str) -> String {
    query.split_whitespace().collect::<Vec<_>>().join(" ")
}
