//! Why a server does not let us in, and what the user can do about it.
//!
//! One SQLSTATE has several reasons, and messages may come in any language: the routine of the server
//! that has raised the error tells them from each other.

use wire::{ConnInfo, quote_ident};

use crate::error::Failure;
use crate::pooler::{self, Side};

/// Gives the failure of a connection attempt its hint. `replication`: what was asked for is a session
/// of a walsender.
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
            "Allow role {role} in pg_hba.conf: logical replication matches the database's name, not \
             the keyword replication. Then: SELECT pg_reload_conf();"
        ),
        (Some("28000"), Some("ClientAuthentication")) => format!(
            "Allow role {role} and database {database} in pg_hba.conf. Then: SELECT \
             pg_reload_conf();"
        ),
        (Some("28000"), Some("InitializeSessionUserId")) => {
            let replication = if replicates { " REPLICATION" } else { "" };
            format!(
                "CREATE ROLE {role} LOGIN{replication}; or, if it is there: ALTER ROLE {role} \
                 LOGIN{replication}; or name another one in the connection string."
            )
        }
        (Some("28P01"), _) => format!(
            "Check the user ({role}) and its password: in the connection string, PGPASSWORD, or the \
             password file."
        ),
        (Some("3D000"), _) => "Check dbname in the connection string: SELECT datname FROM \
                               pg_database; lists what there is."
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
            "Raise max_wal_senders or max_connections on the publisher.".to_owned()
        }
        (Some("53300"), _) => "Raise max_connections on the subscriber.".to_owned(),
        _ => return failure,
    };
    failure.hint(hint)
}
