//! Checks of the replication origins that tag commits.

use wire::Session;

use crate::check::report::{Fix, Reporter, Side};
use crate::check::subscriber::count;
use crate::check::{SubscriptionState, failed};
use crate::config::{Subscription as Config, TagCommits};
use crate::error::Result;
use crate::subscriber::origin;
use crate::subscriber::tagging::{OriginRoom, RunSessions, Tagging, setting};

const SIDE: Side = Side::Subscriber;

/// Tagged commits need the origin functions, and a free slot for each origin in use.
pub(super) fn check(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    if config.tag_commits == TagCommits::Never {
        if config.origin_none() {
            reporter.warn(
                "origin",
                "commits are not tagged (--tag-commits=false): a subscription in the opposite \
                 direction would send them back",
            );
        }
        return Ok(());
    }
    // An origin occupies a slot from its first use until it is dropped. The subscription's own
    // origins already have slots.
    let own = known.row.as_ref().map(|row| origin::prefix(session, row.id)).transpose()?;
    let tagging = Tagging::read(session, config.tag_commits, own.as_deref())?;
    let name = setting(session.server_version().major());
    if !tagging.tagged {
        reporter.ok(
            "origin",
            "commits are not tagged with a replication origin: nobody could see it, because \
             wal_level is not logical and track_commit_timestamp is off",
        );
        return Ok(());
    }
    let refused = refused_functions(session)?;
    if !refused.is_empty() {
        let problem = format!("role {} may not use replication origins", known.role);
        let fix = Fix::Sql(format!("GRANT EXECUTE ON FUNCTION {refused} TO {};", known.role));
        cannot_tag(config, reporter, &problem, fix);
        return Ok(());
    }
    let OriginRoom { most, others, reserve } = tagging.origins;
    // One per worker, one for tables that are copied while others stream, and one per session for
    // streaming transactions.
    let wanted = RunSessions::of(config);
    let needed = count(wanted.workers + wanted.streams + 1);
    let enough = known.service.set(SIDE, name, others + needed + reserve.max(8));
    if config.tag_commits == TagCommits::Always {
        if others + needed > most {
            let problem = format!(
                "{name} is {most}, {others} replication origins of others exist, and a run needs \
                 up to {needed} more"
            );
            cannot_tag(config, reporter, &problem, enough);
        } else {
            reporter.ok("origin", "commits can be tagged with a replication origin");
        }
        return Ok(());
    }
    let sessions = tagging.sessions(config);
    if most <= others {
        let problem = format!("{name} is {most}, and others have {others} replication origins");
        cannot_tag(config, reporter, &problem, enough);
    } else if sessions == wanted {
        reporter
            .ok("origin", format!("commits are tagged with up to {needed} replication origins"));
    } else {
        reporter
            .note(
                "origin",
                format!(
                    "commits are tagged, and each session needs a replication origin: {name} is \
                     {most}, others have {others}, and {reserve} are left for native subscriptions. Sessions \
                     that apply: at most {}, and for streaming transactions {}. If nobody needs tags, pass \
                     --tag-commits=false",
                    sessions.workers, sessions.streams
                ),
            )
            .fix(enough);
    }
    Ok(())
}

/// The origin functions that the role may not call.
fn refused_functions(session: &mut Session) -> Result<String> {
    let rows = session
        .query(
            "SELECT coalesce(pg_catalog.string_agg( \
               p.oid::pg_catalog.regprocedure::pg_catalog.text, ', ' ORDER BY p.proname), '') \
             FROM pg_catalog.pg_proc p \
             WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace \
               AND p.proname IN ('pg_replication_origin_create', 'pg_replication_origin_drop', \
                 'pg_replication_origin_oid', 'pg_replication_origin_session_reset', \
                 'pg_replication_origin_session_setup', \
                 'pg_replication_origin_xact_reset', 'pg_replication_origin_xact_setup') \
               AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')",
            &[],
        )
        .map_err(|e| failed(SIDE, &e, "reading privileges"))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)).unwrap_or_default())
}

fn cannot_tag(config: &Config, reporter: &mut Reporter<'_>, problem: &str, fix: Fix) {
    if config.origin_none() {
        reporter
            .block(
                "origin",
                format!(
                    "{problem}: with --origin none, a subscription in the opposite direction would \
                     send untagged commits back. If there is none, pass --tag-commits=false"
                ),
            )
            .fix(fix);
    } else {
        reporter
            .note(
                "origin",
                format!(
                    "{problem}: commits will not be tagged, so subscriptions to this server \
                     cannot filter them by origin"
                ),
            )
            .fix(fix);
    }
}
