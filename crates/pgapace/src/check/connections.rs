//! How many connections of a server are in use, and the limits that hold for the role.

use wire::{Session, quote_ident};

use crate::check::limits::{Limit, Raise};
use crate::check::report::Side;
use crate::check::service::Service;
use crate::check::{Settings, failed};
use crate::error::{Failure, Result};
use crate::subscriber::catalogue::field;

const MAX_CONNECTIONS: &str = "max_connections";

impl Limit {
    /// Whether it counts walsenders too.
    pub(super) fn counts_walsenders(&self) -> bool {
        self.topic != MAX_CONNECTIONS
    }
}

/// The query for the sessions, and the limits of the role and of the database; -1 is none, as for a superuser.
///
/// A role without pg_read_all_stats sees no `backend_type` of other roles' sessions. Those that it cannot tell
/// are counted, unless they are walsenders, or processes without a role.
const SQL: &str = "\
WITH seen AS (
  SELECT a.datid, a.usesysid, r.pid IS NOT NULL AS walsender,
    coalesce(a.backend_type = 'client backend',
             a.datid IS NOT NULL AND a.usesysid IS NOT NULL AND r.pid IS NULL) AS client
  FROM pg_catalog.pg_stat_activity a LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = a.pid
)
SELECT (SELECT pg_catalog.count(*) FROM seen WHERE client),
  (SELECT pg_catalog.count(*) FROM seen WHERE (client OR walsender) AND usesysid = o.oid),
  (SELECT pg_catalog.count(*) FROM seen WHERE (client OR walsender) AND datid = d.oid),
  CASE WHEN o.rolsuper THEN -1 ELSE o.rolconnlimit END,
  CASE WHEN o.rolsuper THEN -1 ELSE d.datconnlimit END,
  o.rolname, d.datname
FROM pg_catalog.pg_roles o, pg_catalog.pg_database d
WHERE o.rolname = session_user AND d.datname = pg_catalog.current_database()";

/// Reads the limits of connections, without the session of this check, which ends before a run begins. `settings` has
/// `max_connections` and what is reserved of it.
pub(super) fn limits(
    session: &mut Session,
    side: Side,
    settings: &Settings,
    service: Service,
) -> Result<Vec<Limit>> {
    let rows = session.query(SQL, &[]).map_err(|e| failed(side, &e, "counting its connections"))?;
    let row = rows
        .first()
        .ok_or_else(|| Failure::internal("the query for its connections returned no row"))?;
    let number = |name| settings.number(name).unwrap_or(0);
    let reserved = number("superuser_reserved_connections") + number("reserved_connections");
    let mut limits = vec![Limit {
        topic: MAX_CONNECTIONS,
        of: String::new(),
        used: field::<i64>(&row, 0)? - 1,
        most: number(MAX_CONNECTIONS) - reserved,
        raise: Raise::Setting { service, side, name: MAX_CONNECTIONS, reserved },
    }];
    let owners = [("rolconnlimit", "role", "ROLE"), ("datconnlimit", "database", "DATABASE")];
    for (column, (topic, what, keyword)) in owners.into_iter().enumerate() {
        let most: i64 = field(&row, 3 + column)?;
        if most < 0 {
            continue;
        }
        let name = quote_ident(&field::<String>(&row, 5 + column)?);
        limits.push(Limit {
            topic,
            of: format!(" of {what} {name}"),
            used: field::<i64>(&row, 1 + column)? - 1,
            most,
            raise: Raise::Alter(format!("ALTER {keyword} {name}")),
        });
    }
    Ok(limits)
}
