//! The servers that all tests of this process share.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use testbed::Cluster;
use testbed::servers::find_or_fetch;

/// A publisher and a subscriber that all tests of this process share, each with its own databases.
/// Guardian processes stop them after the end of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPair {
    pub(crate) publisher: &'static Cluster,
    pub(crate) subscriber: &'static Cluster,
}

/// The shared servers of these versions, started on first use.
pub(crate) fn servers(publisher_major: u16, subscriber_major: u16) -> SharedPair {
    SharedPair {
        publisher: cluster("publisher", publisher_major),
        subscriber: cluster("subscriber", subscriber_major),
    }
}

fn cluster(role: &'static str, major: u16) -> &'static Cluster {
    type Started = HashMap<(&'static str, u16), &'static Mutex<Option<&'static Cluster>>>;
    static CLUSTERS: Mutex<Option<Started>> = Mutex::new(None);
    // Servers of different versions start concurrently.
    let slot = *CLUSTERS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_with(HashMap::new)
        .entry((role, major))
        .or_insert_with(|| Box::leak(Box::default()));
    let mut started = slot.lock().unwrap_or_else(PoisonError::into_inner);
    started.get_or_insert_with(|| {
        let binaries = find_or_fetch(major).unwrap_or_else(|error| panic!("{error}"));
        let mut builder = Cluster::builder(&binaries).name(format!("{role} {major}"));
        if role == "subscriber" {
            builder = builder.setting("track_commit_timestamp", "on");
        }
        let cluster = builder
            .setting("max_wal_senders", "200")
            .setting("max_connections", "400")
            .setting("max_wal_size", "256MB")
            .setting("min_wal_size", "32MB")
            .setting("autovacuum", "off")
            .setting("wal_retrieve_retry_interval", "100ms")
            .start()
            .unwrap_or_else(|error| panic!("{error}"));
        Box::leak(Box::new(cluster))
    })
}
