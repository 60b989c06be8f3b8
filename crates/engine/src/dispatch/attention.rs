//! When the leader reads the stream and executes groups itself.
//!
//! A commit of the publisher that waits for pgapace passes the receiver, the leader and a worker, and each
//! has to be woken. Where groups are small and end soon, the leader does the work of all three, one group
//! after the other.

use std::time::Duration;

use super::Pacing;

/// Decides it by the groups that were assigned lately.
#[derive(Debug, Default)]
pub struct Attention {
    on: bool,
    /// Small groups since the last look.
    small_groups: usize,
    /// Groups one after the other that did not end in time.
    late: u32,
    /// How long the leader left its groups to workers after such groups, and until when.
    pause: Duration,
    off_until: Duration,
}

impl Attention {
    /// A small group is to be assigned, with nothing else in flight. Returns whether the leader executes
    /// it itself.
    pub fn small_group(&mut self, pacing: &Pacing, now: Duration) -> bool {
        self.small_groups += 1;
        self.on |= self.small_groups >= pacing.attended_groups && now >= self.off_until;
        self.on
    }

    /// The leader has executed a group: whether it ended in time.
    pub fn executed(&mut self, in_time: bool, pacing: &Pacing, now: Duration) {
        self.late = if in_time { 0 } else { self.late + 1 };
        if self.late < pacing.attended_late {
            return;
        }
        // Where commits are slow, other threads cost little and save waiting: commits of several workers
        // overlap.
        (self.on, self.late) = (false, 0);
        let soon = now < self.off_until + self.pause;
        let pause = if soon { 2 * self.pause } else { pacing.attention_pause };
        self.pause = pause.min(pacing.longest_attention_pause);
        self.off_until = now + self.pause;
    }

    /// Looks at the load, a few times a second. Returns whether the leader goes on.
    pub fn look(&mut self) -> bool {
        self.on &= std::mem::take(&mut self.small_groups) > 0;
        self.on
    }

    /// Whether the leader executes small groups itself.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACING: Pacing = Pacing {
        attended_groups: 3,
        attended_late: 2,
        attention_pause: Duration::from_millis(100),
        longest_attention_pause: Duration::from_millis(300),
        ..Pacing::MEASURED
    };

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn it_begins_with_several_small_groups_and_ends_without_any() {
        let mut attention = Attention::default();
        let group = |attention: &mut Attention| attention.small_group(&PACING, at(0));
        assert_eq!([(); 2].map(|()| group(&mut attention)), [false, false]);
        assert!(!attention.look());
        assert_eq!([(); 4].map(|()| group(&mut attention)), [false, false, true, true]);
        assert!(attention.look());
        assert!(group(&mut attention));
        assert!(attention.look() && !attention.look());
        assert!(!group(&mut attention));
    }

    #[test]
    fn it_pauses_longer_each_time_where_groups_end_late() {
        let mut attention = Attention::default();
        let begins = |attention: &mut Attention, now| {
            attention.look();
            (0..3).any(|_| attention.small_group(&PACING, at(now)))
        };
        assert!(begins(&mut attention, 0));
        for in_time in [false, true, false] {
            attention.executed(in_time, &PACING, at(1));
            assert!(attention.is_on(), "a single one may be late");
        }
        let mut now = 1;
        for pause in [100, 200, 300, 300] {
            attention.executed(false, &PACING, at(now));
            attention.executed(false, &PACING, at(now));
            assert!(!attention.is_on() && !begins(&mut attention, now + pause - 1), "{pause}");
            now += pause;
            assert!(begins(&mut attention, now), "{pause}");
        }
        // After a long time in which they ended in time.
        now += 301;
        attention.executed(false, &PACING, at(now));
        attention.executed(false, &PACING, at(now));
        assert!(begins(&mut attention, now + 100));
    }
}
