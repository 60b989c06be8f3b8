//! The first sessions of a verb that works on a subscription and both of its servers.

use wire::Session;

use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::session::Publisher;
use crate::stopping::interrupt::abandonable;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::{self, Subscription};

/// A subscription that exists, and its servers.
pub(super) struct Opened {
    pub(super) control: Session,
    pub(super) row: Subscription,
    pub(super) subscriber: Subscriber,
    pub(super) publisher: Publisher,
}

impl Opened {
    /// A request to stop does not wait until a server answers.
    pub(super) fn open(config: &Config, shutdown: &Shutdown) -> Result<Self> {
        let config = config.clone();
        abandonable(shutdown, "connecting", move || {
            let mut subscriber = Subscriber::new(config.subscriber, &config.name);
            let mut control = subscriber.connect_first()?;
            let row = state::find_existing(&mut control, &config.name)?;
            let encoding = subscriber.encoding();
            let publisher = Publisher::new(config.publisher, &config.name, encoding);
            Ok(Self { control, row, subscriber, publisher })
        })?
    }

    /// Ordinary sessions of both servers, to look at tables: the publisher's, and the subscriber's.
    pub(super) fn connect_to_look(&self, shutdown: &Shutdown) -> Result<(Session, Session)> {
        let (publisher, subscriber) = (self.publisher.clone(), self.subscriber.clone());
        abandonable(shutdown, "connecting", move || {
            Ok((publisher.connect_to_look()?, subscriber.connect(Purpose::Verify)?))
        })?
    }
}
