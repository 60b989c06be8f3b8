//! Output of a switchover for the user: a line for each step, with the time and the outage of writes so far.
//! On a terminal the last line counts. Writes are stopped meanwhile, so nothing waits for the reader of these lines.

use std::fmt::Write;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::cli::output;
use crate::observe::bars;

/// How often the last line is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(50);

/// The lines of one switchover.
#[derive(Debug)]
pub(super) struct Display {
    begun: Instant,
    /// When writes were stopped.
    stopped: Option<Instant>,
    bar: ProgressBar,
}

impl Display {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, bars::target());
        bar.enable_steady_tick(DRAW_EVERY);
        Self { begun: Instant::now(), stopped: None, bar }
    }

    /// Neither side takes writes from here on.
    pub(super) fn writes_stop(&mut self) {
        self.stopped = Some(Instant::now());
    }

    /// How long writes have been stopped.
    pub(super) fn outage(&self) -> Option<Duration> {
        self.stopped.map(|stopped| stopped.elapsed())
    }

    /// The step that begins now.
    pub(super) fn step(&self, what: &str) {
        let (begun, stopped) = (self.begun, self.stopped);
        let line = times(begun, stopped) + what;
        self.bar.suspend(|| output::offer(&line));
        let style = ProgressStyle::with_template("{times}{msg}").map(|style| {
            style.with_key("times", move |_: &ProgressState, out: &mut dyn Write| {
                // A line that cannot be drawn is drawn the next time.
                let _ = out.write_str(&times(begun, stopped));
            })
        });
        if let Ok(style) = style {
            self.bar.set_style(style);
        }
        self.bar.set_message("…");
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

fn times(begun: Instant, stopped: Option<Instant>) -> String {
    let time = begun.elapsed().as_secs_f64();
    match stopped {
        None => format!("{time:8.3} s                       "),
        Some(stopped) => {
            format!("{time:8.3} s  no writes {:>6} ms  ", stopped.elapsed().as_millis())
        }
    }
}
