//! The snapshots of a verification, and the session pairs that read under them.

use std::time::{Duration, Instant};

use wire::Session;

use crate::both_servers::ask_both;
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::verify::pair::{Held, PairSource};
use crate::verify::prepare::{Definitions, Scope};
use crate::verify::sessions::SessionPair;

/// The two servers.
pub(crate) struct Servers<'a> {
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    pub(crate) publications: &'a [String],
}

/// A session of the publisher, and one of the subscriber for this purpose.
pub(crate) fn connect(
    publisher: &Publisher,
    subscriber: &Subscriber,
    purpose: Purpose,
) -> Result<(Session, Session)> {
    let (publisher, subscriber) = ask_both(
        "connecting to the publisher",
        || publisher.connect_to_look(),
        || subscriber.connect(purpose),
    );
    Ok((publisher?, subscriber?))
}

/// Opens session pairs, and takes a new pair of snapshots when the last one is too old.
pub(super) struct Keeper<'a> {
    pub(super) servers: &'a Servers<'a>,
    pub(super) source: &'a mut (dyn PairSource + Send),
    pub(super) scope: &'a Scope,
    pub(super) definitions: &'a Definitions,
    pub(super) shutdown: &'a Shutdown,
    pub(super) lifetime: Duration,
    pub(super) go_on: Option<&'static str>,
    pub(super) held: Option<(Held, Instant)>,
}

impl Keeper<'_> {
    /// A session pair under snapshots that were taken after `after`.
    pub(super) fn open(&mut self, after: Option<Instant>) -> Result<SessionPair> {
        let usable = |taken: Instant| {
            taken.elapsed() < self.lifetime && after.is_none_or(|after| taken > after)
        };
        if !self.held.as_ref().is_some_and(|(_, taken)| usable(*taken)) {
            self.held = None;
            let mut look = self.connect_to_look()?;
            self.check_definitions(&mut look)?;
            let held = self.source.take()?;
            self.check_definitions(&mut look)?;
            self.held = Some((held, Instant::now()));
        }
        let Some((held, taken)) = &self.held else {
            return Err(Failure::internal("there is no pair of snapshots"));
        };
        let (publisher, subscriber) = held.open(self.servers.publisher, self.servers.subscriber)?;
        Ok(SessionPair { publisher, subscriber, lsn: held.lsn, taken: *taken })
    }

    /// Tables and publications must stay as they were planned with.
    fn check_definitions(
        &mut self,
        (publisher, subscriber): &mut (Session, Session),
    ) -> Result<()> {
        let publications = self.servers.publications;
        let sessions = [publisher.cancel_handle(), subscriber.cancel_handle()];
        let now = interruptible(self.shutdown, &sessions, "verification", || {
            Definitions::read(publisher, subscriber, publications, &self.scope.tables)
        })?;
        let Some(table) = self.definitions.changed(&now) else { return Ok(()) };
        self.source.definitions_changed();
        Err(Failure::new(
            Class::Mismatch,
            format!("a publication or the definition of {table} changed during the comparison"),
        )
        .hint(self.go_on.unwrap_or("Start it again.")))
    }

    /// The same, by sessions that are opened for it.
    pub(super) fn check_definitions_again(&mut self) -> Result<()> {
        let mut look = self.connect_to_look()?;
        self.check_definitions(&mut look)
    }

    fn connect_to_look(&self) -> Result<(Session, Session)> {
        connect(self.servers.publisher, self.servers.subscriber, Purpose::Look)
    }
}
