//! Configuration: a file, the environment and flags, in that order of precedence from weak to strong.
//! `declarations` has each setting once; all three, and all documentation, are made from that.

mod cgroup;
pub(crate) mod declarations;
mod file;
pub(crate) mod given;
pub(crate) mod live;
pub(crate) mod liveness;
mod secret_file;
pub(crate) mod setting;

use std::path::Path;
use std::time::Duration;

use wire::ConnInfo;

pub(crate) use self::declarations::{
    ApplyModeSetting, ApplyWorkers, Binary, IfNotEmpty, OnMissedChanges, OnTableError,
    OriginFilter, Prefetch, Streaming, Subscription, TagCommits,
};
use self::file::Entries;
use self::given::Given;
pub(crate) use self::given::list_of_names;
pub(crate) use self::secret_file::SecretFile;
use self::setting::{Setting, Value};
use crate::error::{Class, Failure, Result};
use crate::subscriber::writer_tag::TagRules;

/// Most sessions for streamed transactions where the number of workers is not fixed. Few transactions
/// of that size are open at the same time.
const AUTO_STREAM_SESSIONS: usize = 3;

/// How tables are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CopyOptions {
    pub(crate) workers: usize,
    /// Whether the sessions tag their commits.
    pub(crate) tags: TagRules,
    /// Bytes of a part; larger tables have several.
    pub(crate) split_size: u64,
    pub(crate) if_not_empty: IfNotEmpty,
    /// In binary where the types agree.
    pub(crate) binary: bool,
    pub(crate) analyze: bool,
    /// Indexes of empty tables are built after their rows.
    pub(crate) indexes_after: bool,
    /// The schema first.
    pub(crate) schema: bool,
    /// Between two looks for tables that were added; `None` for never.
    pub(crate) refresh_interval: Option<Duration>,
    pub(crate) on_missed_changes: OnMissedChanges,
    /// Whether only changes are applied that were made on the publisher itself.
    pub(crate) origin_none: bool,
}

impl CopyOptions {
    /// Whether tables may hold rows of other writers, so that only a request of the user may empty them.
    pub(crate) fn keeps_rows(&self) -> bool {
        self.if_not_empty == IfNotEmpty::Keep
    }

    /// While a subscription is rebased, tables that hold rows are compared.
    pub(crate) fn rebasing(mut self, rebasing: bool) -> Self {
        if rebasing {
            self.if_not_empty = IfNotEmpty::Rebase;
        }
        self
    }
}

impl Subscription {
    /// Fills in the defaults that depend on others, and makes the checks that need no server.
    pub(crate) fn resolve(mut given: Given) -> Result<Self> {
        let name: String = given.value("name")?;
        check_name(&name, "name").map_err(|failure| given.blame("name", failure))?;
        if given.get("slot")?.is_none() {
            given.set("slot", &name)?;
        }
        check_name(&given.value::<String>("slot")?, "slot")
            .map_err(|failure| given.blame("slot", failure))?;
        let create_slot: bool = given.value("create-slot")?;
        let copy_data: Option<bool> = given.value("copy-data")?;
        if copy_data == Some(true) && !create_slot {
            return Err(wrong("--copy-data needs --create-slot").hint(
                "Rows can only be copied from the snapshot of a slot that is created with them.",
            ));
        }
        if given.get("memory-limit")?.is_none() {
            given.set("memory-limit", &default_memory_limit().to_string())?;
        }
        let all = Self::of(&given)?;
        check_publications(&all.publications)?;
        Ok(all)
    }

    /// Whether the tables of the first start are copied.
    pub(crate) fn copies_data(&self) -> bool {
        self.copy_data.unwrap_or(self.create_slot)
    }

    /// Whether tables that are added later are copied.
    pub(crate) fn copies_added_tables(&self) -> bool {
        self.copy_data.unwrap_or(true)
    }

    /// After how many rounds, which take a second, a heartbeat has stopped.
    pub(crate) fn takeover_rounds(&self) -> u32 {
        u32::try_from(self.takeover_timeout.as_secs()).unwrap_or(u32::MAX)
    }

    pub(crate) fn copy(&self) -> CopyOptions {
        CopyOptions {
            workers: self.copy_workers,
            tags: TagRules::of(self),
            split_size: match self.copy_split_size {
                0 => u64::MAX,
                bytes => bytes,
            },
            if_not_empty: self.if_not_empty,
            binary: self.binary != Binary::Off,
            analyze: self.analyze,
            indexes_after: self.indexes_after,
            schema: self.copy_schema,
            refresh_interval: unless_zero(self.refresh_interval),
            on_missed_changes: self.on_missed_changes,
            origin_none: self.origin_none(),
        }
    }

    /// Whether only changes are applied that were made on the publisher itself.
    pub(crate) fn origin_none(&self) -> bool {
        self.origin == OriginFilter::None
    }

    /// For how long rows of pgapace.conflict are kept; `None` for ever.
    pub(crate) fn conflict_retention(&self) -> Option<Duration> {
        unless_zero(self.conflict_retention)
    }

    /// How long warnings and errors are kept; `None`: for ever.
    pub(crate) fn event_retention(&self) -> Option<Duration> {
        unless_zero(self.event_retention)
    }

    /// Most sessions on which streamed transactions are applied while they are open.
    pub(crate) fn stream_sessions(&self) -> usize {
        match self.streaming {
            Streaming::Parallel => match self.workers {
                // Each is opened when a transaction needs it.
                ApplyWorkers::Auto => AUTO_STREAM_SESSIONS,
                ApplyWorkers::Fixed(number) => number - 1,
            },
            Streaming::Off | Streaming::On => 0,
        }
    }
}

fn unless_zero(duration: Duration) -> Option<Duration> {
    Some(duration).filter(|duration| !duration.is_zero())
}

/// The default in megabytes: a quarter of the memory that the system allows, because stacks, buffers and
/// other processes need memory too.
fn default_memory_limit() -> usize {
    const USUAL: usize = 256;
    const LEAST: usize = 16;
    const SHARE: u64 = 4;
    let allowed = cgroup::limit().map(|bytes| (bytes / SHARE) >> 20);
    let allowed = allowed.and_then(|megabytes| usize::try_from(megabytes).ok());
    allowed.map_or(USUAL, |megabytes| megabytes.clamp(LEAST, USUAL))
}

/// One subscription, or all of a subscriber, for verbs that need no more than the subscriber.
#[derive(Debug, Clone)]
pub(crate) struct Site {
    pub(crate) subscriber: ConnInfo,
    pub(crate) publisher: Option<ConnInfo>,
    /// `None` for all subscriptions of the subscriber.
    pub(crate) name: Option<String>,
    pub(crate) slot: Option<String>,
    pub(crate) busy_timeout: Duration,
}

impl Site {
    fn resolve(given: &Given) -> Result<Self> {
        let name: Option<String> = given.value("name")?;
        if let Some(name) = &name {
            check_name(name, "name").map_err(|failure| given.blame("name", failure))?;
        }
        Ok(Self {
            subscriber: given.value("subscriber")?,
            publisher: given.value("publisher")?,
            name,
            slot: given.get("slot")?.and_then(<[_]>::first).cloned(),
            busy_timeout: given.value("busy-timeout")?,
        })
    }
}

/// The settings of `pgapace record`: a publisher, and a subscriber only to know which values it reads in
/// binary.
#[derive(Debug, Clone)]
pub(crate) struct RecordSettings {
    pub(crate) publisher: ConnInfo,
    pub(crate) subscriber: Option<ConnInfo>,
    pub(crate) publications: Vec<String>,
    pub(crate) streaming: Streaming,
    pub(crate) binary: Binary,
    pub(crate) origin_none: bool,
}

impl RecordSettings {
    fn resolve(given: &Given) -> Result<Self> {
        let publications: Vec<String> = given.value("publication")?;
        check_publications(&publications)?;
        Ok(Self {
            publisher: given.value("publisher")?,
            subscriber: given.value("subscriber")?,
            publications,
            streaming: given.value("streaming")?,
            binary: given.value("binary")?,
            origin_none: given.value::<OriginFilter>("origin")? == OriginFilter::None,
        })
    }
}

/// Settings of the one subscription whose stream is recorded.
pub(crate) fn record_settings(file: Option<&Path>, given: &Given) -> Result<RecordSettings> {
    RecordSettings::resolve(&one(file::entries(file, given)?.given)?)
}

/// A subscription whose changes come from a recording: publications and slot are those of the recording,
/// and there is no publisher.
pub(crate) fn replayed(
    file: Option<&Path>,
    given: &Given,
    publications: &[String],
    slot: &str,
) -> Result<Subscription> {
    let mut given = one(file::entries(file, given)?.given)?;
    given.set_all("publication", publications)?;
    given.set("slot", slot)?;
    given.set("create-slot", "false")?;
    given.set("copy-data", "false")?;
    // pgapace never connects to it: see `Publisher::absent`.
    given.set("publisher", "host=recording.invalid")?;
    if given.get("name")?.is_none() {
        given.set("name", "replay")?;
    }
    Subscription::resolve(given)
}

fn one(mut all: Vec<Given>) -> Result<Given> {
    let file = all.first().and_then(|one| one.file.clone()).unwrap_or_default();
    all.pop().filter(|_| all.is_empty()).ok_or_else(|| {
        wrong(format!("configuration file {} has several subscriptions", file.display()))
            .hint("Name one with --name.")
    })
}

fn check_publications(publications: &[String]) -> Result<()> {
    if publications.iter().all(String::is_empty) {
        return Err(wrong("--publication is not given")
            .hint("Name at least one publication of the publisher: --publication mypub"));
    }
    Ok(())
}

/// The subscriptions that are chosen, as all sources together give them.
pub(crate) fn subscriptions(file: Option<&Path>, given: &Given) -> Result<Vec<Subscription>> {
    let configured = Configured::read(file, given)?;
    Ok(configured.subscriptions.into_iter().map(|(_, subscription)| subscription).collect())
}

/// What the subscriber has recorded of a subscription.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) publications: Vec<String>,
    pub(crate) slot: String,
}

impl Recorded {
    /// The given settings, and those recorded where they are not given.
    fn or_given(&self, given: &Given) -> Result<Given> {
        let mut all = given.clone();
        if given.get("publication")?.is_none() {
            all.set_all("publication", &self.publications)?;
        }
        if given.get("slot")?.is_none() {
            all.set("slot", &self.slot)?;
        }
        Ok(all)
    }
}

/// The same for a verb that reads from the subscriber what it has recorded of one subscription.
pub(crate) fn existing(
    file: Option<&Path>,
    given: &Given,
    recorded: &Recorded,
) -> Result<Subscription> {
    let one = one(file::entries(file, given)?.given)?;
    Subscription::resolve(recorded.or_given(&one)?)
}

/// The same for several. Only where no publication is given, the subscriber is `read`.
pub(crate) fn all_existing(
    file: Option<&Path>,
    given: &Given,
    read: impl Fn(&Site) -> Result<Recorded>,
) -> Result<Vec<Subscription>> {
    let mut entries = file::entries(file, given)?;
    for one in &mut entries.given {
        if one.get("publication")?.is_none() {
            *one = read(&Site::resolve(one)?)?.or_given(one)?;
        }
    }
    let configured = Configured::of(file, entries)?;
    Ok(configured.subscriptions.into_iter().map(|(_, subscription)| subscription).collect())
}

/// The same for verbs that need no more than the subscriber.
pub(crate) fn sites(file: Option<&Path>, given: &Given) -> Result<Vec<Site>> {
    file::entries(file, given)?.given.iter().map(Site::resolve).collect()
}

/// Everything that `pgapace run` takes from its configuration.
#[derive(Debug)]
pub(crate) struct Configured {
    /// With the settings that were given for each.
    pub(crate) subscriptions: Vec<(Given, Subscription)>,
    /// `log-level` of the file.
    pub(crate) log_level: Option<String>,
}

impl Configured {
    pub(crate) fn read(file: Option<&Path>, given: &Given) -> Result<Self> {
        Self::of(file, file::entries(file, given)?)
    }

    fn of(file: Option<&Path>, Entries { given, log_level }: Entries) -> Result<Self> {
        let resolve = |given: Given| Ok((given.clone(), Subscription::resolve(given)?));
        let subscriptions: Vec<_> = given.into_iter().map(resolve).collect::<Result<_>>()?;
        // Log, events and metrics tell subscriptions of a process by name.
        let mut names: Vec<_> = subscriptions.iter().map(|(_, s)| &s.name).collect();
        names.sort();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let place = file.map_or("the configuration".to_owned(), |file| {
                format!("configuration file {}", file.display())
            });
            let message = format!("{place} has two subscriptions of name {:?}", pair[0]);
            return Err(wrong(message).hint(
                "Give one of them another name. If both exist, give one a configuration file and a \
                 process of its own.",
            ));
        }
        Ok(Self { subscriptions, log_level })
    }
}

/// Reads a connection string as `--publisher` does.
pub(crate) fn conninfo(text: &str) -> std::result::Result<ConnInfo, wire::ConnInfoError> {
    ConnInfo::parse(text).and_then(liveness::usual)
}

impl Value for ConnInfo {
    fn parse(text: &str, _: &Setting) -> std::result::Result<Self, String> {
        conninfo(text).map_err(|e| e.to_string())
    }

    /// The message of a wrong command line would repeat the text, which may have a password.
    fn check(_: &str, _: &Setting) -> std::result::Result<(), String> {
        Ok(())
    }
}

/// Both become names of slots, so PostgreSQL's rule for those holds.
pub(crate) fn check_name(name: &str, key: &str) -> Result<()> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !name.is_empty() && name.len() <= 63 && name.chars().all(legal) {
        return Ok(());
    }
    Err(wrong(format!("--{key} {name:?} is not a valid name")).hint(
        "Use lower case letters, digits and underscores, at most 63, as for a replication slot.",
    ))
}

fn wrong(message: impl Into<String>) -> Failure {
    Failure::new(Class::Config, message)
}

#[cfg(test)]
mod tests;
