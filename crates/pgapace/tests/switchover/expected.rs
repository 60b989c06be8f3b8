//! The faults of a switchover, and the result of each fault in each step.

/// A fault while the verb records a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The verb is killed; what it has sent has no effect.
    VerbKilled,
    /// The verb is killed; what it has sent takes effect.
    VerbKilledAfterSending,
    /// The process that applies is killed.
    ProcessKilled,
    /// The server from which writes move stops at once, and starts again.
    SourceStops,
    /// The server to which writes move does so.
    TargetStops,
    /// The same, but they stay away until the verb has given up.
    SourceStaysAway,
    TargetStaysAway,
    /// The connections of the verb stay open, but its server does not answer until the verb has given up.
    SourceSilent,
    TargetSilent,
}

impl Fault {
    /// Whether the fault lasts until the verb has given up.
    pub(super) fn lasts(self) -> bool {
        self.is_silent() || matches!(self, Self::SourceStaysAway | Self::TargetStaysAway)
    }

    pub(super) fn is_silent(self) -> bool {
        matches!(self, Self::SourceSilent | Self::TargetSilent)
    }
}

pub(super) const FAULTS: [Fault; 9] = [
    Fault::VerbKilled,
    Fault::VerbKilledAfterSending,
    Fault::ProcessKilled,
    Fault::SourceStops,
    Fault::TargetStops,
    Fault::SourceStaysAway,
    Fault::TargetStaysAway,
    Fault::SourceSilent,
    Fault::TargetSilent,
];

pub(super) const STEPS: [&str; 8] =
    ["stopping", "draining", "aside", "verifying", "sequences", "slot", "ended", "opened"];

/// Exit codes and a text of the verb. No code is that of a verb that was killed.
pub(super) struct Said {
    pub(super) codes: &'static [i32],
    pub(super) text: &'static str,
}

/// The result of this fault in this step.
pub(super) fn expected(fault: Fault, step: &str) -> Option<Said> {
    let place = STEPS.iter().position(|one| *one == step).expect("a step");
    let before = |name: &str| place < STEPS.iter().position(|one| *one == name).expect("a step");
    const UNDONE: &str = "Everything was undone";
    const DONE: &str = "event=\"subscription_switched_over\"";
    Some(match fault {
        Fault::VerbKilled | Fault::VerbKilledAfterSending => return None,
        // Behind the hand-over nobody needs the process.
        Fault::ProcessKilled if before("verifying") => Said { codes: &[8, 14, 16], text: UNDONE },
        // Behind the last look for late changes nobody needs the server from which writes move.
        // Without it the process that applies may be missed first.
        Fault::SourceStops if before("ended") => Said { codes: &[4, 8, 16], text: UNDONE },
        Fault::ProcessKilled | Fault::SourceStops => Said { codes: &[0], text: DONE },
        Fault::TargetStops if before("opened") => Said { codes: &[5], text: UNDONE },
        Fault::TargetStops => Said { codes: &[0], text: DONE },
        // A slot that is created meanwhile, or a comparison, may end at the deadline first.
        Fault::SourceSilent if before("ended") => {
            Said { codes: &[4, 5, 8, 14, 16], text: "could not be undone" }
        }
        Fault::SourceStaysAway if before("ended") => {
            Said { codes: &[4, 8, 16], text: "could not be undone" }
        }
        Fault::SourceStaysAway | Fault::SourceSilent => {
            Said { codes: &[0], text: "event=\"ended_slot_left\"" }
        }
        Fault::TargetStaysAway | Fault::TargetSilent if before("opened") => {
            Said { codes: &[5], text: "could not be undone" }
        }
        Fault::TargetStaysAway | Fault::TargetSilent => {
            Said { codes: &[5], text: "The same command again opens the" }
        }
    })
}
