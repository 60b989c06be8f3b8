//! When to read a backlog from a server on the same machine, and how much.
//!
//! The receive window of such a connection is small, and the sender's buffer is large (2.6 MB). As
//! long as messages wait in that buffer, they are sent in packets of half a window. So there should
//! always be some, but the buffer must not be full, or the sender stops.
//!
//! The reader cannot see the sender's buffer, only when it is empty: reading opens the window, the
//! sender fills it again at once, and then less arrives than the window holds. This ends a cycle. The
//! reader pauses, so that the buffer fills, and leaves unread what it has found: the window stays
//! partly closed, and fewer small packets arrive. In the next cycle it reads somewhat faster than
//! the sender sent in this one, so that the buffer becomes empty again a few pauses later.
//!
//! Less than a window may also mean that packets are late: the sender's socket is in use just then, or
//! the kernel's thread that handles packets waits for a CPU. An end of a cycle that was seen in this
//! way can be wrong, and then the rate is too low. So from time to time the reader takes everything,
//! and waits for the next packet: only a small one proves that the sender's buffer was empty.
//!
//! Nothing in this module reads a clock or a socket. docs/performance-trials.md has the measurements.

use std::time::{Duration, Instant};

/// Shortest pause at the beginning of a cycle.
const SHORTEST_PAUSE: Duration = Duration::from_micros(200);
/// Longest pause at the beginning of a cycle. The workers must have enough work for that time.
const LONGEST_PAUSE: Duration = Duration::from_micros(14400);
/// Pause between two reads in a cycle.
const INTERVAL: Duration = Duration::from_micros(4800);
/// How fast the reader is, in percent of the sender's rate. It is faster, so that cycles end.
const READING_PERCENT: u128 = 115;
/// The least that the rate can be, in percent of the rate of the cycle before. A sender that had no
/// CPU seems slow; but reading too fast only ends a cycle early, while reading too slowly stops the
/// sender.
const LEAST_PERCENT: u64 = 80;
/// So long after the last proof that the sender's buffer was empty, the reader takes everything. A
/// sender of 26 MB in a second fills its buffer in that time.
const LONGEST_DOUBT: Duration = Duration::from_millis(100);
/// Data counts as a flow if the previous data arrived no longer ago than this. A publisher that
/// decodes a large transaction sends nothing meanwhile.
const LONGEST_GAP: Duration = Duration::from_millis(20);
/// Bytes per second of a cycle above which the next pause is longer, and below which it is shorter.
const FLOW_RATE: u64 = 2_000_000;
/// Size of the receive window in bytes, before a fuller one was seen.
const SMALLEST_WINDOW: usize = 16 * 1024;

/// The next step of the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Read nothing until then.
    Pause(Instant),
    /// Wait until something can be read, and call [`Pace::arrived`].
    Wait,
    /// Read about this many bytes, or everything: once, and then as long as [`Pace::after_read`] says
    /// so. Then call [`Pace::has_read`].
    Read(Option<usize>),
}

/// The receive window after a read of everything that was in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The sender has filled the window again, and the reader may read more.
    More,
    /// The sender has filled the window again, but the reader has read enough.
    Enough,
    /// The sender did not fill the window.
    Little,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing, or little, is left to read.
    Dry,
    /// The sender's buffer fills until then, and a cycle begins.
    Filling(Instant),
    /// In a cycle. The next read is not before then.
    Reading(Instant),
}

/// The pace of a reader.
#[derive(Debug)]
pub(super) struct Pace {
    phase: Phase,
    pause: Duration,
    /// Bytes per second that the sender sends; unknown before the end of the first cycle.
    rate: Option<u64>,
    last_data: Option<Instant>,
    /// Bytes that the receive window can hold: the most that were found unread.
    window: usize,
    /// When the sender's buffer was last empty, and the bytes read since then.
    empty: Instant,
    bytes: u64,
    /// When the sender's buffer was last certainly empty.
    proof: Instant,
    /// When the pause of this cycle ended, and the bytes read since then.
    began: Instant,
    taken: u64,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Pace {
        Pace {
            phase: Phase::Dry,
            pause: SHORTEST_PAUSE,
            rate: None,
            last_data: None,
            window: SMALLEST_WINDOW,
            empty: now,
            bytes: 0,
            proof: now,
            began: now,
            taken: 0,
        }
    }

    /// The next step, at any time.
    pub(super) fn step(&mut self, now: Instant) -> Step {
        match self.phase {
            Phase::Dry => Step::Wait,
            Phase::Filling(until) | Phase::Reading(until) if now < until => Step::Pause(until),
            Phase::Filling(_) => {
                self.begin(now);
                Step::Read(self.allowance(now))
            }
            Phase::Reading(_) => Step::Read(self.allowance(now)),
        }
    }

    /// After [`Step::Wait`], `unread` bytes or the end of the stream can be read.
    pub(super) fn arrived(&mut self, now: Instant, unread: usize) {
        let flows = self.last_data.is_some_and(|last| now - last < LONGEST_GAP);
        if !flows {
            self.pause = (self.pause / 2).max(SHORTEST_PAUSE);
            self.empty = now;
            self.bytes = 0;
            self.proof = now;
            self.begin(now);
        } else if unread < self.window / 4 {
            self.proof = now;
            self.end_cycle(now);
        } else {
            self.phase = Phase::Reading(now);
        }
    }

    /// After `count` bytes of [`Step::Read`] with that limit were read, `unread` bytes can be read.
    pub(super) fn after_read(
        &mut self,
        limit: Option<usize>,
        count: usize,
        unread: usize,
    ) -> Found {
        self.window = self.window.max(unread);
        let filled = if limit.is_none() { self.window / 8 } else { self.window / 4 * 3 };
        if unread < filled {
            Found::Little
        } else if limit.is_some_and(|limit| limit.saturating_sub(count) < unread / 2) {
            Found::Enough
        } else {
            Found::More
        }
    }

    /// The reader has read `count` bytes, and then `unread` bytes can be read. `found` is
    /// [`Found::More`] if it had no room for more.
    pub(super) fn has_read(&mut self, now: Instant, count: usize, unread: usize, found: Found) {
        self.bytes += count as u64;
        self.taken += count as u64;
        if count > 0 {
            self.last_data = Some(now);
        }
        match found {
            Found::More => self.phase = Phase::Reading(now),
            Found::Enough => self.phase = Phase::Reading(now + INTERVAL.min(self.pause)),
            Found::Little if unread == 0 || self.is_in_doubt(now) => self.phase = Phase::Dry,
            Found::Little => self.end_cycle(now),
        }
    }

    /// Whether the sender's buffer may not have been empty for long.
    fn is_in_doubt(&self, now: Instant) -> bool {
        now - self.proof >= LONGEST_DOUBT
    }

    /// Begins to read, with the allowance of one interval.
    fn begin(&mut self, now: Instant) {
        self.phase = Phase::Reading(now);
        self.began = now;
        self.taken = 0;
    }

    /// How many bytes may be read now; `None` for everything.
    fn allowance(&self, now: Instant) -> Option<usize> {
        let rate = self.rate.filter(|_| !self.is_in_doubt(now))?;
        let micros = (now - self.began + INTERVAL).as_micros();
        let allowed = u128::from(rate) * READING_PERCENT / 100 * micros / 1_000_000;
        let left = allowed.saturating_sub(u128::from(self.taken));
        Some(usize::try_from(left).unwrap_or(usize::MAX))
    }

    /// The sender's buffer is empty: determines its rate and the length of the next pause.
    fn end_cycle(&mut self, now: Instant) {
        let micros = (now - self.empty).as_micros().max(1);
        let rate = u64::try_from(u128::from(self.bytes) * 1_000_000 / micros).unwrap_or(u64::MAX);
        self.pause = if rate >= FLOW_RATE {
            (2 * self.pause).min(LONGEST_PAUSE)
        } else {
            (self.pause / 2).max(SHORTEST_PAUSE)
        };
        self.rate = Some(self.rate.map_or(rate, |last| rate.max(last / 100 * LEAST_PERCENT)));
        self.empty = now;
        self.bytes = 0;
        self.phase = Phase::Filling(now + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use std::mem;

    use super::*;

    const WINDOW: usize = 32 * 1024;
    const SEND_BUFFER: usize = 2_600_000;
    /// Shorter than any pause.
    const TICK: Duration = Duration::from_micros(50);
    const TICKS: u32 = 20_000;
    const MS: u32 = TICKS / 1000;

    /// A sender, its buffer and the receive buffer; all in bytes.
    #[derive(Default)]
    struct Connection {
        /// In the sender's buffer, and in the receive buffer.
        waiting: usize,
        received: usize,
        /// Bytes that came in packets of one message each, and all bytes that were sent.
        small: usize,
        sent: usize,
        /// Bytes for which the sender's buffer had no room.
        refused: usize,
        /// Whether the window is filled later than it is opened, packet by packet.
        is_late: bool,
    }

    impl Connection {
        fn send(&mut self, mut bytes: usize) {
            if self.waiting == 0 {
                let open = bytes.min(WINDOW - self.received);
                self.received += open;
                self.small += open;
                self.sent += open;
                bytes -= open;
            }
            if self.is_late {
                self.fill(WINDOW / 2);
            }
            let accepted = bytes.min(SEND_BUFFER - self.waiting);
            self.refused += bytes - accepted;
            self.waiting += accepted;
            self.sent += accepted;
        }

        fn read(&mut self) -> usize {
            let count = mem::take(&mut self.received);
            if !self.is_late {
                self.fill(WINDOW);
            }
            count
        }

        fn fill(&mut self, packet: usize) {
            let bytes = packet.min(self.waiting).min(WINDOW - self.received);
            self.received += bytes;
            self.waiting -= bytes;
        }

        fn small_percent(&self) -> usize {
            100 * self.small / self.sent
        }
    }

    /// Reads from a sender with that many kilobytes a second at each tick.
    fn run(ticks: u32, rate: impl Fn(u32) -> usize) -> Connection {
        read(Connection::default(), ticks, rate)
    }

    fn read(mut connection: Connection, ticks: u32, rate: impl Fn(u32) -> usize) -> Connection {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for tick in 0..ticks {
            let now = start + tick * TICK;
            connection.send(rate(tick) / 20);
            loop {
                match pace.step(now) {
                    Step::Pause(until) => {
                        assert!(until > now && until <= now + LONGEST_PAUSE);
                        break;
                    }
                    Step::Wait if connection.received == 0 => break,
                    Step::Wait => pace.arrived(now, connection.received),
                    Step::Read(limit) => {
                        let mut count = 0;
                        let found = loop {
                            count += connection.read();
                            let found = pace.after_read(limit, count, connection.received);
                            if found != Found::More {
                                break found;
                            }
                        };
                        pace.has_read(now, count, connection.received, found);
                    }
                }
            }
        }
        connection
    }

    #[test]
    fn few_bytes_come_in_small_packets_and_the_sender_never_stops() {
        for (rate, most) in [(4000, 25), (8000, 6), (15_000, 3), (30_000, 2), (60_000, 1)] {
            let connection = run(5 * TICKS, |_| rate);
            let percent = connection.small_percent();
            assert!(percent <= most, "{percent} % at {rate} kB/s");
            assert_eq!(connection.refused, 0, "{rate} kB/s");
        }
    }

    /// Then cycles seem to end while the sender's buffer is not empty.
    #[test]
    fn the_sender_never_stops_if_packets_are_late() {
        for rate in [4000, 8000, 15_000, 25_000, 60_000, 100_000] {
            let late = Connection { is_late: true, ..Connection::default() };
            let connection = read(late, 5 * TICKS, |_| rate);
            assert_eq!(connection.refused, 0, "{rate} kB/s");
        }
    }

    #[test]
    fn the_pace_follows_a_sender_that_becomes_faster_and_slower() {
        for period in [30 * MS, 300 * MS, TICKS] {
            let connection =
                run(6 * TICKS, |tick| if tick % (2 * period) < period { 3000 } else { 30_000 });
            let percent = connection.small_percent();
            assert!(percent <= 6, "{percent} %, {period} ticks");
            assert_eq!(connection.refused, 0, "{period} ticks");
        }
    }

    /// As while a large transaction is decoded, which is sent afterwards.
    #[test]
    fn a_sender_may_be_silent_between_bursts() {
        for silence in [5 * MS, 15 * MS, 50 * MS] {
            let period = silence + 20 * MS;
            let connection =
                run(5 * TICKS, |tick| if tick % period < silence { 0 } else { 15_000 });
            let percent = connection.small_percent();
            assert!(percent <= 15, "{percent} %, {silence} ticks");
            assert_eq!(connection.refused, 0, "{silence} ticks");
        }
    }

    #[test]
    fn everything_is_read_soon_after_the_sender_has_ended() {
        for end in (100..10_000).step_by(271) {
            let after = 130 * MS;
            let connection = run(end + after, |tick| if tick < end { 12_000 } else { 0 });
            assert_eq!(connection.received + connection.waiting, 0, "{end}");
        }
    }

    #[test]
    fn a_lone_message_is_read_at_once_and_a_slow_flow_soon() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let mut now = start;
        for _ in 0..50 {
            now += LONGEST_GAP;
            assert_eq!(pace.step(now), Step::Wait);
            pace.arrived(now, 100);
            assert!(matches!(pace.step(now), Step::Read(_)));
            pace.has_read(now, 100, 0, Found::Little);
        }
        for _ in 0..50 {
            now += Duration::from_millis(2);
            assert_eq!(pace.step(now), Step::Wait);
            pace.arrived(now, 100);
            assert_eq!(pace.step(now), Step::Pause(now + SHORTEST_PAUSE));
            now += SHORTEST_PAUSE;
            assert!(
                matches!(pace.step(now), Step::Read(limit) if limit.is_none_or(|limit| limit >= 100))
            );
            pace.has_read(now, 100, 0, Found::Little);
        }
    }
}
