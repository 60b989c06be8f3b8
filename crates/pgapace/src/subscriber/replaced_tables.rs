//! Tables of the subscriber that were dropped and created again, or whose name another table took, after they joined
//! the subscription by a copy or without one. The changes that follow go into the new table, which may lack all rows of the old one.
//!
//! A user may replace a table on purpose: one that was filled before it takes the name, such as a partitioned
//! table, is applied to as before. One that was empty then is marked as stale. It is applied all the same: the
//! mark tells, and `pgapace verify` ends it if nothing differs.
//!
//! No oid is stored, because a restored dump has others. These transaction IDs tell instead:
//!
//! * The system columns of a table in `pg_attribute` are written when it is created, and never again. If that is later
//!   than the transaction with which the table joined (`copied_xid`), it is another one. Where table
//!   `pgapace.relation` itself is later, the database was restored or upgraded, and nothing is known.
//! * The row type of a table is written when it gets its name. Rows from before were put there by whoever replaced
//!   the table. Without such rows it was empty when the first change was applied to it.
//!
//! A table is judged once: `copied_xid` becomes the transaction that did. Nothing here waits for a lock longer than a
//! second, and no table is opened that is still the one that joined.
//!
//! A new table of which the publisher has another one, too, lacks nothing of that one:
//! [`published::compare`](crate::subscriber::state::published::compare) decides what becomes of it.
//!
//! Partitions of a table that is published as a whole are not judged. Most new ones are there for new values of the key, and
//! nothing records which values the partitions had before.

use engine::table_name::TableName;
use rustc_hash::FxHashSet;
use wire::{Row, Rows, Session, quote_literal};

use crate::error::{Failure, Result};
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::named::named;
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::table_name::sql_name;

/// SQL: how many transaction IDs before `now.next` this 32-bit one was assigned.
macro_rules! age {
    ($xid:literal) => {
        concat!(
            "(CASE WHEN ",
            $xid,
            "::pg_catalog.text::pg_catalog.int8 < 3 THEN 4294967296 \
             ELSE ((now.next - ",
            $xid,
            "::pg_catalog.text::pg_catalog.int8) % 4294967296 + 4294967296) % 4294967296 END)"
        )
    };
}

/// SQL: the next transaction ID.
macro_rules! now {
    () => {
        "now AS MATERIALIZED (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) \
           ::pg_catalog.text::pg_catalog.int8 AS next)"
    };
}

/// Why such a table is stale.
const REASON: &str = "it was dropped and created again on the subscriber, or another table took its name, and was \
                      empty: it lacks the rows from before";

/// The query for tables of the subscription `$1` that are other tables by now. It opens none of them.
pub(crate) const REPLACED: &str = concat!(
    "WITH ",
    now!(),
    ", own AS MATERIALIZED ( \
       SELECT ",
    age!("a.xmin"),
    " AS age FROM now CROSS JOIN pg_catalog.pg_attribute a \
       WHERE a.attrelid = 'pgapace.relation'::pg_catalog.regclass AND a.attnum = -6 \
     ), copied AS MATERIALIZED ( \
       SELECT r.schema_name, r.table_name, r.copied_xid, \
         now.next - r.copied_xid::pg_catalog.text::pg_catalog.int8 AS age \
       FROM now CROSS JOIN pgapace.relation r \
       WHERE r.subscription = $1::pg_catalog.int4 AND r.state = 'ready' AND r.stale_lsn IS NULL \
         AND r.requested IS NULL AND r.copied_xid IS NOT NULL \
     ) \
     SELECT r.schema_name, r.table_name, r.copied_xid, c.relkind = 'p', \
       now.next - least(n.age, t.age) \
     FROM now CROSS JOIN own CROSS JOIN copied r \
     CROSS JOIN LATERAL ( \
       SELECT c.oid, c.relkind, c.reltype, c.relnamespace FROM pg_catalog.pg_class c \
       WHERE ",
    named!("c", "r.schema_name", "r.table_name"),
    "  AND c.relkind IN ('r', 'p') AND pg_catalog.has_table_privilege(c.oid, 'SELECT') \
         AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE') \
       OFFSET 0 \
     ) c CROSS JOIN LATERAL ( \
       SELECT ",
    age!("a.xmin"),
    " AS age FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = -6 \
       OFFSET 0 \
     ) a CROSS JOIN LATERAL ( \
       SELECT ",
    age!("t.xmin"),
    " AS age FROM pg_catalog.pg_type t WHERE t.oid = c.reltype OFFSET 0 \
     ) t CROSS JOIN LATERAL ( \
       SELECT ",
    age!("n.xmin"),
    " AS age FROM pg_catalog.pg_namespace n WHERE n.oid = c.relnamespace OFFSET 0 \
     ) n \
     WHERE r.age > 0 AND r.age < 2147483648 AND own.age >= r.age AND a.age < r.age"
);

/// A table that replaced one of the subscription.
struct Replaced {
    name: TableName,
    copied_xid: String,
    partitioned: bool,
    /// The transaction in which it took its name, extended to 64 bits.
    named: i64,
}

impl Replaced {
    fn of(row: &Row<'_>) -> Result<Self> {
        Ok(Self {
            name: TableName { schema: field(row, 0)?, name: field(row, 1)? },
            copied_xid: field(row, 2)?,
            partitioned: boolean(row, 3)?,
            named: field(row, 4)?,
        })
    }

    /// SQL: whether it has a row from before it took its name.
    fn was_filled_sql(&self) -> String {
        let only = if self.partitioned { "" } else { "ONLY " };
        format!(
            concat!(
                "WITH ",
                now!(),
                " SELECT EXISTS (SELECT FROM now, {only}{name} r WHERE ",
                age!("r.xmin"),
                " >= now.next - {named})"
            ),
            name = sql_name(&self.name),
            named = self.named,
            only = only
        )
    }

    /// SQL that records that the table was judged, and returns since when it is stale. A table that joined without a copy
    /// may have no sync LSN; then that is the present position.
    fn record_sql(&self, owner: OwnedEpoch, stale: bool) -> String {
        let mark = if stale {
            format!(
                ", stale_lsn = coalesce(nullif(r.sync_lsn, '0/0'), applied.lsn, r.sync_lsn), stale_reason = {}, \
                   stale_through = greatest(r.stale_through, r.sync_lsn, applied.lsn)",
                quote_literal(REASON)
            )
        } else {
            String::new()
        };
        format!(
            "WITH applied AS (SELECT pg_catalog.max(p.lsn) AS lsn FROM pgapace.progress p \
               WHERE p.subscription = {id}) \
             UPDATE pgapace.relation r SET copied_xid = pg_catalog.pg_current_xact_id(){mark} FROM applied \
             WHERE r.subscription = {} AND r.schema_name = {} AND r.table_name = {} \
               AND r.state = 'ready' AND r.requested IS NULL AND r.copied_xid = '{}' \
             RETURNING coalesce(r.stale_lsn, r.sync_lsn)",
            owner.sql(),
            quote_literal(&self.name.schema),
            quote_literal(&self.name.name),
            self.copied_xid,
            id = owner.id.0
        )
    }

    /// Marks the table as stale if it was empty when it took the name. Returns whether it did.
    fn judge(&self, session: &mut Session, owner: OwnedEpoch) -> wire::Result<bool> {
        // The lock keeps the table until the end.
        let begun = session.simple(&format!(
            "BEGIN; SET LOCAL lock_timeout = '1s'; SET LOCAL statement_timeout = '1min'; {}",
            self.was_filled_sql()
        ))?;
        let filled =
            begun.last().and_then(Rows::first).and_then(|row| row.get(0).map(|f| f == "t"));
        let stale = filled == Some(false);
        let recorded = session.simple(&self.record_sql(owner, stale))?;
        session.simple("COMMIT")?;
        let since = recorded.last().and_then(Rows::first);
        let Some(since) = since.filter(|_| stale).and_then(|row| row.get(0).map(str::to_owned))
        else {
            return Ok(false);
        };
        tracing::warn!(
            event = "table_stale",
            table = self.name.to_string(),
            since,
            reason = REASON,
            decision = "it is applied all the same; pgapace resync copies it again, and pgapace verify ends the mark if \
                        nothing differs",
            "table may lack rows"
        );
        Ok(true)
    }
}

/// Judges those tables of [`REPLACED`] for which `is_judged` is true, and marks those that may lack rows. Returns whether
/// one was marked. A table that cannot be read now is left to the next look.
pub(crate) fn judge(
    session: &mut Session,
    owner: OwnedEpoch,
    replaced: &Rows,
    is_judged: impl Fn(&TableName) -> bool,
) -> Result<bool> {
    let mut marked = false;
    for row in replaced.iter() {
        let table = Replaced::of(&row)?;
        if !is_judged(&table.name) {
            continue;
        }
        match table.judge(session, owner) {
            Ok(stale) => marked |= stale,
            Err(error) if error.sqlstate().is_some() => {
                tracing::debug!(%error, table = table.name.to_string(), "cannot judge a replaced table");
                session.simple("ROLLBACK").map_err(|e| failed(&e))?;
            }
            Err(error) => return Err(failed(&error)),
        }
    }
    Ok(marked)
}

/// Looks for such tables, and judges them, except for those in whose place the publisher has another one, too
/// (`made_anew`).
pub(crate) fn look(
    session: &mut Session,
    id: SubscriptionId,
    owner: OwnedEpoch,
    made_anew: &FxHashSet<TableName>,
) -> Result<()> {
    let rows =
        session.query(REPLACED, &[Some(&id.0.to_string())]).map_err(|error| failed(&error))?;
    judge(session, owner, &rows, |table| !made_anew.contains(table)).map(|_| ())
}

fn failed(error: &wire::Error) -> Failure {
    Failure::subscriber(error, "looking for tables that were created again")
}
