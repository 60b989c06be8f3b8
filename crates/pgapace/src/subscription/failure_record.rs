//! Records of a subscription that does not run, for `status`: the failure, and when the next
//! attempt comes.
//!
//! All of it is best effort: the same failure stops the subscription at its next start again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::Session;

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::observe::board::{Board, RunPhase};
use crate::observe::events;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::repertoire::Repertoire;
use crate::subscriber::state::{self, Subscription, error_detail, figures, schema, statistics};

/// How often the same failure is written.
const WRITE_AGAIN: Duration = Duration::from_secs(5);

/// Writes with a session that it keeps from one failure to the next.
pub(super) struct FailureRecord {
    config: Arc<Config>,
    board: Board,
    session: Option<Session>,
    /// Retries that are not written yet.
    retries: u64,
    written: Option<(String, Instant)>,
}

impl FailureRecord {
    pub(super) fn new(config: Arc<Config>, board: Board) -> Self {
        Self { config, board, session: None, retries: 0, written: None }
    }

    pub(super) fn set_config(&mut self, config: Arc<Config>) {
        self.config = config;
    }

    /// A run that failed is followed by another one after a pause.
    pub(super) fn retrying(&mut self, failure: &Failure, pause: Duration) {
        self.board.failed(failure, Some(pause));
        self.retries += 1;
        let recent = self.written.as_ref().is_some_and(|(message, at)| {
            *message == failure.message && at.elapsed() + pause < WRITE_AGAIN
        });
        if !recent {
            self.written = Some((failure.message.clone(), Instant::now()));
            // The next failure, if it comes soon, is not written: the estimate holds until then.
            let next = pause.max(Duration::from_secs(1));
            let retries = std::mem::take(&mut self.retries);
            self.write(failure, |session, id| {
                let counted = std::iter::once((failure.retried_for(), retries));
                if let Some(sql) = figures::retries_sql(id, counted) {
                    figures::execute(session, &[sql])?;
                }
                statistics::error(session, id, failure, Some(next))
            });
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
                error_detail::write(session, id, error_detail::DISABLED, failure)?;
                let message = error_detail::public_text(failure);
                state::set_disabled(session, id, Some(&message))?;
            }
            statistics::error(session, id, failure, next.filter(|_| !disable))
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
            _ => {
                let subscriber = Subscriber::new(self.config.subscriber.clone(), &self.config.name);
                subscriber.connect(Purpose::Look).and_then(|session| self.with(session, &what))
            }
        };
        if let Err(error) = written {
            let lost = self.config.disable_on_error || failure.conflict.is_some();
            if lost {
                tracing::warn!(
                    event = "failure_not_recorded",
                    subscription = self.config.name,
                    %error,
                    "could not record the failure on the subscriber"
                );
            } else {
                tracing::debug!(%error, "cannot record the failure on the subscriber");
            }
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
        {
            what(&mut session, id)?;
            let pending = events::take_pending(&self.config.name);
            let retention = self.config.event_retention();
            let repertoire = Repertoire::of(&session);
            if let Some(sql) = state::events::write_sql(repertoire, &pending, retention) {
                figures::execute(&mut session, &[sql])?;
            }
        }
        self.session = Some(session);
        Ok(())
    }
}
