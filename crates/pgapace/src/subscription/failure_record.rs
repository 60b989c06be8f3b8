//! Records of a subscription that does not run, for `status`: the failure, and when the next
//! attempt comes.
//!
//! They are of the process that runs the subscription. A run that has not become the owner writes none while another
//! process is, unless the heartbeat of that one has stopped: it has not failed.
//!
//! All of it is best effort: the same failure stops the subscription at its next start again. The failure comes first,
//! and is committed alone. It changes a row that is there, which succeeds even on a full disk; counts and events may need
//! new pages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::Session;

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::observe::board::{Board, RunPhase};
use crate::observe::events;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::ownership::{self, SessionId};
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::{self, Subscription, error_detail, figures, schema, statistics};

/// How often the same failure is written.
const WRITE_AGAIN: Duration = Duration::from_secs(5);
/// How often it is logged that failures cannot be written.
const WARN_AGAIN: Duration = Duration::from_secs(30);

/// How the last run stood to the subscription.
#[derive(Debug)]
pub(super) enum Standing {
    Owner,
    /// It had not become the owner. With the owners that do not count as another process that runs it: an earlier run of
    /// this process, and a process whose heartbeat has stopped.
    NotOwner(Vec<SessionId>),
}

/// Writes with a session that it keeps from one failure to the next.
pub(super) struct FailureRecord {
    config: Arc<Config>,
    board: Board,
    standing: Standing,
    session: Option<Session>,
    /// Retries that are not written yet, by SQLSTATE.
    retries: BTreeMap<String, u64>,
    written: Option<(String, Instant)>,
    /// When it was last logged that a failure could not be written.
    warned: Option<Instant>,
}

impl FailureRecord {
    pub(super) fn new(config: Arc<Config>, board: Board) -> Self {
        Self {
            config,
            board,
            standing: Standing::NotOwner(Vec::new()),
            session: None,
            retries: BTreeMap::new(),
            written: None,
            warned: None,
        }
    }

    pub(super) fn set_standing(&mut self, standing: Standing) {
        self.standing = standing;
    }

    pub(super) fn set_config(&mut self, config: Arc<Config>) {
        self.config = config;
    }

    /// A run that failed is followed by another one after a pause.
    pub(super) fn retrying(&mut self, failure: &Failure, pause: Duration) {
        self.board.failed(failure, Some(pause));
        *self.retries.entry(failure.retried_for().to_owned()).or_default() += 1;
        let recent = self.written.as_ref().is_some_and(|(message, at)| {
            *message == failure.message && at.elapsed() + pause < WRITE_AGAIN
        });
        if !recent {
            self.written = Some((failure.message.clone(), Instant::now()));
            // The next failure, if it comes soon, is not written: the estimate holds until then.
            let next = pause.max(Duration::from_secs(1));
            self.write(failure, |session, id| statistics::error(session, id, failure, Some(next)));
        }
    }

    /// The subscription has ended, in this process at least until `next`.
    pub(super) fn failed(&mut self, failure: &Failure, next: Option<Duration>) {
        self.board.failed(failure, next);
        if failure.class == Class::Disabled {
            return;
        }
        let disable = self.config.disable_on_error && failure.class == Class::Apply;
        self.write(failure, |session, id| {
            if disable {
                let message = error_detail::public_text(failure);
                state::set_disabled(session, id, Some(&message))?;
            }
            statistics::error(session, id, failure, next.filter(|_| !disable))?;
            if disable {
                error_detail::offer(session, id, error_detail::DISABLED, failure);
            }
            Ok(())
        });
        if disable {
            tracing::error!(
                event = "subscription_disabled",
                subscription = self.config.name,
                "subscription was disabled; pgapace enable lets it run again"
            );
        }
    }

    /// Nothing comes next.
    pub(super) fn stopped(&mut self) {
        self.board.enters(RunPhase::Stopped);
        if let Some(session) = self.session.take() {
            let written = self.with(session, statistics::not_retrying);
            if let Err(error) = written {
                tracing::debug!(%error, "cannot record the end on the subscriber");
            }
        }
    }

    /// A run streams: its own sessions write from here on.
    pub(super) fn runs(&mut self) {
        self.board.enters(RunPhase::Streaming);
        (self.session, self.written) = (None, None);
    }

    fn write(
        &mut self,
        failure: &Failure,
        what: impl Fn(&mut Session, state::SubscriptionId) -> Result<()>,
    ) {
        let no_session = failure.is_connection_lost() || failure.is_refused();
        if failure.class == Class::Subscriber && no_session {
            self.session = None;
            return;
        }
        let kept = self.session.take().map(|session| self.with(session, &what));
        let written = match kept {
            Some(Ok(())) => Ok(()),
            // The session is still there: what it could write is committed.
            Some(Err(error)) if !error.is_connection_lost() => Err(error),
            _ => {
                let subscriber = Subscriber::new(self.config.subscriber.clone(), &self.config.name);
                subscriber.connect(Purpose::Look).and_then(|session| self.with(session, &what))
            }
        };
        match written {
            Ok(()) => self.warned = None,
            Err(error) if self.warned.is_none_or(|at| at.elapsed() >= WARN_AGAIN) => {
                self.warned = Some(Instant::now());
                tracing::warn!(
                    event = "failure_not_recorded",
                    subscription = self.config.name,
                    %error,
                    "could not record the failure on the subscriber"
                );
            }
            Err(error) => tracing::debug!(%error, "cannot record the failure on the subscriber"),
        }
    }

    /// Does it, if the subscriber has the subscription's row, and keeps the session.
    fn with(
        &mut self,
        mut session: Session,
        what: impl Fn(&mut Session, state::SubscriptionId) -> Result<()>,
    ) -> Result<()> {
        // A schema of another version has other columns.
        if schema::version(&mut session)? == schema::newest()
            && let Some(Subscription { id, .. }) = state::find(&mut session, &self.config.name)?
            && self.may_write(&mut session, id)?
        {
            what(&mut session, id)?;
            self.write_retries(&mut session, id);
            self.write_events(&mut session);
        }
        self.session = Some(session);
        Ok(())
    }

    fn may_write(&self, session: &mut Session, id: state::SubscriptionId) -> Result<bool> {
        match &self.standing {
            Standing::Owner => Ok(true),
            Standing::NotOwner(known) => Ok(!ownership::is_of_another(session, id, known)?),
        }
    }

    /// Retries that cannot be written are written with a later failure.
    fn write_retries(&mut self, session: &mut Session, id: state::SubscriptionId) {
        let counted = self.retries.iter().map(|(sqlstate, count)| (sqlstate.as_str(), *count));
        let Some(sql) = figures::retries_sql(id, counted) else { return };
        match figures::execute(session, &[sql]) {
            Ok(()) => self.retries.clear(),
            Err(error) => tracing::debug!(%error, "cannot count retries on the subscriber"),
        }
    }

    /// Events that cannot be written are kept.
    fn write_events(&self, session: &mut Session) {
        let pending = events::take_pending(&self.config.name);
        let retention = self.config.event_retention();
        let repertoire = Repertoire::of(session);
        let Some(sql) = state::events::write_sql(repertoire, &pending, retention) else { return };
        if let Err(error) = figures::execute(session, &[sql]) {
            tracing::debug!(%error, "cannot record events on the subscriber");
            events::give_back(pending);
        }
    }
}
