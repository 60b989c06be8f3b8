//! The progress of a copy for the user: bars on a terminal, log lines elsewhere.
//!
//! Sizes are those of the publisher's files, which are usually larger than what COPY transfers. So
//! a running table shows the transferred bytes, and counts with its full size when it is complete.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::cli::output::{remark, size};
use crate::observe::bars;
use crate::observe::board::{CopiedTable, CopyShown};
use crate::observe::figures::SlotFigures;

/// Time between two log lines without a terminal.
pub(super) const LINES_EVERY: Duration = Duration::from_secs(10);

/// Maximum number of tables in the summary.
const SHOWN: usize = 20;

/// Counts the bytes that a job transfers.
#[derive(Debug)]
pub(super) struct Meter {
    job: AtomicU64,
    all: Arc<AtomicU64>,
    building: AtomicBool,
}

impl Meter {
    pub(super) fn add(&self, bytes: u64) {
        self.job.fetch_add(bytes, Ordering::Relaxed);
        self.all.fetch_add(bytes, Ordering::Relaxed);
    }

    /// All rows are copied; the job builds indexes until it ends.
    pub(super) fn set_building(&self) {
        self.building.store(true, Ordering::Relaxed);
    }

    fn is_building(&self) -> bool {
        self.building.load(Ordering::Relaxed)
    }

    fn get(&self) -> u64 {
        self.job.load(Ordering::Relaxed)
    }
}

/// A running job.
#[derive(Debug, Clone)]
struct RunningJob {
    name: String,
    bytes: u64,
    meter: Arc<Meter>,
}

/// Finished and remaining work; shared by the workers.
#[derive(Debug)]
pub(super) struct Progress {
    tables: usize,
    bytes: u64,
    tables_done: AtomicUsize,
    bytes_done: AtomicU64,
    rows_done: AtomicU64,
    /// Bytes transferred by all jobs, including those that failed.
    moved: Arc<AtomicU64>,
    running: Mutex<Vec<Option<RunningJob>>>,
    started: Instant,
}

impl Progress {
    pub(super) fn new(tables: usize, bytes: u64, workers: usize) -> Self {
        Self {
            tables,
            bytes,
            tables_done: AtomicUsize::new(0),
            bytes_done: AtomicU64::new(0),
            rows_done: AtomicU64::new(0),
            moved: Arc::default(),
            running: Mutex::new(vec![None; workers]),
            started: Instant::now(),
        }
    }

    /// A worker starts a job.
    pub(super) fn begin(&self, worker: usize, name: String, bytes: u64) -> Arc<Meter> {
        let all = Arc::clone(&self.moved);
        let meter = Meter { job: AtomicU64::new(0), all, building: AtomicBool::new(false) };
        let meter = Arc::new(meter);
        let running = RunningJob { name, bytes, meter: Arc::clone(&meter) };
        self.set(worker, Some(running));
        meter
    }

    /// A worker has finished a job; `bytes` of the publisher's files were copied.
    pub(super) fn end(&self, worker: usize, bytes: u64, rows: u64) {
        self.set(worker, None);
        self.bytes_done.fetch_add(bytes, Ordering::Relaxed);
        self.rows_done.fetch_add(rows, Ordering::Relaxed);
    }

    pub(super) fn table_done(&self) -> usize {
        self.tables_done.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Bytes transferred so far.
    pub(super) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// The number of workers that are building indexes and copy nothing.
    pub(super) fn building(&self) -> usize {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().flatten().filter(|job| job.meter.is_building()).count()
    }

    fn set(&self, worker: usize, running: Option<RunningJob>) {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)[worker] = running;
    }

    fn running(&self) -> Vec<Option<RunningJob>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn bytes_so_far(&self, running: &[Option<RunningJob>]) -> u64 {
        let part = running.iter().flatten().map(|r| r.meter.get().min(r.bytes)).sum::<u64>();
        self.bytes_done.load(Ordering::Relaxed) + part
    }

    /// As the HTTP server shows it.
    pub(super) fn shown(&self, slot: Option<SlotFigures>) -> CopyShown {
        let running = self.running();
        let bytes_done = self.bytes_so_far(&running);
        let tables = running.into_iter().flatten().map(|job| CopiedTable {
            name: job.name,
            bytes: job.bytes,
            bytes_done: job.meter.get().min(job.bytes),
            building_indexes: job.meter.is_building(),
        });
        CopyShown {
            tables: self.tables,
            tables_done: self.tables_done.load(Ordering::Relaxed),
            bytes: self.bytes,
            bytes_done,
            seconds_left: self.eta(bytes_done).map(|left| left.as_secs_f64()),
            running: tables.collect(),
            slot,
        }
    }

    /// The remaining time at the average rate.
    fn eta(&self, done: u64) -> Option<Duration> {
        let elapsed = self.started.elapsed().as_secs_f64();
        let left = self.bytes.saturating_sub(done) as f64;
        (done > 0).then(|| Duration::from_secs_f64(elapsed * left / done as f64))
    }

    /// Logs the summary of a copy.
    pub(super) fn summarize(&self) {
        let elapsed = self.started.elapsed();
        let bytes = self.bytes_done.load(Ordering::Relaxed);
        let millis = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX).max(1);
        tracing::info!(
            event = "table_sync_done",
            tables = self.tables_done.load(Ordering::Relaxed),
            rows = self.rows_done.load(Ordering::Relaxed),
            bytes,
            seconds = elapsed.as_secs_f64(),
            rate = format!("{}/s", pretty(bytes.saturating_mul(1000) / millis)),
            "table sync is done"
        );
    }
}

/// A table in the summary.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) name: String,
    pub(super) rows: u64,
    pub(super) bytes: u64,
}

/// Shows the largest tables and the sum on a terminal; the log has a line for each table.
pub(super) fn table(mut copied: Vec<Copied>) {
    if !std::io::stderr().is_terminal() {
        return;
    }
    summary(&mut copied).iter().for_each(|line| remark(line));
}

fn summary(copied: &mut [Copied]) -> Vec<String> {
    copied.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let (shown, others) = copied.split_at(copied.len().min(SHOWN));
    let sum = |tables: &[Copied]| {
        let (rows, bytes) = tables.iter().fold((0, 0), |(r, b), t| (r + t.rows, b + t.bytes));
        (rows, bytes)
    };
    let line = |name: &str, (rows, bytes): (u64, u64)| {
        format!("{name:<40} {rows:>14} {:>10}", pretty(bytes))
    };
    let mut lines = vec![format!("{:<40} {:>14} {:>10}", "table", "rows", "copied")];
    lines.extend(shown.iter().map(|table| line(&table.name, (table.rows, table.bytes))));
    if !others.is_empty() {
        lines.push(line(&format!("{} others", others.len()), sum(others)));
    }
    lines.push(line(&format!("{} tables", copied.len()), sum(copied)));
    lines
}

/// The display of a running copy.
pub(super) struct Display {
    bars: Option<Bars>,
    last_line: Instant,
}

struct Bars {
    all: ProgressBar,
    workers: Vec<ProgressBar>,
    _screen: MultiProgress,
}

impl Display {
    pub(super) fn new(progress: &Progress) -> Self {
        let bars = std::io::stderr().is_terminal().then(|| Bars::new(progress));
        Self { bars, last_line: Instant::now() }
    }

    pub(super) fn update(&mut self, progress: &Progress) {
        let running = progress.running();
        let done = progress.bytes_so_far(&running);
        let tables = progress.tables_done.load(Ordering::Relaxed);
        if let Some(bars) = &self.bars {
            bars.update(progress, &running, done, tables);
        } else if self.last_line.elapsed() >= LINES_EVERY {
            self.last_line = Instant::now();
            tracing::info!(
                event = "table_sync_progress",
                tables = format!("{tables} of {}", progress.tables),
                bytes = format!("{} of {}", pretty(done), pretty(progress.bytes)),
                seconds_left = progress.eta(done).map(|eta| eta.as_secs()),
                "copying tables"
            );
        }
    }
}

impl Bars {
    fn new(progress: &Progress) -> Self {
        let screen = MultiProgress::with_draw_target(bars::target());
        let style = |template: &str| {
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
        };
        let all = screen.add(ProgressBar::new(progress.bytes));
        all.set_style(style("{msg:<40!} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}"));
        let workers = progress.running().len();
        let workers = (0..workers)
            .map(|_| {
                let bar = screen.add(ProgressBar::new(0));
                bar.set_style(style("  {msg:<38!} {bar:30} {bytes}/{total_bytes}"));
                bar
            })
            .collect();
        Self { all, workers, _screen: screen }
    }

    fn update(
        &self,
        progress: &Progress,
        running: &[Option<RunningJob>],
        done: u64,
        tables: usize,
    ) {
        self.all.set_message(format!("{tables} of {} tables", progress.tables));
        self.all.set_position(done);
        for (bar, running) in self.workers.iter().zip(running) {
            let Some(running) = running else { continue };
            let name = &running.name;
            bar.set_message(if running.meter.is_building() {
                format!("{name}: indexes")
            } else {
                name.clone()
            });
            bar.set_length(running.bytes);
            bar.set_position(running.meter.get().min(running.bytes));
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.workers.iter().for_each(ProgressBar::finish_and_clear);
        self.all.finish_and_clear();
    }
}

fn pretty(bytes: u64) -> String {
    size(i64::try_from(bytes).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::{Copied, SHOWN, summary};

    #[test]
    fn the_summary_names_the_largest_tables_and_adds_up() {
        let table =
            |number: u64| Copied { name: format!("public.t{number}"), rows: 1, bytes: number };
        let mut copied: Vec<_> = (0..SHOWN as u64 + 2).map(table).collect();
        let lines = summary(&mut copied);
        assert_eq!(lines.len(), SHOWN + 3);
        assert!(lines[1].starts_with("public.t21 "), "{lines:?}");
        assert_eq!(
            lines[SHOWN + 1].split_whitespace().collect::<Vec<_>>(),
            ["2", "others", "2", "1", "bytes"]
        );
        assert_eq!(
            lines[SHOWN + 2].split_whitespace().collect::<Vec<_>>(),
            ["22", "tables", "22", "231", "bytes"]
        );
        assert_eq!(summary(&mut [table(3)]).len(), 3);
    }
}
