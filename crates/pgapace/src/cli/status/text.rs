//! Status as text.

use crate::cli::output;
use crate::cli::status::collect::{Status, Table};
use crate::cli::status::values::{
    duration, estimate, lag_line, number, one_line, slot_line, verified, verified_tables, whole,
};
use crate::observe::board::wall;
use crate::observe::figures::Figures;
use crate::observe::history::worker_shares;
use crate::subscriber::state::membership::WaitingProcess;
use crate::subscriber::state::statistics::Spooled;

/// How many events are printed.
const EVENTS: usize = 5;
/// How many tables that wait for their copy are named.
const TABLES: usize = 10;

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

/// Lines of text, in which labels and values stand below each other.
#[derive(Default)]
struct Lines(Vec<String>);

impl Lines {
    fn put(&mut self, line: String) {
        self.0.push(line);
    }

    fn item(&mut self, label: &str, value: &str) {
        self.put(format!("  {label:<15}{value}"));
    }
}

/// The lines of a subscription.
pub(crate) fn lines(status: &Status) -> Vec<String> {
    let mut lines = Lines::default();
    lines.put(match status.switched_over {
        Some(_) => format!("{}: switched over", status.name),
        None => format!("{}: {}, {}", status.name, status.phase, running(status)),
    });
    setting_lines(status, &mut lines);
    position_lines(status, &mut lines);
    counter_lines(status, &mut lines);
    start_lines(status, &mut lines);
    table_lines(status, &mut lines);
    verification_lines(status, &mut lines);
    event_lines(status, &mut lines);
    lines.0
}

/// Whether the subscription runs, and where.
fn running(status: &Status) -> String {
    match &status.owner {
        _ if status.state == "retrying" => {
            let attempt = status.attempt().unwrap_or_else(|| "next try now".to_owned());
            format!("retrying after an error ({attempt})")
        }
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
    }
}

/// Waiting processes, and how changes are received and applied.
fn setting_lines(status: &Status, lines: &mut Lines) {
    for standby in &status.standbys {
        let WaitingProcess { host, process, since, beat_age } = standby;
        lines.item(
            "standby",
            &format!("process {process} on {host} since {since}, seen {beat_age:.0} s ago"),
        );
    }
    lines.item("publications", &status.publications.join(", "));
    lines.item("slot", &slot_line(status));
    if let Some(problem) = &status.slot_problem {
        lines.put(format!("    {}", problem.message));
        lines.put(format!("    HINT:  {}", problem.hint));
    }
    if let (Some(format), Some(reason)) = (&status.format, &status.format_reason) {
        lines.item("format", &format!("{format}: {reason}"));
    }
    if let (Some(mode), Some(reason)) = (&status.streaming, &status.streaming_reason) {
        lines.item("streaming", &format!("{mode}: {reason}"));
    }
    if let (Some(workers), Some(reason)) = (status.workers, &status.workers_reason) {
        lines.item("workers", &format!("{workers}: {reason}"));
    }
    let Spooled { files, bytes } = status.spool;
    let bytes = output::size(i64::try_from(bytes).unwrap_or(i64::MAX));
    lines.item("spool", &format!("{bytes} in {}", number(files, "file", "files")));
}

/// Positions, lag and the present figures.
fn position_lines(status: &Status, lines: &mut Lines) {
    let lsn = |lsn: &Option<String>| lsn.clone().unwrap_or_else(|| "-".to_owned());
    lines.item("received", &lsn(&status.received_lsn));
    lines.item("applied", &lsn(&status.applied_lsn));
    lines.item("flushed", &lsn(&status.flushed_lsn));
    if let Some(waited) = status.standby_wait {
        let line = format!(
            "    waits for a synchronous standby of the subscriber for {}",
            duration(waited)
        );
        lines.put(line);
    }
    lines.item("lag", &lag_line(status));
    if let Some(figures) = &status.figures {
        figure_lines(status, figures, lines);
    }
    if let Some(skip) = &status.skip_lsn {
        lines.item("skips", &format!("the transaction with LSN {skip}"));
    }
}

/// Counters since the subscription was created.
fn counter_lines(status: &Status, lines: &mut Lines) {
    let c = &status.counters;
    lines.item(
        "changes",
        &format!(
            "{}: {} inserts, {} updates, {} deletes, {} truncates",
            number(c.transactions, "transaction", "transactions"),
            c.inserts,
            c.updates,
            c.deletes,
            c.truncates
        ),
    );
    let conflicts: Vec<_> =
        c.conflicts().iter().map(|(name, count)| format!("{count} {name}")).collect();
    lines.item(
        "conflicts",
        &if conflicts.is_empty() { "none".to_owned() } else { conflicts.join(", ") },
    );
    if c.transactions_skipped > 0 {
        let skipped = number(c.transactions_skipped, "transaction", "transactions");
        lines.item("skipped", &format!("{skipped}, by pgapace skip"));
    }
    lines.item(
        "groups",
        &format!(
            "{}, {} of them parallel, {} dependent on others",
            c.groups, c.groups_parallel, c.groups_dependent
        ),
    );
    lines.item(
        "applied again",
        &format!(
            "{} one by one, {} after an error, {} to give way",
            c.fallbacks, c.retries, c.victims
        ),
    );
    if c.tables_serialized > 0 {
        let times = c.tables_serialized;
        let line = format!("{times} times a table whose transactions had deadlocked often");
        lines.item("serialized", &line);
    }
    let waits: Vec<_> = c
        .waits
        .named()
        .iter()
        .filter(|(_, time)| !time.is_zero())
        .map(|(reason, time)| format!("{reason} {:.1}", time.as_secs_f64()))
        .collect();
    if !waits.is_empty() {
        lines.item("waits (s)", &waits.join(", "));
    }
}

/// Starts, and transactions that are prepared.
fn start_lines(status: &Status, lines: &mut Lines) {
    let restarts = number(status.restarts, "restart", "restarts");
    lines.item("starts", &format!("epoch {}, {restarts}", status.epoch));
    if !status.prepared.is_empty() {
        lines.item("prepared", &status.prepared.len().to_string());
        for one in &status.prepared {
            lines.put(format!("    {}", one.line()));
        }
    }
}

/// Tables that are not copied, blocked, stale, or applied in another way.
fn table_lines(status: &Status, lines: &mut Lines) {
    let waiting: Vec<_> = status
        .tables
        .iter()
        .filter(|table| table.sync_lsn.is_none() && table.reason.is_none())
        .map(|table| {
            let name = table.name.to_string();
            match table.publisher_bytes {
                Some(bytes) if table.copy_parts > 1 => format!(
                    "{name} ({}, {} of {} parts)",
                    output::size(bytes),
                    table.copy_parts_done,
                    table.copy_parts
                ),
                Some(bytes) => format!("{name} ({})", output::size(bytes)),
                None => name,
            }
        })
        .collect();
    let copied = match waiting.len() {
        0 => String::new(),
        all => {
            let more = match all.saturating_sub(TABLES) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let named = &waiting[..all.min(TABLES)];
            format!(", not yet copied: {}{more}", named.join(", "))
        }
    };
    lines.item("tables", &format!("{}{copied}", status.tables.len()));
    if let Some(copy) = &status.copy {
        let mut copied = copy.lines(output::size).into_iter();
        lines.item("copied", &copied.next().unwrap_or_default());
        copied.for_each(|line| lines.put(format!("    {line}")));
    }
    let joins = |table: &&Table| table.joins && table.sync_lsn.is_some();
    for table in status.tables.iter().filter(joins) {
        lines.put(format!("    {}: catches up", table.name));
    }
    for table in &status.tables {
        let mut line = |text: &str| {
            lines.put(format!("    {}: {text}", table.name));
        };
        if table.unpublished {
            line("no longer published; it will lack changes if it is published again");
        }
        if let (Some(reason), Some(since)) = (&table.reason, &table.blocked_since) {
            let reason = reason.replace('\n', "\n      ");
            line(&format!("blocked since {since}: {reason}"));
        }
        if let Some(lsn) = &table.stale_lsn {
            let reason = table.stale_reason.as_deref().unwrap_or("unknown reason");
            line(&format!(
                "may lack changes since {lsn}: {reason}; pgapace resync copies it again, and pgapace \
                 verify ends this mark if nothing differs"
            ));
        }
        if let Some(at) = &table.requested_at {
            line(&format!("to be copied again (resync at {at})"));
        }
        if let (Some(mode), Some(reason)) = (&table.apply_mode, &table.apply_reason) {
            line(&format!("{mode}: {reason}"));
        }
    }
}

/// Results of verifications.
fn verification_lines(status: &Status, lines: &mut Lines) {
    if !status.verifications.is_empty() {
        lines.item("verified", &verified_tables(&status.verified));
        for one in &status.verifications {
            lines.put(format!("    {}: {}", one.name, verified(one)));
        }
    }
}

/// The last events and the last error.
fn event_lines(status: &Status, lines: &mut Lines) {
    if !status.events.is_empty() {
        lines.item("last events", "");
        for event in status.events.iter().take(EVENTS) {
            let ago = duration((wall() - event.at).max(0.0));
            let line = format!("{ago} ago, {}: {} {}", event.event, event.message, event.fields);
            lines.put(format!("    {}", line.lines().next().unwrap_or_default()));
        }
    }
    if let Some(error) = &status.last_error {
        let at = status.last_error_at.as_deref().unwrap_or("at an unknown time");
        match (&status.error_since, status.error_count) {
            (Some(since), count @ 2..) => {
                lines.item("last error", &format!("{at}, {count} times since {since}"));
            }
            _ => lines.item("last error", at),
        }
        for line in error.lines() {
            lines.put(format!("    {line}"));
        }
    }
}

/// The present figures.
fn figure_lines(status: &Status, figures: &Figures, lines: &mut Lines) {
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
        lines.item(&format!("  {}", stage.stage), &line);
    }
    // A copy has only the slot.
    if let Some(committed) = figures.stage("committed") {
        let unknown = status.limit_unknown();
        let none = match committed.lag_bytes {
            Some(_) if unknown.is_none() => "none to catch up",
            _ => "unknown",
        };
        let estimate = estimate(figures).filter(|_| unknown.is_none());
        lines.item("estimate", &estimate.unwrap_or_else(|| none.to_owned()));
        let limit = unknown.unwrap_or_else(|| figures.limited_by.replace('_', " "));
        lines.item("limited by", &limit);
    }
    let shares: Vec<_> = worker_shares(figures)
        .into_iter()
        .filter(|(_, share)| *share >= 0.5)
        .map(|(reason, share)| format!("{} {share:.0} %", reason.replace('_', " ")))
        .collect();
    if !shares.is_empty() {
        lines.item("workers' time", &shares.join(", "));
    }
    for blocker in &figures.blockers {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
        let session = match blocker.pid {
            Some(pid) => format!("process {pid} of {}", shown(&blocker.user)),
            None => match &blocker.gid {
                Some(gid) => format!("prepared transaction {}", one_line(gid)),
                None => "a prepared transaction".to_owned(),
            },
        };
        let query = blocker.query.as_ref().map(|query| format!(": {}", one_line(query)));
        let query = query.unwrap_or_default();
        lines.item("blocked by", &format!("{session}{query}"));
    }
    if let Some(error) = &figures.refresh_error {
        let ago = figures.publications_read_at.map(|read_at| duration(wall() - read_at));
        let ago = ago.unwrap_or_else(|| "?".to_owned());
        lines.item("publications", &format!("read {ago} ago; since then: {}", one_line(error)));
    }
    if let Some(slot) = &figures.slot
        && let Some(seconds) = slot.lost_in_seconds
    {
        lines.item("slot lost in", &format!("{} at the present rate", duration(seconds)));
    }
}
