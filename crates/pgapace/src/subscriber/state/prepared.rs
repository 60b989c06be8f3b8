//! Transactions that are prepared on the subscriber (`--two-phase`), under names of ours.
//!
//! Two rows of `pgapace.prepared` tell what has become of one. The first is committed before it is
//! prepared: that it was, or was about to be. The second (`committed`) is inserted by the prepared
//! transaction itself, so it is seen exactly when that has committed. Both are removed with the
//! progress of its COMMIT or ROLLBACK PREPARED, in one subscriber transaction. So, of one that has a
//! first row:
//!
//! * second row: it has committed, and only its progress may be missing;
//! * else its name in `pg_prepared_xacts`: it is prepared, and can be resolved;
//! * else it was never prepared (then nothing of it was acknowledged, and the publisher sends it
//!   again), or somebody has rolled it back by hand.
//!
//! Names hold the database, the publisher's system identifier, the subscription, the publisher's
//! xid and the LSN of the PREPARE: names are known to the whole server, and xids come again.
//!
//! A prepared transaction keeps its locks for as long as it takes, on `pgapace.prepared` too: the
//! statements of it touch no other table of ours, and no migration may ever alter this one.

use engine::assemble::Prepared;
use pgoutput::{Lsn, Timestamp, Xid};
use wire::{Param, Session, quote_literal};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::SubscriptionId;

/// A transaction of the publisher that is prepared on the subscriber, or is about to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreparedHere {
    pub(crate) subscription: SubscriptionId,
    pub(crate) xid: Xid,
    pub(crate) prepare_lsn: Lsn,
    /// Its name on the subscriber.
    pub(crate) name: String,
    /// Its name on the publisher; empty if its first row is gone.
    pub(crate) gid: String,
    /// When it was prepared on the publisher.
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

    /// Its rows of `pgapace.prepared`.
    fn condition(&self) -> String {
        format!(
            "subscription = {} AND xid = {} AND prepare_lsn = '{}'",
            self.subscription.0, self.xid, self.prepare_lsn
        )
    }

    /// For messages.
    pub(crate) fn describe(&self) -> String {
        format!(
            "transaction {} ({:?} on the publisher, {} on the subscriber)",
            self.xid, self.gid, self.name
        )
    }

    /// Queues what makes it durable, and visible once it is committed, as the last statement before
    /// its PREPARE TRANSACTION. With `tagged`, the session has a replication origin.
    pub(crate) fn queue_row(
        &self,
        session: &mut Session,
        epoch: i64,
        tagged: bool,
    ) -> wire::Result<()> {
        let insert = format!(
            "INSERT INTO pgapace.prepared \
               (subscription, xid, prepare_lsn, committed, name, epoch) \
             SELECT {}, {}, '{}', true, {}, {epoch}",
            self.subscription.0,
            self.xid,
            self.prepare_lsn,
            quote_literal(&self.name)
        );
        if tagged {
            // As in the progress row: the origin's LSN is left alone.
            let setup = "pg_catalog.pg_replication_origin_xact_setup('0/0', $1)";
            session.queue_parse("", &format!("{insert} WHERE {setup} IS NOT NULL"), &[1184]);
            let time = self.time.0.to_be_bytes();
            session.queue_bind("", [Param::Binary(&time)].into_iter())?;
        } else {
            session.queue_parse("", &insert, &[]);
            session.queue_bind("", std::iter::empty())?;
        }
        session.queue_execute();
        Ok(())
    }

    /// Queues PREPARE TRANSACTION.
    pub(crate) fn queue_prepare(&self, session: &mut Session) -> wire::Result<()> {
        let sql = format!("PREPARE TRANSACTION {}", quote_literal(&self.name));
        session.queue_parse("", &sql, &[]);
        session.queue_bind("", std::iter::empty())?;
        session.queue_execute();
        Ok(())
    }

    /// Queues the removal of its rows: part of the transaction that records its end as progress.
    pub(crate) fn queue_forget(&self, session: &mut Session) -> wire::Result<()> {
        let sql = format!("DELETE FROM pgapace.prepared WHERE {}", self.condition());
        session.queue_parse("", &sql, &[]);
        session.queue_bind("", std::iter::empty())?;
        session.queue_execute();
        Ok(())
    }

    /// Removes its rows.
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

    /// Notes that the user rolls it back.
    pub(crate) fn give_up(&self, session: &mut Session) -> Result<()> {
        let sql = format!(
            "UPDATE pgapace.prepared SET given_up_at = pg_catalog.now() \
             WHERE {} AND NOT committed",
            self.condition()
        );
        session.simple(&sql).map_err(|e| writing(&e))?;
        Ok(())
    }

    /// COMMIT PREPARED or ROLLBACK PREPARED on the subscriber. Whether it was there; then it is durable.
    pub(crate) fn resolve(&self, session: &mut Session, commit: bool) -> Result<bool> {
        let verb = if commit { "COMMIT" } else { "ROLLBACK" };
        match session.simple(&format!("{verb} PREPARED {}", quote_literal(&self.name))) {
            Ok(_) => Ok(true),
            Err(error) if error.sqlstate() == Some("42704") => Ok(false),
            Err(error) => {
                let doing = format!("{verb} PREPARED of {}", self.describe());
                let failure = Failure::subscriber(&error, &doing);
                Err(match failure.sqlstate.as_deref() {
                    // Somebody else is resolving it this moment.
                    Some("55000") => failure.transient(true),
                    Some("42501") => failure.hint(
                        "Run pgapace with the role that prepared it (owner in pg_prepared_xacts).",
                    ),
                    _ => failure,
                })
            }
        }
    }
}

/// What has become of a transaction that was to be prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is prepared.
    Prepared,
    /// It has committed; its progress is not recorded.
    Committed,
    /// It is not there: it was not prepared, or somebody has rolled it back.
    Absent,
}

/// A transaction that the subscriber knows of.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) prepared: PreparedHere,
    pub(crate) standing: Standing,
    /// Seconds since it was prepared on the publisher; where that is not known, on the subscriber.
    pub(crate) age: f64,
    /// Whether its first row is there.
    pub(crate) noted: bool,
    /// Whether the user has rolled it back (`pgapace prepared --rollback`).
    pub(crate) given_up: bool,
}

/// How many prepared transactions the subscriber can have, 0 if none; and what the names of the
/// subscription's begin with.
pub(crate) fn place(
    session: &mut Session,
    id: SubscriptionId,
    system_identifier: &str,
) -> Result<(usize, String)> {
    let sql = format!(
        "SELECT pg_catalog.current_setting('max_prepared_transactions'), {DATABASE_PREFIX}"
    );
    let rows = session.query(&sql, &[]).map_err(|e| reading(&e))?;
    let row = rows.first().ok_or_else(|| Failure::internal("a setting has no value"))?;
    let prefix: String = field(&row, 1)?;
    Ok((field(&row, 0)?, format!("{prefix}{system_identifier}_{}_", id.0)))
}

/// What all names of ours in this database begin with.
const DATABASE_PREFIX: &str = "\
(SELECT 'pgapace_' || d.oid || '_' FROM pg_catalog.pg_database d
 WHERE d.datname = pg_catalog.current_database())";

/// Commits the first rows of transactions that are about to be prepared. Not durable before the
/// first of them is; fails if this run does not own the subscription any more.
pub(crate) fn note(session: &mut Session, epoch: i64, all: &[&PreparedHere]) -> Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    let rows: Vec<_> = all
        .iter()
        .map(|one| {
            format!(
                "({id}, {}, '{}'::pg_catalog.pg_lsn, false, {}, {}, \
                 '2000-01-01 00:00:00+00'::pg_catalog.timestamptz + \
                   {} * '1 microsecond'::pg_catalog.interval, \
                 (SELECT s.epoch FROM pgapace.subscription s \
                  WHERE s.id = {id} AND s.epoch = {epoch}))",
                one.xid,
                one.prepare_lsn,
                quote_literal(&one.name),
                quote_literal(&one.gid),
                one.time.0,
                id = one.subscription.0,
            )
        })
        .collect();
    let sql = format!(
        "BEGIN; SET LOCAL synchronous_commit TO off; \
         INSERT INTO pgapace.prepared \
           (subscription, xid, prepare_lsn, committed, name, gid, prepared_at, epoch) \
         VALUES {} ON CONFLICT DO NOTHING; COMMIT",
        rows.join(", ")
    );
    session.simple(&sql).map_err(|e| {
        let failure = writing(&e);
        match failure.sqlstate.as_deref() {
            Some("23502") => Failure {
                class: Class::Busy,
                hint: Some("Another process has taken this subscription over.".to_owned()),
                ..failure
            },
            _ => failure,
        }
    })?;
    Ok(())
}

/// Everything of the subscription that is, or was to be, prepared on the subscriber, oldest first: with
/// a first row, or a name of ours.
pub(crate) fn read(session: &mut Session, id: SubscriptionId) -> Result<Vec<Known>> {
    // Most have nothing, and to find that is much less work for the subscriber.
    let sql = format!(
        "SELECT 1 FROM pgapace.prepared WHERE subscription = {} \
         UNION ALL SELECT 1 FROM pg_catalog.pg_prepared_xact() AS x \
         WHERE pg_catalog.starts_with(x.gid, 'pgapace_') LIMIT 1",
        id.0
    );
    if session.query(&sql, &[]).map_err(|e| reading(&e))?.is_empty() {
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
                None => u64::from_str_radix(row.get(2).unwrap_or_default(), 16)
                    .map(Lsn)
                    .map_err(|_| Failure::internal("the name of a prepared transaction"))?,
            };
            let standing = match (boolean(&row, 5)?, boolean(&row, 6)?) {
                (_, true) => Standing::Committed,
                (true, false) => Standing::Prepared,
                (false, false) => Standing::Absent,
            };
            Ok(Known {
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
