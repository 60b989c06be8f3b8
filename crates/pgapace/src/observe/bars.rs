//! Where progress bars are drawn: on standard error, if that is a terminal. A terminal that takes nothing holds up nothing
//! ([`outlet`](super::outlet)).

use std::io;
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressDrawTarget, TermLike};
use rustix::termios::tcgetwinsize;

use crate::observe::log_output;

/// How often bars are drawn in a second at most.
const RATE: u8 = 10;
/// Lines and columns of a terminal that does not tell them.
const USUAL_SIZE: (u16, u16) = (24, 80);

/// The terminal, or nothing.
pub(crate) fn target() -> ProgressDrawTarget {
    if ProgressDrawTarget::stderr().is_hidden() {
        return ProgressDrawTarget::hidden();
    }
    ProgressDrawTarget::term_like_with_hz(Box::new(Terminal::default()), RATE)
}

/// Collects what is drawn at once.
#[derive(Debug, Default)]
struct Terminal(Mutex<String>);

impl Terminal {
    fn add(&self, text: &str) -> io::Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
        Ok(())
    }

    /// Moves the cursor by `n` lines or columns.
    fn go(&self, n: usize, direction: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.add(&format!("\u{1b}[{n}{direction}")) }
    }
}

fn size() -> (u16, u16) {
    match tcgetwinsize(io::stderr()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => USUAL_SIZE,
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        size().1
    }

    fn height(&self) -> u16 {
        size().0
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.go(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.go(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.go(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.go(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\u{1b}[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let drawn = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if !drawn.is_empty() {
            log_output::draw(&drawn);
        }
        Ok(())
    }
}
