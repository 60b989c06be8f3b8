//! Hints for failed connection attempts: why the server refused, and what the user can do.
//!
//! One SQLSTATE has several causes, and messages may be in any language. The name of the server
//! routine that raised the error tells the causes apart.

use wire::{ConnInfo, quote_ident};

use crate::error::Failure;
use crate::pooler::{self, Side};

/// Adds the hint to the failure of a connection attempt. `replication` means that a walsender
/// session was requested.
pub(crate) fn explain(
    side: Side,
    failure: Failure,
    error: &wire::Error,
    info: &ConnInfo,
    replication: bool,
) -> Failure {
    let failure = pooler::explain(side, failure);
    if failure.hint.is_some() {
        return failure;
    }
    let routine = error.server_error().and_then(|said| said.routine.as_deref());
    let (role, database) = (quote_ident(info.user()), quote_ident(info.dbname()));
    let replicates = matches!(side, Side::Publisher);
    let hint = match (failure.sqlstate.as_deref(), routine) {
        (Some("28000"), Some("ClientAuthentication")) if replicates => format!(
            "Allow role {role} in pg_hba.conf: logical replication matches the database's name, \
             not the keyword replication. Then: SELECT pg_reload_conf();"
        ),
        (Some("28000"), Some("ClientAuthentication")) => format!(
            "Allow role {role} and database {database} in pg_hba.conf. Then: SELECT \
             pg_reload_conf();"
        ),
        (Some("28000"), Some("InitializeSessionUserId")) => {
            let replication = if replicates { " REPLICATION" } else { "" };
            format!(
                "CREATE ROLE {role} LOGIN{replication}; or, if it exists: ALTER ROLE {role} \
                 LOGIN{replication}; or use another role in the connection string."
            )
        }
        (Some("28P01"), _) => format!(
            "Check user {role} and its password: in the connection string, in PGPASSWORD, or in \
             the password file."
        ),
        (Some("3D000"), _) => "Check dbname in the connection string: SELECT datname FROM \
                               pg_database; lists the databases."
            .to_owned(),
        (Some("42501"), Some("CheckMyDatabase")) => {
            format!("GRANT CONNECT ON DATABASE {database} TO {role};")
        }
        (Some("42501"), _) if replication => format!("ALTER ROLE {role} REPLICATION;"),
        (Some("53300"), Some("CheckMyDatabase")) => {
            format!("ALTER DATABASE {database} CONNECTION LIMIT -1;")
        }
        (Some("53300"), Some("InitializeSessionUserId")) => {
            format!("ALTER ROLE {role} CONNECTION LIMIT -1;")
        }
        (Some("53300"), _) if replicates => {
            "On the publisher: ALTER SYSTEM SET max_wal_senders = … (or max_connections = …); \
             then restart it."
                .to_owned()
        }
        (Some("53300"), _) => {
            "On the subscriber: ALTER SYSTEM SET max_connections = …; then restart it.".to_owned()
        }
        _ => return failure,
    };
    failure.hint(hint)
}
