//! SIGHUP: `pgapace run` reads its configuration again, as a PostgreSQL server does.
//!
//! An invalid configuration changes nothing. A subscription with other settings ends its run in order, and
//! begins another one with them; no applied transaction is applied again. A setting that only a start can
//! change keeps its value, and an event names it.

use std::sync::Arc;

use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;

use crate::cli::Selection;
use crate::config::given::Given;
use crate::config::live::LiveSettings;
use crate::config::setting::Reload;
use crate::config::{Configured, Subscription, liveness};
use crate::error::{Failure, Result};
use crate::observe::logging;
use crate::systemd::ServiceManager;

/// A subscription of the process.
pub(crate) struct Member {
    pub(crate) given: Given,
    pub(crate) live: Arc<LiveSettings>,
}

/// Reads the configuration again, and hands new settings to the subscriptions.
pub(crate) struct Reloader {
    pub(crate) selection: Selection,
    /// Whether the level of log lines was given by flag or environment.
    pub(crate) has_log_level: bool,
    /// Whether the process was started with --standby.
    pub(crate) standby: bool,
    pub(crate) members: Vec<Member>,
    pub(crate) manager: ServiceManager,
}

impl Reloader {
    /// Reloads at each SIGHUP, until the end of the process. Signals that arrive during a reload are
    /// one more reload.
    pub(crate) fn on_hangup(mut self) -> Result<()> {
        let mut signals = Signals::new([SIGHUP])
            .map_err(|e| Failure::internal(format!("cannot handle signals: {e}")))?;
        std::thread::Builder::new()
            .name("reload".to_owned())
            .spawn(move || {
                for _ in &mut signals {
                    self.manager.reloading();
                    self.reload();
                    self.manager.reloaded();
                }
            })
            .map_err(|e| Failure::internal(format!("cannot start the reload thread: {e}")))?;
        Ok(())
    }

    fn reload(&mut self) {
        let read = self.selection.configured().and_then(|found| self.take_over(found));
        match read {
            Ok(()) => tracing::info!(
                event = "configuration_reloaded",
                "configuration was read again after SIGHUP"
            ),
            Err(failure) => tracing::error!(
                event = "configuration_invalid",
                error = %failure,
                "configuration is invalid; all settings stay as they are"
            ),
        }
    }

    fn take_over(&mut self, found: Configured) -> Result<()> {
        let level = found.log_level.as_deref().unwrap_or(logging::DEFAULT_LEVEL).to_owned();
        let mut found: Vec<_> = found.subscriptions.into_iter().map(Some).collect();
        let (members, mut changed) = (&mut self.members, Vec::new());
        for member in members.iter_mut() {
            let running = member.live.newest();
            let same = found.iter_mut().find(|one| {
                one.as_ref().is_some_and(|(_, one)| identity(one) == identity(&running))
            });
            match same.and_then(Option::take) {
                Some((given, _)) => {
                    let change = Change::between(&member.given, &running, given, self.standby)?;
                    changed.push((running.name.clone(), member, change));
                }
                None => not_now(
                    &running.name,
                    "it is not in the configuration, or has another subscriber",
                ),
            }
        }
        if !self.has_log_level {
            logging::set_level(&level)?;
        }
        // Nothing fails from here on.
        for (name, member, change) in changed {
            change.take_effect(&name, member);
        }
        for (_, added) in found.into_iter().flatten() {
            not_now(&added.name, "it was added to the configuration, or has another subscriber");
        }
        Ok(())
    }
}

/// Identifies a subscription: its state is in one database of one server.
fn identity(config: &Subscription) -> (&str, [Option<&str>; 4]) {
    let keys = ["host", "hostaddr", "port", "dbname"];
    (&config.name, keys.map(|key| config.subscriber.get(key)))
}

/// The changed settings of a subscription.
struct Change {
    given: Given,
    settings: Subscription,
    /// Changed settings, as they are given now: those that the next run takes over, and others.
    next_run: Vec<String>,
    restart: Vec<String>,
}

impl Change {
    /// `running` are the settings of the process, which `before` gave.
    fn between(
        before: &Given,
        running: &Subscription,
        mut given: Given,
        standby: bool,
    ) -> Result<Self> {
        let (mut next_run, mut restart) = (Vec::new(), Vec::new());
        let different: Vec<_> = before.differences(&given).collect();
        for setting in different {
            match setting.reload {
                Reload::NextRun => next_run.push(given.shown(setting)),
                Reload::Restart => {
                    restart.push(given.shown(setting));
                    given.take_from(before, setting)?;
                }
            }
        }
        let mut settings = Subscription::resolve(given.clone())?;
        // The texts may be the same and name a service, whose file has changed.
        let same = settings.publisher.has_parameters_of(&running.publisher)
            && settings.subscriber.has_parameters_of(&running.subscriber);
        if !same && next_run.is_empty() {
            next_run.push("connection parameters of the service file".to_owned());
        }
        if standby {
            liveness::for_standby(&mut settings)?;
        }
        Ok(Self { given, settings, next_run, restart })
    }

    fn take_effect(self, subscription: &str, member: &mut Member) {
        if !self.restart.is_empty() {
            not_now(subscription, &self.restart.join("; "));
        }
        // Rejected settings are tried again: the cause may be outside of the file.
        if member.live.were_rejected() || !self.next_run.is_empty() {
            tracing::info!(
                event = "settings_changed",
                subscription,
                settings = self.next_run.join("; "),
                "settings were changed; another run takes them over"
            );
            member.live.replace(self.settings);
        }
        member.given = self.given;
    }
}

fn not_now(subscription: &str, what: &str) {
    tracing::warn!(
        event = "restart_needed",
        subscription,
        what,
        "a change of the configuration takes effect only after a restart"
    );
}
