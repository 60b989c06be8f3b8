//! Standard error, to which the log is written, and the last error of a verb. Nothing waits for its reader
//! ([`outlet`](super::outlet)).

use std::io::{self, Write};

use crate::observe::outlet::{Outlet, patience_at_end, write_all};
use crate::printable::{changes_direction, escaped};

static ERRORS: Outlet = Outlet::new(|line| write_all(&mut io::stderr(), line), log_dropped);

/// Writes the line of one event.
pub(super) struct Line;

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // As JSON, too, this is an escape of the same character. Colours of the log are control characters.
        match str::from_utf8(line) {
            Ok(text) => ERRORS.send(escaped(text, changes_direction).as_bytes()),
            Err(_) => ERRORS.send(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line behind those of the log.
pub(crate) fn line(text: &str) {
    ERRORS.send(format!("{text}\n").as_bytes());
}

/// Draws on a terminal. If the terminal takes nothing, the drawing is dropped: a later one replaces it.
pub(super) fn draw(text: &str) {
    ERRORS.draw(text.as_bytes());
}

/// Waits at the end of the process until all lines are written.
pub(crate) fn finish() {
    ERRORS.finish(patience_at_end(&io::stderr()));
}

fn log_dropped(lines: u64) {
    tracing::warn!(
        event = "log_lines_dropped",
        lines,
        "lines of the log were dropped, because standard error took none for too long"
    );
}
