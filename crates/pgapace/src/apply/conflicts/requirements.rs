//! Requirements of conflict rules on the subscriber.

use wire::Session;

use crate::error::{Class, Failure, Result};
use crate::subscriber::conflict::Policy;

/// Refuses rules that need commit times where the subscriber has none. `tagged`: whether our commits
/// carry an origin and the publisher's time; without, our own rows could not be told from others.
pub(crate) fn check(session: &mut Session, policy: &Policy, tagged: bool) -> Result<()> {
    let Some(rule) = policy.needs_commit_times() else { return Ok(()) };
    let results = session
        .simple("SELECT pg_catalog.current_setting('track_commit_timestamp')")
        .map_err(|e| Failure::subscriber(&e, "reading track_commit_timestamp"))?;
    let setting = results.first().and_then(wire::Rows::first);
    if setting.is_none_or(|row| row.get(0) != Some("on")) {
        return Err(Failure::new(
            Class::Config,
            format!("--on-conflict {rule} requires track_commit_timestamp on the subscriber"),
        )
        .hint("ALTER SYSTEM SET track_commit_timestamp = on, and restart the subscriber."));
    }
    if !tagged {
        return Err(Failure::new(
            Class::Config,
            format!(
                "--on-conflict {rule} requires commits that are tagged with a replication origin"
            ),
        )
        .hint(
            "Grant the role EXECUTE on the origin functions (see docs/privileges.sql), or remove \
             --tag-commits=false.",
        ));
    }
    Ok(())
}
