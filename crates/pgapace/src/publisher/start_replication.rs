//! The START_REPLICATION command of each version, and its errors.

use pgoutput::{Lsn, Streaming};
use wire::{quote_ident, quote_replication_literal};

use crate::error::{Class, Failure, Result};
use crate::publisher::session::{Publisher, is_standby};
use crate::publisher::slot;
use crate::sqlstate;

/// Options of START_REPLICATION other than the protocol version.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamOptions {
    /// Leave out changes that have a replication origin (16 or later).
    pub(crate) origin_none: bool,
    /// Send prepared transactions at their PREPARE (15 or later). The slot stores this option, so
    /// it stays on.
    pub(crate) two_phase: bool,
    /// Send values in binary format.
    pub(crate) binary: bool,
    /// When large transactions are sent. Every supported version can send them while they are in
    /// progress.
    pub(crate) streaming: Streaming,
}

/// Returns the START_REPLICATION command, with the highest protocol version and the options that
/// the server supports.
pub(crate) fn start_command(
    major: u32,
    slot: &str,
    from: Lsn,
    publications: &[String],
    options: &StreamOptions,
) -> String {
    let protocol = match major {
        16.. => 4,
        15 => 3,
        _ => 2,
    };
    let names: Vec<_> = publications.iter().map(|name| quote_ident(name)).collect();
    let mut sql = format!(
        "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '{protocol}', \
         publication_names {}",
        quote_ident(slot),
        quote_replication_literal(&names.join(","))
    );
    if major >= 16 {
        sql.push_str(if options.origin_none { ", origin 'none'" } else { ", origin 'any'" });
    }
    if options.two_phase {
        sql.push_str(", two_phase 'on'");
    }
    if options.binary {
        sql.push_str(", binary 'true'");
    }
    match options.streaming {
        Streaming::Off => {}
        Streaming::On => sql.push_str(", streaming 'on'"),
        Streaming::Parallel => sql.push_str(", streaming 'parallel'"),
    }
    sql.push(')');
    sql
}

/// The failure of START_REPLICATION. Nothing is decoded yet, so the server's own hint is the next step. It may have
/// lost the slot since that was checked: its messages have any language, so the slot is read again.
pub(crate) fn refused(publisher: &Publisher, name: &str, error: &wire::Error) -> Failure {
    let failure = failure(error);
    if failure.is_connection_lost() || failure.class == Class::Busy {
        return failure;
    }
    match check_slot(publisher, name) {
        Err(found) if found.class == Class::Slot => found,
        _ => failure,
    }
}

fn failure(error: &wire::Error) -> Failure {
    let mut failure = Failure::publisher(error, "starting the stream");
    if failure.sqlstate.as_deref() == Some(sqlstate::OBJECT_IN_USE) {
        failure.class = Class::Busy;
        failure = failure.transient(true);
    }
    // Before 16, no server decodes during recovery. One that is at the end of it accepts sessions a moment earlier.
    if failure.sqlstate.as_deref() == Some(sqlstate::FEATURE_NOT_SUPPORTED) {
        let hint =
            "pgapace run tries again until the server has ended its recovery, or is promoted.";
        failure = failure.hint(hint).not_serving();
    }
    failure
}

fn check_slot(publisher: &Publisher, name: &str) -> Result<Lsn> {
    let mut session = publisher.connect_to_look()?;
    let (found, recovers) = (slot::find(&mut session, name)?, is_standby(&mut session)?);
    slot::check_resume(name, found.as_ref(), recovers, Lsn(u64::MAX))
}

#[cfg(test)]
mod tests {
    use wire::ServerError;

    use super::{Lsn, StreamOptions, Streaming, failure, start_command};
    use crate::error::{Class, Recovery};
    use crate::sqlstate;

    #[test]
    fn an_error_of_the_start_is_none_of_decoding() {
        let refused = |code: &str| {
            let mut said = ServerError::default();
            code.clone_into(&mut said.code);
            said.hint = Some("the server's".to_owned());
            failure(&wire::Error::Server(Box::new(said)))
        };
        let busy = refused(sqlstate::OBJECT_IN_USE);
        assert!(busy.class == Class::Busy && busy.is_transient());
        let recovers = refused(sqlstate::FEATURE_NOT_SUPPORTED);
        assert!(matches!(recovers.recovery, Recovery::Reconnect));
        for code in [sqlstate::UNDEFINED_OBJECT, sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE] {
            let other = refused(code);
            assert_eq!(
                (other.class, other.hint.as_deref()),
                (Class::Publisher, Some("the server's"))
            );
            assert!(matches!(other.recovery, Recovery::None));
        }
    }

    #[test]
    fn options_follow_the_version() {
        let publications = ["p".to_owned(), "it's \"q\"".to_owned()];
        assert_eq!(
            start_command(14, "s", Lsn(16), &publications[..1], &StreamOptions::default()),
            "START_REPLICATION SLOT \"s\" LOGICAL 0/10 (proto_version '2', \
             publication_names '\"p\"')"
        );
        let options = StreamOptions {
            origin_none: true,
            two_phase: true,
            binary: true,
            streaming: Streaming::On,
        };
        let newest = start_command(18, "s", Lsn(16), &publications, &options);
        assert!(newest.contains("proto_version '4'"), "{newest}");
        assert!(newest.contains(r#"publication_names '"p","it''s ""q"""'"#), "{newest}");
        let last = "origin 'none', two_phase 'on', binary 'true', streaming 'on')";
        assert!(newest.ends_with(last), "{newest}");
    }
}
