//! Tables that are blocked because they cannot be copied, while all others stream on.

use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::state::error_detail;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::tablesync::table_state;

/// Whether a failure of a copy beside the stream is one of its tables: they are blocked and copied again later, also if
/// the failure may pass, and all others stream on. Otherwise the run ends: the process is to stop, does not own the
/// subscription, or has lost a server. A server that has no room for one more session is not lost.
pub(super) fn is_of_its_tables(failure: &Failure) -> bool {
    let of_the_run = matches!(
        failure.class,
        Class::Stopped
            | Class::HandedOver
            | Class::Busy
            | Class::Disabled
            | Class::Slot
            | Class::History
    );
    // A refusal of the operating system is Internal too, but transient.
    let bug = failure.class == Class::Internal && !failure.is_transient();
    let full = failure.sqlstate.as_deref() == Some(sqlstate::TOO_MANY_CONNECTIONS);
    !of_the_run && !bug && (full || !failure.is_connection_lost())
}

/// Blocks tables and logs it. `lacks_from` is where their changes begin, if no copy follows.
pub(super) fn block(
    control: &mut Session,
    owner: OwnedEpoch,
    tables: &[(TableName, Failure)],
    lacks_from: Option<Lsn>,
) -> Result<()> {
    let until = if lacks_from.is_some() { "pgapace resync" } else { "its obstacle is gone" };
    for (table, failure) in tables {
        error_detail::write(control, owner.id, &table.to_string(), failure)?;
        let reason = error_detail::public_text(failure);
        table_state::block(control, owner, table, &reason, lacks_from)?;
        tracing::warn!(
            event = "table_blocked",
            table = table.to_string(),
            sqlstate = failure.sqlstate,
            until,
            error = %failure,
            "table cannot be copied; other tables continue"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::is_of_its_tables;
    use crate::error::{Class, Failure};

    #[test]
    fn failures_of_the_run_are_not_those_of_a_table() {
        let failure = |class| Failure::new(class, "failed");
        let of = |class, code: &str| Failure {
            sqlstate: Some(code.to_owned()),
            ..failure(class).not_serving()
        };
        for class in [Class::Publisher, Class::Subscriber, Class::Apply, Class::Mismatch] {
            assert!(is_of_its_tables(&failure(class)));
            assert!(is_of_its_tables(&failure(class).transient(true)));
            assert!(is_of_its_tables(&of(class, "53300")), "no room for one more session");
            assert!(!is_of_its_tables(&failure(class).not_serving()));
            assert!(!is_of_its_tables(&of(class, "57P01")));
        }
        for class in [Class::Stopped, Class::HandedOver, Class::Busy, Class::Slot] {
            assert!(!is_of_its_tables(&failure(class).transient(true)));
            assert!(!is_of_its_tables(&of(class, "53300")));
        }
        assert!(!is_of_its_tables(&Failure::internal("a bug")));
        let refused = std::io::Error::other("no thread");
        assert!(is_of_its_tables(&Failure::refused_by_system("start a thread", &refused)));
    }
}
