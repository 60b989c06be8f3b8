//! The subscription of the way back: from the new side to the old one.
//!
//! ```text
//!  A ──── shop ────► B          generation 0: before the first switchover
//!  A ◄─ shop_back ── B          B records that shop has ended, generation 1
//!  A ──── shop ────► B          A records that shop_back has ended, generation 2: shop begins anew
//! ```
//!
//! The same process applies all of them, one after the other, because it knows both servers. A record is
//! left where the subscription ended. Its generation tells a record that leads on from an old one: a
//! process that comes from generation 1 forgets a record of generation 0 at the other side, and follows one
//! of generation 2.
//!
//! The record is forgotten in the transaction that creates the new subscription. So whenever the process ends, a later
//! one with the old settings finds a record that leads on, or the new subscription. If that one has not streamed, its
//! first start is completed with the settings of a way back: [`or_turn_round`] leads there from the record on the
//! other side.

use wire::{Session, quote_literal};

use super::record::LedHere;
use super::{back, record};
use crate::config::Subscription as Config;
use crate::config::declarations::OriginFilter;
use crate::error::{Class, Failure, Recovery, Result};
use crate::publisher::history;
use crate::publisher::session::{Publisher, is_standby};
use crate::publisher::slot::{self, Slot};
use crate::subscriber::state::{self, Subscription, progress};

/// The subscription that applies changes of the new side on the old side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WayBack {
    /// Of the subscription and of its slot, which exists.
    pub(crate) name: String,
    /// On the new side.
    pub(crate) publications: Vec<String>,
    /// Whether the new side sends only its own changes (origin = none).
    pub(crate) origin_none: bool,
    /// The number of switchovers up to the one that it belongs to.
    pub(crate) generation: i64,
}

impl Config {
    /// The same settings with the sides swapped. Nothing is copied at the start; tables that are added later are copied if
    /// these settings copy them.
    pub(crate) fn reversed(&self, back: &WayBack) -> Self {
        Self {
            publisher: self.subscriber.clone(),
            subscriber: self.publisher.clone(),
            name: back.name.clone(),
            slot: back.name.clone(),
            publications: back.publications.clone(),
            create_slot: false,
            copy_data: self.copy_data.filter(|copies| !copies),
            copy_schema: false,
            origin: if back.origin_none { OriginFilter::None } else { OriginFilter::Any },
            ..self.clone()
        }
    }

    /// The same settings with the slot of `row`, if they name another one and writes were moved back to the publisher:
    /// the slot of a way back has the subscription's name, and the service keeps the settings of before. `connect` is
    /// called for an ordinary session.
    pub(crate) fn with_slot_of_way_back(
        &self,
        row: &Subscription,
        connect: impl FnOnce() -> Result<Session>,
    ) -> Result<Option<Self>> {
        if row.slot_name == self.slot || row.slot_name != row.name {
            return Ok(None);
        }
        let returned = back::returned(&mut connect()?, &row.name)?;
        Ok(returned.map(|_| Self { slot: row.slot_name.clone(), ..self.clone() }))
    }
}

/// Whether the process comes from a later switchover than the one that has ended this subscription. Then the
/// subscription begins anew in its place: `state::forget_superseded_sql` belongs into the transaction that creates it, because a
/// record that is gone leads no later process here.
pub(crate) fn is_superseded(
    control: &mut Session,
    row: &Subscription,
    generation: i64,
) -> Result<bool> {
    let ended = record::read(control, row.id)?.filter(|record| record.step.has_ended());
    Ok(ended.is_some_and(|record| record.generation < generation))
}

/// Refuses the first start of a way back if the old side, its subscriber, is not in the state in which the switchover left
/// it: nothing is copied, so whatever it lacks it would lack for ever.
///
/// The slot stays where it was created until the way back has begun. One that has moved was read by a subscription whose
/// state is gone, with what it had applied. And the old side must have what it wrote itself as the publisher of the
/// subscription that has ended: the new side knows how far that one had followed it.
///
/// It is called before pgapace writes on the old side: whatever is written there takes the LSNs and xids of what is lacking.
/// `publisher` is the new side, `slot` the one there, if it exists.
pub(crate) fn check_begin(
    config: &Config,
    publisher: &Publisher,
    slot: Option<&Slot>,
) -> Result<()> {
    let mut session = publisher.connect_to_look()?;
    // The slots of a standby that is not promoted yet are not its own: the run waits for the promotion.
    if slot.is_none() && is_standby(&mut session)? {
        return Ok(());
    }
    let Some(begun) = record::led_to(&mut session, &config.name)? else { return Ok(()) };
    let Some(row) = state::find(&mut session, &begun.ended)? else { return Ok(()) };
    let refused = |what: &str| {
        let message = format!("slot \"{}\" of the way back {what}", config.slot);
        Failure::new(Class::Slot, message).hint(to_begin_anew(config, slot.is_some()))
    };
    let lost = |what: &str| {
        Err(refused(what).detail(format!(
            "What was written on the publisher since the switchover of {} at {} does not reach the subscriber.",
            row.name, begun.end_lsn
        )))
    };
    let Some(slot) = slot else { return lost("does not exist on the publisher") };
    slot::check_kind(&config.slot, slot)?;
    if let Some(reason) = &slot.invalid {
        return lost(&format!("was invalidated: {reason}"));
    }
    let (Some(made_at), Some(now)) = (begun.slot_made_at, slot.confirmed_flush) else {
        return check_old_side(config, publisher, &mut session, (&row, &begun));
    };
    if made_at != now {
        return Err(refused(&format!(
            "has moved to {now} from {made_at}, where a switchover created it, but the subscriber has nothing of the \
             way back"
        ))
        .detail(format!(
            "The subscriber was restored to an earlier state, or is a promoted standby that lacks the end, or schema \
             pgapace was dropped there. It may also lack what it wrote before the switchover of {} at {}.",
            row.name, begun.end_lsn
        )));
    }
    check_old_side(config, publisher, &mut session, (&row, &begun))
}

/// Refuses an old side that lacks what it wrote itself. `session` is one of the new side, which knows that as the
/// subscriber of the subscription that has ended, `row`.
fn check_old_side(
    config: &Config,
    publisher: &Publisher,
    session: &mut Session,
    (row, begun): (&Subscription, &LedHere),
) -> Result<()> {
    let applied = progress::read(session, row.id)?.unwrap_or_default();
    let mut followed = progress::followed(session, row.id, &applied)?;
    followed.farthest = followed.farthest.max(begun.end_lsn);
    let old = Publisher::new(config.subscriber.clone(), &config.name, publisher.encoding());
    match history::check(&mut old.connect()?, row, &followed) {
        Err(failure) if failure.class == Class::History => Err(Failure::new(
            Class::History,
            format!(
                "the subscriber is not the publisher of {} that was switched over at {}, or lacks what that one \
                 wrote",
                row.name, begun.end_lsn
            ),
        )
        .detail(format!("What {} knows of it as its publisher: {}.", row.name, failure.message))
        .hint(to_begin_anew(config, true))),
        checked => checked.map(drop),
    }
}

/// How a way back begins on an old side that lacks changes. `slot_exists`: its slot on the publisher is in the way.
fn to_begin_anew(config: &Config, slot_exists: bool) -> String {
    let names = config.publications.iter().map(|name| format!(" --publication {name}"));
    let origin = match config.origin {
        OriginFilter::None => " --origin none",
        OriginFilter::Any => "",
    };
    let drop = match slot_exists {
        true => format!(
            "on the publisher, SELECT pg_drop_replication_slot({}); then ",
            quote_literal(&config.slot)
        ),
        false => String::new(),
    };
    format!(
        "If the publisher, which takes writes, is right: {drop}with the two servers swapped in --publisher and --subscriber: pgapace run --name {} --slot {}{}{origin} \
         --if-not-empty rebase --until current. It makes the tables equal to the publisher's, and deletes rows that only \
         the subscriber has. Afterwards start pgapace run with the settings as before.",
        config.name,
        config.slot,
        names.collect::<String>()
    )
}

/// The failure of a first start that finds the slot of a way back, and so is to go on with one that a process has
/// begun after it turned round: this process turns round, too, and so gets the settings of the way back. Any other
/// failure stays as it is.
pub(crate) fn or_turn_round(
    publisher: &Publisher,
    row: &Subscription,
    failure: Failure,
) -> Failure {
    if row.copy_data || !matches!(failure.class, Class::Slot | Class::Config) {
        return failure;
    }
    let returned =
        publisher.connect_to_look().and_then(|mut source| back::returned(&mut source, &row.name));
    match returned {
        Ok(Some(returned)) => Failure {
            recovery: Recovery::WayBack(Box::new(returned.back)),
            ..Failure::new(
                Class::Disabled,
                format!("subscription {} begins as a way back", row.name),
            )
            .hint("pgapace run without --until applies it.")
        },
        Ok(None) | Err(_) => failure,
    }
}
