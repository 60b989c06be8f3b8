//! The parts of the frame.

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};

use crate::cli::output::size;
use crate::cli::status::collect::Status;
use crate::cli::status::values::{duration, one_line, whole};
use crate::observe::board::wall;
use crate::observe::figures::Figures;
use crate::observe::history::worker_shares;
use crate::top::view::{coloured, dim};

/// A row whose cells from `first` on are numbers, which end at the same place.
fn row(cells: Vec<String>, first: usize) -> Row<'static> {
    Row::new(cells.into_iter().enumerate().map(|(index, text)| cell(text, index >= first)))
}

fn cell(text: String, is_number: bool) -> Cell<'static> {
    let line = Line::from(text);
    Cell::from(if is_number { line.right_aligned() } else { line })
}

/// The head of such rows.
fn head(cells: &[&str], first: usize) -> Row<'static> {
    row(cells.iter().map(|cell| (*cell).to_owned()).collect(), first).style(dim())
}

/// A column of a table that leaves columns out where they do not fit.
struct Column {
    head: &'static str,
    width: u16,
    /// Columns with a larger rank are left out first.
    rank: u8,
    is_number: bool,
}

const fn text(head: &'static str, width: u16, rank: u8) -> Column {
    Column { head, width, rank, is_number: false }
}

const fn number(head: &'static str, width: u16, rank: u8) -> Column {
    Column { head, width, rank, is_number: true }
}

/// The columns that fit into this width, in their order.
fn fitting(columns: &[Column], width: u16) -> Vec<usize> {
    let mut indexes: Vec<_> = (0..columns.len()).collect();
    indexes.sort_by_key(|index| columns[*index].rank);
    let mut used = 0;
    indexes.retain(|index| {
        used += columns[*index].width;
        used <= width
    });
    indexes.sort_unstable();
    indexes
}

/// Draws the columns that fit; the column of rank 2 takes the room that is left.
fn columns(
    frame: &mut Frame<'_>,
    area: Rect,
    columns: &[Column],
    rows: impl Iterator<Item = Vec<String>>,
) {
    let shown = fitting(columns, area.width);
    let cells = |mut texts: Vec<String>| {
        let shown = shown.iter();
        Row::new(shown.map(|i| cell(std::mem::take(&mut texts[*i]), columns[*i].is_number)))
    };
    let head = cells(columns.iter().map(|column| column.head.to_owned()).collect()).style(dim());
    let rows: Vec<_> = rows.map(cells).collect();
    let widths = shown.iter().map(|index| match &columns[*index] {
        Column { width, rank: 2, is_number: false, .. } => Constraint::Min(*width),
        column => Constraint::Length(column.width),
    });
    frame.render_widget(Table::new(rows, widths).header(head).column_spacing(0), area);
}

const STAGES: [Column; 6] = [
    text("stage", 9, 0),
    number("behind", 10, 1),
    number("age", 9, 2),
    number("WAL", 11, 3),
    number("tx/s", 6, 4),
    number("rows/s", 7, 5),
];

const WORKERS: [Column; 7] = [
    text("worker", 9, 0),
    text("process", 9, 5),
    text("does", 16, 1),
    text("xid", 9, 4),
    text("table", 14, 2),
    number("rows", 8, 6),
    number("age", 9, 3),
];

/// Position, lag and rates of each stage.
pub(super) fn stages(frame: &mut Frame<'_>, area: Rect, figures: &Figures) {
    let rate = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.0}"));
    // The terminal may have 80 columns.
    let short = |bytes: f64| size(whole(bytes)).replace("bytes", "B");
    let rows = figures.stages.iter().map(|stage| {
        vec![
            stage.stage.clone(),
            stage.lag_bytes.map_or_else(|| "?".to_owned(), |bytes| short(bytes as f64)),
            stage.lag_seconds.map_or_else(|| "?".to_owned(), |seconds| format!("{seconds:.1} s")),
            format!("{}/s", short(stage.wal_bytes_per_second_10s)),
            rate(stage.transactions_per_second_10s),
            rate(stage.changes_per_second_10s),
        ]
    });
    columns(frame, area, &STAGES, rows);
}

/// The error that keeps a subscription from running.
pub(super) fn error(frame: &mut Frame<'_>, area: Rect, text: &str) {
    let lines = text.lines().enumerate().map(|(index, line)| {
        let style = if index == 0 { coloured(Color::Red) } else { Style::new() };
        Line::styled(line.to_owned(), style)
    });
    let text = Paragraph::new(lines.collect::<Vec<_>>()).wrap(Wrap { trim: true });
    frame.render_widget(text, area);
}

/// Bars of the time of the apply workers, by reason of waiting.
pub(super) fn waits(frame: &mut Frame<'_>, area: Rect, figures: &Figures) {
    let mut shares = worker_shares(figures);
    shares.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let width = usize::from(area.width.saturating_sub(22));
    let bar = |share: f64| {
        let cells = usize::try_from(whole(share / 100.0 * width as f64 + 0.5)).unwrap_or(0);
        "█".repeat(cells.min(width))
    };
    let line = |(reason, share): &(String, f64)| {
        let color = match reason.as_str() {
            "busy" | "subscriber" => Color::Green,
            "idle" => Color::DarkGray,
            _ => Color::Yellow,
        };
        Line::from(vec![
            Span::raw(format!("{:<15}{share:>5.1}% ", reason.replace('_', " "))),
            Span::styled(bar(*share), Style::new().fg(color)),
        ])
    };
    let mut lines = vec![Line::styled("workers' time, 10 s", dim())];
    lines.extend(shares.iter().map(line));
    frame.render_widget(Paragraph::new(lines), area);
}

/// Apply workers, those with a group first.
pub(super) fn workers(frame: &mut Frame<'_>, area: Rect, figures: &Figures) {
    let mut workers: Vec<_> = figures.workers.iter().collect();
    workers.sort_by_key(|worker| (worker.xid.is_none(), worker.worker));
    let shown = usize::from(area.height.saturating_sub(1));
    let rows = workers.into_iter().take(shown).map(|worker| {
        vec![
            format!("apply {}", worker.worker),
            worker.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string()),
            worker.waits_for.as_deref().unwrap_or("busy").replace('_', " "),
            worker.xid.map_or_else(String::new, |xid| xid.to_string()),
            worker.table.clone().unwrap_or_default(),
            if worker.xid.is_some() { worker.changes.to_string() } else { String::new() },
            worker.age_seconds.map_or_else(String::new, |age| format!("{age:.1} s")),
        ]
    });
    columns(frame, area, &WORKERS, rows);
}

/// Sessions of others that block.
pub(super) fn blockers(frame: &mut Frame<'_>, area: Rect, figures: &Figures) {
    let lines = figures.blockers.iter().take(usize::from(area.height)).map(|blocker| {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
        let session = match blocker.pid {
            Some(pid) => format!("blocked by {pid} ({}): ", shown(&blocker.user)),
            None => "blocked by a prepared transaction: ".to_owned(),
        };
        let query = one_line(&shown(blocker.pid.map_or(&blocker.gid, |_| &blocker.query)));
        Line::from(vec![Span::styled(session, coloured(Color::Red)), Span::raw(query)])
    });
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), area);
}

/// Tables by rows per second, then those that are not ready or may lack changes.
pub(super) fn tables(frame: &mut Frame<'_>, area: Rect, status: &Status, scrolled: usize) {
    let rates = status.figures.iter().flat_map(|figures| &figures.tables).map(|table| {
        let name = table.name.to_string();
        row(vec![name, format!("{:.0}", table.changes_per_second_10s)], 1)
    });
    let others = status.tables.iter().filter(|table| table.is_remarkable());
    let others = others.map(|table| {
        let is_bad = table.reason.is_some() || table.stale_lsn.is_some();
        let style = if is_bad { coloured(Color::Red) } else { Style::new() };
        let name = table.name.to_string();
        let state = if table.state == "ready" { "stale" } else { table.state };
        row(vec![name, state.to_owned()], 1).style(style)
    });
    let rows: Vec<_> = rates.chain(others).skip(scrolled).collect();
    let head = head(&["table", "rows/s"], 1);
    let widths = [Constraint::Min(12), Constraint::Length(11)];
    frame.render_widget(Table::new(rows, widths).header(head), area);
}

/// Conflicts that were counted, then the last warnings and errors.
pub(super) fn events(frame: &mut Frame<'_>, area: Rect, status: &Status, scrolled: usize) {
    let conflicts: Vec<_> =
        status.counters.conflicts().iter().map(|(name, count)| format!("{count} {name}")).collect();
    let conflicts = if conflicts.is_empty() { "none".to_owned() } else { conflicts.join(", ") };
    let mut lines = vec![Line::from(vec![Span::styled("conflicts ", dim()), Span::raw(conflicts)])];
    if status.counters.transactions_skipped > 0 {
        let skipped = format!("{} transactions were skipped", status.counters.transactions_skipped);
        lines.push(Line::styled(skipped, coloured(Color::Yellow)));
    }
    let now = wall();
    lines.extend(status.events.iter().map(|event| {
        let color = if event.level == "error" { Color::Red } else { Color::Yellow };
        let ago = duration((now - event.at).max(0.0));
        let text = format!(" {} {}", event.message, event.fields).replace('\n', " ");
        Line::from(vec![
            Span::styled(format!("{ago:>7} "), dim()),
            Span::styled(event.event.clone(), Style::new().fg(color)),
            Span::raw(text),
        ])
    }));
    frame.render_widget(Paragraph::new(lines.split_off(scrolled.min(lines.len()))), area);
}

/// Table sync, with a bar for all of it and for each table that is being copied.
pub(super) fn copy(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let Some(copy) = &status.copy else { return };
    let is_wide = area.width >= 100;
    let width = usize::from(area.width.saturating_sub(if is_wide { 80 } else { 64 })).max(10);
    let line = |name: String, done: i64, all: i64, rate: Option<i64>, left: Option<f64>| {
        let part = if all > 0 { (done as f64 / all as f64).clamp(0.0, 1.0) } else { 0.0 };
        let cells = usize::try_from(whole(part * width as f64)).unwrap_or(0);
        let mut text = format!(" {:>3.0} % {} of {}", part * 100.0, size(done), size(all));
        if let Some(rate) = rate.filter(|_| is_wide) {
            text.push_str(&format!(", {}/s", size(rate)));
        }
        if let Some(left) = left {
            text.push_str(&format!(", {} left", duration(left)));
        }
        Line::from(vec![
            Span::raw(format!("{name:<24.24} ")),
            Span::styled("█".repeat(cells), Style::new().fg(Color::Green)),
            Span::styled("░".repeat(width - cells), dim()),
            Span::raw(text),
        ])
    };
    let all = format!("copied {} of {} tables", copy.tables_done, copy.tables);
    let mut lines =
        vec![line(all, copy.bytes_done, copy.bytes, copy.bytes_per_second, copy.seconds_left)];
    lines.extend(copy.running.iter().map(|table| {
        let doing = if table.building_indexes { " (indexes)" } else { "" };
        let name = format!("{}{doing}", table.name);
        line(name, table.bytes_done, table.bytes, table.bytes_per_second, table.seconds_left)
    }));
    frame.render_widget(Paragraph::new(lines), area);
}

/// Help: the keys, and the meaning of the words.
pub(super) fn help(frame: &mut Frame<'_>, area: Rect) {
    let lines = [
        "q, Esc quit   h this   p pause   space refresh   + - interval   tab next subscription",
        "t tables   e events   arrows and page keys scroll",
        "busy: pgapace itself   subscriber: statements run there   commit order: its turn to commit",
        "dependency: an earlier transaction   idle: nothing to do   age: of what is not applied",
    ];
    let text = Paragraph::new(lines.map(Line::from).to_vec()).wrap(Wrap { trim: true });
    frame.render_widget(text, area);
}

#[cfg(test)]
mod tests {
    use super::{STAGES, WORKERS, fitting};

    #[test]
    fn a_narrow_terminal_shows_the_columns_that_matter_most() {
        assert_eq!(fitting(&STAGES, 53), [0, 1, 2, 3, 4, 5]);
        assert_eq!(fitting(&STAGES, 40), [0, 1, 2, 3]);
        assert_eq!(fitting(&WORKERS, 80), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(fitting(&WORKERS, 40), [0, 2, 4]);
        assert_eq!(fitting(&WORKERS, 50), [0, 2, 4, 6]);
        assert_eq!(fitting(&STAGES, 3), [0; 0]);
    }
}
