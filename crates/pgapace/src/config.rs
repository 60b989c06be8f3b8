//! Configuration: a file, the environment and flags, in that order of precedence from weak to
//! strong. Every key exists in all three under the same name.

mod cgroup;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use wire::ConnInfo;

use crate::error::{Class, Failure, Result};
use crate::subscriber::conflict::{Policy, Rule};

/// Which origins the publisher sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OriginFilter {
    /// Changes of every origin.
    Any,
    /// Only changes that were made on the publisher itself (publisher 16 and later).
    None,
}

/// How changes are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ApplyModeSetting {
    /// As sets of net changes, where that means the same.
    Auto,
    /// Every change as it was sent, every transaction alone.
    Row,
}

/// Source transactions that may become one subscriber transaction; `None` is as many as wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NumberOrText")]
pub(crate) struct GroupTransactions(pub(crate) Option<std::num::NonZeroUsize>);

/// As the file has it: `8` or `"auto"`.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(usize),
    Text(String),
}

impl TryFrom<NumberOrText> for GroupTransactions {
    type Error = String;

    fn try_from(value: NumberOrText) -> std::result::Result<Self, String> {
        match value {
            NumberOrText::Number(number) => number.to_string().parse(),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

impl std::str::FromStr for GroupTransactions {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "auto" {
            return Ok(Self(None));
        }
        let number = text.parse().map_err(|_| format!("{text:?} is neither auto nor 1 or more"))?;
        Ok(Self(Some(number)))
    }
}

/// In which form the publisher sends values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Binary {
    /// In binary if the types on both sides agree exactly, else as text.
    Auto,
    /// As text.
    Off,
}

/// What to do with subscriber tables that hold rows before they are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Filled {
    Refuse,
    Keep,
}

/// What becomes of a table that may lack changes, because it was not published all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OnMissedChanges {
    /// The table is copied again.
    Resync,
    /// The table is blocked until it is copied again on request.
    Stop,
    /// Its later changes are applied.
    Ignore,
}

/// How tables are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CopyOptions {
    pub(crate) workers: usize,
    /// Bytes of a part; larger tables have several.
    pub(crate) split_size: u64,
    pub(crate) filled: Filled,
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
}

/// What an error of one table stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OnTableError {
    /// The subscription.
    Stop,
    /// That table, until it is copied again.
    Block,
}

/// Whether rows of transactions that are still to be applied are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Prefetch {
    /// Where reads are slow.
    Auto,
    On,
    Off,
}

/// When the publisher sends large transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Streaming {
    /// After they have committed.
    Off,
    /// While they run; they are kept, and applied when they have committed.
    On,
    /// While they run; they are applied as they come, and committed in their turn.
    Parallel,
}

/// Settings of one subscription as they were given; nothing is filled in.
#[derive(Debug, Clone, Default, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    /// Connection string of the publisher: URI or keywords, as libpq takes them. PG* variables,
    /// the password file and the service file are honoured
    #[arg(long, value_name = "CONNINFO", env = "PGAPACE_PUBLISHER", hide_env_values = true)]
    pub(crate) publisher: Option<String>,

    /// Connection string of the subscriber
    #[arg(
        long,
        alias = "target",
        value_name = "CONNINFO",
        env = "PGAPACE_SUBSCRIBER",
        hide_env_values = true
    )]
    #[serde(alias = "target")]
    pub(crate) subscriber: Option<String>,

    /// Publication to apply; repeat it, or separate several by commas
    #[arg(
        long = "publication",
        value_name = "NAME",
        env = "PGAPACE_PUBLICATION",
        value_delimiter = ','
    )]
    #[serde(rename = "publication", alias = "publications")]
    pub(crate) publications: Option<Vec<String>>,

    /// Name of the subscription: its state on the subscriber, the slot and application_name on the
    /// publisher
    #[arg(long, value_name = "NAME", env = "PGAPACE_NAME")]
    pub(crate) name: Option<String>,

    /// Replication slot on the publisher [default: the subscription's name]
    #[arg(long, value_name = "NAME", env = "PGAPACE_SLOT")]
    pub(crate) slot: Option<String>,

    /// Create the slot on the first run; false uses one that exists [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_CREATE_SLOT",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "create-slot", alias = "create_slot")]
    pub(crate) create_slot: Option<bool>,

    /// Copy the tables on the first run, and those that join the publications later; false on a later run applies all
    /// changes of the latter from then on [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_COPY_DATA",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "copy-data", alias = "copy_data")]
    pub(crate) copy_data: Option<bool>,

    /// Most workers that copy tables, each with a session on either side; two at first, and
    /// another one for as long as more is copied with it [default: 4]
    #[arg(long, value_name = "N", env = "PGAPACE_COPY_WORKERS")]
    #[serde(rename = "copy-workers", alias = "copy_workers")]
    pub(crate) copy_workers: Option<usize>,

    /// Tables larger than this are copied by several workers, in parts of this size, in megabytes;
    /// 0 copies every table as a whole [default: 32]
    #[arg(long, value_name = "MB", env = "PGAPACE_COPY_SPLIT_SIZE")]
    #[serde(rename = "copy-split-size", alias = "copy_split_size")]
    pub(crate) copy_split_size: Option<u64>,

    /// Not a setting: a decision for one start.
    #[arg(skip)]
    pub(crate) truncate: Option<toml::Value>,

    /// Copy into subscriber tables that are not empty, beside the rows that they have [default: false]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_KEEP",
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(crate) keep: Option<bool>,

    /// Make the publisher's schema on the subscriber in the first run, with pg_dump, psql and
    /// pg_restore of the PATH: tables before they are copied, indexes and constraints after it
    /// [default: false]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_SCHEMA",
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(crate) schema: Option<bool>,

    /// How often to look for tables that were added to the publications, in seconds, besides at each
    /// start; those that the subscriber has, without rows, are copied. 0 waits for their first change
    /// [default: 60]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_REFRESH_INTERVAL")]
    #[serde(rename = "refresh-interval", alias = "refresh_interval")]
    pub(crate) refresh_interval: Option<u64>,

    /// What to do with a table that was not published for a while, or differently (it was taken out of
    /// a publication, the publication was dropped, a row filter or column list was changed), so that it
    /// may lack changes: stop blocks this table until pgapace resync, resync copies it again at once,
    /// ignore goes on [default: stop]
    #[arg(long, value_name = "ACTION", env = "PGAPACE_ON_MISSED_CHANGES")]
    #[serde(rename = "on-missed-changes", alias = "on_missed_changes")]
    pub(crate) on_missed_changes: Option<OnMissedChanges>,

    /// ANALYZE tables of the subscriber when they are copied [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_ANALYZE",
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(crate) analyze: Option<bool>,

    /// Build indexes of empty subscriber tables after their rows, in the transaction that copies them,
    /// which locks such a table until its end; false leaves all indexes in place [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_INDEXES_AFTER",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "indexes-after", alias = "indexes_after")]
    pub(crate) indexes_after: Option<bool>,

    /// Have the slot synchronised to standbys, where the publisher can (17 and later)
    /// [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_FAILOVER",
        num_args = 0..=1, default_missing_value = "true"
    )]
    pub(crate) failover: Option<bool>,

    /// Have prepared transactions sent at their PREPARE (publisher 15 and later), and not only when
    /// they are committed; false takes it back (publisher 18 and later) [default: as the slot is; a
    /// new one sends them when they are committed]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_TWO_PHASE",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "two-phase", alias = "two_phase")]
    pub(crate) two_phase: Option<bool>,

    /// How long a prepared transaction is held in memory or in the spool before it is prepared on the
    /// subscriber as well, in seconds; 0 is at once, as it always is for a publisher that waits
    /// [default: 5]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_TWO_PHASE_HOLD")]
    #[serde(rename = "two-phase-hold", alias = "two_phase_hold")]
    pub(crate) two_phase_hold: Option<u64>,

    /// Changes of which origins to take [default: any]
    #[arg(long, value_enum, env = "PGAPACE_ORIGIN")]
    pub(crate) origin: Option<OriginFilter>,

    /// Tag commits with a replication origin, if the role may [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_TAG_COMMITS",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "tag-commits", alias = "tag_commits")]
    pub(crate) tag_commits: Option<bool>,

    /// Form in which the publisher sends values: auto is binary where all types agree exactly
    /// [default: auto]
    #[arg(long, value_enum, env = "PGAPACE_BINARY")]
    pub(crate) binary: Option<Binary>,

    /// Longest time between two status messages to the publisher, and between two records of
    /// progress while idle, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_STATUS_INTERVAL")]
    #[serde(rename = "status-interval", alias = "status_interval")]
    pub(crate) status_interval: Option<u64>,

    /// A publisher that is silent for so long is gone, in seconds [default: 60]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_RECEIVE_TIMEOUT")]
    #[serde(rename = "receive-timeout", alias = "receive_timeout")]
    pub(crate) receive_timeout: Option<u64>,

    /// How long to wait for the slot, or the subscription, while somebody else uses it, in seconds
    /// [default: 75: a dead connection holds a slot for wal_sender_timeout]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_BUSY_TIMEOUT")]
    #[serde(rename = "busy-timeout", alias = "busy_timeout")]
    pub(crate) busy_timeout: Option<u64>,

    /// How long to wait for a server that refuses connections, starts or recovers, in seconds
    /// [default: 10 for a subscription that may be new, an hour for one that has run before, and no
    /// limit once it has streamed in this process]
    #[arg(long, value_name = "SECONDS", env = "PGAPACE_CONNECT_TIMEOUT")]
    #[serde(rename = "connect-timeout", alias = "connect_timeout")]
    pub(crate) connect_timeout: Option<u64>,

    /// When transactions larger than the publisher's logical_decoding_work_mem are sent and applied:
    /// parallel while they run, and committed in their turn; on sent while they run, applied when
    /// they have committed; off after that [default: parallel, or on with one worker]
    #[arg(long, value_enum, env = "PGAPACE_STREAMING")]
    pub(crate) streaming: Option<Streaming>,

    /// Directory for what does not fit into memory of transactions that have not ended. Its files
    /// have no names, and end with the process [default: $TMPDIR, or else /var/tmp]
    #[arg(long, value_name = "DIRECTORY", env = "PGAPACE_SPOOL_DIRECTORY")]
    #[serde(rename = "spool-directory", alias = "spool_directory")]
    pub(crate) spool_directory: Option<PathBuf>,

    /// Disk space for that, in megabytes [default: no limit]
    #[arg(long, value_name = "MB", env = "PGAPACE_SPOOL_LIMIT")]
    #[serde(rename = "spool-limit", alias = "spool_limit")]
    pub(crate) spool_limit: Option<u64>,

    /// Memory for what is received and not yet applied, in megabytes [default: 256, or a quarter of
    /// what the control group allows if that is less]
    #[arg(long, value_name = "MB", env = "PGAPACE_MEMORY_LIMIT")]
    #[serde(rename = "memory-limit", alias = "memory_limit")]
    pub(crate) memory_limit: Option<usize>,

    /// Sessions that apply changes at the same time; 1 is serial. Subscriptions that one process
    /// applies to one server share the sessions: as many as the one with most workers may have, and
    /// at least one each, which is its own [default: 4]
    #[arg(long, value_name = "N", env = "PGAPACE_WORKERS")]
    pub(crate) workers: Option<usize>,

    /// Commit in the publisher's order; false lets transactions that do not depend on each other
    /// become visible in another order [default: true]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_PRESERVE_COMMIT_ORDER",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "preserve-commit-order", alias = "preserve_commit_order")]
    pub(crate) preserve_commit_order: Option<bool>,

    /// Time after which it is looked which locks on the subscriber keep the oldest transaction, in
    /// milliseconds [default: 50]
    #[arg(long, value_name = "MS", env = "PGAPACE_DEADLOCK_TIMEOUT", alias = "lock-probe")]
    #[serde(
        rename = "deadlock-timeout",
        alias = "deadlock_timeout",
        alias = "lock-probe",
        alias = "lock_probe"
    )]
    pub(crate) deadlock_timeout: Option<u64>,

    /// Read rows of transactions that are still to be applied with sessions of their own: auto
    /// where reads are slow [default: off]
    #[arg(long, value_enum, value_name = "MODE", env = "PGAPACE_PREFETCH")]
    pub(crate) prefetch: Option<Prefetch>,

    /// Source transactions that may become one subscriber transaction: auto, or a number; 1 commits
    /// each of them alone [default: auto]
    #[arg(long, value_name = "auto|N", env = "PGAPACE_GROUP_TRANSACTIONS")]
    #[serde(rename = "group-transactions", alias = "group_transactions")]
    pub(crate) group_transactions: Option<GroupTransactions>,

    /// How changes are applied: auto as sets of net changes where that means the same, row each
    /// as it was sent [default: auto]
    #[arg(long, value_enum, value_name = "MODE", env = "PGAPACE_APPLY_MODE")]
    #[serde(rename = "apply-mode", alias = "apply_mode")]
    pub(crate) apply_mode: Option<ApplyModeSetting>,

    /// What is done about a type of conflict, for all tables or for one; repeat it. Types:
    /// insert_exists, update_exists, multiple_unique_conflicts, update_missing, delete_missing,
    /// update_origin_differs, delete_origin_differs, foreign_key_violation, exclusion_violation.
    /// Actions: error (stop), skip, apply, last_update_wins [default: error, but skip for
    /// missing rows]
    #[arg(
        long,
        value_name = "[SCHEMA.TABLE:]TYPE=ACTION",
        env = "PGAPACE_ON_CONFLICT",
        value_delimiter = ','
    )]
    #[serde(rename = "on-conflict", alias = "on_conflict")]
    pub(crate) on_conflict: Option<Vec<Rule>>,

    /// What a change stops that cannot be applied (a constraint, a missing column, table or
    /// privilege): stop the subscription; block that table alone, which then lacks changes until
    /// pgapace resync copies it again [default: stop]
    #[arg(long, value_enum, env = "PGAPACE_ON_TABLE_ERROR")]
    #[serde(rename = "on-table-error", alias = "on_table_error")]
    pub(crate) on_table_error: Option<OnTableError>,

    /// For how long rows of pgapace.conflict are kept, in days; 0 is for ever [default: 30]
    #[arg(long, value_name = "DAYS", env = "PGAPACE_CONFLICT_RETENTION")]
    #[serde(rename = "conflict-retention", alias = "conflict_retention")]
    pub(crate) conflict_retention: Option<u32>,

    /// Disable the subscription when a change cannot be applied: it does not run again until
    /// pgapace enable [default: false]
    #[arg(
        long, value_name = "BOOL", env = "PGAPACE_DISABLE_ON_ERROR",
        num_args = 0..=1, default_missing_value = "true"
    )]
    #[serde(rename = "disable-on-error", alias = "disable_on_error")]
    pub(crate) disable_on_error: Option<bool>,
}

impl Settings {
    /// Fills what is not given from weaker settings.
    fn or(self, weaker: &Self) -> Self {
        Self {
            publisher: self.publisher.or_else(|| weaker.publisher.clone()),
            subscriber: self.subscriber.or_else(|| weaker.subscriber.clone()),
            publications: self.publications.or_else(|| weaker.publications.clone()),
            name: self.name.or_else(|| weaker.name.clone()),
            slot: self.slot.or_else(|| weaker.slot.clone()),
            create_slot: self.create_slot.or(weaker.create_slot),
            copy_data: self.copy_data.or(weaker.copy_data),
            copy_workers: self.copy_workers.or(weaker.copy_workers),
            copy_split_size: self.copy_split_size.or(weaker.copy_split_size),
            truncate: self.truncate.or_else(|| weaker.truncate.clone()),
            keep: self.keep.or(weaker.keep),
            schema: self.schema.or(weaker.schema),
            refresh_interval: self.refresh_interval.or(weaker.refresh_interval),
            on_missed_changes: self.on_missed_changes.or(weaker.on_missed_changes),
            analyze: self.analyze.or(weaker.analyze),
            indexes_after: self.indexes_after.or(weaker.indexes_after),
            failover: self.failover.or(weaker.failover),
            two_phase: self.two_phase.or(weaker.two_phase),
            two_phase_hold: self.two_phase_hold.or(weaker.two_phase_hold),
            origin: self.origin.or(weaker.origin),
            tag_commits: self.tag_commits.or(weaker.tag_commits),
            binary: self.binary.or(weaker.binary),
            status_interval: self.status_interval.or(weaker.status_interval),
            receive_timeout: self.receive_timeout.or(weaker.receive_timeout),
            busy_timeout: self.busy_timeout.or(weaker.busy_timeout),
            connect_timeout: self.connect_timeout.or(weaker.connect_timeout),
            streaming: self.streaming.or(weaker.streaming),
            spool_directory: self.spool_directory.or_else(|| weaker.spool_directory.clone()),
            spool_limit: self.spool_limit.or(weaker.spool_limit),
            memory_limit: self.memory_limit.or(weaker.memory_limit),
            workers: self.workers.or(weaker.workers),
            preserve_commit_order: self.preserve_commit_order.or(weaker.preserve_commit_order),
            deadlock_timeout: self.deadlock_timeout.or(weaker.deadlock_timeout),
            prefetch: self.prefetch.or(weaker.prefetch),
            group_transactions: self.group_transactions.or(weaker.group_transactions),
            apply_mode: self.apply_mode.or(weaker.apply_mode),
            on_conflict: self.on_conflict.or_else(|| weaker.on_conflict.clone()),
            on_table_error: self.on_table_error.or(weaker.on_table_error),
            conflict_retention: self.conflict_retention.or(weaker.conflict_retention),
            disable_on_error: self.disable_on_error.or(weaker.disable_on_error),
        }
    }

    /// Takes what is needed to find the subscription.
    fn site(self) -> Result<Site> {
        if let Some(name) = &self.name {
            check_name(name, "name")?;
        }
        let busy_timeout = self.patience();
        let publisher = self.publisher.filter(|text| !text.is_empty());
        Ok(Site {
            subscriber: conninfo(&need(self.subscriber, "subscriber")?, "subscriber")?,
            publisher: publisher.map(|text| conninfo(&text, "publisher")).transpose()?,
            name: self.name,
            busy_timeout,
        })
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.busy_timeout.unwrap_or(75))
    }

    fn copy_options(&self) -> Result<CopyOptions> {
        if self.truncate.is_some() || std::env::var_os("PGAPACE_TRUNCATE").is_some() {
            return Err(config("truncate is not a setting, but a decision for one start").hint(
                "Take it out of the configuration file and the environment (PGAPACE_TRUNCATE). If \
                 tables are not empty at the first start, the error prints the --truncate to give.",
            ));
        }
        let filled = if self.keep.unwrap_or(false) { Filled::Keep } else { Filled::Refuse };
        let workers = self.copy_workers.unwrap_or(4);
        if !(1..=64).contains(&workers) {
            return Err(config("--copy-workers must be between 1 and 64"));
        }
        let split_size = match self.copy_split_size.unwrap_or(32) {
            0 => u64::MAX,
            megabytes => megabytes.saturating_mul(1 << 20),
        };
        let binary = self.binary != Some(Binary::Off);
        let analyze = self.analyze.unwrap_or(true);
        let indexes_after = self.indexes_after.unwrap_or(true);
        let schema = self.schema.unwrap_or(false);
        let refresh_interval = match self.refresh_interval.unwrap_or(60) {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        };
        Ok(CopyOptions {
            workers,
            split_size,
            filled,
            binary,
            analyze,
            indexes_after,
            schema,
            refresh_interval,
            on_missed_changes: self.on_missed_changes.unwrap_or(OnMissedChanges::Stop),
        })
    }

    /// Fills in the defaults and checks what can be checked without a server.
    fn resolve(self) -> Result<Subscription> {
        let busy_timeout = self.patience();
        let copy = self.copy_options()?;
        let name = need(self.name, "name")?;
        check_name(&name, "name")?;
        let slot = self.slot.unwrap_or_else(|| name.clone());
        check_name(&slot, "slot")?;
        let publications = self.publications.unwrap_or_default();
        if publications.iter().all(String::is_empty) {
            return Err(config("--publication is not given")
                .hint("Name at least one publication of the publisher: --publication mypub"));
        }
        let create_slot = self.create_slot.unwrap_or(true);
        let copy_data = self.copy_data.unwrap_or(create_slot);
        if copy_data && !create_slot {
            return Err(config("--copy-data needs --create-slot").hint(
                "Rows can only be copied from the snapshot of a slot that is created with them.",
            ));
        }
        let seconds = |value: Option<u64>, default, key: &str| match value.unwrap_or(default) {
            0 => Err(config(format!("--{key} must be at least 1 second"))),
            value => Ok(Duration::from_secs(value)),
        };
        let memory_limit = self.memory_limit.unwrap_or_else(default_memory_limit);
        if !(16..=1 << 20).contains(&memory_limit) {
            return Err(config("--memory-limit must be between 16 and 1048576 megabytes"));
        }
        let workers = self.workers.unwrap_or(4);
        if !(1..=64).contains(&workers) {
            return Err(config("--workers must be between 1 and 64"));
        }
        let deadlock_timeout = match self.deadlock_timeout.unwrap_or(50) {
            0 => return Err(config("--deadlock-timeout must be at least 1 millisecond")),
            value => Duration::from_millis(value),
        };
        Ok(Subscription {
            publisher: conninfo(&need(self.publisher, "publisher")?, "publisher")?,
            subscriber: conninfo(&need(self.subscriber, "subscriber")?, "subscriber")?,
            publications,
            name,
            slot,
            create_slot,
            copy_data,
            copy_joining: self.copy_data.unwrap_or(true),
            failover: self.failover.unwrap_or(true),
            two_phase: self.two_phase,
            two_phase_hold: Duration::from_secs(self.two_phase_hold.unwrap_or(5)),
            origin_none: self.origin == Some(OriginFilter::None),
            tag_commits: self.tag_commits.unwrap_or(true),
            binary: self.binary.unwrap_or(Binary::Auto),
            copy,
            status_interval: seconds(self.status_interval, 10, "status-interval")?,
            receive_timeout: seconds(self.receive_timeout, 60, "receive-timeout")?,
            busy_timeout,
            connect_timeout: self.connect_timeout.map(Duration::from_secs),
            streaming: self.streaming.unwrap_or(Streaming::Parallel),
            spool_directory: self.spool_directory,
            spool_limit: self.spool_limit.map(|limit| limit.saturating_mul(1 << 20)),
            memory_limit: memory_limit << 20,
            workers,
            preserve_commit_order: self.preserve_commit_order.unwrap_or(true),
            deadlock_timeout,
            prefetch: self.prefetch.unwrap_or(Prefetch::Off),
            group_transactions: self.group_transactions.unwrap_or_default(),
            apply_mode: self.apply_mode.unwrap_or(ApplyModeSetting::Auto),
            on_conflict: Policy::new(self.on_conflict.unwrap_or_default()),
            on_table_error: self.on_table_error.unwrap_or(OnTableError::Stop),
            conflict_retention: match self.conflict_retention.unwrap_or(30) {
                0 => None,
                days => Some(Duration::from_secs(u64::from(days) * 24 * 60 * 60)),
            },
            disable_on_error: self.disable_on_error.unwrap_or(false),
        })
    }
}

/// Megabytes, if the user does not say: a quarter of what the system allows, for there are stacks,
/// buffers and other processes beside it.
fn default_memory_limit() -> usize {
    const USUAL: usize = 256;
    const LEAST: usize = 16;
    const SHARE: u64 = 4;
    let allowed = cgroup::limit().map(|bytes| (bytes / SHARE) >> 20);
    let allowed = allowed.and_then(|megabytes| usize::try_from(megabytes).ok());
    allowed.map_or(USUAL, |megabytes| megabytes.clamp(LEAST, USUAL))
}

/// Where a subscription is, or all of a subscriber: for verbs that look or remove, and so need no
/// more than the subscriber.
#[derive(Debug, Clone)]
pub(crate) struct Site {
    pub(crate) subscriber: ConnInfo,
    pub(crate) publisher: Option<ConnInfo>,
    /// `None` for all subscriptions of the subscriber.
    pub(crate) name: Option<String>,
    pub(crate) busy_timeout: Duration,
}

/// One subscription, complete.
#[derive(Debug, Clone)]
pub(crate) struct Subscription {
    pub(crate) publisher: ConnInfo,
    pub(crate) subscriber: ConnInfo,
    pub(crate) publications: Vec<String>,
    pub(crate) name: String,
    pub(crate) slot: String,
    pub(crate) create_slot: bool,
    pub(crate) copy_data: bool,
    /// The same for tables that join later.
    pub(crate) copy_joining: bool,
    pub(crate) failover: bool,
    /// `None`: as the slot is.
    pub(crate) two_phase: Option<bool>,
    pub(crate) two_phase_hold: Duration,
    pub(crate) origin_none: bool,
    pub(crate) tag_commits: bool,
    pub(crate) binary: Binary,
    pub(crate) copy: CopyOptions,
    pub(crate) status_interval: Duration,
    pub(crate) receive_timeout: Duration,
    pub(crate) busy_timeout: Duration,
    /// `None`: it depends.
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) streaming: Streaming,
    /// As it was given.
    pub(crate) spool_directory: Option<PathBuf>,
    /// Bytes.
    pub(crate) spool_limit: Option<u64>,
    /// Bytes.
    pub(crate) memory_limit: usize,
    /// At least 1.
    pub(crate) workers: usize,
    pub(crate) preserve_commit_order: bool,
    pub(crate) deadlock_timeout: Duration,
    pub(crate) prefetch: Prefetch,
    pub(crate) group_transactions: GroupTransactions,
    pub(crate) apply_mode: ApplyModeSetting,
    pub(crate) on_conflict: Policy,
    pub(crate) on_table_error: OnTableError,
    /// `None` for ever.
    pub(crate) conflict_retention: Option<Duration>,
    pub(crate) disable_on_error: bool,
}

impl Subscription {
    /// Most sessions on which streamed transactions are applied while they are open.
    pub(crate) fn stream_sessions(&self) -> usize {
        match self.streaming {
            Streaming::Parallel => self.workers - 1,
            Streaming::Off | Streaming::On => 0,
        }
    }
}

/// A configuration file: common settings, and any number of subscriptions.
#[derive(Debug, Default, Deserialize)]
struct File {
    #[serde(default)]
    subscription: Vec<Settings>,
    #[serde(flatten)]
    common: toml::Table,
}

/// Puts file, environment and flags together. With several subscriptions in the file, `--name`
/// picks one, and other flags hold for all that are run.
pub(crate) fn subscriptions(file: Option<&Path>, given: &Settings) -> Result<Vec<Subscription>> {
    let chosen: Vec<_> =
        entries(file, given)?.into_iter().map(Settings::resolve).collect::<Result<_>>()?;
    let mut names: Vec<_> = chosen.iter().map(|s| (&s.name, s.subscriber.redacted())).collect();
    names.sort();
    if names.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(config(
            "the configuration has two subscriptions of one name on one subscriber",
        ));
    }
    Ok(chosen)
}

/// The same for verbs that need no more than the subscriber.
pub(crate) fn sites(file: Option<&Path>, given: &Settings) -> Result<Vec<Site>> {
    entries(file, given)?.into_iter().map(Settings::site).collect()
}

fn entries(file: Option<&Path>, given: &Settings) -> Result<Vec<Settings>> {
    let Some(path) = file else { return Ok(vec![given.clone()]) };
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|e| config(format!("cannot read configuration file {shown}: {e}")))?;
    let unreadable = |e: toml::de::Error| config(format!("configuration file {shown}: {e}"));
    let file: File = toml::from_str(&text).map_err(unreadable)?;
    let common: Settings = file.common.try_into().map_err(unreadable)?;
    if file.subscription.is_empty() {
        return Ok(vec![given.clone().or(&common)]);
    }
    let chosen: Vec<_> = file
        .subscription
        .into_iter()
        .filter(|entry| given.name.is_none() || entry.name == given.name)
        .map(|entry| given.clone().or(&entry.or(&common)))
        .collect();
    if chosen.is_empty() {
        return Err(config(format!(
            "configuration file {shown} has no subscription {:?}",
            given.name.as_deref().unwrap_or_default()
        )));
    }
    Ok(chosen)
}

fn need(value: Option<String>, key: &str) -> Result<String> {
    value.filter(|text| !text.is_empty()).ok_or_else(|| {
        config(format!("--{key} is not given")).hint(format!(
            "Give it as a flag, as {key} in the configuration file, or as {} in the environment.",
            variable(key)
        ))
    })
}

fn conninfo(text: &str, key: &str) -> Result<ConnInfo> {
    ConnInfo::parse(text).and_then(with_liveness).map_err(|e| config(format!("--{key}: {e}")))
}

/// A peer that vanished without a word is noticed within a minute rather than hours, unless the
/// connection string says otherwise. Milliseconds for the last one, as libpq takes them.
const LIVENESS: [(&str, &str); 4] = [
    ("keepalives_idle", "30"),
    ("keepalives_interval", "10"),
    ("keepalives_count", "3"),
    ("tcp_user_timeout", "60000"),
];

fn with_liveness(mut info: ConnInfo) -> std::result::Result<ConnInfo, wire::ConnInfoError> {
    for (key, value) in LIVENESS {
        if info.get(key).is_none() {
            info = info.with(key, value)?;
        }
    }
    Ok(info)
}

/// Names become slot names and advisory state, so PostgreSQL's rule for slots holds for both.
fn check_name(name: &str, key: &str) -> Result<()> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if !name.is_empty() && name.len() <= 63 && name.chars().all(legal) {
        return Ok(());
    }
    Err(config(format!("--{key} {name:?} is not a valid name")).hint(
        "Use lower case letters, digits and underscores, at most 63, as for a replication slot.",
    ))
}

fn variable(key: &str) -> String {
    format!("PGAPACE_{}", key.to_uppercase().replace('-', "_"))
}

fn config(message: impl Into<String>) -> Failure {
    Failure::new(Class::Config, message)
}

#[cfg(test)]
mod tests {
    use super::{Settings, subscriptions};
    use std::io::Write;

    fn given(name: Option<&str>) -> Settings {
        Settings { name: name.map(str::to_owned), ..Settings::default() }
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("written");
        file
    }

    const TWO: &str = r#"
        publisher = "host=p user=u dbname=d"
        subscriber = "host=t user=u dbname=d"
        memory-limit = 64
        [[subscription]]
        name = "a"
        publication = ["p1", "p2"]
        [[subscription]]
        name = "b"
        publication = ["p3"]
        slot = "other"
        memory-limit = 128
    "#;

    #[test]
    fn common_settings_reach_every_subscription() {
        let file = file(TWO);
        let all = subscriptions(Some(file.path()), &given(None)).expect("valid");
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].slot.as_str(), all[0].memory_limit), ("a", 64 << 20));
        assert_eq!((all[1].slot.as_str(), all[1].memory_limit), ("other", 128 << 20));
        assert_eq!(all[0].publications, ["p1", "p2"]);
    }

    #[test]
    fn a_name_picks_one_and_flags_win() {
        let file = file(TWO);
        let flags = Settings { memory_limit: Some(32), ..given(Some("b")) };
        let all = subscriptions(Some(file.path()), &flags).expect("valid");
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].name.as_str(), all[0].memory_limit), ("b", 32 << 20));
    }

    #[test]
    fn mistakes_are_named() {
        let message = |text: &str, name| {
            let file = file(text);
            subscriptions(Some(file.path()), &given(name)).expect_err("invalid").to_string()
        };
        assert!(message("publishr = 'x'", None).contains("publishr"));
        assert!(message(TWO, Some("c")).contains("no subscription \"c\""));
        assert!(message("name = 'Bad Name'", None).contains("not a valid name"));
        assert!(message("name = 'a'", None).contains("--publication is not given"));
        let both = "name='a'\npublication=['p']\ncreate-slot=false\ncopy-data=true";
        assert!(message(both, None).contains("needs --create-slot"));
        let rule = "name='a'\non-conflict=['public.t:update_exists=apply']";
        assert!(
            message(rule, None)
                .contains("not an action for update_exists; use one of: error, skip")
        );
    }
}
