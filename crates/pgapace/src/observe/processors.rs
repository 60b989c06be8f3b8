//! Whether processors are short: whether a thread waits for one at least half as long as it runs.
//!
//! Linux counts both for each thread, in `/proc/thread-self/schedstat` (kernel documentation,
//! `scheduler/sched-stats.rst`). Where that file does not exist, or has only zeros because the kernel does
//! not count, processors are taken to be free.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How long the thread is observed before it is judged.
const OBSERVED: Duration = Duration::from_millis(100);
/// A thread that runs for a smaller part of the time (1 in n) is not judged: it has nothing to do.
const LEAST_PART: u32 = 200;

/// How long a thread has run, and how long it was ready to run and waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Times {
    ran: Duration,
    waited: Duration,
}

/// The processors, as the thread sees them that made this.
#[derive(Debug)]
pub(crate) struct Processors {
    file: Option<File>,
    times: Times,
    read_at: Instant,
    short: bool,
}

impl Processors {
    /// For the calling thread only.
    pub(crate) fn of_this_thread() -> Self {
        let file = File::open("/proc/thread-self/schedstat").ok();
        let times = file.as_ref().and_then(read).unwrap_or_default();
        Self { file, times, read_at: Instant::now(), short: false }
    }

    /// Whether the thread lately waited for a processor at least half as long as it ran. Reads the file
    /// at most ten times a second.
    pub(crate) fn are_short(&mut self) -> bool {
        let elapsed = self.read_at.elapsed();
        if elapsed >= OBSERVED
            && let Some(now) = self.file.as_ref().and_then(read)
        {
            self.short = is_short(self.times, now, elapsed);
            self.times = now;
            self.read_at += elapsed;
        }
        self.short
    }
}

fn is_short(before: Times, now: Times, elapsed: Duration) -> bool {
    let ran = now.ran.saturating_sub(before.ran);
    let waited = now.waited.saturating_sub(before.waited);
    2 * waited >= ran && ran >= elapsed / LEAST_PART
}

fn read(file: &File) -> Option<Times> {
    let mut bytes = [0; 96];
    let count = file.read_at(&mut bytes, 0).ok()?;
    parse(std::str::from_utf8(&bytes[..count]).ok()?)
}

/// Nanoseconds on a processor, nanoseconds of waiting for one, and the number of time slices.
fn parse(text: &str) -> Option<Times> {
    let mut fields = text.split_ascii_whitespace();
    let mut next = || fields.next()?.parse().ok().map(Duration::from_nanos);
    Some(Times { ran: next()?, waited: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn times(ran: u64, waited: u64) -> Times {
        Times { ran: Duration::from_millis(ran), waited: Duration::from_millis(waited) }
    }

    #[test]
    fn a_thread_that_waits_nearly_as_long_as_it_runs_shows_that_processors_are_short() {
        let before = times(1000, 5000);
        for (now, short) in [
            (times(1010, 5030), true),
            (times(1020, 5010), true),
            (times(1030, 5010), false),
            (times(1010, 5000), false),
            // It hardly ran.
            (times(1000, 5000), false),
            (times(1000, 5050), false),
        ] {
            assert_eq!(is_short(before, now, Duration::from_millis(100)), short, "{now:?}");
        }
    }

    #[test]
    fn the_file_of_the_kernel_is_understood() {
        assert_eq!(parse("2000000 3000000 17\n"), Some(times(2, 3)));
        assert_eq!(parse("2000000\n"), None);
        assert_eq!(parse("0 x 1"), None);
    }

    /// The times are those of the thread that asks, not of the whole process.
    #[test]
    fn a_thread_is_judged_by_its_own_times() {
        const LONG: Duration = Duration::from_millis(20);
        let ran = || Processors::of_this_thread().times.ran;
        // It runs for so long however short processors are; a kernel that does not count ends it.
        let busy = std::thread::spawn(move || {
            let begun = Instant::now();
            while ran() < LONG && (ran() > Duration::ZERO || begun.elapsed() < LONG) {}
            ran()
        });
        // Fails if the thread has panicked.
        if busy.join().unwrap() == Duration::ZERO {
            return;
        }
        assert!(std::thread::spawn(ran).join().unwrap() < LONG);
    }
}
