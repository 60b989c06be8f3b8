//! Waiting until the lag is small, before writes are stopped.

use std::time::{Duration, Instant};

use crate::cli::output;
use crate::cli::status::collect::StatusReader;
use crate::cli::status::health::{MaxLag, is_behind};
use crate::config::Site;
use crate::error::{Class, Failure, Result};
use crate::stopping::shutdown::Shutdown;

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often a user is told that the lag is too large.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// The lag that a switchover waits for.
pub(super) struct LagBound {
    pub(super) most: MaxLag,
    /// For how long it is no more.
    pub(super) lasts: Duration,
    /// For how long to wait for that.
    pub(super) patience: Duration,
}

impl LagBound {
    pub(super) fn wait(&self, site: &Site, name: &str, stop: &Shutdown) -> Result<()> {
        let mut reader = StatusReader::new(site.clone());
        let begun = Instant::now();
        let (mut small_since, mut told) = (None, begun);
        loop {
            stop.check("the wait for the lag")
                .map_err(|stopped| stopped.hint("Nothing was changed."))?;
            let all = reader.read()?.unwrap_or_default();
            let status = all.iter().find(|status| status.name == name);
            // An unknown lag may be too large.
            let behind = status.is_none_or(|status| is_behind(status, self.most) != Some(false));
            if behind {
                small_since = None;
            } else if small_since.get_or_insert_with(Instant::now).elapsed() >= self.lasts {
                return Ok(());
            }
            if begun.elapsed() >= self.patience {
                return Err(Failure::new(
                    Class::Behind,
                    format!("the lag of {name} was not below --max-lag for {:?}", self.lasts),
                )
                .hint("Nothing was changed. See pgapace status, or allow more (--max-lag)."));
            }
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                output::line(&format!(
                    "waiting until the lag is below --max-lag for {:?}; it is {} now",
                    self.lasts,
                    if behind { "larger" } else { "smaller" }
                ));
            }
            stop.sleep(LOOK_EVERY);
        }
    }
}
