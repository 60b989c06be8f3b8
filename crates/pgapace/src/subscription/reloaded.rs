//! A subscription whose configuration was reloaded: the next run has the new settings, unless none can begin with
//! them.

use std::sync::Arc;

use super::Supervisor;
use super::failure_record::FailureRecord;
use super::retry::Retry;
use crate::config::Subscription as Config;
use crate::config::live::SettingsWatch;
use crate::error::Failure;

/// The settings that replace those of the present run, or did.
pub(super) struct Reload {
    /// Tells when the configuration was reloaded.
    pub(super) newer: SettingsWatch,
    /// Settings of before a reload, until a run streams with those that followed.
    previous: Option<Arc<Config>>,
}

impl Reload {
    pub(super) fn new(newer: SettingsWatch) -> Self {
        Self { newer, previous: None }
    }

    /// Takes the settings of a reloaded configuration, in place of those `in_use`.
    fn take(&mut self, in_use: &Arc<Config>) -> Option<Arc<Config>> {
        let config = self.newer.take()?;
        // Of several reloads in a row, the last settings that have streamed count.
        self.previous.get_or_insert_with(|| Arc::clone(in_use));
        Some(config)
    }

    /// Whether no run has streamed with the reloaded settings yet.
    pub(super) fn is_on_trial(&self) -> bool {
        self.previous.is_some()
    }

    /// A run streams with the settings.
    pub(super) fn proven(&mut self) {
        self.previous = None;
    }

    /// Rejects the reloaded settings, and returns those of before.
    fn reject(&mut self) -> Option<Arc<Config>> {
        let previous = self.previous.take()?;
        self.newer.reject();
        Some(previous)
    }
}

impl Supervisor<'_> {
    /// Another run has the settings of a reloaded configuration.
    pub(super) fn take_settings(&mut self, record: &mut FailureRecord, retry: &mut Retry) {
        let Some(config) = self.reload.take(&self.config) else { return };
        tracing::info!(
            event = "settings_taken_over",
            subscription = config.name,
            "run begins with the settings of the reloaded configuration"
        );
        self.set_config(config, record, retry);
    }

    fn set_config(&mut self, config: Arc<Config>, record: &mut FailureRecord, retry: &mut Retry) {
        self.leaseholder.set_most(config.workers.most());
        retry.set_timeout(config.connect_timeout);
        record.set_config(Arc::clone(&config));
        self.config = config;
    }

    /// The next run has the settings of before a reload, because no run could begin with the later ones.
    pub(super) fn go_back(
        &mut self,
        failure: &Failure,
        record: &mut FailureRecord,
        retry: &mut Retry,
    ) {
        let Some(previous) = self.reload.reject() else { return };
        tracing::error!(
            event = "settings_rejected",
            subscription = previous.name,
            error = %failure,
            "no run could begin with the settings of the reloaded configuration; the earlier ones stay"
        );
        self.set_config(previous, record, retry);
    }
}
