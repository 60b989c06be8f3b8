//! `pgapace switchover`: moves writes from the publisher to the subscriber.
//!
//! ```text
//! running ──► stopping ──► draining ──► aside ──► verifying ──► sequences ──► slot ──► ended ──► opened
//!    ▲        writes are   all up to    nothing   both sides    are set on    of the   run       the new
//!    │        stopped      the end      is        are quiet:    the           way      applies   side
//!    │                     LSN is       applied   --verify      subscriber    back     the way   takes
//!    │                     applied      any more                                       back      writes
//!    └────────────┴────────────┴───────────┴──────────┴─────────────┴─── undo ──┘
//! ```
//!
//! Each step is recorded in `pgapace.switchover` on the subscriber before it is done. So after a crash
//! the row tells what has to be undone ([`Step::undo`]). Up to `ended` every failure undoes everything,
//! and a signal is one ([`deadline`]). From `ended` on nothing is undone, because applications may write on the new
//! side: the same procedure with the sides swapped leads back ([`back`]). A signal then ends nothing, nor an undo that
//! has begun: nobody can write before they are done.
//!
//! Before `ended` is recorded, this process owns the subscription and no apply session is left. Then it
//! looks into the slot: a transaction with published changes that is not applied means that a session
//! still writes on the publisher, and everything is undone. It looks before the sequences are set, and again
//! when the slot of the way back is created, which may wait for other transactions.
//!
//! Nothing may wait longer than the deadline while writes are stopped ([`deadline`]), not even for a server that does not
//! answer. If that is the subscriber, writes are resumed without it, as long as nothing can have ended the subscription
//! ([`undo`]). Commits on the publisher
//! wait for no standby, because the subscription may be the one: it does not answer while the verb lasts.
//!
//! The process that applied the subscription stands aside meanwhile ([`crate::hand_over`]). Afterwards it
//! finds what became of the subscription: undone, it applies it further; ended, it turns round and applies
//! the way back ([`way_back`]). So does any later `pgapace run` of the subscription.

mod applying_roles;
pub(crate) mod back;
mod carried;
mod command;
mod deadline;
mod display;
mod finish;
pub(crate) mod lost;
mod plan;
mod procedure;
mod publisher;
mod record;
mod roles;
mod servers;
mod silence;
mod undo;
mod verify_at_end;
pub(crate) mod way_back;

pub(crate) use plan::{CHECKS, Findings, plan};
pub(crate) use procedure::{Request, Sides, go, lock, refuse_under_way};
pub(crate) use record::{check_finished, check_not_ended, ended_sql, has_ended, refuse_ended};
pub(crate) use undo::{NOT_BEGUN_SINCE, Writes, abort};

/// How far a switchover has come. A step is recorded before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Writes on the publisher are, or are about to be, stopped.
    Stopping,
    /// The subscriber applies the changes from before writes were stopped.
    Draining,
    /// The process that applies gives the subscription up for a while.
    Aside,
    /// Tables are compared.
    Verifying,
    /// Sequences are set on the subscriber, never backwards: that need not be undone.
    Sequences,
    /// The slot of the way back is, or is about to be, created on the subscriber.
    Slot,
    /// The subscription has ended.
    Ended,
    /// The new side takes writes.
    Opened,
}

/// An action that undoes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Undo {
    DropSlot,
    ResumeWrites,
}

impl Step {
    pub(crate) const ALL: [Self; 8] = [
        Self::Stopping,
        Self::Draining,
        Self::Aside,
        Self::Verifying,
        Self::Sequences,
        Self::Slot,
        Self::Ended,
        Self::Opened,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::Draining => "draining",
            Self::Aside => "aside",
            Self::Verifying => "verifying",
            Self::Sequences => "sequences",
            Self::Slot => "slot",
            Self::Ended => "ended",
            Self::Opened => "opened",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.name() == name)
    }

    /// The actions that undo everything if the procedure ends in this step, the latest first; `None` if
    /// nothing may be undone any more.
    pub(crate) fn undo(self) -> Option<&'static [Undo]> {
        match self {
            Self::Stopping | Self::Draining | Self::Aside | Self::Verifying | Self::Sequences => {
                Some(&[Undo::ResumeWrites])
            }
            Self::Slot => Some(&[Undo::DropSlot, Undo::ResumeWrites]),
            Self::Ended | Self::Opened => None,
        }
    }

    /// Whether the subscription has ended.
    pub(crate) fn has_ended(self) -> bool {
        self.undo().is_none()
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
                None => assert!(matches!(step, Step::Ended | Step::Opened)),
            }
        }
    }

    #[test]
    fn a_later_step_undoes_what_an_earlier_one_does() {
        let undo = |step: Step| step.undo().unwrap_or_default();
        for pair in Step::ALL.windows(2).filter(|pair| pair[1].undo().is_some()) {
            assert!(undo(pair[1]).ends_with(undo(pair[0])));
        }
    }

    #[test]
    fn names_lead_back_to_steps() {
        for step in Step::ALL {
            assert_eq!(Step::from_name(step.name()), Some(step));
        }
        assert_eq!(Step::from_name("none"), None);
    }
}
