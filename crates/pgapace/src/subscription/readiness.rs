//! From ownership to the stream: everything that a run reads, checks and opens before its leader starts.
//!
//! To a distant server each round trip counts. So the sessions that apply connect as soon as this
//! process owns the subscription, and both servers are read meanwhile. While tables are copied, the
//! sessions would only idle: then they connect behind the copy.

use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};

use engine::dispatch::Pacing;
use pgoutput::Streaming;
use wire::{ReplicationStream, Rows, Session};

use super::Supervisor;
use super::pipeline::{Applying, Opened, ReadyToStream, purpose};
use super::resume::Resumption;
use super::sessions::OpenedSessions;
use super::startup::OwnedSubscription;
use crate::apply::blockers::Pulse;
use crate::apply::durability;
use crate::apply::leader::Outcome;
use crate::both_servers::ask_both;
use crate::error::{Failure, Result};
use crate::observe::board::RunPhase;
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::Publisher;
use crate::publisher::source::ChangeSource;
use crate::publisher::start_replication;
use crate::publisher::watch::{self, Commits, Watch};
use crate::scoped_thread;
use crate::subscriber::format::Servers;
use crate::subscriber::origin;
use crate::subscriber::replaced_tables;
use crate::subscriber::session;
use crate::subscriber::state::{self, Phase, RelationState, Subscription, heartbeat};
use crate::subscriber::storage;
use crate::subscriber::tagging::Tagging;
use crate::tablesync::SyncContext;

/// Whether the leader may start.
pub(super) enum Readiness<'r> {
    Ready(Box<ReadyToStream<'r>>, Box<Opened>),
    /// Another process asks for the subscription.
    GivenUp(Outcome),
}

/// Sessions that are being opened, and how.
struct Opening<'s> {
    /// Whether commits of the publisher wait for the subscription.
    commits: Commits,
    durable_commits: bool,
    tagging: Tagging,
    applying: Applying,
    sessions: ScopedJoinHandle<'s, Result<OpenedSessions>>,
}

impl Supervisor<'_> {
    /// Copies the tables that are to be copied, checks that the stream can resume, starts it, and opens
    /// the sessions that apply it. `read`: whether commits of the publisher wait for the subscription,
    /// and the row of [`Tagging::sql`], as read before.
    pub(super) fn get_ready<'r>(
        &mut self,
        owned: &'r OwnedSubscription,
        context: SyncContext<'r>,
        (commits, tagging): (Commits, Option<Rows>),
        mut control: Session,
        mut source: Session,
    ) -> Result<Readiness<'r>> {
        let OwnedSubscription { row, database, .. } = owned;
        let prefix = origin::prefix_in(database, row.id);
        let streams = row.phase == Phase::Streaming;
        std::thread::scope(|scope| {
            let mut opening = None;
            if let Some(tagging) = tagging.filter(|_| streams) {
                let tagging = Tagging::of(&tagging, self.config.tag_commits, Some(&prefix))?;
                let begun =
                    self.begin_to_open(scope, &mut control, owned, context, (commits, tagging))?;
                opening = Some(begun);
            }
            let begun = if streams {
                self.begin_to_stream(&mut control, &mut source, owned, context)?
            } else {
                self.record_start(&mut control, owned)?.map_or(Ok(None), Err)
            };
            let read = match begun {
                Ok(read) => read,
                Err(outcome) => return Ok(Readiness::GivenUp(outcome)),
            };
            if !streams {
                self.board.enters(RunPhase::Copying);
            }
            let published = self.sync_tables(&mut control, &mut source, row, context, read)?;
            self.name_unused_rules(&published);
            // A rebase is over with the first tables: those that are added are treated as the settings say.
            let context = SyncContext { options: self.config.copy(), ..context };
            let opening = match opening {
                Some(opening) => opening,
                None => {
                    let read = self.look_again(&mut control, &mut source, &prefix)?;
                    self.begin_to_open(scope, &mut control, owned, context, read)?
                }
            };
            self.drop_unused_origins(&mut control, &prefix, &opening.tagging)?;
            let resumption =
                self.resume(&mut control, &mut source, row, context, opening.commits, &published)?;
            let streaming = self.streaming().of_publisher(source.server_version().major());
            let servers = Servers::of(&source, &control);
            let source = (context.publisher, source);
            let (stream, states) =
                self.begin_stream(source, &mut control, row, &resumption, streaming, &published)?;
            let Opening { commits, durable_commits, mut applying, sessions, .. } = opening;
            applying.identity.round_trip = control
                .measure_round_trip(Pacing::MEASURED.far)
                .map_err(|e| Failure::subscriber(&e, "looking how far away it is"))?;
            let panicked = |_| Err(Failure::internal("connecting panicked"));
            let sessions = sessions.join().unwrap_or_else(panicked)?;
            let (pulse, opposites) = (Pulse::default(), Arc::default());
            let (pool, durability) = self.pool(
                context.subscriber,
                &applying,
                purpose(durable_commits),
                sessions,
                &pulse,
                &opposites,
            )?;
            let until = self.goal(resumption.wal_end);
            let (name, standby) = (&self.config.name, resumption.standby.clone());
            let of = (name.as_str(), row.slot_name.as_str());
            let watch = Watch::spawn(context.publisher, of, commits, standby, opposites)?;
            let opened = Opened {
                control,
                source: ChangeSource::Publisher(Box::new(stream)),
                resumption,
                states,
                pool,
                durability,
                applying,
                pulse,
                until,
                commits,
                durable_commits,
                streaming,
                servers,
                watch,
            };
            let ready = ReadyToStream { row, context, published };
            Ok(Readiness::Ready(Box::new(ready), Box::new(opened)))
        })
    }

    /// Logs conflict rules for tables that are not published, perhaps because of a mistyped name: not again at each
    /// retry.
    fn name_unused_rules(&mut self, published: &[PublishedTable]) {
        let unused = self.config.on_conflict.unpublished(published);
        for table in unused.iter().filter(|table| !self.unused_rules.contains(table)) {
            tracing::warn!(
                event = "conflict_rule_unused",
                subscription = self.config.name,
                table,
                "a rule of --on-conflict is for a table that is not published"
            );
        }
        self.unused_rules = unused;
    }

    /// Begins to open the sessions that apply.
    fn begin_to_open<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        control: &mut Session,
        OwnedSubscription { row, database, .. }: &OwnedSubscription,
        context: SyncContext<'s>,
        (commits, tagging): (Commits, Tagging),
    ) -> Result<Opening<'s>> {
        self.drop_left_origins(control, &origin::prefix_in(database, row.id), &tagging)?;
        let durable_commits = commits.are_synchronous() && durability::is_quick(control, row.id)?;
        let applying = self.applying(control, *database, row, &tagging, context.subscriber);
        let Applying { identity, workers, .. } = applying;
        let connector = self.connector(context.subscriber, purpose(durable_commits), identity);
        let (leaseholder, subscriber, id) =
            (Arc::clone(&self.leaseholder), context.subscriber, row.id);
        let sessions = scoped_thread::spawn(scope, "connect", move || {
            OpenedSessions::open(subscriber, &leaseholder, workers, &connector, id)
        })?;
        Ok(Opening { commits, durable_commits, tagging, applying, sessions })
    }

    /// Behind a copy, which may have taken long: whether commits of the publisher wait for the
    /// subscription, and how commits are tagged.
    fn look_again(
        &self,
        control: &mut Session,
        source: &mut Session,
        prefix: &str,
    ) -> Result<(Commits, Tagging)> {
        let name = watch::standby_name(source, &self.config.name);
        let (commits, tagging) = ask_both(
            "reading synchronous_standby_names",
            || watch::look_once(source, &name),
            || Tagging::read(control, self.config.tag_commits, Some(prefix)),
        );
        let tagging = tagging?;
        Ok((commits?, tagging))
    }

    /// Starts the stream, and reads the states of the tables. Tells once in a process how the tables are
    /// stored.
    fn begin_stream(
        &mut self,
        (publisher, source): (&Publisher, Session),
        control: &mut Session,
        row: &Subscription,
        resumption: &Resumption,
        streaming: Streaming,
        published: &[PublishedTable],
    ) -> Result<(ReplicationStream, Vec<RelationState>)> {
        let looks = !std::mem::replace(&mut self.looked_at_storage, true);
        let names = if looks { storage::names(published) } else { Default::default() };
        let names = names.each_ref().map(|names| Some(names.as_str()));
        let stored = if looks { (storage::STORAGE, &names[..]) } else { ("SELECT", &[][..]) };
        let walsender = source.backend_pid();
        self.ownership.set_walsender(walsender);
        let begins = format!(
            "WITH sender AS ({}) {}",
            heartbeat::walsender_sql(row.owned_epoch(), walsender),
            session::give_up_locks_sql()
        );
        let this: &Self = self;
        let (stream, read) = ask_both(
            "starting the stream",
            || this.start_stream(publisher, source, row, resumption, streaming),
            || state::relations_and(control, row.id, &begins, stored),
        );
        let (stream, (mut states, stored, replaced)) = (stream?, read?);
        if replaced_tables::judge(control, row.owned_epoch(), &replaced, |_| true)? {
            states = state::relations(control, row.id)?;
        }
        if looks {
            storage::warn_of_unlogged(&stored, published)?;
        }
        Ok((stream, states))
    }

    fn start_stream(
        &self,
        publisher: &Publisher,
        source: Session,
        row: &Subscription,
        resumption: &Resumption,
        streaming: Streaming,
    ) -> Result<ReplicationStream> {
        let command = start_replication::start_command(
            source.server_version().major(),
            &row.slot_name,
            resumption.start,
            &self.config.publications,
            &start_replication::StreamOptions {
                origin_none: self.config.origin_none(),
                two_phase: resumption.two_phase,
                binary: resumption.format.binary,
                streaming,
            },
        );
        tracing::debug!(command, "starting the stream");
        ReplicationStream::start(source, &command)
            .map_err(|e| start_replication::refused(publisher, &row.slot_name, &e))
    }
}
