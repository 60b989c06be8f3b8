//! A native subscription to the same publisher, for comparison: what PostgreSQL accepts, and its
//! resulting rows.

use testbed::wait_until;

use super::{Case, Database, PATIENCE, explain, must};

/// A native subscription into its own database on the subscriber's server.
pub(crate) struct Native<'c> {
    case: &'c Case,
    pub(crate) database: Database<'static>,
}

impl<'c> Native<'c> {
    /// Subscribes, or returns the server's error message.
    pub(crate) fn subscribe(case: &'c Case, ddl: &str, publications: &str) -> Result<Self, String> {
        let name = format!("{}_native", case.tool.name);
        let database = Database::create(case.subscriber.cluster, &name, "");
        database.sql(ddl);
        let created = database.client.borrow_mut().batch_execute(&format!(
            "CREATE SUBSCRIPTION {name} CONNECTION '{}' PUBLICATION {publications}",
            case.publisher.conninfo().replace('\'', "''")
        ));
        let native = Self { case, database };
        created.map_err(|error| explain(&error))?;
        Ok(native)
    }

    /// Waits until all tables are copied and all committed transactions are applied. Returns the
    /// server's error counters if an error prevents that.
    #[track_caller]
    pub(crate) fn wait(&self) -> Result<(), String> {
        let name = &self.database.name;
        let end = self.case.publisher.value("SELECT pg_current_wal_lsn()");
        let applied = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{name}' AND replay_lsn >= '{end}'"
        );
        let ready = format!(
            "SELECT count(*) FILTER (WHERE r.srsubstate <> 'r') FROM pg_subscription s \
             JOIN pg_subscription_rel r ON r.srsubid = s.oid WHERE s.subname = '{name}'"
        );
        let failed = format!(
            "SELECT 'errors applying: ' || apply_error_count || ', copying: ' || sync_error_count \
             FROM pg_stat_subscription_stats \
             WHERE subname = '{name}' AND apply_error_count + sync_error_count > 0"
        );
        let mut failure = None;
        must(wait_until(PATIENCE, "the native subscription to catch up or fail", || {
            failure = self.database.rows(&failed).pop();
            let done =
                || self.database.value(&ready) == "0" && self.case.publisher.value(&applied) == "1";
            Ok(failure.is_some() || done())
        }));
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Native<'_> {
    fn drop(&mut self) {
        let name = &self.database.name;
        // This also drops the slots of the subscription and of its table syncs.
        for sql in
            [format!("ALTER SUBSCRIPTION {name} DISABLE"), format!("DROP SUBSCRIPTION {name}")]
        {
            let _ = self.database.client.borrow_mut().batch_execute(&sql);
        }
        let sql = format!("DROP DATABASE {name} WITH (FORCE)");
        let _ = self.database.cluster.sql("postgres", &sql);
    }
}
