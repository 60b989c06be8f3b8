//! Decides which step follows a run that failed. `retry_loop` takes the step.
//!
//! | the failure, the first line that fits | the step |
//! |---|---|
//! | another process became the owner first | another run, which waits for that process |
//! | a table cannot be read in binary | another run, with text |
//! | an internal error of a publisher that sends transactions in progress | another run, which has them sent after their commit |
//! | a transaction did not end in time for another process that asked | another run |
//! | the subscription was switched over | the end: its way back is applied |
//! | a change could not be applied, and its table may lack changes, as a look at the publications shows | another run, which treats the table as `--on-missed-changes` says |
//! | reloaded settings may be the cause, and no run has streamed with them | another run, with the earlier ones |
//! | a change of one table, with `--on-table-error block` | another run, which blocks the table |
//! | a stop was requested, and the failure would pass | the end that was requested |
//! | any other | as [`super::retry`] says |

use std::time::Duration;

use super::lessons::is_of_table;
use super::retry::Next;
use crate::error::{Class, Failure, Recovery};
use crate::sqlstate;

/// A step that follows from the failure alone. It does not count as a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// Another run, in which values are sent as text.
    SendText,
    /// Another run, to which transactions are sent only after their commit: PostgreSQL has bugs in decoding transactions
    /// in progress, which it reports as internal errors.
    SendWhole,
    /// Another run: another process asked for the subscription, and a transaction did not end in time.
    AskedFor,
    /// The end, so that the way back is applied.
    WayBack,
}

impl Expected {
    /// `streamed`: transactions in progress were sent to the run.
    pub(super) fn of(failure: &Failure, stop_requested: bool, streamed: bool) -> Option<Self> {
        match &failure.recovery {
            Recovery::SendText => Some(Self::SendText),
            Recovery::DecodeAgain
                if streamed && failure.sqlstate.as_deref() == Some(sqlstate::INTERNAL_ERROR) =>
            {
                Some(Self::SendWhole)
            }
            _ if failure.class == Class::Stopped && !stop_requested => Some(Self::AskedFor),
            Recovery::WayBack(_) => Some(Self::WayBack),
            _ => None,
        }
    }
}

/// The facts that decide the step, besides the failure.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Circumstances {
    pub(super) stop_requested: bool,
    /// The settings were reloaded, and no run has streamed with them.
    pub(super) settings_on_trial: bool,
    /// The value of `--on-table-error` is `block`.
    pub(super) blocks_tables: bool,
}

/// The step after a failure that counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Another run, with the settings of before a reload.
    GoBack,
    /// Another run, which blocks the table.
    BlockTable,
    /// The end that was requested.
    Stop,
    /// Another run after this pause; `named` if the reason is to be logged.
    Again { pause: Duration, named: bool },
    /// The end: pgapace has waited for the server as long as it may.
    Waited(Duration),
    /// The end.
    End,
}

impl Step {
    /// `next`: what would follow if there were only the pauses.
    pub(super) fn after(failure: &Failure, next: Next, around: Circumstances) -> Self {
        let passes = matches!(next, Next::Again { .. });
        // A wrong password, for example. Without SQLSTATE: a server was not asked, or its answer does not fit the
        // settings.
        let of_settings =
            failure.is_refused() || !failure.is_connection_lost() && failure.sqlstate.is_none();
        match next {
            _ if around.settings_on_trial && (of_settings || !passes) => Self::GoBack,
            Next::End if around.blocks_tables && is_of_table(failure) => Self::BlockTable,
            _ if around.stop_requested && (passes || failure.class == Class::Stopped) => Self::Stop,
            Next::Again { pause, named } => Self::Again { pause, named },
            Next::Waited(waited) => Self::Waited(waited),
            Next::End => Self::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Circumstances, Expected, Step};
    use crate::error::{Class, Failure, Offender, Recovery};
    use crate::subscription::retry::Next;
    use engine::table_name::TableName;
    use pgoutput::{Lsn, Xid};
    use std::time::Duration;

    const AGAIN: Next = Next::Again { pause: Duration::from_secs(1), named: true };

    fn failure(class: Class, recovery: Recovery) -> Failure {
        Failure { recovery, ..Failure::new(class, "x") }
    }

    /// A change of one table that cannot be applied.
    fn of_table() -> Failure {
        let relation = Some(TableName { schema: "public".to_owned(), name: "orders".to_owned() });
        let offender = Offender {
            commit_lsn: Lsn(1),
            is_prepare: false,
            xid: Xid(1),
            table: None,
            relation,
            operation: "INSERT",
            key: None,
        };
        let sqlstate = Some("23505".to_owned());
        Failure {
            sqlstate,
            offender: Some(Box::new(offender)),
            ..failure(Class::Apply, Recovery::None)
        }
    }

    #[test]
    fn a_stop_of_the_run_is_no_failure_unless_the_process_stops() {
        let stopped = failure(Class::Stopped, Recovery::None);
        assert_eq!(Expected::of(&stopped, false, true), Some(Expected::AskedFor));
        assert_eq!(Expected::of(&stopped, true, true), None);
        let text = failure(Class::Subscriber, Recovery::SendText);
        assert_eq!(Expected::of(&text, true, true), Some(Expected::SendText));
        assert_eq!(Expected::of(&of_table(), false, true), None);
    }

    #[test]
    fn only_an_internal_error_of_streaming_changes_what_is_sent() {
        let decoding = |code: &str| Failure {
            sqlstate: Some(code.to_owned()),
            ..failure(Class::Publisher, Recovery::DecodeAgain)
        };
        let internal = decoding("XX000");
        assert_eq!(Expected::of(&internal, false, true), Some(Expected::SendWhole));
        assert_eq!(Expected::of(&internal, false, false), None);
        assert_eq!(Expected::of(&decoding("22012"), false, true), None);
        let elsewhere = Failure { recovery: Recovery::None, ..internal };
        assert_eq!(Expected::of(&elsewhere, false, true), None);
    }

    #[test]
    fn reloaded_settings_are_rejected_for_what_they_may_have_caused() {
        let around = Circumstances { settings_on_trial: true, ..Circumstances::default() };
        let lost = failure(Class::Subscriber, Recovery::Reconnect);
        assert!(matches!(Step::after(&lost, AGAIN, around), Step::Again { .. }));
        assert_eq!(Step::after(&lost, Next::End, around), Step::GoBack);
        let refused = failure(Class::Config, Recovery::None);
        assert_eq!(Step::after(&refused, AGAIN, around), Step::GoBack);
        let password = Failure {
            sqlstate: Some("28P01".to_owned()),
            ..failure(Class::Publisher, Recovery::Admission)
        };
        assert_eq!(Step::after(&password, AGAIN, around), Step::GoBack);
        let trusted = Circumstances::default();
        assert!(matches!(Step::after(&password, AGAIN, trusted), Step::Again { .. }));
        let full = Failure {
            sqlstate: Some("53100".to_owned()),
            ..failure(Class::Apply, Recovery::Retry)
        };
        assert!(matches!(Step::after(&full, AGAIN, around), Step::Again { .. }));
        let stopping = Circumstances { stop_requested: true, ..around };
        assert_eq!(Step::after(&full, AGAIN, stopping), Step::Stop);
    }

    #[test]
    fn a_table_is_blocked_only_for_an_error_that_stays() {
        let blocks = Circumstances { blocks_tables: true, ..Circumstances::default() };
        assert_eq!(Step::after(&of_table(), Next::End, blocks), Step::BlockTable);
        assert_eq!(Step::after(&of_table(), Next::End, Circumstances::default()), Step::End);
        assert!(matches!(Step::after(&of_table(), AGAIN, blocks), Step::Again { .. }));
        let away = failure(Class::Subscriber, Recovery::WaitForServer);
        let waited = Duration::from_secs(10);
        assert_eq!(Step::after(&away, Next::Waited(waited), blocks), Step::Waited(waited));
    }

    #[test]
    fn a_requested_stop_does_not_hide_an_error_that_stays() {
        let stopping = Circumstances { stop_requested: true, ..Circumstances::default() };
        assert_eq!(Step::after(&of_table(), Next::End, stopping), Step::End);
        assert_eq!(Step::after(&of_table(), AGAIN, stopping), Step::Stop);
        let stopped = failure(Class::Stopped, Recovery::None);
        assert_eq!(Step::after(&stopped, Next::End, stopping), Step::Stop);
    }
}
