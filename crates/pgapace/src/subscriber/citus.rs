//! Tables of a Citus coordinator: where their rows are, and the requirements of Citus for a transaction.
//!
//! Citus keeps the rows of a distributed table in shards on several servers. It sends each statement to the
//! shards. A session with `session_replication_role = replica` does not run the triggers with which Citus
//! follows TRUNCATE. So pgapace does five things otherwise in a database with Citus:
//!
//! * Plans are custom plans. With the generic plan of a statement, Citus 13.2 and later crash when SET names the
//!   distribution column, and refuse subqueries ("could not create distributed plan").
//! * Each transaction executes [`TWO_PHASE`] before its progress row. Citus commits a transaction that writes on
//!   one worker alone in one phase, and there before on the coordinator. A crash in between would keep the rows
//!   and lose the progress. A write to a table of the coordinator that Citus knows makes the commit a two-phase
//!   one: the coordinator's commit, with the progress row, decides. The statement finds no row, so nothing grows.
//! * Commits are synchronous. Otherwise a crash of the coordinator loses a commit that the workers have made
//!   durable.
//! * A commit that failed on a worker, behind that of the coordinator, is waited for ([`recover`]). Citus only warns, and the
//!   changes become visible only when it recovers the transaction, by default within a minute. A change that looked for
//!   their rows before would not find them. So nothing is sent behind a COMMIT that is not answered, the session
//!   is given up with the warning, and the next one waits.
//! * The replica role is set in each transaction ([`REPLICA_ROLE`]), because only SET LOCAL reaches the workers. Without
//!   it, foreign keys are checked there.
//!
//! The distribution column is never in SET, since Citus refuses that. A row whose value changes is deleted and
//! inserted. A reader on the coordinator may see the shards of one transaction change one after the other: Citus
//! promises no common snapshot (documentation of Citus, "Multi-node transactions").

use std::time::{Duration, Instant};

use engine::table_name::TableName;
use rustc_hash::FxHashMap;
use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field};

/// The major version of Citus with which pgapace is tested.
pub(crate) const TESTED: &str = "14.";

/// Settings of every session in a database with Citus. The first two replace those of other servers.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("plan_cache_mode", "force_custom_plan"),
    ("synchronous_commit", "on"),
    ("citus.propagate_set_commands", "local"),
    // Schema pgapace belongs to the coordinator.
    ("citus.enable_schema_based_sharding", "off"),
    // With it, two groups that update several shards of one table wait for each other's end.
    ("citus.enable_deadlock_prevention", "off"),
    // A reference table with foreign keys refuses changes beside parallel ones.
    ("citus.multi_shard_modify_mode", "sequential"),
];

/// Makes the open transaction commit in two phases.
pub(crate) const TWO_PHASE: &str = "DELETE FROM pgapace.coordinator_commit";

/// Sets the role of the open transaction, on the workers too.
pub(crate) const REPLICA_ROLE: &str = "SET LOCAL session_replication_role TO replica";

/// The same for TRUNCATE, which Citus follows with a trigger.
pub(crate) const ORIGIN_ROLE: &str = "SET LOCAL session_replication_role TO origin";

/// Where the rows of a subscriber table are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Placement {
    /// In the table itself. Citus does not know it.
    #[default]
    Plain,
    /// In one shard.
    OneShard,
    /// In one shard on each server.
    Reference,
    /// In shards by the hash of this column.
    Distributed { column: String },
}

impl Placement {
    pub(crate) fn is_plain(&self) -> bool {
        *self == Self::Plain
    }
}

/// The placement of a table, or why it is not supported.
pub(crate) type FoundPlacement = std::result::Result<Placement, String>;

/// Tables of the database that Citus knows, by name.
pub(crate) type Placements = FxHashMap<TableName, FoundPlacement>;

/// Whether the database has the extension.
pub(crate) fn is_present(session: &mut Session) -> Result<bool> {
    let rows = session
        .query("SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'citus'", &[])
        .map_err(|e| Failure::subscriber(&e, "looking for Citus"))?;
    Ok(!rows.is_empty())
}

/// The error for a table that Citus manages, although the sessions of the run lack what Citus needs.
pub(crate) fn came_later(table: &str) -> Failure {
    let message = format!("Citus manages table {table}, and was not there when the run began");
    Failure::new(Class::Subscriber, message)
        .hint("The next run opens its sessions as Citus needs them.")
        .transient(true)
}

/// The version of Citus and of PostgreSQL, for messages.
pub(crate) fn version(session: &mut Session) -> Result<String> {
    let rows = session
        .query("SELECT pg_catalog.current_setting('citus.version', true)", &[])
        .map_err(|e| Failure::subscriber(&e, "reading the version of Citus"))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)).unwrap_or_default())
}

/// Reads all tables that Citus knows. Only in a database with Citus. It takes no locks on them.
pub(crate) fn placements(session: &mut Session) -> Result<Placements> {
    let rows = session
        .query(
            "SELECT n.nspname, c.relname, p.partmethod, p.repmodel, \
               pg_catalog.column_to_column_name(p.logicalrelid, p.partkey), \
               c.relispartition OR c.relkind = 'p' \
             FROM pg_catalog.pg_dist_partition p \
             JOIN pg_catalog.pg_class c ON c.oid = p.logicalrelid \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace",
            &[],
        )
        .map_err(|e| Failure::subscriber(&e, "reading the tables of Citus"))?;
    let placement = |row: wire::Row<'_>| {
        let column = row.get(4).map(str::to_owned);
        let placement = match (row.get(2), row.get(3), column) {
            _ if boolean(&row, 5)? => Err("it is partitioned".to_owned()),
            (Some("h"), _, Some(column)) => Ok(Placement::Distributed { column }),
            (Some("n"), Some("t"), _) => Ok(Placement::Reference),
            (Some("n"), _, _) => Ok(Placement::OneShard),
            (method, ..) => Err(format!("its partition method is {}", method.unwrap_or("unknown"))),
        };
        Ok((TableName { schema: field(&row, 0)?, name: field(&row, 1)? }, placement))
    };
    rows.iter().map(placement).collect()
}

/// The error for a table that Citus stores in a way that is not supported.
pub(crate) fn unsupported(table: &TableName, why: &str) -> Failure {
    Failure::new(
        Class::Mismatch,
        format!(
            "changes cannot be applied to subscriber table {table}, which Citus manages: {why}"
        ),
    )
    .hint(format!(
        "Make it a distributed table by hash, a reference table or a local table (SELECT \
         undistribute_table('{table}')), or take it out of the publication."
    ))
}

/// The server as a member of its Citus cluster.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    is_coordinator: bool,
    /// Whether the coordinator is a node of its own cluster, so that it can have tables that Citus knows.
    in_metadata: bool,
    /// Whether the table of [`TWO_PHASE`] exists.
    prepared: bool,
}

impl Member {
    pub(crate) fn read(session: &mut Session) -> Result<Self> {
        let rows = session
            .query(
                "SELECT (SELECT groupid FROM pg_catalog.pg_dist_local_group LIMIT 1) = 0, \
                   EXISTS (SELECT 1 FROM pg_catalog.pg_dist_node WHERE groupid = 0), \
                   EXISTS (SELECT 1 FROM pg_catalog.pg_dist_partition p \
                     JOIN pg_catalog.pg_class c ON c.oid = p.logicalrelid \
                     JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                     WHERE n.nspname = 'pgapace' AND c.relname = 'coordinator_commit')",
                &[],
            )
            .map_err(|e| Failure::subscriber(&e, "looking at the Citus cluster"))?;
        let row = rows.first().ok_or_else(|| Failure::internal("Citus has no local group"))?;
        Ok(Self {
            is_coordinator: boolean(&row, 0)?,
            in_metadata: boolean(&row, 1)?,
            prepared: boolean(&row, 2)?,
        })
    }

    /// Why it cannot be a subscriber.
    pub(crate) fn obstacle(self) -> Option<Failure> {
        if !self.is_coordinator {
            let message = "the subscriber is a worker of a Citus cluster";
            return Some(
                Failure::new(Class::Subscriber, message)
                    .hint("Connect to the coordinator as subscriber."),
            );
        }
        (!self.in_metadata).then(|| {
            Failure::new(
                Class::Subscriber,
                "the Citus coordinator is not a node of its own cluster, so no commit of a worker can be tied \
                 to the progress",
            )
            .hint("On the coordinator: SELECT citus_set_coordinator_host('<host>', <port>);")
        })
    }
}

/// The pause between two looks at prepared transactions.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How long a session waits for the recovery of Citus: more than twice its default interval.
const RECOVERY_PATIENCE: Duration = Duration::from_secs(150);

/// The prepared transactions of this role and coordinator on the workers, and which workers did not answer. Their sessions
/// have the settings of roles and databases there.
const PREPARED_SQL: &str = "\
SELECT coalesce(pg_catalog.string_agg(pg_catalog.concat(nodename, ':', nodeport), ', ') FILTER (WHERE NOT success), ''), \
  coalesce(pg_catalog.string_agg(result, ',') FILTER (WHERE success AND result <> ''), ''), \
  pg_catalog.has_function_privilege('pg_catalog.recover_prepared_transactions()', 'EXECUTE') \
FROM pg_catalog.run_command_on_workers($command$ \
  SELECT coalesce(pg_catalog.string_agg(gid, ',' ORDER BY gid), '') FROM pg_catalog.pg_prepared_xacts \
  WHERE database OPERATOR(pg_catalog.=) pg_catalog.current_database() \
    AND owner OPERATOR(pg_catalog.=) current_user AND pg_catalog.starts_with(gid, 'citus_0_') $command$)";

/// Waits until no transaction that this role has committed is prepared on a worker any more.
///
/// # Errors
/// A worker does not answer, or Citus does not recover: both are transient.
pub(crate) fn recover(session: &mut Session) -> Result<()> {
    let mut waited_for: Option<Vec<String>> = None;
    let deadline = Instant::now() + RECOVERY_PATIENCE;
    loop {
        let rows = session
            .query(PREPARED_SQL, &[])
            .map_err(|e| Failure::subscriber(&e, "looking at the workers of Citus"))?;
        let row = rows.first().ok_or_else(|| Failure::internal("Citus gave no answer"))?;
        let (silent, prepared) = (field::<String>(&row, 0)?, field::<String>(&row, 1)?);
        let may_recover = boolean(&row, 2)?;
        if !silent.is_empty() {
            let message = format!("the Citus worker {silent} does not answer");
            return Err(Failure::new(Class::Subscriber, message).transient(true));
        }
        // Those that other sessions prepare meanwhile are not waited for.
        let mut left: Vec<_> =
            prepared.split(',').filter(|gid| !gid.is_empty()).map(str::to_owned).collect();
        if let Some(before) = &waited_for {
            left.retain(|gid| before.contains(gid));
        }
        if left.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let message = format!("Citus has not recovered its prepared transaction {}", left[0]);
            return Err(Failure::new(Class::Subscriber, message)
                .hint("As a superuser on the coordinator: SELECT recover_prepared_transactions();")
                .transient(true));
        }
        if waited_for.is_none() {
            tracing::info!(
                event = "citus_recovery",
                transactions = left.len(),
                "waiting until Citus has committed transactions that are prepared on its workers"
            );
        }
        waited_for = Some(left);
        if may_recover {
            session
                .query("SELECT pg_catalog.recover_prepared_transactions()", &[])
                .map_err(|e| Failure::subscriber(&e, "recovering transactions of Citus"))?;
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Prepares a database with Citus for [`TWO_PHASE`], once.
pub(crate) fn prepare(session: &mut Session) -> Result<()> {
    if Member::read(session)?.prepared {
        return Ok(());
    }
    session
        .simple(
            "BEGIN; \
             SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgapace.schema')); \
             CREATE TABLE IF NOT EXISTS pgapace.coordinator_commit (id integer PRIMARY KEY); \
             COMMENT ON TABLE pgapace.coordinator_commit IS 'always empty: a transaction that writes it \
               commits in two phases'; \
             SELECT pg_catalog.citus_add_local_table_to_metadata('pgapace.coordinator_commit') \
             WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_dist_partition \
               WHERE logicalrelid = 'pgapace.coordinator_commit'::pg_catalog.regclass); \
             COMMIT",
        )
        .map_err(|e| Failure::subscriber(&e, "preparing the Citus coordinator"))?;
    Ok(())
}
