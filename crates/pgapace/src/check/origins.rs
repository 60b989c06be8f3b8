//! Checks of the replication origins that tag commits: of each subscription, and of all in a file together.

use wire::Session;

use crate::check::report::{Fix, Report, Reporter, Severity, Side};
use crate::check::service::Service;
use crate::check::subscriber::count;
use crate::check::{SubscriptionState, failed, server};
use crate::config::{Subscription as Config, TagCommits};
use crate::error::Result;
use crate::subscriber::origin;
use crate::subscriber::tagging::{OriginRoom, RunSessions, Tagging, setting};

const SIDE: Side = Side::Subscriber;

/// What a subscription needs of the replication origins of its server, which its file's others need too.
#[derive(Debug)]
pub(super) struct OriginNeed {
    server: String,
    /// Whether the subscription has an origin already.
    has_one: bool,
    /// `others` counts those of the subscription too.
    room: OriginRoom,
    /// Whether the subscription does not start without.
    needed: bool,
    setting: &'static str,
    service: Service,
}

/// Adds up what the subscriptions of a file need, which each check reported for its own alone: a first run
/// of one of them leaves fewer to the next. The finding is one of the first subscription on each server.
pub(crate) fn add_up(reports: &mut [Report]) {
    for first in 0..reports.len() {
        let (before, rest) = reports.split_at(first);
        let Some(need) = rest.first().and_then(|report| report.origins.as_ref()) else { continue };
        let same = |report: &&Report| {
            report.origins.as_ref().is_some_and(|other| other.server == need.server)
        };
        if before.iter().any(|report| same(&report)) {
            continue;
        }
        let all: Vec<_> = rest.iter().filter(same).filter_map(|it| it.origins.as_ref()).collect();
        let new = all.iter().filter(|need| !need.has_one).count();
        let OriginRoom { most, others, reserve, .. } = need.room;
        let left = usize::try_from(most - others - reserve).unwrap_or(0);
        // Where none is left, or one subscription is short, its own findings say so.
        if all.len() < 2 || new <= left {
            continue;
        }
        let (name, enough) = (need.setting, others + count(new) + reserve);
        let fix = need.service.set(SIDE, name, enough);
        let consequence = if all.iter().any(|need| need.needed) {
            "do not start if they have --origin none, and do not tag their commits otherwise"
        } else {
            "do not tag their commits"
        };
        let message = format!(
            "{} subscriptions of this configuration apply to this server, and {new} of them need a first \
             replication origin: {name} is {most}, {others} exist, and {reserve} are left for native \
             subscriptions. {} subscriptions {consequence}. If nobody needs tags, pass --tag-commits=false",
            all.len(),
            new - left,
        );
        reports[first].add(Severity::Warning, SIDE, "origin", message).fix(fix);
    }
}

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
    if let Some(grant) = missing_grant(session)? {
        let problem = format!("role {} may not use replication origins", known.role);
        cannot_tag(config, reporter, Severity::Note, &problem, Fix::Sql(grant));
        return Ok(());
    }
    let OriginRoom { most, others, reserve, .. } = tagging.origins;
    let own_origins = i64::try_from(tagging.own()).unwrap_or(i64::MAX);
    if tagging.room().is_some() {
        reporter.report.origins = Some(OriginNeed {
            server: server(session, SIDE)?,
            has_one: own_origins > 0,
            room: OriginRoom { others: others + own_origins, ..tagging.origins },
            needed: config.origin_none(),
            setting: name,
            service: known.service,
        });
    }
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
            cannot_tag(config, reporter, Severity::Warning, &problem, enough);
        } else {
            reporter.ok("origin", "commits can be tagged with a replication origin");
        }
        return Ok(());
    }
    let sessions = tagging.sessions(config);
    if tagging.is_short() {
        let problem = format!(
            "{name} is {most}, others have {others} replication origins, and {reserve} are left for native \
             subscriptions"
        );
        cannot_tag(config, reporter, Severity::Warning, &problem, enough);
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

/// The SQL that grants the origin functions that the role may not call.
fn missing_grant(session: &mut Session) -> Result<Option<String>> {
    let rows = session
        .query(origin::GRANT_SQL, &[])
        .map_err(|e| failed(SIDE, &e, "reading privileges"))?;
    Ok(rows.first().and_then(|row| row.get(0).map(str::to_owned)))
}

/// Without `--origin none`, the finding has this severity: the role may lack the privileges on purpose.
fn cannot_tag(
    config: &Config,
    reporter: &mut Reporter<'_>,
    severity: Severity,
    problem: &str,
    fix: Fix,
) {
    let (severity, consequence) = if config.origin_none() {
        let consequence = "with --origin none, a subscription in the opposite direction would send untagged \
                           commits back. If there is none, pass --tag-commits=false";
        (Severity::Blocker, consequence)
    } else {
        let consequence = "commits will not be tagged, so subscriptions to this server cannot filter them by \
                           origin";
        (severity, consequence)
    };
    let message = format!("{problem}: {consequence}");
    reporter.report.add(severity, SIDE, "origin", message).fix(fix);
}
