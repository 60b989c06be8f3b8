//! A subscription whose configuration was reloaded: the next run has the new settings, unless none can begin with
//! them.

use std::sync::Arc;

use super::Supervisor;
use super::failure_record::FailureRecord;
use super::retry::Retry;
use crate::config::Subscription as Config;
use crate::error::Failure;

impl Supervisor<'_> {
    /// Another run has the settings of a reloaded configuration.
    pub(super) fn take_settings(&mut self, record: &mut FailureRecord, retry: &mut Retry) {
        let Some(config) = self.newer.take() else { return };
        tracing::info!(
            event = "settings_taken_over",
            subscription = config.name,
            "run begins with the settings of the reloaded configuration"
        );
        // Of several reloads in a row, the last settings that have streamed count.
        let before = Arc::clone(&self.config);
        self.previous.get_or_insert(before);
        self.set_config(config, record, retry);
    }

    fn set_config(&mut self, config: Arc<Config>, record: &mut FailureRecord, retry: &mut Retry) {
        self.leaseholder.set_most(config.workers.most());
        retry.set_timeout(config.connect_timeout);
        record.set_config(Arc::clone(&config));
        self.config = config;
    }

    /// Whether a failure is due to reloaded settings, as far as one can tell: no run has streamed with
    /// them yet. Then the next run has those of before.
    pub(super) fn goes_back(
        &mut self,
        failure: &Failure,
        record: &mut FailureRecord,
        retry: &mut Retry,
    ) -> bool {
        let Some(previous) = self.previous.take() else { return false };
        self.newer.reject();
        tracing::error!(
            event = "settings_rejected",
            subscription = previous.name,
            error = %failure,
            "no run could begin with the settings of the reloaded configuration; the earlier ones stay"
        );
        self.set_config(previous, record, retry);
        true
    }
}
