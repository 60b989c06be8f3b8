//! Status as text.

use std::cell::RefCell;

use crate::cli::output;
use crate::cli::status::collect::{Status, Table};
use crate::observe::board::wall;
use crate::observe::figures::Figures;
use crate::observe::history::worker_shares;
use crate::subscriber::state::membership::WaitingProcess;
use crate::subscriber::state::statistics::Spooled;
use crate::subscriber::state::verification::summary::VerificationSummary;
use crate::subscriber::state::verification::{TableVerification, VerificationKind};

/// How many events are printed.
const EVENTS: usize = 5;

pub(super) fn print(status: &Status) {
    lines(status).iter().for_each(|line| output::line(line));
}

/// One line per subscription: its owner, the number of standbys, and the lag.
pub(super) fn brief(all: &[Status]) -> Vec<String> {
    let rows: Vec<[String; 5]> = all
        .iter()
        .map(|status| {
            let process = match status.owner.as_ref().map(|owner| (&owner.host, owner.process)) {
                Some((Some(host), Some(process))) => format!("process {process} on {host}"),
                Some(_) => "a process".to_owned(),
                None => "-".to_owned(),
            };
            let waits = format!("{} waiting", status.standbys.len());
            let (name, state) =
                (status.name.clone(), format!("{}, {}", status.phase, status.state));
            [name, state, process, waits, format!("lag {}", lag_line(status))]
        })
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..4).filter_map(width).collect();
    let line = |row: &[String; 5]| {
        let cells = row.iter().zip(widths.iter().chain([&0]));
        cells.map(|(cell, width)| format!("{cell:<width$}")).collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}

/// The lines of a subscription.
pub(crate) fn lines(status: &Status) -> Vec<String> {
    let lines = RefCell::new(Vec::new());
    let put = |line: String| lines.borrow_mut().push(line);
    let running = match &status.owner {
        _ if status.state == "retrying" => format!(
            "retrying after an error (next try {})",
            status.next_try_at.as_deref().unwrap_or("now")
        ),
        None if status.disabled.is_some() => "disabled because of an error".to_owned(),
        None if status.state == "failed" => "not running because of an error".to_owned(),
        None => "not running".to_owned(),
        Some(owner) => {
            let process = match (&owner.host, owner.process) {
                (Some(host), Some(process)) => format!("process {process} on {host}, "),
                _ => String::new(),
            };
            format!(
                "running ({process}backend {} from {}, since {})",
                owner.pid,
                owner.client.as_deref().unwrap_or("a local socket"),
                owner.since.as_deref().unwrap_or("?")
            )
        }
    };
    put(format!("{}: {}, {running}", status.name, status.phase));
    let item = |label: &str, value: &str| put(format!("  {label:<15}{value}"));
    let lsn = |lsn: &Option<String>| lsn.clone().unwrap_or_else(|| "-".to_owned());
    for standby in &status.standbys {
        let WaitingProcess { host, process, since, beat_age } = standby;
        item(
            "standby",
            &format!("process {process} on {host} since {since}, seen {beat_age:.0} s ago"),
        );
    }
    item("publications", &status.publications.join(", "));
    item("slot", &slot_line(status));
    if let (Some(format), Some(reason)) = (&status.format, &status.format_reason) {
        item("format", &format!("{format}: {reason}"));
    }
    if let (Some(mode), Some(reason)) = (&status.streaming, &status.streaming_reason) {
        item("streaming", &format!("{mode}: {reason}"));
    }
    if let (Some(workers), Some(reason)) = (status.workers, &status.workers_reason) {
        item("workers", &format!("{workers}: {reason}"));
    }
    let Spooled { files, bytes } = status.spool;
    let bytes = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    item("spool", &format!("{bytes} in {files} files"));
    item("received", &lsn(&status.received_lsn));
    item("applied", &lsn(&status.applied_lsn));
    item("flushed", &lsn(&status.flushed_lsn));
    item("lag", &lag_line(status));
    if let Some(figures) = &status.figures {
        figure_lines(figures, item);
    }
    if let Some(skip) = &status.skip_lsn {
        item("skips", &format!("the transaction with commit LSN {skip}"));
    }
    let c = &status.counters;
    item(
        "changes",
        &format!(
            "{} transactions: {} inserts, {} updates, {} deletes, {} truncates",
            c.transactions, c.inserts, c.updates, c.deletes, c.truncates
        ),
    );
    let conflicts: Vec<_> =
        c.conflicts().iter().map(|(name, count)| format!("{count} {name}")).collect();
    item("conflicts", &if conflicts.is_empty() { "none".to_owned() } else { conflicts.join(", ") });
    if c.transactions_skipped > 0 {
        item("skipped", &format!("{} transactions, by pgapace skip", c.transactions_skipped));
    }
    item(
        "groups",
        &format!(
            "{}, {} of them parallel, {} dependent on others",
            c.groups, c.groups_parallel, c.groups_dependent
        ),
    );
    item(
        "applied again",
        &format!(
            "{} one by one, {} after an error, {} to give way",
            c.fallbacks, c.retries, c.victims
        ),
    );
    if c.tables_serialized > 0 {
        item(
            "stream order",
            &format!("tables were put into it for a while {} times", c.tables_serialized),
        );
    }
    let waits: Vec<_> = c
        .waits
        .named()
        .iter()
        .filter(|(_, time)| !time.is_zero())
        .map(|(reason, time)| format!("{reason} {:.1}", time.as_secs_f64()))
        .collect();
    item("waits (s)", &waits.join(", "));
    item("starts", &format!("epoch {}, {} restarts", status.epoch, status.restarts));
    if !status.prepared.is_empty() {
        item("prepared", &status.prepared.len().to_string());
        for one in &status.prepared {
            put(format!("    {}", one.line()));
        }
    }
    let waiting: Vec<_> = status
        .tables
        .iter()
        .filter(|table| table.sync_lsn.is_none() && table.reason.is_none())
        .map(|table| {
            let name = format!("{}.{}", table.schema, table.name);
            match table.publisher_bytes {
                Some(bytes) => format!(
                    "{name} ({}, {} of {} parts)",
                    output::size(bytes),
                    table.copy_parts_done,
                    table.copy_parts
                ),
                None => name,
            }
        })
        .collect();
    let copied = if waiting.is_empty() {
        String::new()
    } else {
        format!(", not yet copied: {}", waiting.join(", "))
    };
    item("tables", &format!("{}{copied}", status.tables.len()));
    if let Some(copy) = &status.copy {
        let mut lines = copy.lines(output::size).into_iter();
        item("copied", &lines.next().unwrap_or_default());
        lines.for_each(|line| put(format!("    {line}")));
    }
    let joins = |table: &&Table| table.joins && table.sync_lsn.is_some();
    for table in status.tables.iter().filter(joins) {
        put(format!("    {}.{}: catches up", table.schema, table.name));
    }
    for table in &status.tables {
        let line = |text: String| put(format!("    {}.{}: {text}", table.schema, table.name));
        if let (Some(reason), Some(since)) = (&table.reason, &table.blocked_since) {
            line(format!("blocked since {since}: {reason}"));
        }
        if let Some(lsn) = &table.stale_lsn {
            let reason = table.stale_reason.as_deref().unwrap_or("unknown reason");
            line(format!(
                "may lack changes since {lsn}: {reason}; pgapace resync copies it again, and pgapace \
                 verify ends this mark if nothing differs"
            ));
        }
        if let Some(at) = &table.requested_at {
            line(format!("to be copied again (resync at {at})"));
        }
        if let (Some(mode), Some(reason)) = (&table.apply_mode, &table.apply_reason) {
            put(format!("    {}.{}: {mode}: {reason}", table.schema, table.name));
        }
    }
    if !status.verifications.is_empty() {
        item("verified", &verified_tables(&status.verified));
        for one in &status.verifications {
            put(format!("    {}.{}: {}", one.schema, one.name, verified(one)));
        }
    }
    if !status.events.is_empty() {
        item("last events", "");
        for event in status.events.iter().take(EVENTS) {
            let ago = duration((wall() - event.at).max(0.0));
            let line = format!("{ago} ago, {}: {} {}", event.event, event.message, event.fields);
            put(format!("    {}", line.lines().next().unwrap_or_default()));
        }
    }
    if let Some(error) = &status.last_error {
        let at = status.last_error_at.as_deref().unwrap_or("at an unknown time");
        match (&status.error_since, status.error_count) {
            (Some(since), count @ 2..) => {
                item("last error", &format!("{at}, {count} times since {since}"));
            }
            _ => item("last error", at),
        }
        for line in error.lines() {
            put(format!("    {line}"));
        }
    }
    lines.into_inner()
}

/// All tables together.
fn verified_tables(summary: &VerificationSummary) -> String {
    let VerificationSummary { tables_equal, tables_different, tables_unverified, .. } = summary;
    let found = format!(
        "{tables_equal} tables equal, {tables_different} different, {tables_unverified} not verified"
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
fn verified(one: &TableVerification) -> String {
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
        VerificationKind::Verb => one.scope.clone(),
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

fn slot_line(status: &Status) -> String {
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
        let why = if status.lag_unknown.is_some() { "state unknown" } else { "does not exist" };
        return format!("{}: {why}", status.slot);
    };
    let mut line = format!(
        "{}: {}, WAL {}",
        status.slot,
        if slot.active { "active" } else { "not active" },
        slot.wal_status.as_deref().unwrap_or("unknown"),
    );
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

fn lag_line(status: &Status) -> String {
    // The process saw it a moment ago.
    let committed = status.figures.as_ref().and_then(|figures| figures.stage("committed"));
    if status.lag_bytes.is_none()
        && let Some(stage) = committed
        && let Some(bytes) = stage.lag_bytes
    {
        let size = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
        return match stage.lag_seconds {
            _ if bytes == 0 => "none".to_owned(),
            Some(seconds) => format!("{size}, {seconds:.1} seconds"),
            None => size,
        };
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

/// Writes the present figures. `item` writes a line with a label.
fn figure_lines(figures: &Figures, item: impl Fn(&str, &str)) {
    let size = |bytes: f64| output::size(whole(bytes));
    for stage in &figures.stages {
        let bytes = stage.lag_bytes.map_or_else(|| "?".to_owned(), |bytes| size(bytes as f64));
        let mut line = format!("{bytes} behind");
        if let Some(seconds) = stage.lag_seconds {
            line.push_str(&format!(", {seconds:.1} s"));
        }
        line.push_str(&format!("; {}/s", size(stage.wal_bytes_per_second_10s)));
        if let Some(rate) = stage.transactions_per_second_10s {
            line.push_str(&format!(", {rate:.0} transactions/s"));
        }
        if let Some(rate) = stage.changes_per_second_10s {
            line.push_str(&format!(", {rate:.0} rows/s"));
        }
        item(&format!("  {}", stage.stage), &line);
    }
    let estimate = match figures.seconds_to_zero {
        Some(0.0) => "none to catch up".to_owned(),
        Some(seconds) => format!("caught up in {}", duration(seconds)),
        None => "not shrinking".to_owned(),
    };
    item("estimate", &estimate);
    item("limited by", &figures.limited_by.replace('_', " "));
    let shares: Vec<_> = worker_shares(figures)
        .into_iter()
        .filter(|(_, share)| *share >= 0.5)
        .map(|(reason, share)| format!("{reason} {share:.0} %"))
        .collect();
    if !shares.is_empty() {
        item("workers' time", &shares.join(", "));
    }
    for blocker in &figures.blockers {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
        let who = match blocker.pid {
            Some(pid) => format!("process {pid} of {}", shown(&blocker.user)),
            None => "a prepared transaction".to_owned(),
        };
        let query = blocker.query.as_ref().map_or(String::new(), |query| format!(": {query}"));
        item("blocked by", &format!("{who}{query}"));
    }
    if let Some(slot) = &figures.slot
        && let Some(seconds) = slot.lost_in_seconds
    {
        item("slot lost in", &format!("{} at the present rate", duration(seconds)));
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
