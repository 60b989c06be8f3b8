//! The times at which pgapace looks whether the subscriber's tables have changed.
//!
//! Nothing announces such a change. What would lose rows fails by itself, in the statement that meets the
//! changed table: see [`Table::is_this_one`](crate::subscriber::catalogue::Table::is_this_one). The looks find
//! the rest, such as triggers. They are made beside the stream, so that no transaction waits for one.

use std::time::{Duration, Instant};

use pgoutput::Lsn;

/// Shortest time between two looks.
const INTERVAL: Duration = Duration::from_secs(2);
/// Longest time between two looks while nothing is applied: tables are often altered while an application is
/// stopped.
const IDLE: Duration = Duration::from_secs(60);
/// A look may take this share of the time: with very many tables it is made less often.
const SHARE: u32 = 20;

/// Decides when the next look is due. While nothing is applied, each pause is twice as long as the one before.
#[derive(Debug)]
pub(crate) struct SchemaWatch {
    asked: Instant,
    pause: Duration,
    idle: Duration,
    waiting: bool,
    applied: Lsn,
}

impl SchemaWatch {
    pub(crate) fn new(now: Instant) -> Self {
        Self { asked: now, pause: INTERVAL, idle: INTERVAL, waiting: false, applied: Lsn::INVALID }
    }

    /// Whether to look now; if so, an answer follows.
    pub(crate) fn is_due(&mut self, applied: Lsn, now: Instant) -> bool {
        let is_idle = applied == self.applied;
        let pause = if is_idle { self.pause.max(self.idle) } else { self.pause };
        if self.waiting || now.duration_since(self.asked) < pause {
            return false;
        }
        self.idle = if is_idle { (self.idle * 2).min(IDLE) } else { INTERVAL };
        self.applied = applied;
        self.asked = now;
        self.waiting = true;
        true
    }

    /// The answer has come.
    pub(crate) fn answered(&mut self, now: Instant) {
        self.waiting = false;
        self.pause = INTERVAL.max(now.duration_since(self.asked) * SHARE);
    }
}

#[cfg(test)]
mod tests {
    use super::{IDLE, INTERVAL, SHARE, SchemaWatch};
    use pgoutput::Lsn;
    use std::time::{Duration, Instant};

    /// The pauses before the next looks, each of which takes `look`, while `applied` says what is applied.
    fn pauses<const N: usize>(look: Duration, applied: impl Fn(u64) -> Lsn) -> [Duration; N] {
        let (mut now, second) = (Instant::now(), Duration::from_secs(1));
        let mut watch = SchemaWatch::new(now);
        let mut looks = 0;
        [(); N].map(|()| {
            let since = now;
            while !watch.is_due(applied(looks), now) {
                now += second;
            }
            looks += 1;
            let pause = now - since;
            now += look;
            watch.answered(now);
            pause
        })
    }

    #[test]
    fn looks_are_rare_while_nothing_is_applied() {
        let seconds = |pauses: [Duration; 8]| pauses.map(|pause| pause.as_secs());
        let moving = pauses(Duration::ZERO, |looks| Lsn(looks + 1));
        assert_eq!(seconds(moving), [INTERVAL.as_secs(); 8]);
        let once = |_| Lsn(1);
        let longest = IDLE.as_secs();
        assert_eq!(seconds(pauses(Duration::ZERO, once)), [2, 2, 4, 8, 16, 32, longest, longest]);
        let again = |looks| Lsn(1 + looks / 4);
        assert_eq!(seconds(pauses(Duration::ZERO, again)), [2, 2, 4, 8, 2, 2, 4, 8]);
        let slow = pauses::<3>(Duration::from_secs(3), once);
        assert!(slow[2] + Duration::from_secs(3) >= Duration::from_secs(3) * SHARE);
    }
}
