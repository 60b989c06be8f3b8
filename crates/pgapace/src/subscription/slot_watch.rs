//! Looks at the slot while no run goes on: the publisher may be well, and the slot retains more and more WAL. Keeps it
//! from being invalidated as idle.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use wire::Session;

use crate::config::Subscription as Config;
use crate::error::Result;
use crate::observe::board::{Board, RunPhase};
use crate::observe::events::Concern;
use crate::observe::figures::SlotForecast;
use crate::publisher::session::Publisher;
use crate::publisher::slot::{self, Slot};
use crate::subscription::slot_touch;

/// The pause between two looks. A run that is tried again at once needs none.
const INTERVAL: Duration = Duration::from_secs(5);

/// Shows the slot on the board whenever the subscription is retrying. Dropping it ends its thread, which may
/// still wait for the publisher for a moment.
pub(super) struct SlotWatch {
    _ends: Sender<()>,
}

impl SlotWatch {
    /// Starts it; `None` if the system has no thread for it.
    pub(super) fn start(config: &Config, board: Board) -> Option<Self> {
        let (_ends, ended) = mpsc::channel();
        let publisher = Publisher::new(config.publisher.clone(), &config.name, "UTF8");
        let slot = config.slot.clone();
        let look = move || {
            let (mut session, mut forecast, started) = (None, SlotForecast::new(), Instant::now());
            let mut pause = INTERVAL;
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = INTERVAL;
                if board.shown().phase != RunPhase::Retrying {
                    (session, forecast) = (None, SlotForecast::new());
                    board.set_slot(None);
                    continue;
                }
                match look(&publisher, &mut session, &slot) {
                    Ok((slot, next)) => {
                        let figures = slot.map(|slot| {
                            forecast.seen_slot(started.elapsed(), &slot);
                            forecast.figures()
                        });
                        board.set_slot(figures.flatten());
                        pause = next.map_or(INTERVAL, |next| next.min(INTERVAL));
                    }
                    Err(failure) => {
                        tracing::debug!(%failure, "cannot look at the slot");
                        session = None;
                        board.set_slot(None);
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("slot".to_owned()).spawn(Concern::keep(look));
        thread.is_ok().then_some(Self { _ends })
    }
}

/// Looks at the slot, and uses it if it has been idle for long. Returns when that is due again, if it ever is.
fn look(
    publisher: &Publisher,
    session: &mut Option<Session>,
    slot: &str,
) -> Result<(Option<Slot>, Option<Duration>)> {
    let found = slot::find(publisher.session_to_look(session)?, slot)?;
    let touched = slot_touch::touch(publisher, session, slot);
    let next = touched.inspect_err(|failure| tracing::debug!(%failure, "cannot touch the slot"));
    Ok((found, next.unwrap_or_default()))
}
