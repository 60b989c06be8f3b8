//! The subscriptions that a verb works on.

use std::path::PathBuf;

use clap::Args;
use wire::{ConnInfo, Session};

use crate::config::declarations::SETTINGS;
use crate::config::given::Given;
use crate::config::{
    Configured, RecordSettings, Recorded, Site, Subscription, all_existing, existing,
    record_settings, replayed, sites, subscriptions,
};
use crate::error::{Class, Failure, Result};
use crate::subscriber::session::Subscriber;
use crate::subscriber::state;

/// Which subscriptions a verb works on.
#[derive(Debug, Clone, Args)]
pub(crate) struct Selection {
    /// Configuration file (TOML) with one or several subscriptions
    ///
    /// Each setting is a flag (--copy-workers), an environment variable (PGAPACE_COPY_WORKERS) and a
    /// key of this file (copy-workers). A flag overrides the environment, and that the file.
    #[arg(long, value_name = "FILE", env = "PGAPACE_CONFIG", help_heading = "Subscription")]
    config: Option<PathBuf>,

    #[command(flatten)]
    settings: Given,
}

impl Selection {
    pub(crate) fn subscriptions(&self) -> Result<Vec<Subscription>> {
        subscriptions(self.config.as_deref(), &self.settings)
    }

    /// The settings with which a reload compares.
    pub(crate) fn configured(&self) -> Result<Configured> {
        Configured::read(self.config.as_deref(), &self.settings)
    }

    /// Warns of flags that show a password to every user who can list processes.
    pub(crate) fn warn_of_passwords(&self) -> Result<()> {
        for setting in SETTINGS.iter().filter_map(|setting| setting.from_file) {
            let texts = self.settings.get(setting)?.unwrap_or_default();
            if texts.iter().any(|text| ConnInfo::text_has_password(text)) {
                tracing::warn!(
                    event = "password_on_command_line",
                    setting,
                    hint =
                        format!("use --{setting}-file, a password file, or the configuration file"),
                    "the list of processes shows the password of a connection string"
                );
            }
        }
        Ok(())
    }

    /// For verbs that need no more than the subscriber.
    pub(crate) fn subscriber_only(&self) -> Result<Vec<Site>> {
        sites(self.config.as_deref(), &self.settings)
    }

    /// For `record`.
    pub(crate) fn recorded(&self) -> Result<RecordSettings> {
        record_settings(self.config.as_deref(), &self.settings)
    }

    /// For `replay`: see [`replayed`].
    pub(crate) fn replayed(&self, publications: &[String], slot: &str) -> Result<Subscription> {
        replayed(self.config.as_deref(), &self.settings, publications, slot)
    }

    /// For verbs that work on one subscription, which may not exist yet.
    pub(crate) fn one_site(&self) -> Result<Site> {
        let mut all = self.subscriber_only()?;
        all.pop().filter(|_| all.is_empty()).ok_or_else(several)
    }

    /// For verbs that work on one subscription and need no more than the subscriber.
    pub(crate) fn one_by_name(&self) -> Result<(String, Site)> {
        let site = self.one_site()?;
        let name = site.name.clone().ok_or_else(no_name)?;
        Ok((name, site))
    }

    /// For verbs that work on subscriptions which exist. Where no publication is given, they have the recorded ones, and the
    /// recorded slot.
    pub(crate) fn all_existing(&self) -> Result<Vec<Subscription>> {
        all_existing(self.config.as_deref(), &self.settings, |site| {
            let name = site.name.clone().ok_or_else(no_name)?;
            let mut control = Subscriber::new(site.subscriber.clone(), &name).connect_first()?;
            Ok(recorded(state::find_existing(&mut control, &name)?))
        })
    }

    /// The same for verbs that work on one.
    pub(crate) fn one_existing(&self) -> Result<Subscription> {
        let mut all = self.all_existing()?;
        all.pop().filter(|_| all.is_empty()).ok_or_else(several)
    }

    /// The one subscription, with what is recorded of it unless something else is given.
    pub(crate) fn with_recorded(&self, row: &state::Subscription) -> Result<Subscription> {
        existing(self.config.as_deref(), &self.settings, &recorded(row.clone()))
    }

    /// For verbs that change the records of one subscription.
    pub(crate) fn existing(&self) -> Result<(Session, state::Subscription)> {
        self.connected().map(|(_, control, row)| (control, row))
    }

    /// The same, and where further sessions are opened.
    pub(crate) fn connected(&self) -> Result<(Subscriber, Session, state::Subscription)> {
        let (name, site) = self.one_by_name()?;
        let mut subscriber = Subscriber::new(site.subscriber.clone(), &name);
        let mut control = subscriber.connect_first()?;
        let row = state::find_existing(&mut control, &name)?;
        Ok((subscriber, control, row))
    }
}

fn recorded(row: state::Subscription) -> Recorded {
    Recorded { publications: row.publications, slot: row.slot_name }
}

fn several() -> Failure {
    Failure::new(Class::Config, "the configuration file has several subscriptions")
        .hint("Name one with --name.")
}

fn no_name() -> Failure {
    Failure::new(Class::Config, "--name is not given")
        .hint("pgapace status lists the subscriptions of a subscriber.")
}
