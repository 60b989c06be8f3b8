//! Forecasts for a recording with other numbers of workers: [`engine::forecast`] with the subscriber's
//! tables, its distance, and costs that were measured or given.

pub(crate) mod answer;
pub(crate) mod costs;
mod limits;
mod stream;

use std::time::Duration;

use engine::dispatch::{DispatchSettings, Pacing};
use engine::forecast::{Costs, Forecast, ForecastError, Machines, Settings, forecast};
use engine::group::GroupLimits;
use engine::writeset::WritesetLimits;
use wire::Session;

use crate::config::Subscription as Config;
use crate::error::{Failure, Result};
use crate::recording::file::Recording;
use crate::whatif::limits::Limits;
use crate::whatif::stream::Transactions;

/// The parameters of a forecast, beside the number of workers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) costs: Costs,
    pub(crate) round_trip: Duration,
    pub(crate) machines: Machines,
    pub(crate) group: GroupLimits,
}

/// A recording, and the subscriber on which definitions of tables are read.
pub(crate) struct Forecaster<'a> {
    pub(crate) recording: &'a Recording,
    pub(crate) config: &'a Config,
    pub(crate) control: &'a mut Session,
}

/// How fast the recording is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speed {
    /// As fast as it is applied, as a backlog would be.
    Backlog,
    /// As the publisher sent it.
    Recorded,
}

impl Forecaster<'_> {
    /// Forecasts the recording with so many workers.
    pub(crate) fn forecast(
        &mut self,
        scenario: Scenario,
        workers: usize,
        speed: Speed,
    ) -> Result<Forecast> {
        Ok(self.look(scenario, workers, speed, false)?.0)
    }

    /// The same, with the tables and keys on which changes depended.
    pub(crate) fn limits(
        &mut self,
        scenario: Scenario,
        workers: usize,
    ) -> Result<(Forecast, Limits)> {
        self.look(scenario, workers, Speed::Backlog, true)
    }

    fn look(
        &mut self,
        scenario: Scenario,
        workers: usize,
        speed: Speed,
        notes_keys: bool,
    ) -> Result<(Forecast, Limits)> {
        let config = self.config;
        let mut transactions =
            Transactions::open(self.recording, self.control, config, notes_keys)?;
        let settings = Settings {
            dispatch: DispatchSettings {
                workers,
                vary: false,
                scaled: false,
                ordered: config.preserve_commit_order,
                round_trip: scenario.round_trip,
                group: scenario.group,
                lock_table: usize::MAX,
                writeset: WritesetLimits::default(),
                deadlock_timeout: config.deadlock_timeout,
                pacing: Pacing::MEASURED,
            },
            costs: scenario.costs,
            machines: scenario.machines,
            recorded_pace: speed == Speed::Recorded,
            memory: config.memory_limit,
        };
        let found = forecast(&mut transactions, settings).map_err(|error| match error {
            ForecastError::Recorded(failure) => failure,
            ForecastError::Lock(error) => Failure::internal(error.to_string()),
            ForecastError::Stuck => Failure::internal("the model waits for nothing"),
        })?;
        Ok((found, transactions.into_limits()))
    }
}
