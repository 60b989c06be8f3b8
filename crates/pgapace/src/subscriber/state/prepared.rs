//! Transactions that pgapace has prepared on the subscriber (`--two-phase`).
//!
//! Two rows of `pgapace.prepared` show the state of such a transaction. The first row is committed
//! before PREPARE TRANSACTION. The prepared transaction itself inserts the second row
//! (`committed`), so that row is visible exactly when the transaction has committed. Both are
//! removed in the subscriber transaction that records the progress of its COMMIT PREPARED or
//! ROLLBACK PREPARED. So a transaction with a first row is in one of these states:
//!
//! * It has a second row: it has committed, and at most its progress is missing.
//! * Otherwise, its name is in `pg_prepared_xacts`: it is prepared.
//! * Otherwise, it was never prepared, or a user has rolled it back. If it was never prepared,
//!   nothing of it was acknowledged, and the publisher sends it again.
//!
//! A name contains the oid of the database, the publisher's system identifier, the subscription,
//! the publisher's xid, and the LSN of the PREPARE. Names must be unique in the cluster, and xids
//! are reused.
//!
//! A prepared transaction keeps its locks until it ends, including the one on `pgapace.prepared`.
//! So its statements touch no other table of schema `pgapace`, and no migration may alter this
//! table.
//!
//! No transaction can wait for a prepared one for ever. Its rows were locked on the publisher from
//! its PREPARE to its end, so whatever touches them comes after that end in the stream. The end
//! itself is a barrier in the writeset and waits for no transaction that waits for it. There are two
//! exceptions, which the monitor reports: a unique index that only the subscriber has, and a session
//! of others that holds a lock which an earlier transaction needs, and waits for the prepared one.

use engine::assemble::Prepared;
use engine::table_name::TableName;
use pgoutput::{Lsn, Timestamp, Xid};
use wire::{Param, Rows, Session, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::repertoire::Repertoire;

/// A transaction of the publisher that is prepared on the subscriber, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreparedHere {
    pub(crate) subscription: SubscriptionId,
    pub(crate) xid: Xid,
    pub(crate) prepare_lsn: Lsn,
    /// The transaction's gid on the subscriber.
    pub(crate) name: String,
    /// The transaction's gid on the publisher; empty if its first row is missing.
    pub(crate) gid: String,
    /// When it was prepared on the publisher; on the subscriber if its first row is missing.
    pub(crate) time: Timestamp,
}

impl PreparedHere {
    pub(crate) fn new(subscription: SubscriptionId, prefix: &str, prepared: &Prepared) -> Self {
        let Prepared { xid, prepare_lsn, .. } = *prepared;
        Self {
            subscription,
            xid,
            prepare_lsn,
            name: format!("{prefix}{xid}_{:X}", prepare_lsn.as_u64()),
            gid: prepared.gid.clone(),
            time: prepared.prepare_time,
        }
    }

    /// SQL condition for its rows in `pgapace.prepared`.
    fn condition(&self) -> String {
        format!(
            "subscription = {} AND xid = {} AND prepare_lsn = '{}'",
            self.subscription.0, self.xid, self.prepare_lsn
        )
    }

    /// Describes the transaction for messages.
    pub(crate) fn describe(&self) -> String {
        format!(
            "transaction {} ({:?} on the publisher, {} on the subscriber)",
            self.xid, self.gid, self.name
        )
    }

    /// Queues the insert of the second row, as the last statement before PREPARE TRANSACTION. The session has
    /// the statements of [`queue_parses`].
    pub(crate) fn queue_row(&self, session: &mut Session, epoch: i64) -> wire::Result<()> {
        let (key, epoch, time) = (self.key(), epoch.to_be_bytes(), self.time.0.to_be_bytes());
        let [subscription, xid, lsn] = key.params();
        let name = Param::Text(self.name.as_bytes());
        let params = [subscription, xid, lsn, name, Param::Binary(&epoch), Param::Binary(&time)];
        session.queue_bind(ROW, params.into_iter())?;
        session.queue_execute();
        Ok(())
    }

    /// The key of its rows.
    fn key(&self) -> Key {
        Key {
            subscription: self.subscription.0.to_be_bytes(),
            xid: i64::from(self.xid.0).to_be_bytes(),
            prepare_lsn: self.prepare_lsn.as_u64().to_be_bytes(),
        }
    }

    pub(crate) fn queue_prepare(&self, session: &mut Session) -> wire::Result<()> {
        let sql = format!("PREPARE TRANSACTION {}", quote_literal(&self.name));
        session.queue_statement(&sql, &[], [].into_iter())
    }

    /// Queues the removal of its rows, in the transaction that records its end as progress. The session has the
    /// statements of [`queue_parses`].
    pub(crate) fn queue_forget(&self, session: &mut Session) -> wire::Result<()> {
        session.queue_bind(FORGET, self.key().params().into_iter())?;
        session.queue_execute();
        Ok(())
    }

    pub(crate) fn forget(&self, session: &mut Session) -> Result<()> {
        let sql = format!("DELETE FROM pgapace.prepared WHERE {}", self.condition());
        session.simple(&sql).map_err(|e| writing(&e))?;
        Ok(())
    }

    /// Whether it has committed on the subscriber.
    pub(crate) fn is_committed(&self, session: &mut Session) -> Result<bool> {
        let sql =
            format!("SELECT 1 FROM pgapace.prepared WHERE {} AND committed", self.condition());
        let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
        Ok(!rows.is_empty())
    }

    /// Whether the user has rolled it back (`pgapace prepared --rollback`).
    pub(crate) fn is_given_up(&self, session: &mut Session) -> Result<bool> {
        let sql = format!(
            "SELECT 1 FROM pgapace.prepared WHERE {} AND given_up_at IS NOT NULL",
            self.condition()
        );
        let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
        Ok(!rows.is_empty())
    }

    /// Records that the user rolls it back.
    pub(crate) fn give_up(&self, session: &mut Session) -> Result<()> {
        let sql = format!(
            "UPDATE pgapace.prepared SET given_up_at = pg_catalog.now() \
             WHERE {} AND NOT committed",
            self.condition()
        );
        session.simple(&sql).map_err(|e| writing(&e))?;
        Ok(())
    }

    /// Executes COMMIT PREPARED or ROLLBACK PREPARED on the subscriber. Returns whether the
    /// prepared transaction existed; if so, its end is durable.
    pub(crate) fn resolve(&self, session: &mut Session, commit: bool) -> Result<bool> {
        let sql = self.end_sql(commit);
        self.resolved(session.simple(&sql).map(drop), commit)
    }

    /// COMMIT PREPARED or ROLLBACK PREPARED.
    pub(crate) fn end_sql(&self, commit: bool) -> String {
        let verb = if commit { "COMMIT" } else { "ROLLBACK" };
        format!("{verb} PREPARED {}", quote_literal(&self.name))
    }

    /// Judges the answer to [`Self::end_sql`], as [`Self::resolve`] does.
    pub(crate) fn resolved(&self, answer: wire::Result<()>, commit: bool) -> Result<bool> {
        match answer {
            Ok(()) => Ok(true),
            Err(error) if error.sqlstate() == Some(sqlstate::UNDEFINED_OBJECT) => Ok(false),
            Err(error) => {
                let verb = if commit { "COMMIT" } else { "ROLLBACK" };
                let doing = format!("{verb} PREPARED of {}", self.describe());
                let failure = Failure::subscriber(&error, &doing);
                Err(match failure.sqlstate.as_deref() {
                    // Another session is ending it at this moment
                    // (object_not_in_prerequisite_state).
                    Some(sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE) => failure.transient(true),
                    Some(sqlstate::INSUFFICIENT_PRIVILEGE) => failure.hint(
                        "Run pgapace with the role that prepared it (owner in pg_prepared_xacts).",
                    ),
                    _ => failure,
                })
            }
        }
    }
}

/// The key of the rows of a transaction in `pgapace.prepared`, in binary form.
struct Key {
    subscription: [u8; 4],
    xid: [u8; 8],
    prepare_lsn: [u8; 8],
}

impl Key {
    fn params(&self) -> [Param<'_>; 3] {
        [
            Param::Binary(&self.subscription),
            Param::Binary(&self.xid),
            Param::Binary(&self.prepare_lsn),
        ]
    }
}

const ROW: &str = "prepared_row";
const FORGET: &str = "prepared_forget";

/// Queues the Parse of the statements with which sessions that apply change `pgapace.prepared`. With `tagged`, the session
/// has a replication origin.
pub(crate) fn queue_parses(session: &mut Session, tagged: bool) {
    // As in the progress row, the origin's LSN stays '0/0'. The time is a parameter in any case.
    let condition = match tagged {
        true => "pg_catalog.pg_replication_origin_xact_setup('0/0', $6) IS NOT NULL",
        false => "$6 IS NOT NULL",
    };
    let row = format!(
        "INSERT INTO pgapace.prepared (subscription, xid, prepare_lsn, committed, name, epoch) \
         SELECT $1, $2, $3, true, $4, $5 WHERE {condition}"
    );
    // int4, int8, pg_lsn, text, int8, timestamptz
    session.queue_parse(ROW, &row, &[23, 20, 3220, 25, 20, 1184]);
    let forget = "DELETE FROM pgapace.prepared WHERE subscription OPERATOR(pg_catalog.=) $1 \
                  AND xid OPERATOR(pg_catalog.=) $2 AND prepare_lsn OPERATOR(pg_catalog.=) $3";
    session.queue_parse(FORGET, forget, &[23, 20, 3220]);
}

/// The error for a COMMIT PREPARED of a transaction that is not prepared on the subscriber any more.
pub(crate) fn not_prepared_here(described: &str) -> Failure {
    Failure::new(
        Class::Apply,
        format!(
            "{described} was committed on the publisher, but another session has rolled it back on the subscriber"
        ),
    )
    .hint(
        "Start pgapace once more: if the publisher still has the PREPARE, it sends the changes again. If this error stays, \
         they are lost on the subscriber: pgapace prepared --rollback GID skips the transaction. Then repeat its changes \
         manually, or copy the tables again (pgapace resync), and start pgapace.",
    )
}

/// The state of a transaction that was to be prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The transaction is prepared.
    Prepared,
    /// The transaction has committed; its progress is not recorded.
    Committed,
    /// The transaction does not exist: it was never prepared, or a user has rolled it back.
    Absent,
}

/// A transaction that the subscriber knows.
#[derive(Debug)]
pub(crate) struct KnownPrepared {
    pub(crate) prepared: PreparedHere,
    pub(crate) standing: Standing,
    /// Seconds since it was prepared on the publisher, or, if that is unknown, on the subscriber.
    pub(crate) age: f64,
    /// Whether its first row exists.
    pub(crate) noted: bool,
    /// Whether the user has rolled it back (`pgapace prepared --rollback`).
    pub(crate) given_up: bool,
}

/// The query for [`place_in`].
pub(crate) fn place_sql() -> String {
    format!("SELECT pg_catalog.current_setting('max_prepared_transactions'), {DATABASE_PREFIX}")
}

/// Returns `max_prepared_transactions` of the subscriber, and the prefix of the subscription's
/// gids. From the row of [`place_sql`].
pub(crate) fn place_in(
    rows: &Rows,
    id: SubscriptionId,
    system_identifier: &str,
) -> Result<(usize, String)> {
    let row =
        rows.first().ok_or_else(|| Failure::internal("max_prepared_transactions has no value"))?;
    let prefix: String = field(&row, 1)?;
    Ok((field(&row, 0)?, format!("{prefix}{system_identifier}_{}_", id.0)))
}

/// SQL that returns a row if the subscription may have prepared transactions on the subscriber.
pub(crate) fn any_sql(id: SubscriptionId) -> String {
    format!(
        "SELECT 1 FROM pgapace.prepared WHERE subscription = {} \
         UNION ALL SELECT 1 FROM pg_catalog.pg_prepared_xact() AS x \
         WHERE pg_catalog.starts_with(x.gid, 'pgapace_') LIMIT 1",
        id.0
    )
}

/// The prefix of all gids of pgapace in this database.
const DATABASE_PREFIX: &str = "\
(SELECT 'pgapace_' || d.oid || '_' FROM pg_catalog.pg_database d
 WHERE d.datname = pg_catalog.current_database())";

/// Commits the first rows of transactions that are about to be prepared, and that changes of these tables are left
/// out (`without`). A first row that exists is of a transaction that was never prepared; a publisher that was restored
/// may have prepared another one in its place since. The commit is asynchronous: it becomes durable with the first
/// PREPARE TRANSACTION, or the progress of a later commit. Returns how many transactions are prepared, in all databases.
/// Fails if this run no longer owns the subscription.
pub(crate) fn note(
    session: &mut Session,
    (id, epoch): (SubscriptionId, i64),
    all: &[&PreparedHere],
    without: &[&TableName],
) -> Result<usize> {
    let (repertoire, id) = (Repertoire::of(session), id.0);
    let owner = format!(
        "(SELECT s.epoch FROM pgapace.subscription s WHERE s.id = {id} AND s.epoch = {epoch})"
    );
    let rows: Vec<_> = all
        .iter()
        .map(|one| {
            format!(
                "({id}, {}, '{}'::pg_catalog.pg_lsn, false, {}, {}, \
                 '2000-01-01 00:00:00+00'::pg_catalog.timestamptz + \
                   {} * '1 microsecond'::pg_catalog.interval, {owner})",
                one.xid,
                one.prepare_lsn,
                quote_literal(&one.name),
                quote_literal(&repertoire.storable(&one.gid)),
                one.time.0,
            )
        })
        .collect();
    let mut sql = String::from("BEGIN; SET LOCAL synchronous_commit TO off; ");
    if !rows.is_empty() {
        sql += &format!(
            "INSERT INTO pgapace.prepared \
               (subscription, xid, prepare_lsn, committed, name, gid, prepared_at, epoch) \
             VALUES {} ON CONFLICT (subscription, xid, prepare_lsn, committed) DO UPDATE \
               SET gid = excluded.gid, prepared_at = excluded.prepared_at, epoch = excluded.epoch \
               WHERE prepared.prepared_at IS DISTINCT FROM excluded.prepared_at; ",
            rows.join(", ")
        );
    }
    if !without.is_empty() {
        let name = |table: &&TableName| {
            format!("({}, {})", quote_literal(&table.schema), quote_literal(&table.name))
        };
        let names: Vec<_> = without.iter().map(name).collect();
        sql += &format!(
            "UPDATE pgapace.relation SET lacks_prepared = true \
             WHERE subscription = {id} AND (schema_name, table_name) IN ({}) AND NOT lacks_prepared \
               AND {owner} IS NOT NULL; ",
            names.join(", ")
        );
    }
    sql += "COMMIT; SELECT pg_catalog.count(*) FROM pg_catalog.pg_prepared_xact()";
    let results = session.simple(&sql).map_err(|e| {
        let failure = writing(&e);
        match failure.sqlstate.as_deref() {
            Some(sqlstate::NOT_NULL_VIOLATION) => Failure {
                class: Class::Busy,
                hint: Some(
                    "Another process has taken over this subscription; see pgapace status."
                        .to_owned(),
                ),
                ..failure
            },
            _ => failure,
        }
    })?;
    let count = results.last().and_then(Rows::first);
    field(&count.ok_or_else(|| Failure::internal("a count has no row"))?, 0)
}

/// Reads all transactions of the subscription that have a first row, or a gid of pgapace in
/// `pg_prepared_xacts`, oldest first.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Vec<KnownPrepared>> {
    // Most subscriptions have none, and this check costs the subscriber much less.
    if session.query(&any_sql(id), &[]).map_err(|e| reading(&e))?.is_empty() {
        return Ok(Vec::new());
    }
    let rows = session
        .query(
            &format!(
                "WITH here AS ( \
                   SELECT x.gid AS name, x.prepared, \
                     pg_catalog.regexp_match(x.gid, '^' || {DATABASE_PREFIX} || {}) AS part \
                   FROM pg_catalog.pg_prepared_xacts x \
                   WHERE x.database = pg_catalog.current_database() \
                 ), ours AS (SELECT * FROM here WHERE part[1] = {}), \
                 noted AS (SELECT * FROM pgapace.prepared p \
                           WHERE p.subscription = {id} AND NOT p.committed) \
                 SELECT coalesce(n.xid::pg_catalog.text, o.part[2]), n.prepare_lsn, o.part[3], \
                   coalesce(n.name, o.name), n.gid, o.name IS NOT NULL, \
                   EXISTS (SELECT 1 FROM pgapace.prepared c \
                           WHERE c.subscription = {id} AND c.committed \
                             AND c.xid = n.xid AND c.prepare_lsn = n.prepare_lsn), \
                   EXTRACT(epoch FROM pg_catalog.clock_timestamp() \
                           - coalesce(n.prepared_at, o.prepared)), \
                   (EXTRACT(epoch FROM coalesce(n.prepared_at, o.prepared) \
                            - '2000-01-01 00:00:00+00') * 1000000)::pg_catalog.int8, \
                   n.given_up_at IS NOT NULL \
                 FROM noted n FULL JOIN ours o ON o.name = n.name \
                 ORDER BY coalesce(n.prepared_at, o.prepared)",
                quote_literal("[0-9]+_([0-9]+)_([0-9]+)_([0-9A-F]+)$"),
                quote_literal(&id.0.to_string()),
                id = id.0
            ),
            &[],
        )
        .map_err(|e| reading(&e))?;
    rows.iter()
        .map(|row| {
            let prepare_lsn = match row.get(1) {
                Some(_) => field(&row, 1)?,
                None => u64::from_str_radix(row.get(2).unwrap_or_default(), 16).map(Lsn).map_err(
                    |_| Failure::internal("a prepared transaction has an unknown form of gid"),
                )?,
            };
            let standing = match (boolean(&row, 5)?, boolean(&row, 6)?) {
                (_, true) => Standing::Committed,
                (true, false) => Standing::Prepared,
                (false, false) => Standing::Absent,
            };
            Ok(KnownPrepared {
                prepared: PreparedHere {
                    subscription: id,
                    xid: Xid(field(&row, 0)?),
                    prepare_lsn,
                    name: field(&row, 3)?,
                    gid: row.get(4).unwrap_or_default().to_owned(),
                    time: Timestamp(field(&row, 8)?),
                },
                standing,
                age: field(&row, 7)?,
                noted: row.get(4).is_some(),
                given_up: boolean(&row, 9)?,
            })
        })
        .collect()
}

fn reading(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "reading the state of prepared transactions")
}

fn writing(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "writing the state of prepared transactions")
}
