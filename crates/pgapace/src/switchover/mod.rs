//! `pgapace switchover`: moves writes from the publisher to the subscriber.
//!
//! ```text
//! running ──► stopping ──────────────► slot ──────────────────► ended
//!    ▲        writes are stopped,      the slot of the way      run refuses from here on;
//!    │        all is applied           back is created          the new side is opened
//!    └──────────────┴───── undo ─────────┘
//! ```
//!
//! Each step is recorded in `pgapace.switchover` on the subscriber before it is done. So after a crash
//! the row tells what has to be undone ([`Step::undo`]). Up to `ended` every failure undoes everything.
//! From `ended` on nothing is undone, because applications may write on the new side: the same
//! procedure with the sides swapped leads back.
//!
//! Before `ended` is recorded, this process owns the subscription and no apply session is left. Then it
//! looks into the slot: a transaction with published changes that is not applied means that somebody
//! still writes, and everything is undone.

mod procedure;
mod publisher;
mod record;

pub(crate) use procedure::{Request, abort, go, plan};
pub(crate) use record::{check_not_ended, ended_sql};

/// How far a switchover has come. A step is recorded before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Writes on the publisher are, or are about to be, stopped.
    Stopping,
    /// The slot of the way back is, or is about to be, created on the subscriber.
    Slot,
    /// The subscription has ended.
    Ended,
}

/// What takes a step back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undo {
    DropSlot,
    ResumeWrites,
}

impl Step {
    pub(crate) const ALL: [Self; 3] = [Self::Stopping, Self::Slot, Self::Ended];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::Slot => "slot",
            Self::Ended => "ended",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.name() == name)
    }

    /// What has to be undone if the procedure ends in this step, the latest first; `None` if nothing may
    /// be undone any more.
    pub(crate) fn undo(self) -> Option<&'static [Undo]> {
        match self {
            Self::Stopping => Some(&[Undo::ResumeWrites]),
            Self::Slot => Some(&[Undo::DropSlot, Undo::ResumeWrites]),
            Self::Ended => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Step, Undo};

    #[test]
    fn every_step_before_the_end_resumes_writes_last() {
        for step in Step::ALL {
            match step.undo() {
                Some(undo) => assert_eq!(undo.last(), Some(&Undo::ResumeWrites)),
                None => assert_eq!(step, Step::Ended),
            }
        }
    }

    #[test]
    fn a_later_step_undoes_what_an_earlier_one_does() {
        let undo = |step: Step| step.undo().unwrap_or_default();
        assert!(undo(Step::Slot).ends_with(undo(Step::Stopping)));
    }

    #[test]
    fn names_lead_back_to_steps() {
        for step in Step::ALL {
            assert_eq!(Step::from_name(step.name()), Some(step));
        }
        assert_eq!(Step::from_name("none"), None);
    }
}
