//! The procedure: the steps in their order, and the way back from each.

use std::time::Duration;

use engine::sequence::Rules;
use engine::table_name::TableName;
use pgoutput::Lsn;
use wire::{CancelHandle, Session, quote_literal};

use super::Step;
use super::deadline::Deadline;
use super::display::Display;
use super::finish::{drop_left_slot, drop_slot, finish};
use super::plan::{CHECKS, Findings, less_on_the_way_back, plan, slot_possible, tables_ready};
use super::publisher::{
    allow_writes, database_setting, end_sessions, has_more, stop, wait_for_late_writers,
    wait_for_writers, write_end_message,
};
use super::record::{self, Position, Record, Stopped};
use super::servers::check_system;
use super::silence::Servers;
use super::undo::{Reached, Settled, settle, undo};
use super::verify_at_end;
use super::way_back::WayBack;
use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::hand_over;
use crate::lag;
use crate::publisher::publication::PublishedTable;
use crate::publisher::session::Publisher;
use crate::publisher::slot;
use crate::sequences::{self, Chosen, SetOptions};
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::field;
use crate::subscriber::session::Subscriber;
use crate::subscriber::state::{Subscription, heartbeat, ownership, progress};

/// First key of the advisory locks of a switchover ("pgsw"). The second is the subscription id, or that of a database.
const LOCK: i32 = 0x7067_7377;
/// The second key of the lock of a database, which no subscription has.
const DATABASE: i32 = 0;

/// Both servers, and the subscription from one to the other.
pub(crate) struct Sides<'a> {
    /// On the subscriber, the side that takes writes afterwards.
    pub(crate) control: &'a mut Session,
    /// On the publisher, the side that takes writes now.
    pub(crate) source: &'a mut Session,
    pub(crate) row: &'a Subscription,
    pub(crate) config: &'a Config,
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    /// A signal. Before the subscription has ended, it is a failure like others.
    pub(crate) stop: &'a Shutdown,
}

impl Sides<'_> {
    pub(crate) fn cancel_handles(&self) -> [CancelHandle; 2] {
        [self.control.cancel_handle(), self.source.cancel_handle()]
    }

    /// The waits of all sessions of the verb.
    pub(super) fn servers(&self) -> Servers {
        Servers {
            publisher: self.publisher.activity().clone(),
            subscriber: self.subscriber.activity().clone(),
        }
    }
}

/// The options of the verb.
pub(crate) struct Request<'a> {
    pub(crate) stop_writes: Option<&'a str>,
    pub(crate) resume_writes: Option<&'a str>,
    pub(crate) open: Option<&'a str>,
    /// `None` for no way back. Its generation is found out.
    pub(crate) back: Option<WayBack>,
    /// The longest outage of writes that is accepted.
    pub(crate) deadline: Duration,
    pub(crate) margin: u64,
    /// Tables to compare at the end LSN: none, or all if the list is empty.
    pub(crate) verify: Option<Vec<TableName>>,
    /// How old the last verification of each table may be.
    pub(crate) verified_within: Option<Duration>,
    /// Whether roles and privileges on the new side are not looked at.
    pub(crate) ignore_roles: bool,
    /// Whether other subscriptions between the same databases may end later.
    pub(crate) with_others: bool,
    /// Whether the subscription is itself a way back: then an earlier switchover has created its slot.
    pub(crate) returns: bool,
}

impl Request<'_> {
    /// The side that is closed, and the side that is opened, as the user names them.
    pub(super) fn sides_by_name(&self) -> (&'static str, &'static str) {
        if self.returns { ("new side", "old side") } else { ("publisher", "new side") }
    }
}

/// The result of a switchover.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) end_lsn: Lsn,
    /// How long writes were stopped; `None` if that was reported before.
    pub(crate) outage: Option<Duration>,
    /// The way back, as it was recorded.
    pub(crate) back: Option<WayBack>,
}

/// Locks the subscription.
pub(crate) fn lock(control: &mut Session, row: &Subscription) -> Result<()> {
    let failed = |e: &wire::Error| Failure::subscriber(e, "locking the switchover");
    match try_lock(control, "pg_try_advisory_lock", row.id.0).map_err(|e| failed(&e))? {
        Tried::Locked => Ok(()),
        Tried::Held(holder) => Err(held(row, &holder)),
    }
}

fn held(row: &Subscription, holder: &Holder) -> Failure {
    let message = format!("another process switches {} over", row.name);
    Failure::new(Class::Busy, message).hint(holder.hint("subscriber"))
}

/// Refuses a plan while a switchover is under way that [`go`] would refuse too. It locks nothing.
pub(crate) fn refuse_under_way(sides: &mut Sides<'_>) -> Result<()> {
    let doing = "looking for another switchover";
    let of_subscription = holder(sides.control, sides.row.id.0);
    if let Some(holder) = of_subscription.map_err(|e| Failure::subscriber(&e, doing))? {
        return Err(held(sides.row, &holder));
    }
    let of_database = holder(sides.source, DATABASE);
    match of_database.map_err(|e| Failure::publisher(&e, doing))? {
        Some(holder) => Err(database_held(&holder, "publisher")),
        None => Ok(()),
    }
}

/// Locks both databases. A switchover stops writes of the whole publisher's database, and ends its sessions, so two
/// of them would undo each other's work. Several may open the same subscriber's database.
pub(super) fn lock_databases(sides: &mut Sides<'_>) -> Result<()> {
    lock_opened(sides.control)?;
    lock_closed(sides.source)
}

/// The database that is opened at the end: no switchover may close it meanwhile.
pub(super) fn lock_opened(control: &mut Session) -> Result<()> {
    lock_database(control, "pg_try_advisory_lock_shared", "subscriber", |e| {
        Failure::subscriber(e, "locking the subscriber's database")
    })
}

/// The database whose writes are stopped.
pub(super) fn lock_closed(source: &mut Session) -> Result<()> {
    lock_database(source, "pg_try_advisory_lock", "publisher", |e| {
        Failure::publisher(e, "locking the publisher's database")
    })
}

fn lock_database(
    session: &mut Session,
    function: &str,
    server: &str,
    failed: impl Fn(&wire::Error) -> Failure,
) -> Result<()> {
    match try_lock(session, function, DATABASE).map_err(|e| failed(&e))? {
        Tried::Locked => Ok(()),
        Tried::Held(holder) => Err(database_held(&holder, server)),
    }
}

fn database_held(holder: &Holder, server: &str) -> Failure {
    let message = format!(
        "another process switches {} over, and with it the whole database",
        holder.name.as_deref().unwrap_or("a subscription")
    );
    let hint = format!(
        "Writes of a database move in one switchover after the other. {}",
        holder.hint(server)
    );
    Failure::new(Class::Busy, message).hint(hint)
}

enum Tried {
    Locked,
    Held(Holder),
}

/// A session that holds a lock; all is `None` if it has ended meanwhile, or if the role may not see it.
#[derive(Default)]
struct Holder {
    name: Option<String>,
    pid: Option<String>,
    /// Where its process runs, and since when it does nothing.
    about: Option<String>,
}

impl Holder {
    fn hint(&self, server: &str) -> String {
        let Some(pid) = &self.pid else { return "Wait until it has ended.".to_owned() };
        let about = self.about.as_deref().unwrap_or_default();
        format!(
            "Wait until it has ended. It has session {pid} of the {server}{about}. If its machine is lost, the servers end its \
             sessions within 10 seconds; if they do not, on the {server}: SELECT pg_terminate_backend({pid})."
        )
    }
}

/// Tries to get a lock until the end of the session.
///
/// A server does not notice by itself that the machine of an idle session is lost, and would keep the lock for hours. So
/// it asks for a sign of life. A session with a lock always reads its replies, so it may be judged by them.
fn try_lock(
    session: &mut Session,
    function: &str,
    key: i32,
) -> std::result::Result<Tried, wire::Error> {
    let alive = [
        ("tcp_keepalives_idle", "3"),
        ("tcp_keepalives_interval", "2"),
        ("tcp_keepalives_count", "2"),
        ("tcp_user_timeout", "7s"),
    ]
    .map(|(name, value)| format!("pg_catalog.set_config('{name}', '{value}', false)"));
    let sql = format!("SELECT pg_catalog.{function}({LOCK}, {key}), {}", alive.join(", "));
    let results = session.simple(&sql)?;
    let locked = |rows: &wire::Rows| rows.first().is_some_and(|row| row.get(0) == Some("t"));
    if results.first().is_some_and(locked) {
        return Ok(Tried::Locked);
    }
    Ok(Tried::Held(holder(session, key)?.unwrap_or_default()))
}

/// The other session that holds a lock, if there is one.
fn holder(session: &mut Session, key: i32) -> std::result::Result<Option<Holder>, wire::Error> {
    // The session that holds a lock of a database is found in the same database.
    let holder = format!(
        "SELECT nullif(a.application_name, ''), a.pid, \
           pg_catalog.concat(' from ' || pg_catalog.host(a.client_addr), ', idle since ' || CASE WHEN a.state = 'idle' \
             THEN pg_catalog.date_trunc('second', a.state_change)::pg_catalog.text END) \
         FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
         WHERE l.locktype = 'advisory' AND l.granted AND l.classid = {LOCK} AND l.objid = {key} \
           AND a.datname = pg_catalog.current_database() AND l.pid <> pg_catalog.pg_backend_pid() \
         ORDER BY a.state_change LIMIT 1"
    );
    let results = session.simple(&holder)?;
    let Some(row) = results.first().and_then(|rows| rows.first()) else { return Ok(None) };
    let column = |at| row.get(at).map(str::to_owned);
    Ok(Some(Holder { name: column(0), pid: column(1), about: column(2) }))
}

/// Ends the locks of a verb that has found nothing to do, before the end of its sessions.
pub(super) fn unlock(sides: &mut Sides<'_>) -> Result<()> {
    let sql = "SELECT pg_catalog.pg_advisory_unlock_all()";
    let doing = "unlocking the switchover";
    sides.control.simple(sql).map_err(|e| Failure::subscriber(&e, doing))?;
    sides.source.simple(sql).map_err(|e| Failure::publisher(&e, doing))?;
    Ok(())
}

/// Locks the subscription and both databases, and reads how far a switchover of it has come.
pub(super) fn begin(sides: &mut Sides<'_>) -> Result<Option<Record>> {
    let (stop, sessions) = (sides.stop, sides.cancel_handles());
    let begun = interruptible(stop, &sessions, CHECKS, || {
        lock(sides.control, sides.row)?;
        check_system(sides)?;
        lock_databases(sides)?;
        allow_writes(sides.source)?;
        record::read(sides.control, sides.row.id)
    })?;
    stop.check(CHECKS)?;
    Ok(begun)
}

/// Switches over. Before the subscription has ended, every failure undoes everything, and so does a signal. Afterwards a
/// signal changes nothing.
pub(crate) fn go(sides: &mut Sides<'_>, request: &Request<'_>) -> Result<Outcome> {
    let row = sides.row;
    let mut display = Display::new();
    match begin(sides)? {
        Some(Record { step: Step::Opened, end_lsn, back, .. }) => {
            drop_slot(sides, request);
            return Ok(Outcome { end_lsn: end_lsn.unwrap_or(Lsn::INVALID), outage: None, back });
        }
        Some(Record { step: Step::Ended, end_lsn, back, .. }) => {
            // Only the last steps were interrupted; each can be repeated.
            let end_lsn = end_lsn.unwrap_or(Lsn::INVALID);
            let outage = finish(sides, request, end_lsn, &display)?;
            return Ok(Outcome { end_lsn, outage: Some(outage), back });
        }
        Some(begun) => {
            undo(sides, &begun)?;
        }
        None => {}
    }
    display.step("checking both sides");
    let (stop, sessions) = (sides.stop, sides.cancel_handles());
    interruptible(stop, &sessions, CHECKS, || drop_left_slot(sides, request))?;
    let Findings { problems, .. } = plan(sides, request)?;
    if !problems.is_empty() {
        return Err(Failure::new(Class::Config, format!("{} cannot be switched over", row.name))
            .detail(problems.join("\n         ")));
    }
    if let Some(less) = less_on_the_way_back(sides, request)? {
        display.step(&less);
    }
    let stopped = match request.stop_writes {
        Some(_) => Stopped::Command(request.resume_writes.map(str::to_owned)),
        None => Stopped::Database(database_setting(sides.source)?.1),
    };
    let generation = generation(sides, request)?;
    let begun = Record {
        step: Step::Stopping,
        stopped,
        back: request.back.clone(),
        generation,
        end_lsn: None,
    };
    // From here on, what a signal ends has to be undone.
    stop.check(CHECKS)?;
    display.writes_stop();
    let deadline = Deadline::after(request.deadline, stop);
    let (servers, mut reached) = (sides.servers(), Reached::Nothing);
    let ended = deadline.enforce(&sessions, &servers, || {
        record::begin(sides.control, row.id, &begun)?;
        up_to_end(sides, request, deadline, &mut reached, &display)
    });
    let end_lsn = match ended {
        Ok(end_lsn) => end_lsn,
        Err(failure) => match settle(sides, failure, (&begun, reached), deadline) {
            Settled::Ended(end_lsn) => end_lsn,
            Settled::Undone(failure) => {
                display.step("undone");
                display.end();
                return Err(failure);
            }
            Settled::Open(failure) => {
                display.end();
                return Err(failure);
            }
        },
    };
    tracing::info!(
        event = "subscription_switched_over",
        subscription = row.name,
        lsn = %end_lsn,
        "subscription has ended; the subscriber takes writes"
    );
    finish(sides, request, end_lsn, &display)?;
    let outage = display.outage();
    display.end();
    Ok(Outcome { end_lsn, outage, back: request.back.clone() })
}

/// The number of this switchover: one more than that of the one before, whose record is on the other side. It has led
/// to this subscription, or has ended the one that becomes the way back.
fn generation(sides: &mut Sides<'_>, request: &Request<'_>) -> Result<i64> {
    let led_here = record::ended_before(sides.source, &sides.row.name)?;
    let led_here = led_here.map_or(0, |(_, generation, _)| generation);
    let ended = match &request.back {
        Some(back) => record::ended_generation(sides.source, &back.name)?,
        None => 0,
    };
    Ok(led_here.max(ended) + 1)
}

/// The steps up to the end of the subscription.
fn up_to_end(
    sides: &mut Sides<'_>,
    request: &Request<'_>,
    deadline: Deadline<'_>,
    reached: &mut Reached,
    display: &Display,
) -> Result<Lsn> {
    let row = sides.row;
    *reached = Reached::Stopping;
    display.step(&format!("stopping writes on the {}", request.sides_by_name().0));
    stop(sides.source, request.stop_writes, deadline)?;
    if request.stop_writes.is_none() {
        end_sessions(sides.source, deadline)?;
    }
    wait_for_writers(sides.source, deadline)?;
    let end_lsn = write_end_message(sides.source)?;
    record::advance(sides.control, row.id, Step::Draining, Some(Position::End(end_lsn)))?;
    display.step(&format!("applying everything up to {end_lsn}"));
    drain(sides, end_lsn, deadline)?;
    record::advance(sides.control, row.id, Step::Aside, None)?;
    display.step("the process that applies stands aside");
    take_over(sides, deadline)?;
    if let Some(tables) = &request.verify {
        record::advance(sides.control, row.id, Step::Verifying, None)?;
        display.step(&format!("comparing tables at {end_lsn}"));
        let rows = verify_at_end::verify(sides, tables, end_lsn, deadline)?;
        display.step(&format!("{rows} rows are equal"));
    }
    record::advance(sides.control, row.id, Step::Sequences, None)?;
    display.step("looking for late changes, and setting sequences");
    wait_for_late_writers(sides.source, deadline)?;
    set_sequences(sides, end_lsn, request.margin, display)?;
    let mut slot_made_at = None;
    if let Some(back) = &request.back {
        // The undo of the next step drops this slot: it must not be another one's.
        let mut problems = Vec::new();
        slot_possible(sides.control, back, false, &mut problems)?;
        if let Some(problem) = problems.pop() {
            return Err(Failure::new(Class::Config, problem));
        }
        record::advance(sides.control, row.id, Step::Slot, None)?;
        display.step(&format!("creating slot {} of the way back", back.name));
        slot_made_at = create_slot(sides.control, &back.name, deadline)?;
        // It may have waited for a while.
        wait_for_late_writers(sides.source, deadline)?;
        nothing_is_left(sides, end_lsn)?;
    }
    deadline.check()?;
    *reached = Reached::Ending;
    // A synchronous commit: all that was applied is durable with it.
    record::advance(sides.control, row.id, Step::Ended, slot_made_at.map(Position::Slot))?;
    Ok(end_lsn)
}

/// Waits until everything before the end LSN is applied.
fn drain(sides: &mut Sides<'_>, end_lsn: Lsn, deadline: Deadline<'_>) -> Result<()> {
    let Sides { control, source, row, .. } = sides;
    let stopping = deadline.stopping();
    if let Some(lag) = lag::wait(control, source, row, end_lsn, deadline.left(), &stopping)? {
        return Err(Failure::new(
            Class::Behind,
            lag.because("the subscriber did not catch up within --deadline"),
        ));
    }
    deadline.check()?;
    // Before the other process is disturbed.
    nothing_applied_after(control, row, end_lsn)?;
    // A table may have been blocked meanwhile: nothing waits for it.
    all_take_part(sides).map(|_| ())
}

/// Refuses tables that do not have all of their changes. Returns the published tables.
fn all_take_part(sides: &mut Sides<'_>) -> Result<Vec<PublishedTable>> {
    let mut problems = Vec::new();
    let tables = tables_ready(sides, &mut problems)?;
    match problems.is_empty() {
        true => Ok(tables),
        false => Err(Failure::new(Class::Mismatch, problems.join("; "))),
    }
}

/// Refuses late changes that are applied already. Returns what is applied.
fn nothing_applied_after(
    control: &mut Session,
    row: &Subscription,
    end_lsn: Lsn,
) -> Result<progress::AppliedStream> {
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    let newest = applied.newest_history().and_then(|history| history.last);
    if newest.is_some_and(|last| last.commit_lsn >= end_lsn) {
        return Err(changed_after_end(end_lsn));
    }
    Ok(applied)
}

/// Becomes the owner. From here on nothing is applied any more. If all is undone, the other process
/// resumes by itself.
fn take_over(sides: &mut Sides<'_>, deadline: Deadline<'_>) -> Result<()> {
    let Sides { control, source, row, .. } = sides;
    let stopping = deadline.stopping();
    hand_over::ask_to_stand_aside(control, row, deadline.left(), &stopping)?;
    let none = ownership::Former::default();
    let owning = ownership::become_owner(control, row.id, deadline.left(), &none, None, &stopping)?;
    ownership::fence(control, row.id, &owning, &stopping)?
        .ok_or_else(|| Failure::new(Class::Config, "the subscription was dropped meanwhile"))?;
    if let Some(walsender) = heartbeat::last_walsender(control, row.id)? {
        slot::end_walsender(source, walsender, &row.name, deadline.left(), &stopping)?;
    }
    slot::wait_until_free(source, &row.slot_name, deadline.left(), &stopping)?;
    deadline.check()
}

/// Refuses late changes, applied or not, while this process owns the subscription.
fn nothing_is_left(sides: &mut Sides<'_>, end_lsn: Lsn) -> Result<()> {
    // The process that stood aside may have applied late changes until then.
    let applied = nothing_applied_after(sides.control, sides.row, end_lsn)?;
    if applied.highest() != applied.through || has_more(sides.source, sides.row, applied.through)? {
        return Err(changed_after_end(end_lsn));
    }
    Ok(())
}

/// Both sides are quiet: nothing is left in the slot, all tables take part, sequences are set.
fn set_sequences(
    sides: &mut Sides<'_>,
    end_lsn: Lsn,
    margin: u64,
    display: &Display,
) -> Result<()> {
    let row = sides.row;
    let tables = all_take_part(sides)?;
    let found = sequences::read(sides.source, &row.publications, &tables, Chosen::All)?;
    // Late changes are looked for when the sequences are read: the look finds a change that has taken a value since.
    nothing_is_left(sides, end_lsn)?;
    let options =
        SetOptions { rules: Rules { margin, allow_backwards: false }, ..SetOptions::default() };
    let (unset, notes) = sequences::set(sides.control, &found, &options)?.reasons();
    for note in notes {
        display.step(&format!("sequence {note}"));
    }
    if unset.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Class::Mismatch,
        format!("sequences that could not be set: {}", unset.join("; ")),
    ))
}

fn changed_after_end(end_lsn: Lsn) -> Failure {
    Failure::new(
        Class::Busy,
        format!("published tables were changed after {end_lsn}: a client still writes"),
    )
    .hint(
        "Find out who writes although writes are stopped, or stop them with --stop-writes. Where the publication is FOR ALL \
         TABLES, pgapace verify and other verbs that write on this server count, too: wait until they have ended.",
    )
}

/// Creates the slot of the way back. It waits for open transactions of the subscriber. Returns where the slot begins.
fn create_slot(control: &mut Session, name: &str, deadline: Deadline<'_>) -> Result<Option<Lsn>> {
    let mut made_at = None;
    slot::create_without_snapshot(control, name, |control| {
        deadline.check()?;
        let sql = format!(
            "SET statement_timeout = {}; \
             SELECT lsn FROM pg_catalog.pg_create_logical_replication_slot({}, 'pgoutput'); \
             SET statement_timeout = 0",
            deadline.left().as_millis().max(1),
            quote_literal(name)
        );
        // One message is one transaction, and a slot cannot be created in one that has written: it has not.
        let created = control.simple(&sql).map_err(|e| {
            let failure = Failure::subscriber(&e, "creating the slot of the way back");
            if e.sqlstate() != Some("57014") {
                return failure;
            }
            failure.hint(
                "It waited until --deadline for open transactions of the subscriber: SELECT pid, datname, xact_start, \
                 query FROM pg_stat_activity WHERE backend_xid IS NOT NULL; SELECT * FROM pg_prepared_xacts.",
            )
        })?;
        let row = created.iter().find_map(wire::Rows::first);
        made_at = row.map(|row| field(&row, 0)).transpose()?;
        Ok(())
    })?;
    Ok(made_at)
}
