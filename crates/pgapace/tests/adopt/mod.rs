//! A native subscription is adopted and handed back: nothing is applied twice, nothing is lost.

mod busy;
mod echo;
mod interrupted;
mod lost_slot;
mod names;
mod native_progress;
mod origin_filter;
mod positions;
mod refused;
mod release_refused;
mod released;
mod restored;
mod rounds;
mod steps;
mod synchronous;
mod turns;
mod under_load;

use testbed::{Result, wait_until};

use crate::support::{Case, DB, Finished, PATIENCE, Site, must};

/// Creates a native subscription of a site, and waits until its table is ready.
fn subscribe(site: &Site, name: &str) -> Result<()> {
    let conninfo = site.publisher.conninfo(DB).replace('\'', "''");
    let create = format!("CREATE SUBSCRIPTION {name} CONNECTION '{conninfo}' PUBLICATION pub");
    site.subscriber.sql(DB, &create)?;
    let ready = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate = 'r'";
    wait_until(PATIENCE, "the table", || Ok(site.subscriber.query_one_text(DB, ready)? == "1"))
}

/// A native subscription of a case, in the case's own database. Its name is that of the case.
pub(crate) struct NativeSubscription<'c> {
    pub(crate) case: &'c Case,
    pub(crate) name: String,
}

impl<'c> NativeSubscription<'c> {
    /// Creates it, and waits until all its tables are ready.
    #[track_caller]
    pub(crate) fn ready(case: &'c Case, options: &str) -> Self {
        let native = Self::create(case, options);
        native.wait_until_ready();
        native
    }

    #[track_caller]
    pub(crate) fn create(case: &'c Case, options: &str) -> Self {
        let name = case.tool.name.clone();
        case.subscriber.sql(&format!(
            "CREATE SUBSCRIPTION {name} CONNECTION '{}' PUBLICATION pub {options}",
            case.publisher.conninfo().replace('\'', "''")
        ));
        Self { case, name }
    }

    #[track_caller]
    pub(crate) fn wait_until_ready(&self) {
        let sql = "SELECT count(*) FILTER (WHERE srsubstate <> 'r') = 0 AND count(*) > 0 \
                   FROM pg_subscription_rel";
        must(wait_until(PATIENCE, "all tables to be ready", || {
            Ok(self.case.subscriber.value(sql) == "t")
        }));
    }

    /// Waits until it has applied what the publisher has committed.
    #[track_caller]
    pub(crate) fn wait_until_applied(&self) {
        let end = self.case.publisher.value("SELECT pg_current_wal_insert_lsn()");
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{}' AND replay_lsn >= '{end}'",
            self.name
        );
        must(wait_until(PATIENCE, "the native subscription to catch up", || {
            Ok(self.case.publisher.value(&sql) == "1")
        }));
    }

    /// Disables it, and waits until its worker has left the slot.
    pub(crate) fn disable(&self) {
        self.case.subscriber.sql(&format!("ALTER SUBSCRIPTION {} DISABLE", self.name));
        let free = format!(
            "SELECT NOT active FROM pg_replication_slots WHERE slot_name = '{}'",
            self.name
        );
        must(wait_until(PATIENCE, "the slot to be free", || {
            Ok(self.case.publisher.value(&free) == "t")
        }));
        // It ends soon after it has left the slot. Until then, some settings cannot be altered.
        let worker = format!(
            "SELECT count(*) FROM pg_stat_subscription WHERE subname = '{}' AND pid IS NOT NULL",
            self.name
        );
        must(wait_until(PATIENCE, "the worker to end", || {
            Ok(self.case.subscriber.value(&worker) == "0")
        }));
    }

    /// `t|slot` or `f|∅`.
    pub(crate) fn state(&self) -> String {
        self.case.subscriber.value(&format!(
            "SELECT subenabled, subslotname FROM pg_subscription WHERE subname = '{}'",
            self.name
        ))
    }

    /// The state of a subscription that runs.
    pub(crate) fn running(&self) -> String {
        format!("t|{}", self.name)
    }

    /// A subscription that exists already, or will.
    pub(crate) fn existing(case: &'c Case) -> Self {
        Self { case, name: case.tool.name.clone() }
    }

    pub(crate) fn adopt(&self, args: &[&str]) -> Finished {
        let all: Vec<_> = ["--subscription", &self.name].iter().chain(args).copied().collect();
        self.case.tool.finish("adopt", &all)
    }
}

impl Drop for NativeSubscription<'_> {
    fn drop(&mut self) {
        let Ok(mut client) = self.case.subscriber.cluster.connect(&self.case.subscriber.name)
        else {
            return;
        };
        for action in ["DISABLE", "SET (slot_name = NONE)"] {
            let _ = client.batch_execute(&format!("ALTER SUBSCRIPTION {} {action}", self.name));
        }
        let _ = client.batch_execute(&format!("DROP SUBSCRIPTION {}", self.name));
    }
}

/// A table with a key, and one without.
pub(crate) const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v int); \
                                 CREATE TABLE log (v int); ALTER TABLE log REPLICA IDENTITY FULL";
