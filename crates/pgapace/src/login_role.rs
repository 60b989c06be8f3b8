//! The role that a session of pgapace logged in as.
//!
//! `ALTER ROLE … SET role` has sessions act under another role. The server hides from that role when the
//! sessions of the login role began and what they wait for, and refuses to terminate them, even the session
//! itself. So pgapace looks at its sessions, and ends them, under the login role.

/// SQL: the same process id, for the argument of `pg_stat_get_activity` or `pg_terminate_backend`. The server
/// evaluates the argument first. So the function runs under the login role, and so does the rest of the transaction.
/// The server checks earlier, under the other role, which tables and functions the statement may use.
pub(crate) fn as_login_role(pid: &str) -> String {
    format!(
        "CASE WHEN pg_catalog.set_config('role', 'none', true) OPERATOR(pg_catalog.=) 'none' THEN {pid} END"
    )
}

/// SQL that terminates a backend, if it is still there. One that has ended since its process id was read is no reason for
/// the warning that the server would send.
pub(crate) fn terminate(pid: &str) -> String {
    let quiet = format!(
        "CASE WHEN pg_catalog.set_config('client_min_messages', 'error', true) \
           OPERATOR(pg_catalog.=) 'error' THEN {pid} END"
    );
    format!("pg_catalog.pg_terminate_backend({})", as_login_role(&quiet))
}
