//! Whether a run that failed is followed by another one, and after which pause.
//!
//! | what failed | at the first start | once it has run, in any process | once this process has streamed, or was the standby of one that has |
//! |---|---|---|---|
//! | a server refuses connections, starts, or recovers | again for `--connect-timeout`, 10 s by default | again for `--connect-timeout`, an hour by default | again, for ever unless `--connect-timeout` says otherwise |
//! | a lost connection, a server without room | the end | the same | the same |
//! | a refused session: a login, a database that accepts none | the end | the end | again, for ever unless `--connect-timeout` says otherwise; the end of a standby that has not streamed itself, and with `--until` |
//! | anything else that may pass, while pgapace waits for a server | the same | the same | the same |
//! | anything else that may pass | the end | the end | again, for ever |
//! | the publisher fails while it decodes WAL | again, 20 times unless something is applied | the same | the same |
//! | anything else | the end | the end | the end |
//!
//! Where the end of one subscription is not the end of the process, because others run in it, that
//! subscription is tried again, with pauses of up to a minute: a user may have repaired the cause.

use std::time::{Duration, Instant};

use crate::error::{Failure, Recovery};

/// The first pause before another run, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The pause between two attempts to reach a server: a twentieth of the time that it was away, within
/// these limits. It may be back at any moment, and a short outage should not become much longer.
const SHORTEST_AWAY: Duration = Duration::from_millis(20);
const LONGEST_AWAY: Duration = Duration::from_millis(200);
const PART_OF_AWAY: u32 = 20;
/// The first pause after a failure that a user must repair, and the longest.
const FIRST_FAILED: Duration = Duration::from_secs(5);
const LONGEST_FAILED: Duration = Duration::from_secs(60);
/// A run that lasted this long was not a failed attempt: the next pause is short again.
const GOOD_RUN: Duration = Duration::from_secs(30);
/// How long pgapace waits for a server by default: while a user watches, and during a crash recovery.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);
const LATER_TIMEOUT: Duration = Duration::from_secs(3600);
/// How often a publisher may fail to decode the same changes: for more than a minute. A native
/// subscription tries for ever. Some such errors are bugs of the server that depend on its caches, but
/// others come back each time, and a user should then learn of it.
const DECODING_ATTEMPTS: u32 = 20;
/// How often the same reason to wait is logged.
const NAME_AGAIN: Duration = Duration::from_secs(30);

/// The runs of the subscription before the one that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PreviousRuns {
    /// None that is known: this may be its first start.
    None,
    /// Its slot is there, or one of that name.
    Perhaps,
    /// It has run before: its state is there.
    Earlier,
    /// Another process has run it, and this one waited as its standby. Whether the servers accept this one is not known.
    OfAnotherProcess,
    /// This process has copied tables for it, or streamed.
    OfThisProcess,
}

/// The action after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Another run after this pause; `named` if the reason is to be logged.
    Again { pause: Duration, named: bool },
    /// pgapace has waited for the server as long as it may.
    Waited(Duration),
    /// The end.
    End,
}

/// The pauses of one subscription.
#[derive(Debug)]
pub(super) struct Retry {
    /// The value of `--connect-timeout`.
    timeout: Option<Duration>,
    pause: Duration,
    failed_pause: Duration,
    /// When pgapace began to wait for a server.
    away_since: Option<Instant>,
    /// Failures of the publisher in decoding since something was applied.
    in_decoding: u32,
    /// The first failure since something was applied.
    failing_since: Option<Instant>,
    named: Option<(String, Instant)>,
}

impl Retry {
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        Self {
            timeout,
            pause: FIRST_PAUSE,
            failed_pause: FIRST_FAILED,
            away_since: None,
            in_decoding: 0,
            failing_since: None,
            named: None,
        }
    }

    /// Sets the value of `--connect-timeout` for failures from now on.
    pub(super) fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// A run that began at `started` has applied something, or not, and has failed `now`.
    pub(super) fn after_run(&mut self, started: Instant, now: Instant, advanced: bool) {
        if advanced {
            self.failing_since = None;
        }
        if advanced || now.duration_since(started) >= GOOD_RUN {
            // Decoding the same changes may take long each time.
            let in_decoding = if advanced { 0 } else { self.in_decoding };
            let failing_since = self.failing_since;
            *self = Self { in_decoding, failing_since, ..Self::new(self.timeout) };
        }
    }

    /// A run has failed. Whether runs have failed for `patience`, and nothing was applied meanwhile.
    pub(super) fn fails_for(&mut self, patience: Duration, now: Instant) -> bool {
        now.duration_since(*self.failing_since.get_or_insert(now)) >= patience
    }

    /// Both servers were reached, by a run that has failed or not. A server that does not serve is still waited
    /// for.
    pub(super) fn reached(&mut self, failure: Option<&Failure>) {
        let accepted = |failure: &Failure| !failure.is_connection_lost() && !failure.is_refused();
        if failure.is_none_or(accepted) {
            self.away_since = None;
        }
    }

    /// The action after a failure, by its kind.
    pub(super) fn next(
        &mut self,
        failure: &Failure,
        previous_runs: PreviousRuns,
        now: Instant,
    ) -> Next {
        // A server that has just started may still be a standby, or without room, for a moment.
        let back_soon = self.away_since.is_some() && failure.is_transient();
        let waits = failure.is_away()
            || back_soon
            || previous_runs >= PreviousRuns::Perhaps && failure.is_connection_lost()
            || previous_runs == PreviousRuns::OfThisProcess && failure.is_refused();
        if !waits {
            self.away_since = None;
            let in_decoding = matches!(failure.recovery, Recovery::DecodeAgain);
            self.in_decoding += u32::from(in_decoding);
            let again = failure.is_transient() && previous_runs >= PreviousRuns::OfAnotherProcess
                || in_decoding && self.in_decoding <= DECODING_ATTEMPTS;
            return if again { self.again(failure, now) } else { Next::End };
        }
        let since = *self.away_since.get_or_insert(now);
        let limit = self.timeout.or(match previous_runs {
            PreviousRuns::None => Some(FIRST_TIMEOUT),
            PreviousRuns::Perhaps | PreviousRuns::Earlier => Some(LATER_TIMEOUT),
            PreviousRuns::OfAnotherProcess | PreviousRuns::OfThisProcess => None,
        });
        let waited = now.duration_since(since);
        match limit {
            Some(limit) if waited >= limit => Next::Waited(waited),
            _ => self.again(failure, now),
        }
    }

    /// The pause after a failure that ends a subscription which runs alone.
    pub(super) fn after_end(&mut self) -> Duration {
        let pause = self.failed_pause;
        self.failed_pause = (pause * 2).min(LONGEST_FAILED);
        pause
    }

    /// Another run, after a pause.
    pub(super) fn again(&mut self, failure: &Failure, now: Instant) -> Next {
        let has_session = !failure.is_connection_lost() && !failure.is_refused();
        let pause = if failure.is_away() || self.away_since.is_some() && has_session {
            let away = self.away_since.map_or(Duration::ZERO, |since| now.duration_since(since));
            (away / PART_OF_AWAY).clamp(SHORTEST_AWAY, LONGEST_AWAY)
        } else {
            let pause = self.pause;
            self.pause = (pause * 2).min(LONGEST_PAUSE);
            pause
        };
        let same = self.named.as_ref().is_some_and(|(message, at)| {
            *message == failure.message && now.duration_since(*at) < NAME_AGAIN
        });
        if !same {
            self.named = Some((failure.message.clone(), now));
        }
        Next::Again { pause, named: !same }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        DECODING_ATTEMPTS, FIRST_FAILED, FIRST_PAUSE, FIRST_TIMEOUT, GOOD_RUN, LATER_TIMEOUT,
        LONGEST_FAILED, LONGEST_PAUSE, Next, PreviousRuns, Retry,
    };
    use crate::error::{Class, Failure, Recovery};
    use std::time::{Duration, Instant};

    fn failure(recovery: Recovery) -> Failure {
        Failure { recovery, ..Failure::new(Class::Subscriber, "x") }
    }

    /// How long pgapace waits for a server that never comes back, and the longest pause.
    fn waited(
        timeout: Option<Duration>,
        previous_runs: PreviousRuns,
    ) -> Option<(Duration, Duration)> {
        let (start, mut longest) = (Instant::now(), Duration::ZERO);
        let (mut retry, mut now) = (Retry::new(timeout), start);
        let away = failure(Recovery::WaitForServer);
        while now < start + 2 * LATER_TIMEOUT {
            match retry.next(&away, previous_runs, now) {
                Next::Again { pause, .. } => {
                    longest = longest.max(pause);
                    now += pause;
                }
                Next::Waited(waited) => return Some((waited, longest)),
                Next::End => return None,
            }
        }
        Some((Duration::MAX, longest))
    }

    #[test]
    fn a_server_that_is_away_is_looked_for_every_second_and_not_for_ever() {
        let limits = [
            (None, PreviousRuns::None, FIRST_TIMEOUT),
            (None, PreviousRuns::Earlier, LATER_TIMEOUT),
            (Some(Duration::from_secs(60)), PreviousRuns::None, Duration::from_secs(60)),
            (Some(Duration::from_secs(60)), PreviousRuns::OfThisProcess, Duration::from_secs(60)),
            (None, PreviousRuns::OfThisProcess, Duration::MAX),
        ];
        for (timeout, previous_runs, limit) in limits {
            let (waited, longest) = waited(timeout, previous_runs).expect("it is waited for");
            assert!(waited >= limit, "{previous_runs:?}: {waited:?}");
            assert!(waited == Duration::MAX || waited < limit + Duration::from_secs(1));
            assert!(longest < Duration::from_secs(1));
        }
    }

    #[test]
    fn temporary_errors_are_retried_once_the_run_has_begun() {
        let (mut retry, now) = (Retry::new(None), Instant::now());
        let full = failure(Recovery::Retry);
        let lost = failure(Recovery::Reconnect);
        let wrong = failure(Recovery::None);
        assert_eq!(retry.next(&full, PreviousRuns::None, now), Next::End);
        assert_eq!(retry.next(&full, PreviousRuns::Earlier, now), Next::End);
        assert_eq!(retry.next(&lost, PreviousRuns::None, now), Next::End);
        assert!(matches!(retry.next(&lost, PreviousRuns::Earlier, now), Next::Again { .. }));
        assert!(matches!(retry.next(&full, PreviousRuns::OfThisProcess, now), Next::Again { .. }));
        assert_eq!(retry.next(&wrong, PreviousRuns::OfThisProcess, now), Next::End);
    }

    #[test]
    fn a_session_that_is_refused_is_tried_again_once_this_process_has_streamed() {
        let (refused, now) = (failure(Recovery::Admission), Instant::now());
        let others = [
            PreviousRuns::None,
            PreviousRuns::Perhaps,
            PreviousRuns::Earlier,
            PreviousRuns::OfAnotherProcess,
        ];
        for previous_runs in others {
            assert_eq!(Retry::new(None).next(&refused, previous_runs, now), Next::End);
        }
        let timeout = Duration::from_secs(60);
        for limit in [None, Some(timeout)] {
            let (mut retry, mut later, mut last) = (Retry::new(limit), now, Duration::ZERO);
            let next = loop {
                // The other server is reached each time.
                retry.reached(Some(&refused));
                match retry.next(&refused, PreviousRuns::OfThisProcess, later) {
                    Next::Again { pause, .. } if later < now + 10 * timeout => {
                        assert!(pause >= last);
                        (later, last) = (later + pause, pause);
                    }
                    next => break next,
                }
            };
            assert_eq!(last, LONGEST_PAUSE);
            assert_eq!(matches!(next, Next::Waited(_)), limit.is_some(), "{next:?}");
        }
    }

    #[test]
    fn a_publisher_that_cannot_decode_is_asked_again_but_not_for_ever() {
        let (mut retry, now) = (Retry::new(None), Instant::now());
        let error = failure(Recovery::DecodeAgain);
        let attempts = |retry: &mut Retry| {
            let again = |_: &u32| {
                retry.after_run(now, now + GOOD_RUN, false);
                retry.next(&error, PreviousRuns::OfThisProcess, now) != Next::End
            };
            (0..1000).take_while(again).count()
        };
        assert_eq!(attempts(&mut retry), DECODING_ATTEMPTS as usize);
        assert_eq!(attempts(&mut retry), 0);
        retry.after_run(now, now, true);
        assert_eq!(attempts(&mut retry), DECODING_ATTEMPTS as usize);
    }

    #[test]
    fn runs_that_apply_nothing_have_failed_since_the_first_one() {
        let (mut retry, now, patience) = (Retry::new(None), Instant::now(), GOOD_RUN * 2);
        let later = now + patience;
        assert!(!retry.fails_for(patience, now));
        retry.after_run(now, later, false);
        assert!(retry.fails_for(patience, later));
        retry.after_run(now, later, true);
        assert!(!retry.fails_for(patience, later));
    }

    /// A standby that is behind, for example, is reached by each run.
    #[test]
    fn a_server_that_is_reached_but_does_not_serve_is_not_waited_for_for_ever() {
        let (start, timeout) = (Instant::now(), Duration::from_secs(60));
        let (mut retry, mut now) = (Retry::new(Some(timeout)), start);
        let lost = failure(Recovery::Reconnect);
        let mut longest = Duration::ZERO;
        while now < start + 10 * timeout {
            retry.reached(Some(&lost));
            match retry.next(&lost, PreviousRuns::OfThisProcess, now) {
                Next::Again { pause, .. } => {
                    longest = longest.max(pause);
                    now += pause;
                }
                next => {
                    assert!(matches!(next, Next::Waited(_)), "{next:?}");
                    break;
                }
            }
        }
        assert_eq!(longest, LONGEST_PAUSE);
        assert!(now < start + timeout + LONGEST_PAUSE);
        retry.reached(None);
        assert!(matches!(retry.next(&lost, PreviousRuns::OfThisProcess, now), Next::Again { .. }));
    }

    /// A server that ends its recovery accepts read-only sessions first.
    #[test]
    fn temporary_errors_are_waited_for_like_a_server_before_the_run() {
        let (mut retry, now) = (Retry::new(None), Instant::now());
        let (starts, read_only) = (failure(Recovery::WaitForServer), failure(Recovery::Retry));
        assert_eq!(retry.next(&read_only, PreviousRuns::None, now), Next::End);
        assert!(matches!(retry.next(&starts, PreviousRuns::None, now), Next::Again { .. }));
        assert!(matches!(retry.next(&read_only, PreviousRuns::None, now), Next::Again { .. }));
        let later = now + FIRST_TIMEOUT;
        assert_eq!(retry.next(&read_only, PreviousRuns::None, later), Next::Waited(FIRST_TIMEOUT));
        assert_eq!(retry.next(&failure(Recovery::None), PreviousRuns::None, now), Next::End);
    }

    #[test]
    fn pauses_grow_and_start_anew_when_something_was_applied() {
        let (mut retry, now) = (Retry::new(None), Instant::now());
        let full = failure(Recovery::Retry);
        let pause = |retry: &mut Retry| match retry.next(&full, PreviousRuns::OfThisProcess, now) {
            Next::Again { pause, .. } => pause,
            next => panic!("{next:?}"),
        };
        let mut last = Duration::ZERO;
        for _ in 0..10 {
            last = pause(&mut retry);
            retry.after_run(now, now, false);
        }
        assert_eq!(last, LONGEST_PAUSE);
        retry.after_run(now, now, true);
        assert_eq!(pause(&mut retry), FIRST_PAUSE);
        assert_eq!(retry.after_end(), FIRST_FAILED);
        for _ in 0..10 {
            last = retry.after_end();
        }
        assert_eq!(last, LONGEST_FAILED);
    }

    #[test]
    fn the_same_reason_is_not_named_every_second() {
        let (mut retry, now) = (Retry::new(None), Instant::now());
        let away = failure(Recovery::WaitForServer);
        let named = |next| matches!(next, Next::Again { named: true, .. });
        assert!(named(retry.next(&away, PreviousRuns::Earlier, now)));
        assert!(!named(retry.next(&away, PreviousRuns::Earlier, now + Duration::from_secs(1))));
        assert!(named(retry.next(&away, PreviousRuns::Earlier, now + Duration::from_secs(31))));
    }
}
