//! Hints for failed connection attempts: the server's reason, and the user's next step.
//!
//! One SQLSTATE has several causes, and messages may be in any language. The name of the server
//! routine that raised the error tells the causes apart.

use wire::{ConnInfo, quote_ident};

use crate::error::Failure;
use crate::pooler::{self, Side};
use crate::sqlstate;

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
    if let Some(hint) = before_the_server_answers(error) {
        return failure.hint(hint);
    }
    // The same routine and SQLSTATE as without a line of pg_hba.conf.
    let lacks_certificate =
        |said: &wire::ServerError| said.message.contains("valid client certificate");
    if error.server_error().is_some_and(lacks_certificate) {
        return failure.hint(
            "pg_hba.conf demands a client certificate: name its files with sslcert and sslkey in the connection \
             string, signed by an authority in ssl_ca_file of the server.",
        );
    }
    let hint = match (failure.sqlstate.as_deref(), routine) {
        (Some(sqlstate::INVALID_AUTHORIZATION_SPECIFICATION), Some("ClientAuthentication"))
            if replicates =>
        {
            format!(
                "Allow role {role} in pg_hba.conf: logical replication matches the database's name, \
             not the keyword replication. Then: SELECT pg_reload_conf();"
            )
        }
        (Some(sqlstate::INVALID_AUTHORIZATION_SPECIFICATION), Some("ClientAuthentication")) => {
            format!(
                "Allow role {role} and database {database} in pg_hba.conf. Then: SELECT \
             pg_reload_conf();"
            )
        }
        // Untranslated; otherwise the next hint has both.
        (Some(sqlstate::INVALID_AUTHORIZATION_SPECIFICATION), Some("InitializeSessionUserId"))
            if error.server_error().is_some_and(may_not_log_in) =>
        {
            format!("ALTER ROLE {role} LOGIN;")
        }
        (Some(sqlstate::INVALID_AUTHORIZATION_SPECIFICATION), Some("InitializeSessionUserId")) => {
            let replication = if replicates { " REPLICATION" } else { "" };
            format!(
                "CREATE ROLE {role} LOGIN{replication}; or, if it exists: ALTER ROLE {role} \
                 LOGIN{replication}; or use another role in the connection string."
            )
        }
        (Some(sqlstate::INVALID_PASSWORD), _) => format!(
            "Check user {role} and its password: in the connection string, in PGPASSWORD, or in \
             the password file. It may have expired: SELECT rolvaliduntil FROM pg_roles WHERE rolname = {};",
            wire::quote_literal(info.user())
        ),
        (Some(sqlstate::INVALID_CATALOG_NAME), _) => {
            "Check dbname in the connection string: SELECT datname FROM \
                               pg_database; lists the databases."
                .to_owned()
        }
        (Some(sqlstate::OBJECT_NOT_IN_PREREQUISITE_STATE), Some("CheckMyDatabase")) => {
            format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true;")
        }
        (Some(sqlstate::INSUFFICIENT_PRIVILEGE), Some("CheckMyDatabase")) => {
            format!("GRANT CONNECT ON DATABASE {database} TO {role};")
        }
        (Some(sqlstate::INSUFFICIENT_PRIVILEGE), _) if replication => {
            format!("ALTER ROLE {role} REPLICATION;")
        }
        (Some(sqlstate::TOO_MANY_CONNECTIONS), Some("CheckMyDatabase")) => {
            format!("ALTER DATABASE {database} CONNECTION LIMIT -1;")
        }
        (Some(sqlstate::TOO_MANY_CONNECTIONS), Some("InitializeSessionUserId")) => {
            format!("ALTER ROLE {role} CONNECTION LIMIT -1;")
        }
        (Some(sqlstate::TOO_MANY_CONNECTIONS), _) if replicates => {
            "On the publisher: ALTER SYSTEM SET max_wal_senders = … (or max_connections = …); \
             then restart it."
                .to_owned()
        }
        (Some(sqlstate::TOO_MANY_CONNECTIONS), _) => {
            "On the subscriber: ALTER SYSTEM SET max_connections = …; then restart it.".to_owned()
        }
        _ => return failure,
    };
    failure.hint(hint)
}

/// Whether the role exists, and lacks LOGIN.
fn may_not_log_in(said: &wire::ServerError) -> bool {
    said.message.contains("is not permitted to log in")
}

/// The next step after a failure that no server has reported.
fn before_the_server_answers(error: &wire::Error) -> Option<&'static str> {
    let text = error.to_string();
    if text.contains("no password supplied") {
        return Some(
            "The server asks for a password: give it in the connection string, in PGPASSWORD, or in the password \
             file.",
        );
    }
    text.contains("no trusted certificate").then_some(
        "Name the certificate of its issuer with sslrootcert=FILE, or the system's certificates with \
         sslrootcert=system.",
    )
}
