//! The progress of a verification: a bar on a terminal, with the time left; or counters on the board.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::observe::bars;
use crate::observe::board::Board;

/// Counts rows of the publisher.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    board: Option<Board>,
    started: Instant,
}

impl Progress {
    /// `rows`: the publisher's estimate.
    pub(crate) fn new(rows: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(rows), bars::target());
        let style = "{bar:30} {human_pos} of about {human_len} rows, {per_sec}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self { bar, board: None, started: Instant::now() }
    }

    /// Without a bar: in the background.
    pub(crate) fn on(board: Board) -> Self {
        Self { bar: ProgressBar::hidden(), board: Some(board), started: Instant::now() }
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    pub(crate) fn add(&self, rows: u64, bytes: u64) {
        if let Some(board) = &self.board {
            board.add_verified(rows, bytes);
            return;
        }
        self.bar.inc(rows);
        // The estimate may be too small.
        if self.bar.length().is_some_and(|length| self.bar.position() > length) {
            self.bar.set_length(self.bar.position());
        }
    }

    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
