//! What each session on the subscriber is for, which determines its name, timeouts and durability.

use super::settings::LEADER_PATIENCE;

/// Length to which a server cuts `application_name`, in bytes (`NAMEDATALEN`).
const SHOWN: usize = 63;

/// The purpose of a session. It determines `application_name`, timeouts and durability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// State, catalogue, ownership of the subscription.
    Control,
    /// Applies changes; [`Purpose::Durability`] makes them durable.
    Apply,
    /// Applies changes; each commit is durable.
    DurableApply,
    /// Makes earlier commits durable.
    Durability,
    /// Does other jobs of the durability session while that waits.
    Relief,
    /// Copies tables.
    Copy,
    /// Reads which sessions block others.
    Monitor,
    /// Reads state and tables.
    Look,
    /// Reads rows that apply workers will change.
    Prefetch,
    /// Compares tables with the publisher's.
    Verify,
    /// Looks whether another process still runs a subscription, and writes its own beat.
    Standby,
    /// Writes the heartbeat of a run that does not stream yet.
    Heartbeat,
}

impl Purpose {
    const ALL: [Self; 12] = [
        Self::Control,
        Self::Apply,
        Self::DurableApply,
        Self::Durability,
        Self::Relief,
        Self::Copy,
        Self::Monitor,
        Self::Look,
        Self::Prefetch,
        Self::Verify,
        Self::Standby,
        Self::Heartbeat,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Apply | Self::DurableApply => "apply",
            Self::Durability => "durability",
            Self::Relief => "relief",
            Self::Copy => "copy",
            Self::Monitor => "monitor",
            Self::Look => "look",
            Self::Prefetch => "prefetch",
            Self::Verify => "verify",
            Self::Standby => "standby",
            Self::Heartbeat => "heartbeat",
        }
    }

    /// Whether only the process that runs the subscription opens such sessions. Another one may have a control
    /// session too, which waits for the owner lock.
    fn is_of_owner(self) -> bool {
        !matches!(self, Self::Control | Self::Look | Self::Verify | Self::Standby)
    }

    /// Whether the session may write to replicated tables.
    pub(super) fn writes(self) -> bool {
        !matches!(
            self,
            Self::Monitor
                | Self::Look
                | Self::Prefetch
                | Self::Verify
                | Self::Standby
                | Self::Heartbeat
        )
    }

    /// Whether the session writes rows as the native apply worker does, and reads none.
    pub(super) fn only_writes(self) -> bool {
        matches!(self, Self::Apply | Self::DurableApply | Self::Copy)
    }

    /// Results of these sessions are of no use after one second.
    pub(super) fn statement_timeout(self) -> &'static str {
        match self {
            Self::Monitor | Self::Prefetch => "1s",
            _ => "0",
        }
    }

    /// A report does not wait for a copy that holds a lock on its table. The durability session
    /// fails, and ends the run, rather than wait, because others depend on it.
    pub(super) fn lock_timeout(self) -> &'static str {
        match self {
            Self::Look | Self::Standby | Self::Heartbeat => "5s",
            Self::Durability | Self::Relief => LEADER_PATIENCE,
            _ => "0",
        }
    }

    pub(super) fn synchronous_commit(self) -> &'static str {
        match self {
            // If the copy of a table is lost in a crash, its sync LSN is lost too. The next commit
            // of the control session makes both durable.
            Self::Apply | Self::Copy => "off",
            // A heartbeat means nothing after a crash.
            Self::Standby | Self::Heartbeat => "off",
            // Nothing that the publisher or a user is told relies on what these write: it survives a crash, and
            // waits for no standby. A flush makes its own commit wait.
            Self::Durability | Self::Relief | Self::Monitor | Self::Look | Self::Prefetch => {
                "local"
            }
            // Changes of the state are rare, and later steps rely on them. A run sets its control session to
            // `local`: see [`super::LOCAL_COMMITS`].
            Self::DurableApply | Self::Control | Self::Verify => "on",
        }
    }
}

/// The `application_name` of a session, unless the connection string has one.
pub(super) fn application_name(subscription: &str, purpose: Purpose) -> String {
    format!("pgapace {subscription} {}", purpose.name())
}

/// The same as the server shows it. The name of a subscription has letters of one byte only.
fn shown_name(subscription: &str, purpose: Purpose) -> String {
    let mut name = application_name(subscription, purpose);
    name.truncate(SHOWN);
    name
}

/// The name of the session that makes commits durable.
pub(crate) fn name_of_durability(subscription: &str) -> String {
    shown_name(subscription, Purpose::Durability)
}

/// The name of the sessions that apply.
pub(crate) fn name_of_apply(subscription: &str) -> String {
    shown_name(subscription, Purpose::Apply)
}

/// The names of the sessions that only the owner of a subscription opens. A name that is cut so short that
/// sessions of others may have it is not among them.
pub(crate) fn names_of_owner(subscription: &str) -> Vec<String> {
    let shown = |purpose: &Purpose| shown_name(subscription, *purpose);
    let (own, others): (Vec<_>, Vec<_>) =
        Purpose::ALL.into_iter().partition(|purpose| purpose.is_of_owner());
    let others: Vec<_> = others.iter().map(shown).collect();
    own.iter().map(shown).filter(|name| !others.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::{SHOWN, names_of_owner};

    #[test]
    fn names_of_an_owner_are_those_that_a_server_shows() {
        assert!(names_of_owner("s").contains(&"pgapace s durability".to_owned()));
        assert!(!names_of_owner("s").contains(&"pgapace s standby".to_owned()));
        let long = "n".repeat(50);
        let names = names_of_owner(&long);
        assert!(names.contains(&format!("pgapace {long} dura")), "{names:?}");
        // `copy` and `control` begin with one letter.
        let longer = "n".repeat(53);
        let names = names_of_owner(&longer);
        assert!(names.contains(&format!("pgapace {longer} d")), "{names:?}");
        assert!(!names.contains(&format!("pgapace {longer} c")), "{names:?}");
        assert!(names.iter().all(|name| name.len() <= SHOWN));
        // Nothing is left of the purpose.
        assert!([54, 63].iter().all(|length| names_of_owner(&"n".repeat(*length)).is_empty()));
    }
}
