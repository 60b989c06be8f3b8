//! Output that its reader cannot hold up.
//!
//! A reader may stop: a terminal after Ctrl-S, or a log collector that hangs. A write then takes as long as the reader
//! likes, and apply must not lag because of that, nor a switchover keep writes stopped. So a thread of its own writes,
//! and a line waits for it only for a moment. In ordinary times that is enough: a line is there whatever ends the process
//! next. Lines that cannot be written are kept up to a limit; further ones are dropped and counted.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many bytes of lines are kept until they are written.
const MOST_BYTES: usize = 1 << 20;
/// How long a line waits until it is written, unless lines before it wait already.
const PATIENCE: Duration = Duration::from_millis(100);
/// Between two attempts, if the output does not block.
const RETRY_EVERY: Duration = Duration::from_millis(10);

thread_local! {
    /// Whether this thread writes the lines of others.
    static WRITES: Cell<bool> = const { Cell::new(false) };
}

/// How long the end of the process waits for the reader of an output that takes nothing. It waits for a terminal without a
/// limit: a user is there, and has to see the last lines.
pub(crate) fn patience_at_end(output: &impl IsTerminal) -> Option<Duration> {
    const PATIENCE: Duration = Duration::from_secs(10);
    (!output.is_terminal()).then_some(PATIENCE)
}

/// Writes everything, also to an output that does not block.
pub(crate) fn write_all(output: &mut impl Write, line: &[u8]) {
    let mut left = line;
    while !left.is_empty() {
        match output.write(left) {
            Ok(0) => return,
            Ok(written) => left = &left[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_EVERY),
            // The output may be closed, or its disk full.
            Err(_) => return,
        }
    }
}

/// The lines that are not written yet.
#[derive(Debug)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    /// Of these lines, and of the one that is being written.
    bytes: usize,
    /// How many lines were taken in, and how many of them are written.
    sent: u64,
    written: u64,
    /// How many were dropped since the last report.
    dropped: u64,
    /// Whether the thread logs that lines were dropped.
    reports: bool,
    /// Whether a line has waited for too long, and the lines since were not written either.
    blocked: bool,
    thread: WritingThread,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WritingThread {
    None,
    Runs,
    /// The system has refused it.
    Refused,
}

impl Queue {
    /// Returns whether there was room.
    fn add(&mut self, line: &[u8]) -> bool {
        if self.bytes > 0 && self.bytes + line.len() > MOST_BYTES {
            return false;
        }
        self.bytes += line.len();
        self.sent += 1;
        self.lines.push_back(line.to_vec());
        true
    }

    fn is_done(&self) -> bool {
        self.written == self.sent && !self.reports
    }
}

/// An output, with the lines that are not written yet.
pub(crate) struct Outlet {
    queue: Mutex<Queue>,
    changed: Condvar,
    write: fn(&[u8]),
    report: fn(u64),
}

impl Outlet {
    /// `report` tells how many lines were dropped, in a line that is sent here or nowhere.
    pub(crate) const fn new(write: fn(&[u8]), report: fn(u64)) -> Self {
        let queue = Queue {
            lines: VecDeque::new(),
            bytes: 0,
            sent: 0,
            written: 0,
            dropped: 0,
            reports: false,
            blocked: false,
            thread: WritingThread::None,
        };
        Self { queue: Mutex::new(queue), changed: Condvar::new(), write, report }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a line written, and waits a moment for that.
    pub(crate) fn send(&'static self, line: &[u8]) {
        let mut queue = self.queue();
        if queue.thread == WritingThread::None {
            queue.thread = self.start_thread();
        }
        if queue.thread == WritingThread::Refused {
            drop(queue);
            return (self.write)(line);
        }
        if !queue.add(line) {
            queue.dropped += 1;
            return;
        }
        self.changed.notify_all();
        if WRITES.get() {
            return;
        }
        let this = queue.sent;
        let waits = |queue: &mut Queue| queue.written < this && !queue.blocked;
        let waited = self.changed.wait_timeout_while(queue, PATIENCE, waits);
        let (mut queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            queue.blocked = true;
            self.changed.notify_all();
        }
    }

    /// Has something written that is soon replaced, unless lines wait.
    pub(crate) fn draw(&'static self, text: &[u8]) {
        if !self.queue().blocked {
            self.send(text);
        }
    }

    fn start_thread(&'static self) -> WritingThread {
        let thread = std::thread::Builder::new().name("log".to_owned());
        match thread.spawn(move || self.write_lines()) {
            Ok(_) => WritingThread::Runs,
            Err(_) => WritingThread::Refused,
        }
    }

    fn write_lines(&self) {
        WRITES.set(true);
        let mut queue = self.queue();
        loop {
            let Some(line) = queue.lines.pop_front() else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            (self.write)(&line);
            queue = self.queue();
            queue.bytes -= line.len();
            queue.written += 1;
            if queue.lines.is_empty() {
                queue.blocked = false;
                queue.reports = queue.dropped > 0;
            }
            self.changed.notify_all();
            if queue.reports {
                let dropped = std::mem::take(&mut queue.dropped);
                drop(queue);
                (self.report)(dropped);
                queue = self.queue();
                queue.reports = false;
                self.changed.notify_all();
            }
        }
    }

    /// Waits until all lines are written, or for `patience` without any. Returns whether they are written.
    pub(crate) fn finish(&self, patience: Option<Duration>) -> bool {
        let mut queue = self.queue();
        let (mut written, mut since) = (queue.written, Instant::now());
        while !queue.is_done() {
            if queue.written > written {
                (written, since) = (queue.written, Instant::now());
            }
            if patience.is_some_and(|patience| since.elapsed() >= patience) {
                return false;
            }
            let waited = self.changed.wait_timeout(queue, PATIENCE);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use super::{MOST_BYTES, Outlet};

    #[test]
    fn lines_that_nobody_takes_are_kept_up_to_a_limit_and_then_counted() {
        /// The reader takes nothing while this is locked.
        static READER: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        static DROPPED: AtomicU64 = AtomicU64::new(0);
        static OUTLET: Outlet = Outlet::new(
            |line| READER.lock().unwrap().extend_from_slice(line),
            |lines| {
                DROPPED.fetch_add(lines, Ordering::Relaxed);
                OUTLET.send(b"dropped\n");
            },
        );
        let first = b"first\n";
        OUTLET.send(first);
        assert!(OUTLET.finish(None));
        let reader = READER.lock().unwrap();
        assert_eq!(*reader, first);
        let begun = Instant::now();
        let line = [b'x'; 1024];
        for _ in 0..MOST_BYTES / line.len() + 7 {
            OUTLET.send(&line);
        }
        assert!(!OUTLET.finish(Some(Duration::ZERO)));
        // All lines together wait no longer than one.
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        drop(reader);
        assert!(OUTLET.finish(None));
        assert_eq!(DROPPED.load(Ordering::Relaxed), 7);
        OUTLET.send(b"last\n");
        assert!(OUTLET.finish(None));
        let written = READER.lock().unwrap();
        assert_eq!(written.len(), first.len() + MOST_BYTES + "dropped\nlast\n".len());
        assert!(written.ends_with(b"xdropped\nlast\n"));
    }
}
