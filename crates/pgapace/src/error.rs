//! Failures. The class of a failure tells who has to act, and decides the exit code.

use std::fmt;

use engine::table_name::TableName;
use pgoutput::{Lsn, Xid};

use crate::encoding_error::{self, Origin};
use crate::sqlstate;
use crate::subscriber::missing_label;
use crate::subscriber::state::conflicts::Conflict;
use crate::subscriber::state::schema;
use crate::switchover::way_back::WayBack;

/// Classes of failures; each has one documented exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// A bug, or a resource that the operating system refuses.
    Internal,
    /// Configuration: file, connection string, combination of settings.
    Config,
    /// The publisher cannot be reached, is too old, or refuses.
    Publisher,
    /// The subscriber cannot be reached, is too old, or refuses.
    Subscriber,
    /// Publisher and subscriber do not fit together: tables, columns, identities.
    Mismatch,
    /// The slot is gone, invalidated, or ahead of the subscriber.
    Slot,
    /// Another process uses this subscription or its slot.
    Busy,
    /// A change could not be applied.
    Apply,
    /// The publisher's history is not the one that the subscriber followed.
    History,
    /// An earlier error disabled the subscription.
    Disabled,
    /// Stopped on request before the goal was reached: --until, or what the verb is to do.
    Stopped,
    /// The spool: its directory is full or cannot be used.
    Spool,
    /// The subscriber is behind the publisher, more than `--max-lag` or than the verb needs.
    Behind,
    /// `status --check`: a subscription is retrying after an error.
    Retrying,
    /// `status --check`: a subscription does not run.
    NotRunning,
    /// `status --check`: the state is not known.
    Unknown,
    /// A verification found rows that differ.
    Different,
    /// Another process asked this one to give the subscription up.
    HandedOver,
    /// A recording cannot be written, is damaged, or does not fit the subscriber.
    Recording,
}

impl Class {
    /// The process exit code. Documented in `pgapace --help` and docs/verbs.md.
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Internal => 1,
            // 2 is a usage error, given by the command line parser.
            Self::Config => 3,
            Self::Publisher => 4,
            Self::Subscriber => 5,
            Self::Mismatch => 6,
            Self::Slot => 7,
            Self::Busy => 8,
            Self::Apply => 9,
            Self::History => 10,
            Self::Stopped => 11,
            Self::Spool => 12,
            Self::Disabled => 13,
            Self::Behind => 14,
            Self::Retrying => 15,
            Self::NotRunning => 16,
            Self::Unknown => 17,
            Self::Different => 18,
            Self::HandedOver => 19,
            Self::Recording => 20,
        }
    }

    /// The class of a failure that was recorded with its exit code.
    pub(crate) fn of_exit_code(code: u8) -> Option<Self> {
        let all = [
            Self::Internal,
            Self::Config,
            Self::Publisher,
            Self::Subscriber,
            Self::Mismatch,
            Self::Slot,
            Self::Busy,
            Self::Apply,
            Self::History,
            Self::Disabled,
            Self::Stopped,
            Self::Spool,
            Self::Behind,
            Self::Retrying,
            Self::NotRunning,
            Self::Unknown,
            Self::Different,
            Self::HandedOver,
            Self::Recording,
        ];
        all.into_iter().find(|class| class.exit_code() == code)
    }
}

/// Which change could not be applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offender {
    pub(crate) commit_lsn: Lsn,
    /// The transaction was to be prepared, and the LSN is that of its PREPARE.
    pub(crate) is_prepare: bool,
    pub(crate) xid: Xid,
    pub(crate) table: Option<String>,
    /// The table, if it is one.
    pub(crate) relation: Option<TableName>,
    pub(crate) operation: &'static str,
    pub(crate) key: Option<String>,
}

/// The alternate form has no key.
impl fmt::Display for Offender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lsn = if self.is_prepare { "PREPARE at LSN" } else { "commit LSN" };
        write!(f, "transaction {} with {lsn} {}", self.xid, self.commit_lsn)?;
        write!(f, ", {}", self.operation)?;
        if let Some(table) = &self.table {
            write!(f, " on {table}")?;
        }
        let names_row = !f.alternate();
        if let Some(key) = self.key.as_ref().filter(|_| names_row) {
            write!(f, ", key {key}")?;
        }
        Ok(())
    }
}

/// A failure: message, context, detail and hint, as PostgreSQL shows them.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) class: Class,
    pub(crate) message: String,
    pub(crate) sqlstate: Option<String>,
    pub(crate) detail: Option<String>,
    pub(crate) hint: Option<String>,
    /// What to change on the subscriber, where `hint` also has the next step of a run that stops.
    pub(crate) remedy: Option<Box<str>>,
    pub(crate) offender: Option<Box<Offender>>,
    /// The functions of the subscriber in which the error occurred, one on each line. They quote no rows.
    pub(crate) user_code: Option<Box<str>>,
    /// The commit LSN of the last transaction that may be the cause, if `offender` is not known.
    pub(crate) last_suspect: Option<Lsn>,
    /// The conflict behind it, to count and record.
    pub(crate) conflict: Option<Box<Conflict>>,
    pub(crate) recovery: Recovery,
    /// The error of the server is about a row of schema pgapace.
    pub(crate) of_state: bool,
}

/// The way to go on after a failure. Whether another run follows also depends on the runs before: see
/// `subscription/retry.rs`.
#[derive(Debug)]
pub(crate) enum Recovery {
    /// Nothing: another run would fail as well.
    None,
    /// A retry from the recorded state.
    Retry,
    /// A retry when the connection can be established again: it was lost, or refused for a reason that may pass.
    Reconnect,
    /// A retry when the server accepts connections again: it is down, starts, stops or recovers.
    WaitForServer,
    /// A retry if this process has streamed: the server refuses the session, and has accepted such sessions before. An
    /// administrator may have closed the database for a while.
    Admission,
    /// A retry in which values are sent as text.
    SendText,
    /// A retry in which the subscriber's catalogue is read again, once for each commit LSN: the definition of the
    /// table that was read before allows no such change.
    ReadCatalogue,
    /// A few retries: the publisher could not decode its WAL or could not write a change. A bug of the server
    /// may be the cause, and its caches may differ the next time.
    DecodeAgain,
    /// The subscription was switched over: this way back is to be applied instead.
    WayBack(Box<WayBack>),
}

impl Failure {
    /// The message may repeat an argument or a setting with a password, which it does not show.
    pub(crate) fn new(class: Class, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            class,
            message: wire::without_passwords(&message).into_owned(),
            sqlstate: None,
            detail: None,
            hint: None,
            remedy: None,
            offender: None,
            user_code: None,
            last_suspect: None,
            conflict: None,
            recovery: Recovery::None,
            of_state: false,
        }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(Class::Internal, message)
    }

    /// The operating system refused to start a thread, or to open a file, which this process needs.
    /// `doing` completes "cannot …". The cause may pass, so the exit code lets a service manager start the process again.
    pub(crate) fn refused_by_system(doing: &str, error: &std::io::Error) -> Self {
        Self::new(Class::Internal, format!("cannot {doing}: {error}"))
            .hint(Self::LIMITS_HINT)
            .transient(true)
    }

    /// The next step when the operating system refuses a thread or a file.
    pub(crate) const LIMITS_HINT: &'static str = "The process has reached a limit of threads, files or memory. In \
        the systemd unit, raise TasksMax and LimitNOFILE; else see ulimit -u and ulimit -n.";

    /// The operating system refuses so many bytes for `what`. As with [`Self::refused_by_system`], the cause may pass.
    pub(crate) fn out_of_memory(bytes: usize, what: &str) -> Self {
        Self::new(
            Class::Internal,
            format!("out of memory: the system refuses {bytes} bytes for {what}"),
        )
        .hint(Self::MEMORY_HINT)
        .transient(true)
    }

    /// The next step when the operating system refuses memory for a large value.
    pub(crate) const MEMORY_HINT: &'static str = "The process has reached a limit of its memory. Raise ulimit -v (in the \
        systemd unit, LimitAS), or vm.overcommit_ratio: a change needs two to three times the size of its largest value. \
        Or run the subscription in a process of its own.";

    /// The next step when a lock was not granted in time, and it is not known who held it.
    pub(crate) const LOCK_HINT: &'static str = "Another session holds a conflicting lock: see pg_locks and \
        pg_blocking_pids(). Try again when it is gone.";

    /// A wire error on the publisher's side; `doing` completes "while …".
    pub(crate) fn publisher(error: &wire::Error, doing: &str) -> Self {
        Self::from_wire(Class::Publisher, "publisher", error, doing)
    }

    /// A wire error on the subscriber's side; `doing` completes "while …".
    pub(crate) fn subscriber(error: &wire::Error, doing: &str) -> Self {
        Self::from_wire(Class::Subscriber, "subscriber", error, doing)
    }

    fn from_wire(class: Class, party: &str, error: &wire::Error, doing: &str) -> Self {
        let class = if matches!(error, wire::Error::ConnInfo(_)) { Class::Config } else { class };
        let mut failure = match error {
            wire::Error::Server(server) => {
                let mut failure =
                    Self::new(class, format!("{party}: {} while {doing}", server.message));
                if let Some(detail) = &server.detail {
                    failure = failure.detail(detail);
                }
                if let Some(hint) = &server.hint {
                    failure = failure.hint(hint);
                }
                failure.of_state = server.schema.as_deref() == Some("pgapace");
                if class == Class::Subscriber && missing_label::is_reported(server) {
                    failure.hint = Some(missing_label::hint(server, std::iter::empty()));
                }
                if class == Class::Subscriber && schema::is_missing(server) {
                    failure.message =
                        format!("{}: {} while {doing}", schema::DAMAGED, server.message);
                    failure.hint = Some(schema::begin_anew(None));
                }
                if let Some(remedy) = encoding_error::remedy(server, Origin::Table) {
                    failure.hint = Some(format!("{remedy}."));
                }
                failure
            }
            wire::Error::OutOfMemory { .. } => {
                Self::new(Class::Internal, format!("{party}: {error} while {doing}"))
                    .hint(Self::MEMORY_HINT)
            }
            // It does not pass by itself.
            wire::Error::NotUtf8 { .. } => {
                Self::new(Class::Mismatch, format!("{party}: {error} while {doing}"))
                    .hint(encoding_error::NAMES_HINT)
            }
            other => Self::new(class, format!("{party}: {other} while {doing}")),
        };
        failure.sqlstate = error.sqlstate().map(str::to_owned);
        if error.is_out_of_files() {
            failure.hint = Some(Self::LIMITS_HINT.to_owned());
        }
        if failure.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) {
            failure.hint.get_or_insert_with(|| Self::LOCK_HINT.to_owned());
        }
        if failure.sqlstate.as_deref() == Some(sqlstate::DISK_FULL) {
            let files = error.server_error().is_some_and(fills_disk_of_temp_files);
            failure.hint = Some(match files {
                true => format!("On the {party}: {FULL_OF_TEMP_FILES}."),
                false => format!("Make room on the {party}'s disk."),
            });
        }
        let needs_files = error.server_error().is_some_and(exceeds_temp_file_limit);
        if needs_files {
            failure.hint = Some(format!("On the {party}: {TEMP_FILES_REMEDY}."));
        }
        failure.recovery = if needs_files {
            Recovery::None
        } else if error.is_away() {
            Recovery::WaitForServer
        } else if error.is_connection_loss() || matches!(error, wire::Error::Timeout) {
            Recovery::Reconnect
        } else if matches!(error, wire::Error::OutOfMemory { .. })
            || failure.sqlstate.as_deref().is_some_and(is_transient)
        {
            Recovery::Retry
        } else if matches!(error, wire::Error::Connect { .. }) {
            Recovery::Admission
        } else {
            Recovery::None
        };
        failure
    }

    /// A run that has applied more than this has gone beyond the failure. `None` if it is of no transaction.
    pub(crate) fn position(&self) -> Option<Lsn> {
        let known = self.offender.as_deref().map(|offender| offender.commit_lsn);
        known.or(self.last_suspect).filter(|lsn| *lsn != Lsn::INVALID)
    }

    /// Under what its retries are counted: a lost connection has no SQLSTATE.
    pub(crate) fn retried_for(&self) -> &str {
        self.sqlstate.as_deref().unwrap_or("none")
    }

    /// The same failure of another table, without a change that caused it.
    #[must_use]
    pub(crate) fn like(&self) -> Self {
        Self {
            sqlstate: self.sqlstate.clone(),
            detail: self.detail.clone(),
            hint: self.hint.clone(),
            remedy: self.remedy.clone(),
            user_code: self.user_code.clone(),
            ..Self::new(self.class, self.message.clone())
        }
        .transient(self.is_transient())
    }

    /// Names the change that failed, unless one is named or the failure is not about a change.
    #[must_use]
    pub(crate) fn of(mut self, offender: impl FnOnce() -> Offender) -> Self {
        if !self.is_transient() && !self.is_refused() && self.class != Class::Stopped {
            self.offender.get_or_insert_with(|| Box::new(offender()));
        }
        self
    }

    /// A failure whose text was recorded.
    pub(crate) fn recorded(class: Class, text: &str) -> Self {
        let (message, hint) = match text.rsplit_once("\nHINT:  ") {
            Some((message, hint)) => (message, Some(hint.to_owned())),
            None => (text, None),
        };
        let code = message.split_once("(SQLSTATE ").and_then(|(_, code)| code.get(..5));
        Self { sqlstate: code.map(str::to_owned), hint, ..Self::new(class, message) }
    }

    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        // It may be that of a server.
        self.hint = Some(wire::without_passwords(&hint.into()).into_owned());
        self
    }

    #[must_use]
    pub(crate) fn detail(mut self, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        self.detail = Some(wire::without_passwords(&detail).into_owned());
        self
    }

    /// The server does not serve now, as if the connection was lost: try again, after pauses that grow.
    #[must_use]
    pub(crate) fn not_serving(mut self) -> Self {
        self.recovery = Recovery::Reconnect;
        self
    }

    /// Whether a retry may succeed.
    #[must_use]
    pub(crate) fn transient(mut self, transient: bool) -> Self {
        if transient != self.is_transient() {
            self.recovery = if transient { Recovery::Retry } else { Recovery::None };
        }
        self
    }

    /// Whether a retry from the recorded state may succeed, when a server is there again if that is why.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self.recovery, Recovery::Retry | Recovery::SendText) || self.is_connection_lost()
    }

    /// Whether the connection was lost or not established, for a reason that may pass.
    pub(crate) fn is_connection_lost(&self) -> bool {
        matches!(self.recovery, Recovery::Reconnect | Recovery::WaitForServer)
    }

    /// Whether the server refused a session for a reason that does not pass by itself.
    pub(crate) fn is_refused(&self) -> bool {
        matches!(self.recovery, Recovery::Admission)
    }

    /// Whether the server accepts no connections now.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self.recovery, Recovery::WaitForServer)
    }
}

/// Whether pgapace retries after this SQLSTATE: the cause may go away by itself.
pub(crate) fn is_transient(code: &str) -> bool {
    matches!(code.get(..2), Some("08" | "40" | "53" | "57" | "58"))
        || code == sqlstate::LOCK_NOT_AVAILABLE
}

/// The next step after [`exceeds_temp_file_limit`].
pub(crate) const TEMP_FILES_REMEDY: &str = "ALTER ROLE … SET temp_file_limit = …; or give the role more work_mem, so that it \
    needs fewer temporary files";

/// Whether a session needs larger temporary files than its settings allow. The name of the setting is the same in
/// messages of any language.
pub(crate) fn exceeds_temp_file_limit(said: &wire::ServerError) -> bool {
    said.code == sqlstate::CONFIGURATION_LIMIT_EXCEEDED && said.message.contains("temp_file_limit")
}

/// Whether temporary files of the session do not fit on their disk, which may be another one than that of the data. Their
/// directory has this name in messages of any language.
pub(crate) fn fills_disk_of_temp_files(said: &wire::ServerError) -> bool {
    said.code == sqlstate::DISK_FULL && said.message.contains("pgsql_tmp")
}

/// The next step after [`fills_disk_of_temp_files`].
const FULL_OF_TEMP_FILES: &str = "the disk of temporary files is full. Make room where temp_tablespaces has them \
    (base/pgsql_tmp by default); or give the role more work_mem, so that it needs fewer temporary files";

/// Whether the next attempt may succeed after this SQLSTATE: a serialization failure, a deadlock, a
/// lock that was not available, a canceled statement.
pub(crate) fn passes_soon(code: &str) -> bool {
    code.starts_with("40")
        || matches!(code, sqlstate::LOCK_NOT_AVAILABLE | sqlstate::QUERY_CANCELED)
}

/// Whether reading the subscriber's catalogue again may help after this SQLSTATE: its schema may have
/// changed since the statements were prepared. A value may have been read as the type that its
/// column had before (class 22). If that type was dropped, the server reports an internal error.
pub(crate) fn is_stale_catalogue(code: &str) -> bool {
    matches!(code.get(..2), Some("22" | "42"))
        || matches!(
            code,
            sqlstate::FEATURE_NOT_SUPPORTED
                | sqlstate::INVALID_SQL_STATEMENT_NAME
                | sqlstate::INTERNAL_ERROR
        )
}

/// The alternate form leaves out what may quote rows: the key, and DETAIL.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        // The text of a refused connection has it.
        let code = self.sqlstate.as_ref().map(|sqlstate| format!("(SQLSTATE {sqlstate})"));
        if let Some(code) = code.filter(|code| !self.message.contains(code)) {
            write!(f, " {code}")?;
        }
        let quotes_rows = !f.alternate();
        match &self.offender {
            Some(offender) if quotes_rows => write!(f, "\nCONTEXT:  {offender}")?,
            Some(offender) => write!(f, "\nCONTEXT:  {offender:#}")?,
            None => {}
        }
        if let Some(code) = &self.user_code {
            let name = if self.offender.is_some() { "" } else { "CONTEXT:  " };
            write!(f, "\n{name}{code}")?;
        }
        if let Some(detail) = self.detail.as_ref().filter(|_| quotes_rows) {
            write!(f, "\nDETAIL:  {detail}")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nHINT:  {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// Result with a [`Failure`].
pub(crate) type Result<T> = std::result::Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::{Class, Failure};

    #[test]
    fn a_failure_has_the_same_text_after_it_was_recorded() {
        let failure = Failure {
            sqlstate: Some("53100".to_owned()),
            ..Failure::new(Class::Subscriber, "no space").hint("Make room.")
        };
        let recorded = Failure::recorded(failure.class, &failure.to_string());
        assert_eq!(recorded.to_string(), failure.to_string());
        assert_eq!((recorded.sqlstate, recorded.hint), (failure.sqlstate, failure.hint));
        for code in 0..=u8::MAX {
            assert!(Class::of_exit_code(code).is_none_or(|class| class.exit_code() == code));
        }
        assert_eq!(Class::of_exit_code(9), Some(Class::Apply));
    }

    #[test]
    fn a_full_disk_has_a_next_step() {
        let mut full = wire::ServerError::default();
        full.code = "53100".to_owned();
        let error = wire::Error::Server(Box::new(full));
        for (failure, party) in [
            (Failure::publisher(&error, "creating the slot"), "publisher"),
            (Failure::subscriber(&error, "applying"), "subscriber"),
        ] {
            assert!(failure.is_transient());
            assert_eq!(failure.hint, Some(format!("Make room on the {party}'s disk.")));
        }
        let mut full = wire::ServerError::default();
        full.code = "53100".to_owned();
        full.message = "could not write to file \"base/pgsql_tmp/pgsql_tmp17576.2\"".to_owned();
        let failure = Failure::subscriber(&wire::Error::Server(Box::new(full)), "applying");
        let hint = failure.hint.as_deref().unwrap_or_default();
        assert!(failure.is_transient() && hint.contains("temp_tablespaces"), "{hint}");
    }
}
