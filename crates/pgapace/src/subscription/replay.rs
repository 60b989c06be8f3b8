//! A run whose changes come from a recording instead of a publisher.
//!
//! The subscription of a replay is like others: with its row, its tables, its progress. So a replay that
//! was interrupted resumes, whatever ended it. In place of a slot's name its row has that of the recorded
//! system (`recording_…`), so that no `run` takes it for its own. No other subscription may apply changes
//! to its tables: a replay refuses a subscriber where another subscription has one of them.

use std::sync::{Arc, OnceLock};

use engine::dispatch::Pacing;
use pgoutput::Lsn;
use wire::Session;

use super::failure_record::FailureRecord;
use super::pipeline::{Opened, ReadyToStream};
use super::resume::{Preparing, RecordedPosition, Resumption};
use super::retry::PreviousRuns;
use super::sessions::OpenedSessions;
use super::startup::{OwnedSubscription, sync_context};
use super::{Outcome, Supervisor};
use crate::apply::blockers::Pulse;
use crate::apply::pool::{ApplySpan, Elapsed};
use crate::both_servers::ask_both;
use crate::config::{Binary, CopyOptions};
use crate::error::{Class, Failure, Result};
use crate::observe::board::RunPhase;
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::Publisher;
use crate::publisher::source::ChangeSource;
use crate::publisher::watch::{Commits, Watch};
use crate::recording::file::Recording;
use crate::recording::player::{Pace, Player};
use crate::subscriber::catalogue::field;
use crate::subscriber::format::{self, Format, Servers};
use crate::subscriber::origin;
use crate::subscriber::other_subscriptions;
use crate::subscriber::session::{self, Purpose, Subscriber};
use crate::subscriber::state::{self, NewSubscription, Phase, Subscription, schema};
use crate::subscriber::tagging::Tagging;
use crate::tablesync::table_state::set_sync_lsns;
use crate::tablesync::{SyncContext, check_first_subscribers};

/// A recording that is replayed, and the pace.
#[derive(Debug)]
pub(crate) struct Replay {
    pub(crate) recording: Recording,
    pub(crate) pace: Pace,
    span: Arc<ApplySpan>,
    /// The counts of the subscription when this process became its owner.
    before: OnceLock<Applied>,
}

/// The counts of a subscription so far: transactions, changes, conflicts.
pub(crate) type Applied = [i64; 3];

const APPLIED: &str = "\
SELECT t.transactions, t.inserts + t.updates + t.deletes + t.truncates, \
  coalesce((SELECT sum(c.conflicts) FROM pgapace.stat_conflict c WHERE c.subscription = t.subscription), 0) \
FROM pgapace.stat_subscription t JOIN pgapace.subscription s ON s.id = t.subscription WHERE s.name = $1";

pub(crate) fn applied(session: &mut Session, name: &str) -> Result<Applied> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "reading what was applied");
    let rows = session.query(APPLIED, &[Some(name)]).map_err(|e| failed(&e))?;
    let Some(row) = rows.first() else { return Ok([0; 3]) };
    Ok([field(&row, 0)?, field(&row, 1)?, field(&row, 2)?])
}

impl Replay {
    pub(crate) fn new(recording: Recording, pace: Pace) -> Self {
        Self { recording, pace, span: Arc::default(), before: OnceLock::new() }
    }

    pub(crate) fn end(&self) -> Lsn {
        Lsn(self.recording.tail.end)
    }

    /// The counts of the subscription before this process applied anything; `None` if it was never the owner.
    pub(crate) fn applied_before(&self) -> Option<Applied> {
        self.before.get().copied()
    }

    /// How long changes were applied, in all runs of this process, and the processor time of that.
    pub(crate) fn applied_for(&self) -> Elapsed {
        self.span.elapsed()
    }
}

impl Supervisor<'_> {
    /// Everything from "connect" to the first failure.
    pub(super) fn replay_once(
        &mut self,
        replay: &Replay,
        record: &mut FailureRecord,
    ) -> Result<Outcome> {
        self.board.enters(RunPhase::Starting);
        let (config, board) = (Arc::clone(&self.config), self.board.clone());
        let Recording { head, .. } = &replay.recording;
        let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
        let mut control = subscriber.connect_first()?;
        self.stage.connected();
        let row = self.find_or_create_replay(&mut control, replay)?;
        // Another process may have created one meanwhile.
        check_alone(&mut control, &config.name, &head.tables)?;
        let publisher = Publisher::absent();
        let (owned, beat) =
            self.take_ownership(&mut control, None, (&subscriber, &publisher), &row)?;
        if let Some(outcome) = self.record_start(&mut control, &owned)? {
            return Ok(outcome);
        }
        let OwnedSubscription { row, database, .. } = &owned;
        // Another process may have replayed while this one waited for the subscription.
        if replay.before.get().is_none() {
            let _ = replay.before.set(applied(&mut control, &config.name)?);
        }
        self.begin_replay(&mut control, row, &replay.recording)?;
        let context =
            sync_context(self.shutdown, (&config, &board), (&subscriber, &publisher), row);
        // No table is copied or added.
        let options = CopyOptions { refresh_interval: None, ..context.options };
        let context = SyncContext { copy_data: false, indexes_after: false, options, ..context };
        let published = head.tables.clone();
        let ready = ReadyToStream { row, context, published };
        let opened = self.open_replay(&ready, *database, control, replay)?;
        self.previous_runs = PreviousRuns::OfThisProcess;
        drop(beat);
        self.lead(ready, opened, record)
    }

    /// The subscription of the replay. All checks come before it is created, so that a refusal leaves nothing behind.
    fn find_or_create_replay(
        &self,
        control: &mut Session,
        replay: &Replay,
    ) -> Result<Subscription> {
        let (config, head) = (Arc::clone(&self.config), &replay.recording.head);
        let encoding = control.parameter("client_encoding").unwrap_or_default();
        if encoding != head.publisher.client_encoding {
            return Err(Failure::new(
                Class::Recording,
                format!(
                    "the recording has text in {}, and the subscriber needs {encoding}",
                    head.publisher.client_encoding
                ),
            ));
        }
        let of_database = control.parameter("server_encoding").unwrap_or_default();
        session::refuse_unlike_encodings(&head.publisher.server_encoding, of_database)?;
        if let Some(row) = state::find_in_any(control, &config.name)? {
            return Ok(row);
        }
        check_alone(control, &config.name, &head.tables)?;
        check_first_subscribers(
            control,
            (&config.name, &head.tables),
            false,
            config.if_not_empty,
            &[],
        )?;
        self.replay_format(control, replay)?;
        let version = schema::version(control)?;
        schema::upgrade(control, version)?;
        let created = state::create(
            control,
            &NewSubscription {
                name: &config.name,
                slot_name: &config.slot,
                publications: &config.publications,
                owns_slot: false,
                copy_data: false,
                schema_copy: None,
                rebasing: false,
            },
        )?;
        created.map_or_else(|| state::find_of_other(control, &config.name), Ok)
    }

    /// Records where the changes begin, unless an earlier start has.
    fn begin_replay(
        &self,
        control: &mut Session,
        row: &Subscription,
        recording: &Recording,
    ) -> Result<()> {
        let (head, start) = (&recording.head, recording.head.start());
        let owner = row.owned_epoch();
        if row.phase == Phase::Creating {
            let sent_as = self.sent_as();
            state::set_copying(control, owner, start, (&head.identity(), None), &sent_as, false)?;
        }
        if row.phase != Phase::Streaming {
            set_sync_lsns(control, owner, &head.tables, start)?;
            state::set_streaming(control, row.id, false)?;
        }
        Ok(())
    }

    /// Opens the recording and the sessions that apply it.
    fn open_replay(
        &mut self,
        ready: &ReadyToStream<'_>,
        database: u32,
        mut control: Session,
        replay: &Replay,
    ) -> Result<Opened> {
        let (row, head) = (ready.row, &replay.recording.head);
        let (prefix, subscriber) = (origin::prefix_in(database, row.id), ready.context.subscriber);
        let tagging = Tagging::read(&mut control, self.config.tag_commits, Some(&prefix))?;
        self.drop_unused_origins(&mut control, &prefix, &tagging)?;
        let mut applying = self.applying(&control, database, row, &tagging, subscriber);
        applying.identity.round_trip = control
            .measure_round_trip(Pacing::MEASURED.far)
            .map_err(|e| Failure::subscriber(&e, "looking how far away it is"))?;
        let servers = Servers::recorded(&head.publisher, &control);
        let connector = self.connector(subscriber, Purpose::Apply, applying.identity);
        let this: &Self = self;
        let (opened, resumed) = ask_both(
            "opening sessions",
            || {
                let workers = applying.workers;
                OpenedSessions::open(subscriber, &this.leaseholder, workers, &connector, row.id)
            },
            || {
                let resumption = this.resume_replay(&mut control, row, replay)?;
                let locks = session::give_up_locks_sql();
                let nothing = ("SELECT", &[][..]);
                let states = state::relations_and(&mut control, row.id, &locks, nothing)?.0;
                Ok((resumption, states))
            },
        );
        let (resumption, states) = resumed?;
        let pulse = Pulse::default();
        let (pool, durability) =
            self.pool(subscriber, &applying, Purpose::Apply, opened?, &pulse, &Arc::default())?;
        let pool = pool.with_span(Arc::clone(&replay.span));
        Ok(Opened {
            control,
            source: ChangeSource::Recording(Player::new(&replay.recording, replay.pace)?),
            resumption,
            states,
            pool,
            durability,
            applying,
            pulse,
            until: Some(replay.end()),
            commits: Commits::Asynchronous,
            durable_commits: false,
            streaming: head.streaming()?,
            servers,
            watch: Watch::without_publisher(),
        })
    }

    fn resume_replay(
        &self,
        control: &mut Session,
        row: &Subscription,
        replay: &Replay,
    ) -> Result<Resumption> {
        let head = &replay.recording.head;
        let RecordedPosition { applied, .. } = RecordedPosition::read(control, row.id)?;
        let applied = applied.ok_or_else(|| {
            Failure::new(Class::Subscriber, "the progress of the subscription is missing")
        })?;
        if head.start() > applied.through {
            return Err(Failure::new(
                Class::Recording,
                format!(
                    "the recording begins at {}, but the subscriber has applied changes only up to \
                     {}: changes in between are missing",
                    head.start(),
                    applied.through
                ),
            )
            .hint(
                "Replay the recording before this one first, or take a clone of this one's start.",
            ));
        }
        let format = self.replay_format(control, replay)?;
        state::set_run(control, row, &head.identity(), &self.manner(&format, false))?;
        let prefix = String::new();
        Ok(Resumption {
            acknowledged: head.start(),
            start: head.start(),
            needed_from: applied.through,
            applied,
            catching_up: Vec::new(),
            two_phase: false,
            prepared: Vec::new(),
            preparing: Preparing { hold: None, limit: 0, prefix },
            format,
            wal_end: replay.end(),
            standby: None,
        })
    }

    /// The recorded format, if this subscriber can read it.
    fn replay_format(&self, control: &mut Session, replay: &Replay) -> Result<Format> {
        let head = &replay.recording.head;
        if !head.options.binary {
            return Ok(Format::text("it was recorded as text"));
        }
        let format = match &self.lessons.text {
            Some(reason) => Format::text(reason),
            None => format::choose(control, &head.tables, Binary::Auto)?,
        };
        if format.binary {
            return Ok(format);
        }
        Err(Failure::new(
            Class::Recording,
            format!("the subscriber cannot read the recording's binary values: {}", format.reason),
        )
        .hint("Give the columns the publisher's types, or record again with --binary off."))
    }
}

/// Checks that no other subscription applies changes to the tables. The subscription of which the
/// subscriber is a clone would.
fn check_alone(control: &mut Session, name: &str, tables: &[PublishedTable]) -> Result<()> {
    let keys: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
    let others = other_subscriptions::read(control, name, &keys)?;
    let Some((place, others)) = others.into_iter().next() else { return Ok(()) };
    Err(Failure::new(
        Class::Recording,
        format!("{others} applies changes to {} on this subscriber", tables[place].name),
    )
    .hint(
        "Replay to a clone, never to a subscriber in use. On a clone, drop the subscription first: \
         pgapace drop --keep-slot, or for a native one ALTER SUBSCRIPTION … DISABLE, ALTER \
         SUBSCRIPTION … SET (slot_name = NONE), DROP SUBSCRIPTION ….",
    ))
}
