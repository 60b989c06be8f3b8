//! `pgapace rebase`: a new slot, and tables that are compared instead of copied.

use std::time::Duration;

use clap::Args;
use engine::table_name::TableName;
use wire::Session;

use crate::apply::blockers::naming_blockers;
use crate::apply::session_leases::Leaseholder;
use crate::barrier::waiting_for;
use crate::cli::{Selection, output};
use crate::config::Subscription as Config;
use crate::config::live::LiveSettings;
use crate::error::{Class, Failure, Result};
use crate::observe::board::Board;
use crate::publisher::history::{self, TO_FOLLOW_ANOTHER, check_followed};
use crate::publisher::session::{Publisher, SystemIdentity, identify, is_standby};
use crate::publisher::slot::{self, Slot};
use crate::publisher::{publication, recreated, slot_to_drop};
use crate::same_database;
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Subscriber, refuse_unlike_bytes};
use crate::subscriber::state::statistics::{self, Statistics};
use crate::subscriber::state::{
    self, Phase, Subscription, ownership, prepared, progress, published,
};
use crate::subscriber::writer_tag::{self, TagRules};
use crate::subscription::{self, RunOptions, Until, check_sent_alike, check_start};
use crate::switchover::lost::check_not_moved;
use crate::tablesync::rebase::{self, CHECKS, refuse_kept};

#[derive(Debug, Args)]
pub(crate) struct RebaseArgs {
    #[command(flatten)]
    selection: Selection,
}

/// How long a walsender of an earlier run may use the slot.
const FREE_WITHIN: Duration = Duration::from_secs(60);

/// Rebases one subscription, and runs it until it has everything that the publisher has now.
pub(crate) fn run(args: &RebaseArgs) -> Result<()> {
    let config = args.selection.one_existing()?;
    let shutdown = Shutdown::on_signals()?;
    begin(&config, &shutdown)?;
    let options = RunOptions { rebases: true, ..RunOptions::alone(Some(Until::Current))? };
    let leaseholder = Leaseholder::of(std::slice::from_ref(&config)).pop();
    let leaseholder =
        leaseholder.ok_or_else(|| Failure::internal("a subscription is no leaseholder"))?;
    let name = config.name.clone();
    subscription::run(
        &LiveSettings::new(config),
        &options,
        &shutdown,
        leaseholder,
        &Board::default(),
    )?;
    output::line(&format!("rebased subscription {name}; pgapace run goes on"));
    Ok(())
}

/// The facts that a rebase reads before it changes anything.
struct Found {
    system: SystemIdentity,
    slot: Option<Slot>,
    /// Tables that stay blocked.
    blocked: Vec<TableName>,
}

/// The first sessions of a rebase, and its subscription.
struct Sides {
    subscriber: Subscriber,
    publisher: Publisher,
    control: Session,
    source: Session,
    row: Subscription,
}

/// This completes "stopped during …".
const DOING: &str = "the start of the rebase";

/// Drops the slot and forgets the progress, unless an interrupted rebase has done so.
fn begin(config: &Config, shutdown: &Shutdown) -> Result<()> {
    let mut sides = connect(config, shutdown)?;
    let sessions = [&sides.control, &sides.source].map(Session::cancel_handle);
    let found = interruptible(shutdown, &sessions, CHECKS, || check(config, &mut sides, shutdown))?;
    let Some(Found { system, slot, blocked }) = found else { return Ok(()) };
    shutdown.check(CHECKS)?;
    let Sides { subscriber, mut control, mut source, row, .. } = sides;
    let had_two_phase = slot.as_ref().is_some_and(|slot| slot.two_phase);
    let begun = naming_blockers(&subscriber, &mut control, Some(row.id), |control| {
        interruptible(shutdown, &sessions, DOING, || {
            state::set_rebasing(control, row.id, &system, (&blocked, had_two_phase), || {
                // A slot that is gone without this record is the reason for rebase.
                slot.map_or(Ok(()), |_| slot::drop(&mut source, &row.slot_name).map(drop))
            })
        })
    });
    begun.map_err(|failure| match failure.class {
        Class::Stopped => failure.hint("pgapace rebase begins again."),
        _ => failure,
    })?;
    tracing::info!(
        event = "rebase_started",
        subscription = config.name,
        slot = row.slot_name,
        "slot and progress are gone; tables are compared under the snapshot of a new slot"
    );
    Ok(())
}

/// Opens the first sessions, and becomes the owner of the subscription, if it may start with these settings.
fn connect(config: &Config, shutdown: &Shutdown) -> Result<Sides> {
    let (config, stop) = (config.clone(), shutdown.clone());
    abandonable(shutdown, "connecting", move || {
        let mut subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
        let mut control = subscriber.connect_first()?;
        let row = state::find_in_any(&mut control, &config.name)?.ok_or_else(|| {
            state::missing(&config.name).hint(
                "A new one compares tables that hold rows with: pgapace run --if-not-empty rebase.",
            )
        })?;
        // An interrupted one has been decided.
        if !row.rebasing {
            refuse_kept(&config)?;
        }
        let none = ownership::Former::default();
        let stopping = || stop.requested();
        let id = row.id;
        let row = naming_blockers(&subscriber, &mut control, Some(id), |control| {
            let owning =
                ownership::become_owner(control, id, Duration::ZERO, &none, None, &stopping)?;
            ownership::fence(control, id, &owning, &stopping)
        })?;
        let row = row.ok_or_else(|| state::missing(&config.name))?;
        // With these settings, the run that follows would be refused when the slot is gone.
        check_start(&mut control, &row, &config)?;
        // Its publications may have to change.
        let publications = row.publications.clone();
        check_sent_alike(&row, &Config { publications, ..config.clone() })?;
        if !row.rebasing {
            check_prepared(&mut control, &row)?;
        }
        let encoding = subscriber.encoding();
        let publisher = Publisher::new(config.publisher.clone(), &config.name, encoding);
        let source = publisher.connect()?;
        Ok(Sides { subscriber, publisher, control, source, row })
    })?
}

/// Everything that would keep the rebase from its end. Nothing if a run can go on with an interrupted one.
fn check(config: &Config, sides: &mut Sides, shutdown: &Shutdown) -> Result<Option<Found>> {
    let Sides { subscriber, publisher, control, source, row } = sides;
    let stopping = || shutdown.requested();
    same_database::refuse(source, control)?;
    refuse_unlike_bytes(source, control)?;
    // A first start may have wanted it, and later ones may not.
    if row.rebasing && !row.is_first_start() {
        let system = identify(source)?;
        check_followed(source, &system, row, TO_FOLLOW_ANOTHER)?;
        if row.phase == Phase::Creating || can_go_on(control, source, row, &system)? {
            return Ok(None);
        }
        // The slot of the interrupted rebase is lost, too, or is that of another history: it begins again.
    }
    let (system, found) =
        slot_to_drop::find(source, row, TO_FOLLOW_ANOTHER, FREE_WITHIN, &stopping)?;
    if found.is_none() {
        check_not_moved(control, source, row)?;
    }
    check_not_restored(control, source, row, &system)?;
    publication::check_exist(source, &config.publications)?;
    if let Some((found, was_used)) = &found {
        slot::check_kind(&row.slot_name, found)?;
        if row.phase == Phase::Creating && !slot::is_ours(found, row.slot_made_at) {
            return Err(slot::not_ours(&row.slot_name));
        }
        if *was_used {
            slot_to_drop::check_of_original(control, row, found)?;
        }
        if !row.owns_slot {
            return Err(Failure::new(
                Class::Slot,
                format!("pgapace did not create slot \"{}\", and does not drop it", row.slot_name),
            )
            .hint(format!(
                "If nobody else needs it, on the publisher: SELECT pg_drop_replication_slot({}).",
                wire::quote_literal(&row.slot_name)
            )));
        }
    }
    // Before anything is dropped: the user can still mend what the run would refuse.
    let sides = (&*publisher, &*subscriber);
    let blocked = rebase::check(control, sides, &config.publications, row, shutdown)?;
    writer_tag::check(subscriber, row.id, TagRules::of(config))?;
    check_receives(source)?;
    Ok(Some(Found { system, slot: found.map(|(slot, _)| slot), blocked }))
}

/// Refuses a standby that receives nothing: its new slot would wait for the primary, and the old one be gone.
fn check_receives(source: &mut Session) -> Result<()> {
    if !is_standby(source)? || waiting_for::receives(source)? {
        return Ok(());
    }
    Err(Failure::new(
        Class::Publisher,
        "a rebase needs a new slot, for which the publisher, a standby, waits for its primary",
    )
    .detail(waiting_for::NOT_RECEIVING)
    .hint("Start the primary, or see primary_conninfo of the standby. SELECT * FROM pg_stat_wal_receiver; must return a row."))
}

/// Whether a run can go on with the slot of an interrupted rebase.
fn can_go_on(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    system: &SystemIdentity,
) -> Result<bool> {
    let found = slot::find(source, &row.slot_name)?;
    if found.is_none_or(|slot| slot.invalid.is_some()) {
        return Ok(false);
    }
    let followed = followed(control, row)?;
    match history::check_identified(source, system, row, &followed) {
        Err(failure) if failure.class == Class::History => Ok(false),
        checked => checked.map(|()| true),
    }
}

/// Refuses a publisher that was restored to an earlier state, or whose database was created again: the rows that it lacks
/// would be deleted.
fn check_not_restored(
    control: &mut Session,
    source: &mut Session,
    row: &Subscription,
    system: &SystemIdentity,
) -> Result<()> {
    recreated::check(source, row, &published::read(control, row.id)?.database())?;
    let followed = followed(control, row)?;
    let last_error = statistics::read(control, row.id)?.and_then(Statistics::other_history);
    history::check_not_restored(source, system, row, &followed, last_error.as_deref())
}

fn followed(control: &mut Session, row: &Subscription) -> Result<progress::Followed> {
    let applied = progress::read(control, row.id)?.unwrap_or_default();
    progress::followed(control, row.id, &applied)
}

/// The new slot sends a transaction that is prepared now when it is committed.
fn check_prepared(control: &mut Session, row: &Subscription) -> Result<()> {
    let known = prepared::read(control, row.id)?;
    let here = known.iter().find(|known| known.standing == prepared::Standing::Prepared);
    match here {
        None => Ok(()),
        Some(known) => Err(Failure::new(
            Class::Busy,
            format!("a transaction is prepared on the subscriber: {}", known.prepared.describe()),
        )
        .hint("Resolve it first: pgapace prepared.")),
    }
}
