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

use wire::Session;

use super::record;
use crate::config::Subscription as Config;
use crate::config::declarations::OriginFilter;
use crate::error::Result;
use crate::subscriber::origin;
use crate::subscriber::state::{self, Subscription};

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
    /// The same settings with the sides swapped.
    pub(crate) fn reversed(&self, back: &WayBack) -> Self {
        Self {
            publisher: self.subscriber.clone(),
            subscriber: self.publisher.clone(),
            name: back.name.clone(),
            slot: back.name.clone(),
            publications: back.publications.clone(),
            create_slot: false,
            copy_data: Some(false),
            copy_schema: false,
            origin: if back.origin_none { OriginFilter::None } else { OriginFilter::Any },
            ..self.clone()
        }
    }
}

/// Forgets a subscription that an earlier switchover has ended, if the process comes from a later one.
/// Returns whether it has.
pub(crate) fn forget_superseded(
    control: &mut Session,
    row: &Subscription,
    generation: i64,
) -> Result<bool> {
    let ended = record::read(control, row.id)?.filter(|record| record.step.has_ended());
    let superseded = ended.is_some_and(|record| record.generation < generation);
    if superseded {
        origin::drop_if_unused(control, row.id)?;
        state::forget(control, row.id)?;
    }
    Ok(superseded)
}
