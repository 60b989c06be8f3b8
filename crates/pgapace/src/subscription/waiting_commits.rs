//! Commits of the publisher that wait for a subscription whose first copy is not complete.
//!
//! If `synchronous_standby_names` names the subscription, they wait until it streams. Before that it answers none: an answer
//! would promise rows that the subscriber does not have. And a new slot waits for every transaction that writes, also for one
//! whose commit waits. So a commit and the first start, or a rebase, wait for each other. The server does not detect this
//! deadlock, and native has it too. The thread here tells of it.
//!
//! Beside the stream nothing is told: the stream answers the commits, so the slot of an added table's copy is created.

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use wire::Session;

use crate::error::{Failure, Result};
use crate::observe::events::Concern;
use crate::observe::long_wait::TELL_AFTER;
use crate::publisher::session::Publisher;
use crate::publisher::watch;
use crate::subscriber::catalogue::{boolean, first_row};

/// Most process ids that the message names.
const SHOWN: usize = 10;

/// Looks for such commits until it is dropped. Its thread is not waited for.
#[derive(Debug)]
pub(super) struct WaitingCommits {
    _ends: Sender<()>,
}

impl WaitingCommits {
    /// Starts the thread; `None` if the system has none: then nothing is told. `source` is a session on the publisher.
    pub(super) fn watch(
        publisher: &Publisher,
        source: &Session,
        subscription: &str,
    ) -> Option<Self> {
        let (_ends, ended) = bounded(0);
        let name = watch::standby_name(source, subscription);
        let (publisher, subscription) = (publisher.clone(), subscription.to_owned());
        let watch = move || watch(&publisher, &subscription, &name, &ended);
        let thread = std::thread::Builder::new()
            .name("waiting commits".to_owned())
            .spawn(Concern::keep(watch));
        thread.is_ok().then_some(Self { _ends })
    }
}

/// Warns at the start if commits of the publisher need the answer of the subscription, before one waits.
pub(super) fn warn_if_named(source: &mut Session, subscription: &str) -> Result<()> {
    let name = watch::standby_name(source, subscription);
    if watch::needs(source, &name)? {
        tracing::warn!(
            event = "commits_will_wait_for_copy",
            subscription,
            hint = remedy(&name),
            "synchronous_standby_names of the publisher names this subscription, whose first copy is not complete: \
             commits will wait until it streams"
        );
    }
    Ok(())
}

fn remedy(name: &str) -> String {
    format!(
        "On the publisher: ALTER SYSTEM SET synchronous_standby_names = … without {name}; SELECT pg_reload_conf(). Put it \
         back when the subscription streams."
    )
}

/// Tells once of commits that wait, and again if there were none meanwhile.
fn watch(publisher: &Publisher, subscription: &str, name: &str, ended: &Receiver<()>) {
    let (mut session, mut told) = (None, false);
    while ended.recv_timeout(TELL_AFTER) == Err(RecvTimeoutError::Timeout) {
        match look(publisher, &mut session, name) {
            Ok(Some(waiting)) if !told => {
                tell(subscription, name, &waiting);
                told = true;
            }
            Ok(waiting) => told = waiting.is_some(),
            Err(failure) => {
                tracing::debug!(%failure, "cannot look for commits that wait");
                session = None;
            }
        }
    }
}

fn tell(subscription: &str, name: &str, waiting: &str) {
    tracing::warn!(
        event = "commits_wait_for_copy",
        subscription,
        waiting,
        hint = remedy(name),
        "commits of the publisher wait for this subscription, which answers none before its first copy is complete"
    );
}

/// The processes whose commits wait for a standby of this name, for a message. `None` if there are none, or if
/// other standbys can answer them.
fn look(
    publisher: &Publisher,
    session: &mut Option<Session>,
    name: &str,
) -> Result<Option<String>> {
    let session = publisher.session_to_look(session)?;
    if !watch::needs(session, name)? {
        return Ok(None);
    }
    // Others than a member of pg_read_all_stats do not see what sessions of other roles wait for.
    let sql = format!(
        "SELECT (SELECT pg_catalog.string_agg(CASE WHEN w.n > {SHOWN} THEN '…' ELSE w.pid::pg_catalog.text END, ', ' \
             ORDER BY w.n) \
           FROM (SELECT a.pid, pg_catalog.row_number() OVER (ORDER BY a.xact_start, a.pid) AS n \
             FROM pg_catalog.pg_stat_activity a WHERE a.wait_event = 'SyncRep') w WHERE w.n <= {SHOWN} + 1), \
           pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE')"
    );
    let results = session
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "looking for commits that wait"))?;
    let row = first_row(&results, "the query for sessions that wait")?;
    Ok(match row.get(0) {
        Some(waiting) => Some(waiting.to_owned()),
        None if boolean(&row, 1)? => None,
        None => Some("perhaps sessions that only pg_read_all_stats may see".to_owned()),
    })
}
