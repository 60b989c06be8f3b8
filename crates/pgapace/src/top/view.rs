//! The frame: header, curves, stages and waits, workers, and below them tables and events.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline};

use crate::cli::output::size;
use crate::cli::status::collect::Status;
use crate::cli::status::values::{duration, estimate, whole};
use crate::observe::figures::Figures;
use crate::observe::history::Point;
use crate::printable::is_obeyed;
use crate::top::keys::{Keys, Pane};
use crate::top::{Seen, panes};

/// Rows of workers that are always there, so that little moves.
const WORKERS: u16 = 4;

/// A style for values that are good, doubtful or bad.
pub(super) fn coloured(color: Color) -> Style {
    Style::new().fg(color).add_modifier(Modifier::BOLD)
}

pub(super) fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// Draws everything, without characters that the terminal would obey.
pub(super) fn draw(frame: &mut Frame<'_>, seen: &Seen, keys: &Keys) {
    draw_as_it_is(frame, seen, keys);
    for cell in &mut frame.buffer_mut().content {
        if cell.symbol().contains(is_obeyed) {
            let shown = cell.symbol().replace(is_obeyed, "");
            // The text was laid out without them: they have no width.
            cell.set_symbol(if shown.is_empty() { " " } else { &shown });
        }
    }
}

fn draw_as_it_is(frame: &mut Frame<'_>, seen: &Seen, keys: &Keys) {
    let Some((status, history)) = seen.subscriptions.get(keys.selected()) else {
        let line = seen.failure.clone().unwrap_or_else(|| "no subscription".to_owned());
        frame.render_widget(Paragraph::new(line), frame.area());
        return;
    };
    let figures = status.figures.as_ref();
    let is_copying = status.copy.is_some();
    // More workers are shown where there is room.
    let most = frame.area().height.saturating_sub(20).max(WORKERS);
    let workers = figures.map_or(0, |figures| figures.workers.len());
    let workers = u16::try_from(workers).unwrap_or(u16::MAX).clamp(1, most);
    let blockers = figures.map_or(0, |figures| figures.blockers.len().min(2));
    let blockers = u16::try_from(blockers).unwrap_or(0);
    // In few rows, the stages and what a key asked for matter most.
    let is_short = frame.area().height < 17 + blockers;
    let is_asked = is_short && keys.pane() != Pane::Both;
    let left = frame.area().height.saturating_sub(3 + 5 + blockers + 1);
    let work = match left {
        _ if !is_short => 1 + workers,
        0 | 1 => 0,
        _ if is_asked => 0,
        _ => left.min(1 + workers),
    };
    let stages = if is_asked { 0 } else { 6 - u16::from(is_short) };
    let [header, curves, middle, work, blocked, lower, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(if is_copying || is_short { 0 } else { 2 }),
        Constraint::Length(stages),
        Constraint::Length(work),
        Constraint::Length(blockers),
        Constraint::Min(if is_short { 0 } else { 3 }),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    head(frame, header, status, (keys.selected(), seen.subscriptions.len()));
    if is_copying {
        panes::copy(frame, middle, status);
    } else {
        self::curves(frame, curves, history, figures);
        let is_narrow = middle.width < 53 + 20;
        let [left, right] = match is_narrow {
            true => [middle, Rect::ZERO],
            false => {
                Layout::horizontal([Constraint::Length(53), Constraint::Min(20)]).areas(middle)
            }
        };
        if let Some(figures) = figures {
            panes::stages(frame, left, figures);
            panes::waits(frame, right, figures);
        } else if let Some(error) = &status.last_error {
            // The room of the workers is free, too.
            panes::error(frame, middle.union(work), error);
        } else {
            let line = "no process has written figures in the last 90 s";
            frame.render_widget(Paragraph::new(line).style(dim()), left);
        }
    }
    if let Some(figures) = figures {
        panes::workers(frame, work, figures);
        panes::blockers(frame, blocked, figures);
    }
    match keys.pane() {
        // The events are one key away.
        Pane::Both if lower.width < 60 => panes::tables(frame, lower, status, keys.scrolled()),
        Pane::Both => {
            let halves = [Constraint::Percentage(45), Constraint::Percentage(55)];
            let [left, right] = Layout::horizontal(halves).spacing(2).areas(lower);
            panes::tables(frame, left, status, keys.scrolled());
            panes::events(frame, right, status, keys.scrolled());
        }
        Pane::Tables => panes::tables(frame, lower, status, keys.scrolled()),
        Pane::Events => panes::events(frame, lower, status, keys.scrolled()),
        Pane::Help => panes::help(frame, lower),
    }
    frame.render_widget(Paragraph::new(footer(seen, keys)), foot);
}

fn head(frame: &mut Frame<'_>, area: Rect, status: &Status, (index, number): (usize, usize)) {
    let state = match status.state {
        "running" => coloured(Color::Green),
        "retrying" => coloured(Color::Yellow),
        _ => coloured(Color::Red),
    };
    let several = if number > 1 { format!(" ({}/{number})", index + 1) } else { String::new() };
    let phase = match status.switched_over {
        Some(_) => status.state.to_owned(),
        None => format!("{}, {}", status.phase, status.state),
    };
    let mut first = vec![
        Span::styled(format!("pgapace {}{several}: ", status.name), Modifier::BOLD),
        Span::styled(phase, state),
    ];
    if let Some(attempt) = status.attempt().filter(|_| status.state == "retrying") {
        first.push(Span::raw(format!(", {attempt}")));
    }
    // Without figures there is room for all of it below.
    if let Some(error) = status.last_error.as_ref().filter(|_| status.figures.is_some()) {
        let error = error.lines().next().unwrap_or_default();
        first.push(Span::styled(format!("  {error}"), coloured(Color::Red)));
    }
    let lines = match &status.figures {
        None => vec![Line::from(first)],
        Some(figures) if figures.stages.is_empty() => vec![Line::from(first), slot(figures)],
        Some(figures) => vec![Line::from(first), lag(status, figures), slot(figures)],
    };
    frame.render_widget(Paragraph::new(lines), area);
}

fn lag(status: &Status, figures: &Figures) -> Line<'static> {
    let committed = figures.stage("committed");
    let bytes = committed.and_then(|stage| stage.lag_bytes);
    let seconds = committed.and_then(|stage| stage.lag_seconds);
    let lag = match (bytes, seconds) {
        (Some(0), _) => "none".to_owned(),
        (Some(bytes), Some(seconds)) => format!("{}, {seconds:.1} s", size(whole(bytes as f64))),
        (Some(bytes), None) => size(whole(bytes as f64)),
        (None, _) => "unknown".to_owned(),
    };
    let unknown = status.limit_unknown();
    let estimate = estimate(figures).filter(|_| unknown.is_none());
    let estimate = estimate.map_or_else(String::new, |text| format!(", {text}"));
    let limit = unknown.unwrap_or_else(|| figures.limited_by.replace('_', " "));
    let style = if figures.blockers.is_empty() { Style::new() } else { coloured(Color::Red) };
    Line::from(vec![
        Span::styled("lag ", dim()),
        Span::styled(lag, Modifier::BOLD),
        Span::raw(estimate),
        Span::styled("   limited by ", dim()),
        Span::styled(limit, style),
    ])
}

fn slot(figures: &Figures) -> Line<'static> {
    let mut spans = vec![Span::styled("slot ", dim())];
    match &figures.slot {
        None => spans.push(Span::raw("unknown")),
        Some(slot) => {
            let retained = slot.retained_bytes.map_or_else(|| "?".to_owned(), size);
            spans.push(Span::raw(format!("keeps {retained}")));
            match (slot.lost_in_seconds, slot.safe_wal_size) {
                (Some(seconds), _) => spans.push(Span::styled(
                    format!(", lost in {}", duration(seconds)),
                    if seconds < 3600.0 { coloured(Color::Red) } else { Style::new() },
                )),
                (None, Some(safe)) => spans.push(Span::raw(format!(", {} left", size(safe)))),
                (None, None) => {}
            }
        }
    }
    if figures.memory_limit == 0 {
        // A copy has no memory and no spool.
        return Line::from(spans);
    }
    let memory = size(whole(figures.memory_bytes as f64));
    let limit = size(whole(figures.memory_limit as f64));
    let spool = size(whole(figures.spool_bytes as f64));
    spans.push(Span::styled("   memory ", dim()));
    spans.push(Span::raw(format!("{memory} of {limit}")));
    spans.push(Span::styled("   spool ", dim()));
    spans.push(Span::raw(spool));
    Line::from(spans)
}

/// The value of a point that a curve shows.
type Value = fn(&Point) -> f64;

/// Three curves beside each other, each with its last value.
fn curves(frame: &mut Frame<'_>, area: Rect, history: &[Point], figures: Option<&Figures>) {
    let thirds = [Constraint::Ratio(1, 3); 3];
    let areas: [Rect; 3] = Layout::horizontal(thirds).spacing(1).areas(area);
    let now = figures.and_then(|figures| figures.stage("committed"));
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
    let curves: [(String, Value); 3] = [
        (
            format!("tx/s {}", rate(now.and_then(|stage| stage.transactions_per_second_10s))),
            |point| point.transactions_per_second,
        ),
        (format!("rows/s {}", rate(now.and_then(|stage| stage.changes_per_second_10s))), |point| {
            point.rows_per_second
        }),
        ("lag of ten minutes".to_owned(), |point| point.lag_bytes.unwrap_or(0) as f64),
    ];
    for (area, (title, value)) in areas.into_iter().zip(curves) {
        let [label, curve] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
        frame.render_widget(Paragraph::new(title).style(dim()), label);
        let newest = history.len().saturating_sub(usize::from(curve.width));
        let values = history[newest..].iter().map(|point| whole(value(point)).unsigned_abs());
        let style = Style::new().fg(Color::Cyan);
        frame.render_widget(
            Sparkline::default().data(values.collect::<Vec<_>>()).style(style),
            curve,
        );
    }
}

fn footer(seen: &Seen, keys: &Keys) -> Line<'static> {
    if let Some(failure) = &seen.failure {
        let failure = failure.lines().next().unwrap_or_default().to_owned();
        return Line::styled(failure, coloured(Color::Red));
    }
    let paused = if keys.is_paused() { " PAUSED" } else { "" };
    let seconds = keys.interval().as_secs();
    Line::styled(
        format!(
            "q quit  h help  p pause  space refresh  +/- {seconds} s  t tables  e events  tab next{paused}"
        ),
        dim(),
    )
}
