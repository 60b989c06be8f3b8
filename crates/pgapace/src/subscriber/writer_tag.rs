//! Replication origins of sessions that write replicated tables beside the apply workers: those that
//! empty, copy, rebase and repair tables.
//!
//! An untagged TRUNCATE or COPY among tagged commits would be sent back by a subscription in the opposite
//! direction, and would remove or overwrite rows that were written on the publisher since. So these
//! sessions tag wherever the apply workers do, and they fail before they write where a tag is needed and
//! cannot be had.

use std::fmt::{self, Display, Formatter};

use wire::{Session, quote_literal};

use crate::config::{Subscription as Config, TagCommits};
use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::origin::{self, LeftFree, Untagged};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::SubscriptionId;
use crate::subscriber::tagging::{RunSessions, Tagging};

/// The rules that decide whether these sessions have replication origins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TagRules {
    tag_commits: TagCommits,
    origin_none: bool,
    /// The sessions that apply, at most.
    wanted: RunSessions,
}

/// Such a session. Apply workers have numbers, so the names of their origins differ from these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writer {
    /// Copy worker of this number. The first one's origin also serves what happens before: emptying and
    /// rebasing tables.
    Copy(usize),
    /// A verb that runs beside the subscription.
    Repair,
}

impl Display for Writer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy(number) => write!(f, "copy{number}"),
            Self::Repair => f.write_str("repair"),
        }
    }
}

impl TagRules {
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            tag_commits: config.tag_commits,
            origin_none: config.origin_none(),
            wanted: RunSessions::of(config),
        }
    }

    /// How many copy workers there may be, because each needs an origin. `beside`: apply workers run
    /// meanwhile, so theirs are left to them.
    pub(crate) fn copy_workers(
        self,
        session: &mut Session,
        id: SubscriptionId,
        beside: bool,
        workers: usize,
    ) -> Result<usize> {
        if self.tag_commits == TagCommits::Never {
            return Ok(workers);
        }
        let prefix = origin::prefix(session, id)?;
        let tagging = Tagging::read(session, self.tag_commits, Some(&prefix))?;
        let most = tagging.copy_sessions(self.wanted, beside).unwrap_or(workers);
        if most < workers {
            tracing::info!(
                event = "origins_limit_copy_workers",
                workers = most,
                configured = workers,
                "fewer workers than configured copy, because each needs a replication origin"
            );
        }
        Ok(workers.min(most))
    }
}

/// The origin of a session, until [`Self::release`].
#[derive(Debug)]
pub(crate) struct WriterTag {
    id: SubscriptionId,
    database: u32,
    writer: Writer,
    /// Whether the origin may be dropped when it is not used any more.
    may_drop: bool,
}

impl WriterTag {
    /// Tags the commits of the session from here on. `None` if tags are not wanted or not visible, or if
    /// neither the apply workers nor these sessions can have them and the subscription does without.
    pub(crate) fn attach(
        session: &mut Session,
        id: SubscriptionId,
        rules: TagRules,
        writer: Writer,
    ) -> Result<Option<Self>> {
        if rules.tag_commits == TagCommits::Never {
            return Ok(None);
        }
        let tagging = Tagging::read(session, rules.tag_commits, None)?;
        if !tagging.tagged {
            return Ok(None);
        }
        let database = origin::database(session)?;
        let failed = |e: &wire::Error| Failure::subscriber(e, "setting the replication origin");
        let ask = origin::ask_sql(session, database, id, writer);
        let asked = session.simple(&ask).map_err(|e| failed(&e))?;
        // One of each kind stands for all of them.
        let is_first = matches!(writer, Writer::Copy(0) | Writer::Repair);
        let left_free =
            tagging.room().map(|room| LeftFree { reserve: room.reserve, one_each: !is_first });
        let mut attached = origin::attach(session, database, id, writer, left_free, &asked)?;
        let others_tag = attached.is_err() && has_origins(session, database, id)?;
        // What it writes lies among tagged commits: it takes one that is left to others, until it ends.
        if matches!(attached, Err(Untagged::Short(_))) && others_tag && is_first {
            attached = origin::attach(session, database, id, writer, None, &asked)?;
        }
        match attached {
            Ok(()) => Ok(Some(Self { id, database, writer, may_drop: tagging.may_drop })),
            Err(reason) if rules.origin_none || others_tag => Err(refusal(&reason, rules)),
            Err(reason) => {
                if is_first {
                    reason.log(&name_of(session, id)?);
                }
                Ok(None)
            }
        }
    }

    /// Ends the tag. Later commits of the session are untagged.
    pub(crate) fn release(self, session: &mut Session) {
        let Self { id, database, writer, may_drop } = self;
        if session.is_broken() {
            return;
        }
        if may_drop {
            origin::release(session, database, id, writer);
        } else {
            origin::detach(session);
        }
    }
}

/// Refuses a subscription whose tables cannot be written now, because a tag is needed and cannot be had. It is for verbs
/// that drop something before they write, while no process runs the subscription: origins of its workers are free.
pub(crate) fn check(subscriber: &Subscriber, id: SubscriptionId, rules: TagRules) -> Result<()> {
    let mut session = subscriber.connect(Purpose::Control)?;
    if rules.tag_commits != TagCommits::Never {
        let prefix = origin::prefix(&mut session, id)?;
        let tagging = Tagging::read(&mut session, rules.tag_commits, Some(&prefix))?;
        origin::drop_unused(&mut session, &tagging.numbered_from(&prefix, 1))?;
    }
    if let Some(tag) = WriterTag::attach(&mut session, id, rules, Writer::Copy(0))? {
        tag.release(&mut session);
    }
    Ok(())
}

/// Whether sessions of the subscription tag: then another direction may rely on it.
fn has_origins(session: &mut Session, database: u32, id: SubscriptionId) -> Result<bool> {
    let prefix = quote_literal(&origin::prefix_in(database, id));
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_replication_origin \
         WHERE pg_catalog.starts_with(roname, {prefix}))"
    );
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading its replication origins"))?;
    let row = rows.first().ok_or_else(|| Failure::internal("EXISTS returned no row"))?;
    boolean(&row, 0)
}

fn name_of(session: &mut Session, id: SubscriptionId) -> Result<String> {
    let sql = format!("SELECT s.name FROM pgapace.subscription s WHERE s.id = {}", id.0);
    let rows = session
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading the subscription's name"))?;
    field(&first_row(&[rows], "the query for the subscription")?, 0)
}

fn refusal(reason: &Untagged, rules: TagRules) -> Failure {
    let message = format!(
        "cannot write to replicated tables: the writes cannot be tagged with a replication origin: {reason}"
    );
    Failure::new(Class::Subscriber, message).hint(reason.remedy(
        rules.tag_commits == TagCommits::Auto,
        "A subscription in the opposite direction would send untagged writes back.",
    ))
}
