//! The servers of one regime: clusters, databases, slots and their copies.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use pgoutput::Lsn;
use testbed::postgres::Client;
use testbed::servers::ServerBinaries;
use testbed::{Cluster, ClusterBuilder, Proxy, wait_until};

use crate::regime::{Regime, ServerSettings, Setting};

/// The publication of every workload.
pub(crate) const PUBLICATION: &str = "bench";
/// Copied for every round; never read itself.
pub(crate) const SLOT: &str = "backlog";
/// The table into which the last transaction of a backlog inserts a row.
pub(crate) const MARKER: &str = "bench_marker";
/// Limit for the time until the server notices the end of a connection.
const RELEASE_PATIENCE: Duration = Duration::from_secs(60);

/// A publisher and a subscriber with their proxies.
#[derive(Debug)]
pub(crate) struct Environment {
    // Dropped before the clusters, so that connections are cut first.
    publisher_proxy: Option<Proxy>,
    subscriber_proxy: Option<Proxy>,
    pub(crate) publisher: Cluster,
    pub(crate) subscriber: Cluster,
    binaries: ServerBinaries,
    standby: ClusterBuilder,
    settings: String,
    /// The settings that a workload requested, for publisher and subscriber.
    asked: [ServerSettings; 2],
}

impl Environment {
    /// Starts both servers. A workload's settings override the regime's, except for those that
    /// define the regime.
    pub(crate) fn start(
        binaries: &ServerBinaries,
        regime: Regime,
        publisher_settings: &[Setting],
        subscriber_settings: &[Setting],
    ) -> Result<Self> {
        let regime_subscriber = regime.subscriber(binaries.major());
        let publisher_all =
            [regime.both(), regime.publisher(), publisher_settings.to_vec()].concat();
        let subscriber_all =
            [regime.both(), subscriber_settings.to_vec(), regime_subscriber].concat();
        let builder = |name: &str, settings: &ServerSettings, on_disk, durable| {
            let mut builder = Cluster::builder(binaries).name(name);
            for (name, value) in settings {
                builder = builder.setting(*name, value.as_str());
            }
            if on_disk {
                builder = builder.dir(disk_directory(name));
            }
            if durable { builder.durable() } else { builder }
        };
        let publisher: ClusterBuilder = builder(
            "publisher",
            &publisher_all,
            regime.publisher_on_disk(),
            regime.publisher_durable(),
        );
        let standby = builder(
            "standby",
            &publisher_all,
            regime.subscriber_on_disk(),
            regime.subscriber_durable(),
        );
        let subscriber = builder(
            "subscriber",
            &subscriber_all,
            regime.subscriber_on_disk(),
            regime.subscriber_durable(),
        );
        let (publisher, subscriber) = thread::scope(|scope| {
            let publisher = scope.spawn(|| publisher.start());
            let subscriber = subscriber.start();
            let publisher =
                publisher.join().map_err(|_| anyhow!("the start of the publisher panicked"))?;
            anyhow::Ok((publisher?, subscriber?))
        })?;
        let proxy = |cluster: &Cluster, delay| {
            let proxy = Proxy::in_front_of(cluster)?;
            proxy.set_delay(delay);
            anyhow::Ok(proxy)
        };
        let (publisher_proxy, subscriber_proxy) = match regime.one_way() {
            Some(delay) => (Some(proxy(&publisher, delay)?), Some(proxy(&subscriber, delay)?)),
            None => (None, None),
        };
        let describe = |settings: &ServerSettings, durable: bool, on_disk: bool, data: &Path| {
            let mut last = std::collections::BTreeMap::new();
            last.extend(settings.iter().map(|(name, value)| (*name, value.as_str())));
            let list: Vec<_> = last.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let place = match (on_disk, data.starts_with("/dev/shm")) {
                (false, true) => "memory",
                _ => "disk",
            };
            format!(
                "{} fsync={} data in {place}",
                list.join(" "),
                if durable { "on" } else { "off" }
            )
        };
        let settings = format!(
            "publisher: {}; subscriber: {}",
            describe(
                &publisher_all,
                regime.publisher_durable(),
                regime.publisher_on_disk(),
                publisher.data_dir()
            ),
            describe(
                &subscriber_all,
                regime.subscriber_durable(),
                regime.subscriber_on_disk(),
                subscriber.data_dir()
            ),
        );
        Ok(Self {
            publisher_proxy,
            subscriber_proxy,
            publisher,
            subscriber,
            binaries: binaries.clone(),
            standby,
            settings,
            asked: [publisher_settings.to_vec(), subscriber_settings.to_vec()],
        })
    }

    /// Whether these servers were started with the same settings.
    pub(crate) fn was_asked_for(&self, publisher: &[Setting], subscriber: &[Setting]) -> bool {
        self.asked[0] == publisher && self.asked[1] == subscriber
    }

    /// The servers' programs.
    pub(crate) fn binaries(&self) -> &ServerBinaries {
        &self.binaries
    }

    /// A builder for a server that can become a standby of the publisher.
    pub(crate) fn standby_builder(&self) -> ClusterBuilder {
        self.standby.clone()
    }

    /// The settings, for the report.
    pub(crate) fn settings(&self) -> &str {
        &self.settings
    }

    /// The path of a log file, which is removed with the publisher.
    pub(crate) fn log_file(&self, name: &str) -> PathBuf {
        self.publisher.socket_dir().join(name)
    }

    /// The publisher's address for the native subscription. The simulated network is on this
    /// connection.
    pub(crate) fn publisher_for_native(&self, database: &str) -> String {
        match &self.publisher_proxy {
            Some(proxy) => proxy.conninfo(database),
            None => self.publisher.conninfo_tcp(database),
        }
    }

    /// The publisher's address for pgapace.
    pub(crate) fn publisher_for_pgapace(&self, database: &str) -> String {
        self.publisher.conninfo_tcp(database)
    }

    /// The subscriber's address for pgapace. The simulated network is on this connection.
    pub(crate) fn subscriber_for_pgapace(&self, database: &str) -> String {
        match &self.subscriber_proxy {
            Some(proxy) => proxy.conninfo(database),
            None => self.subscriber.conninfo(database),
        }
    }

    /// Copies the slot for one reader, because reading a slot consumes its changes.
    pub(crate) fn copy_slot(&self, database: &str, name: &str) -> Result<()> {
        self.drop_slot(database, name)?;
        let sql = format!("SELECT pg_copy_logical_replication_slot('{SLOT}', '{name}')");
        Ok(self.publisher.sql(database, &sql)?)
    }

    /// Waits until no reader uses a slot.
    pub(crate) fn wait_until_free(&self, database: &str, name: &str) -> Result<()> {
        let free = format!(
            "SELECT NOT EXISTS (SELECT 1 FROM pg_replication_slots \
             WHERE slot_name = '{name}' AND active)"
        );
        Ok(wait_until(RELEASE_PATIENCE, format!("slot {name} to be free"), || {
            Ok(self.publisher.query_one_text(database, &free)? == "t")
        })?)
    }

    /// Drops a slot, if it exists, as soon as no reader uses it.
    pub(crate) fn drop_slot(&self, database: &str, name: &str) -> Result<()> {
        self.wait_until_free(database, name)?;
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name = '{name}'"
        );
        Ok(self.publisher.sql(database, &sql)?)
    }

    /// Creates the subscriber database of a round as a copy of `base`, and gives both servers the
    /// same initial state.
    pub(crate) fn reset_subscriber(&self, base: &str, round: &str) -> Result<()> {
        self.drop_subscriber(round)?;
        // A file copy writes no WAL and does not use shared_buffers.
        let strategy =
            if self.subscriber.binaries().major() >= 15 { "STRATEGY file_copy" } else { "" };
        self.subscriber
            .sql("postgres", &format!("CREATE DATABASE {round} TEMPLATE {base} {strategy}"))?;
        self.subscriber.sql(round, "VACUUM")?;
        self.subscriber.sql(round, "CHECKPOINT")?;
        Ok(())
    }

    /// Drops the subscriber database of a round and its remaining replication origins.
    pub(crate) fn drop_subscriber(&self, round: &str) -> Result<()> {
        // Prepared transactions of a stopped subscriber would prevent DROP DATABASE, and only
        // sessions of the same database can end them.
        let prepared = format!("SELECT gid FROM pg_prepared_xacts WHERE database = '{round}'");
        for row in self.subscriber.query_texts("postgres", &prepared)? {
            if let Some(Some(gid)) = row.first() {
                self.subscriber.sql(round, &format!("ROLLBACK PREPARED '{gid}'"))?;
            }
        }
        self.subscriber
            .sql("postgres", &format!("DROP DATABASE IF EXISTS {round} WITH (FORCE)"))?;
        self.subscriber.sql(
            "postgres",
            "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin",
        )?;
        Ok(())
    }

    /// Removes all objects of a workload, so that the next one finds clean servers.
    pub(crate) fn clean(&self, database: &str, subscribers: &[&str]) -> Result<()> {
        for subscriber in subscribers {
            self.drop_subscriber(subscriber)?;
        }
        let slots =
            format!("SELECT slot_name FROM pg_replication_slots WHERE database = '{database}'");
        for row in self.publisher.query_texts("postgres", &slots)? {
            if let Some(Some(slot)) = row.first() {
                self.drop_slot(database, slot)?;
            }
        }
        let drop = format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)");
        Ok(self.publisher.sql("postgres", &drop)?)
    }
}

/// The path of a new directory on a disk; the cluster creates and removes it.
fn disk_directory(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let base = std::env::var_os("PGAPACE_TEST_TMP").filter(|value| !value.is_empty());
    let base = base.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    base.join(format!("pgapace-bench-{}-{number}-{name}", std::process::id()))
}

/// Runs a query that returns an LSN.
pub(crate) fn lsn(client: &mut Client, sql: &str) -> Result<Lsn> {
    let text: String = client.query_one(sql, &[])?.get(0);
    text.parse().with_context(|| format!("{text} is not a valid LSN"))
}
