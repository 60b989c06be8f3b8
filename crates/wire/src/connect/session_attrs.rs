//! `target_session_attrs`: checks the kind of server that a session is connected to.
//!
//! Source: `CONNECTION_CHECK_TARGET` in `src/interfaces/libpq/fe-connect.c`.

use crate::conninfo::SessionAttrs;
use crate::error::{Error, Result};
use crate::session::Session;

/// Checks a new session. A server of another kind gives [`Error::UnexpectedResult`].
pub(super) fn check(session: &mut Session, wanted: SessionAttrs) -> Result<()> {
    let problem = match wanted {
        SessionAttrs::Any | SessionAttrs::PreferStandby => return Ok(()),
        SessionAttrs::ReadWrite => is_read_only(session)?.then_some("session is read-only"),
        SessionAttrs::ReadOnly => (!is_read_only(session)?).then_some("session is not read-only"),
        SessionAttrs::Primary => is_standby(session)?.then_some("server is in hot standby mode"),
        SessionAttrs::Standby => {
            (!is_standby(session)?).then_some("server is not in hot standby mode")
        }
    };
    match problem {
        None => Ok(()),
        Some(problem) => Err(Error::UnexpectedResult(problem.to_owned())),
    }
}

/// Servers since version 14 report both properties as parameters; older servers need a query.
fn is_standby(session: &mut Session) -> Result<bool> {
    match session.parameter("in_hot_standby") {
        Some(value) => Ok(value == "on"),
        None => first(session, "SELECT pg_catalog.pg_is_in_recovery()").map(|value| value == "t"),
    }
}

fn is_read_only(session: &mut Session) -> Result<bool> {
    match session.parameter("default_transaction_read_only") {
        Some(value) => Ok(value == "on" || is_standby(session)?),
        None => first(session, "SHOW transaction_read_only").map(|value| value == "on"),
    }
}

fn first(session: &mut Session, sql: &str) -> Result<String> {
    let results = session.simple(sql)?;
    let row = results.first().and_then(|rows| rows.first());
    row.and_then(|row| row.get(0))
        .map(str::to_owned)
        .ok_or_else(|| Error::Protocol(format!("no answer to {sql}")))
}
