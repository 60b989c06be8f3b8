//! A pair of servers: publisher and subscriber.

use std::thread;

use crate::cluster::{Cluster, ClusterBuilder};
use crate::error::{Error, Result};
use crate::servers::find_or_fetch;

/// Two running servers.
#[derive(Debug)]
pub struct Pair {
    /// The server whose changes are replicated.
    pub publisher: Cluster,
    /// The server to which changes are applied.
    pub subscriber: Cluster,
}

impl Pair {
    /// Starts two servers of these major versions with the default settings.
    pub fn start(publisher_major: u16, subscriber_major: u16) -> Result<Self> {
        Self::start_with(
            publisher_major,
            subscriber_major,
            |publisher| publisher,
            |subscriber| subscriber,
        )
    }

    /// Starts two servers of these major versions. The closures adjust each builder.
    pub fn start_with(
        publisher_major: u16,
        subscriber_major: u16,
        publisher: impl FnOnce(ClusterBuilder) -> ClusterBuilder,
        subscriber: impl FnOnce(ClusterBuilder) -> ClusterBuilder,
    ) -> Result<Self> {
        let publisher_binaries = find_or_fetch(publisher_major)?;
        let subscriber_binaries = find_or_fetch(subscriber_major)?;
        Self::from_builders(
            publisher(Cluster::builder(&publisher_binaries).name("publisher")),
            subscriber(Cluster::builder(&subscriber_binaries).name("subscriber")),
        )
    }

    /// Starts both servers concurrently.
    pub fn from_builders(publisher: ClusterBuilder, subscriber: ClusterBuilder) -> Result<Self> {
        thread::scope(|scope| {
            let publisher = scope.spawn(|| publisher.start());
            let subscriber = subscriber.start();
            let publisher = publisher
                .join()
                .unwrap_or_else(|_| Err(Error::other("the start of the publisher panicked")))?;
            Ok(Self { publisher, subscriber: subscriber? })
        })
    }
}
