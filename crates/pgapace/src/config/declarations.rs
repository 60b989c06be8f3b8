//! Every setting, declared once. docs/settings.md is made from this: `pgapace settings` writes it.

use std::fmt::{Display, Formatter};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use wire::ConnInfo;

use super::given::Given;
use super::setting::{
    Group, MOST, Quoted, Reload, Renamed, Setting, Shape, Unit, Value, choices, settings,
};
use crate::error::Result;
use crate::subscriber::conflict::{Policy, Rule};
use crate::verify::rate::Rate;

/// Verbs that look at one table or more on both sides.
const BOTH_SIDES: &[&str] =
    &["run", "check", "resync", "refresh", "sequences", "verify", "repair", "rebase", "record"];
/// Verbs that run the subscription themselves, if no other process does, and `check`.
const RUNNING: &[&str] = &["run", "check", "verify", "repair", "rebase"];
/// The same, and `replay`.
const RUNNING_OR_REPLAYING: &[&str] = &["run", "check", "verify", "repair", "rebase", "replay"];
/// Verbs that apply changes, or look whether they could be applied.
const APPLYING: &[&str] = &["run", "check", "replay"];
const ALL: &[&str] = &[
    "run",
    "check",
    "adopt",
    "release",
    "status",
    "top",
    "report",
    "resync",
    "refresh",
    "sequences",
    "verify",
    "repair",
    "rebase",
    "switchover",
    "hand-over",
    "skip",
    "prepared",
    "enable",
    "drop",
    "replay",
];

/// In days. With a much larger number, now() minus so many days is out of the range of timestamptz.
const LONGEST_RETENTION: u64 = 36_500;

settings! {
    /// One subscription, complete.
    #[derive(Debug, Clone)]
    Subscription {
        "publisher" publisher: ConnInfo {
            value: "CONNINFO",
            help: "Connection string of the publisher, a URI or keywords as in libpq",
            more: "PG* variables, the password file and the service file are used as in libpq.",
            group: Group::Subscription,
            verbs: &["run", "check", "status", "resync", "refresh", "sequences", "verify", "repair", "rebase", "drop", "adopt", "release", "switchover", "record"],
        }
        "subscriber" subscriber: ConnInfo {
            value: "CONNINFO",
            help: "Connection string of the subscriber",
            group: Group::Subscription,
            renamed: &[Renamed::from("target")],
            verbs: ALL,
        }
        "publisher-file" _publisher_file: () {
            value: "FILE",
            help: "File that has the connection string of the publisher, in place of --publisher",
            more: "So a password is neither in the process list nor in the configuration file. If the file \
                   has a password, group and others must not have access to it. In the configuration file, \
                   the path is relative to that file.",
            default_is: "the credential `publisher` of systemd, if there is one",
            group: Group::Subscription,
            from_file: Some("publisher"),
            verbs: &["run", "check", "status", "resync", "refresh", "sequences", "verify", "repair", "rebase", "drop", "adopt", "release", "switchover", "record"],
        }
        "subscriber-file" _subscriber_file: () {
            value: "FILE",
            help: "File that has the connection string of the subscriber, in place of --subscriber",
            default_is: "the credential `subscriber` of systemd, if there is one",
            group: Group::Subscription,
            from_file: Some("subscriber"),
            verbs: ALL,
        }
        "publication" publications: Vec<String> {
            value: "NAME",
            help: "Publication to apply; repeat it, or separate several by commas",
            more: "run and check need it. Verbs that work on an existing subscription take the publications and the slot \
                   that are recorded on the subscriber if it is not given.",
            group: Group::Subscription,
            renamed: &[Renamed::from("publications")],
            verbs: BOTH_SIDES,
        }
        "name" name: String {
            value: "NAME",
            help: "Name of the subscription",
            more: "It names the state on the subscriber, the slot and application_name on the publisher. A \
                   process runs one subscription of a name.",
            group: Group::Subscription,
            reload: Reload::Restart,
            verbs: ALL,
        }
        "copy-data" copy_data: Option<bool> {
            help: "Copy the tables at the first start, and tables that are added later",
            more: "If it is false at a later start, tables that are added then are applied without a copy. A \
                   copy that was requested or begun is made all the same.",
            default_is: "true, or false with --create-slot=false",
            group: Group::Copy,
            verbs: &["run", "check", "rebase"],
        }
        "copy-schema" copy_schema: bool {
            help: "Create the publisher's tables on the subscriber at the first start",
            more: "pg_dump, psql and pg_restore must be in the PATH. Tables are created before the copy, \
                   indexes and constraints after it. All schemas of the database are created, whatever the \
                   publications have. Owners and privileges are left out: what is created belongs to the role \
                   that pgapace connects as. pg_dump --schema-only … | grep -E \
                   '^(ALTER .* OWNER TO|ALTER DEFAULT PRIVILEGES|GRANT|REVOKE) ' | psql … carries them over.",
            default: "false",
            group: Group::Copy,
            renamed: &[Renamed::from("schema")],
        }
        "copy-workers" copy_workers: usize {
            help: "Maximum number of workers that copy tables",
            more: "Each has a session on either side. Two start, and more follow while they copy faster.",
            default: "4",
            range: Some(1..=64),
            group: Group::Copy,
        }
        "if-not-empty" if_not_empty: IfNotEmpty {
            help: "Action if tables hold rows before their copy",
            more: "To truncate tables is a decision for one start, not a setting: it is never taken from \
                   the configuration file or the environment, and needs --truncate, which names the \
                   tables and the time at which a user looked at them. refuse prints what to give.",
            default: "refuse",
            environment: false,
            group: Group::Copy,
            renamed: &[Renamed { name: "keep", values: Some(("refuse", "keep")) }],
            verbs: &["run", "rebase", "refresh"],
        }
        "workers" workers: ApplyWorkers {
            value: "auto|N",
            help: "Number of sessions that apply changes at the same time",
            more: "auto measures what another worker gains, and uses up to 16; status shows the decision. \
                   Subscriptions that one process applies to one server share their sessions: as many as \
                   the largest --workers among them, and at least one each.",
            default: "auto",
            word: "auto",
            range: Some(1..=64),
            group: Group::Apply,
            verbs: APPLYING,
        }
        "streaming" streaming: Streaming {
            help: "Handling of transactions larger than logical_decoding_work_mem",
            default: "parallel",
            default_is: "parallel, or on with one worker",
            group: Group::Apply,
            verbs: &["run", "check", "record"],
        }
        "two-phase" two_phase: Option<bool> {
            help: "Receive prepared transactions at PREPARE TRANSACTION (publisher 15 and later)",
            more: "Without it they are received at COMMIT PREPARED. To switch it off again needs \
                   publisher 18 or later.",
            default_is: "as the slot is, or was before a rebase; false for a new subscription",
            group: Group::Apply,
            verbs: &["run", "check", "rebase"],
        }
        "origin" origin: OriginFilter {
            value: "ORIGIN",
            help: "Origins of which changes are applied",
            default: "any",
            group: Group::Apply,
            verbs: &["run", "check", "verify", "repair", "rebase", "record"],
        }
        "memory-limit" memory_limit: usize {
            help: "Memory for changes that are received and not yet applied",
            default_is: "256MB, or a quarter of the control group's limit if that is less",
            unit: Unit::Megabytes,
            range: Some(16..=1 << 20),
            group: Group::Apply,
            verbs: APPLYING,
        }
        "on-conflict" on_conflict: Policy {
            value: "[SCHEMA.TABLE:]TYPE=ACTION",
            help: "Resolution of conflicts of a type, for all tables or for one; repeat it",
            more: "Types: insert_exists, update_exists, multiple_unique_conflicts, update_missing, \
                   delete_missing, update_origin_differs, delete_origin_differs, \
                   foreign_key_violation, exclusion_violation. Actions: error, skip, apply, \
                   last_update_wins.",
            default_is: "error, and skip for update_missing and delete_missing",
            group: Group::Errors,
            verbs: RUNNING_OR_REPLAYING,
        }
        "on-table-error" on_table_error: OnTableError {
            help: "Action if a change of a table cannot be applied",
            default: "stop",
            group: Group::Errors,
            verbs: RUNNING,
        }
        "on-missed-changes" on_missed_changes: OnMissedChanges {
            help: "Action on a table that may lack changes",
            more: "A table may lack changes if it was not published for a while, or if its row filter or \
                   column list was changed. With --if-not-empty keep, resync acts as stop: another copy \
                   would remove the rows that are kept.",
            default: "stop",
            group: Group::Errors,
            verbs: RUNNING,
        }
        "disable-on-error" disable_on_error: bool {
            help: "Disable the subscription when a change cannot be applied, until pgapace enable",
            default: "false",
            group: Group::Errors,
        }
        "slot" slot: String {
            value: "NAME",
            help: "Replication slot on the publisher",
            reload: Reload::Restart,
            default_is: "the name of the subscription",
            verbs: &["run", "check", "rebase", "adopt"],
        }
        "create-slot" create_slot: bool {
            help: "Create the slot at the first start; false uses an existing slot",
            default: "true",
        }
        "failover" failover: bool {
            help: "Create the slot with failover, so that it is synchronized to standbys",
            more: "It needs publisher 17 or later, and has no effect on older ones.",
            default: "true",
            verbs: &["run", "check", "rebase"],
        }
        "copy-split-size" copy_split_size: u64 {
            help: "Larger tables are copied by several workers, in parts of this size",
            more: "0 copies each table as a whole.",
            default: "32MB",
            unit: Unit::Megabytes,
        }
        "indexes-after" indexes_after: bool {
            help: "Build the indexes of empty tables after their rows are copied",
            more: "A table is locked until its copy ends. The role must own the table and have CREATE on its schema; \
                   otherwise its indexes stay in place. false copies with indexes in place.",
            default: "true",
        }
        "analyze" analyze: bool {
            help: "ANALYZE tables after their copy",
            more: "The role must own the table or the database, or have MAINTAIN on the table (17 and later). \
                   Other tables are left to autovacuum.",
            default: "true",
        }
        "refresh-interval" refresh_interval: Duration {
            help: "Time between two looks for tables that were added to the publications",
            more: "Such tables are copied if they exist on the subscriber and are empty. 0 waits for \
                   their first change.",
            default: "60s",
            unit: Unit::Seconds,
        }
        "two-phase-hold" two_phase_hold: Duration {
            help: "Delay before a prepared transaction is prepared on the subscriber as well",
            more: "Until then it is held in memory or spool. There is no delay if the publisher waits \
                   for this subscription (synchronous_standby_names).",
            default: "5s",
            unit: Unit::Seconds,
        }
        "tag-commits" tag_commits: TagCommits {
            value: "auto|BOOL",
            help: "Tag commits with a replication origin, if the role is allowed to",
            more: "auto tags them if a tag can be seen: wal_level is logical or track_commit_timestamp is \
                   on. It then uses no more workers than there are free replication origins, and leaves \
                   some to native subscriptions. If no other one is free, it does not tag. true leaves none to \
                   them.",
            default: "auto",
            word: "auto",
            verbs: &["run", "check", "repair", "rebase", "replay"],
        }
        "binary" binary: Binary {
            help: "Form in which the publisher sends values",
            more: "One column of a composite type, an extension's type, a range type of your own, jsonpath, xml or money makes \
                   all values text, because their binary form is not the same everywhere.",
            default: "auto",
            verbs: &["run", "check", "record"],
        }
        "preserve-commit-order" preserve_commit_order: bool {
            help: "Commit in the publisher's order",
            more: "false lets independent transactions become visible in another order.",
            default: "true",
            verbs: APPLYING,
        }
        "deadlock-timeout" deadlock_timeout: Duration {
            help: "Delay before pgapace looks for locks that block the oldest transaction",
            more: "At least four times as long as transactions took lately, up to a second.",
            default: "50ms",
            unit: Unit::Milliseconds,
            range: Some(1..=MOST),
            renamed: &[Renamed::from("lock-probe")],
        }
        "prefetch" prefetch: Prefetch {
            help: "Read rows of the subscriber before changes are applied to them",
            default: "off",
        }
        "group-transactions" group_transactions: GroupTransactions {
            value: "auto|N",
            help: "Maximum number of source transactions in one subscriber transaction",
            more: "auto takes as many as wait; 1 commits each transaction alone.",
            default: "auto",
            verbs: APPLYING,
        }
        "apply-mode" apply_mode: ApplyModeSetting {
            help: "Form in which changes are applied",
            default: "auto",
            verbs: APPLYING,
        }
        "conflict-retention" conflict_retention: Duration {
            help: "Time for which rows of pgapace.conflict are kept",
            more: "0 keeps them for ever.",
            default: "30d",
            unit: Unit::Days,
            range: Some(0..=LONGEST_RETENTION),
        }
        "event-retention" event_retention: Duration {
            help: "Time for which rows of pgapace.event are kept",
            more: "0 keeps them for ever.",
            default: "30d",
            unit: Unit::Days,
            range: Some(0..=LONGEST_RETENTION),
        }
        "verify-interval" verify_interval: Duration {
            reload: Reload::Restart,
            help: "Time between two verifications of each table in the background",
            more: "Each table is compared with the publisher's as pgapace verify does it, chunk by chunk, by \
                   one session on each server. 0 is off.",
            default: "0s",
            unit: Unit::Seconds,
        }
        "verify-max-rate" verify_max_rate: Rate {
            value: "RATE",
            reload: Reload::Restart,
            help: "Most that --verify-interval compares per second: rows (50000) or bytes of text (20MB)",
            default: "10MB",
        }
        "status-interval" status_interval: Duration {
            help: "Maximum time between two status messages to the publisher",
            more: "An idle subscription records its progress as often.",
            default: "10s",
            unit: Unit::Seconds,
            range: Some(1..=MOST),
        }
        "receive-timeout" receive_timeout: Duration {
            help: "Time without a message after which the publisher is considered gone",
            default: "60s",
            unit: Unit::Seconds,
            range: Some(1..=MOST),
        }
        "busy-timeout" busy_timeout: Duration {
            help: "Time to wait for a slot or subscription that another process uses",
            more: "A lost connection holds a slot for wal_sender_timeout. drop and release wait for the slot only, and are \
                   refused while a process runs the subscription. adopt and release wait no longer for a lock either.",
            default: "75s",
            unit: Unit::Seconds,
            verbs: &["run", "check", "adopt", "release", "drop"],
        }
        "takeover-timeout" takeover_timeout: Duration {
            help: "Time without a heartbeat after which a standby takes a subscription over (run --standby)",
            more: "The standby counts seconds in which its own commits on the subscriber succeed and the \
                   heartbeat of the other process stays the same. A process that has ended releases its \
                   lock, which is seen at once.",
            default: "5s",
            unit: Unit::Seconds,
            range: Some(2..=3600),
        }
        "weight" weight: usize {
            help: "Load of the subscription, compared to others, when processes share them (run --standby)",
            more: "Processes with the same configuration file spread its subscriptions so that the sums of \
                   the weights are as equal as they can be. If processes have different weights for one, the \
                   largest counts.",
            default: "1",
            range: Some(1..=1000),
            reload: Reload::Restart,
            verbs: &["run"],
        }
        "connect-timeout" connect_timeout: Option<Duration> {
            help: "Time to wait for a server that refuses connections, starts or recovers",
            default_is: "10s for a new subscription, 1h for one that has run before, no limit once it \
                         has streamed in this process",
            unit: Unit::Seconds,
        }
        "spool-directory" spool_directory: Option<PathBuf> {
            value: "DIRECTORY",
            help: "Directory for open transactions that do not fit into memory",
            more: "Its files have no names, and end with the process.",
            default_is: "$TMPDIR, or /var/tmp",
        }
        "spool-limit" spool_limit: Option<u64> {
            help: "Disk space for the spool",
            default_is: "no limit",
            unit: Unit::Megabytes,
        }
    }
}

choices!(
    OriginFilter,
    ApplyModeSetting,
    Binary,
    IfNotEmpty,
    OnMissedChanges,
    OnTableError,
    Prefetch,
    Streaming
);

/// Origins of which the publisher sends changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OriginFilter {
    /// All origins.
    Any,
    /// Only changes that were made on the publisher itself (publisher 16 and later).
    None,
}

/// How changes are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum ApplyModeSetting {
    /// As sets of net changes, where the result is the same.
    #[default]
    Auto,
    /// Each change as it was sent. With --group-transactions 1, each transaction is committed alone.
    Row,
}

/// How many sessions apply changes at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApplyWorkers {
    /// As many as gain something.
    Auto,
    Fixed(usize),
}

impl ApplyWorkers {
    /// The most that [`Self::Auto`] uses. On slow storage and at a distance, 16 were the fastest of all
    /// numbers that were measured; each costs the subscriber a session.
    const MOST: usize = 16;

    pub(crate) fn most(self) -> usize {
        match self {
            Self::Auto => Self::MOST,
            Self::Fixed(number) => number,
        }
    }

    /// How many there are from the start.
    pub(crate) fn at_start(self) -> usize {
        match self {
            Self::Auto => 1,
            Self::Fixed(number) => number,
        }
    }
}

impl Display for ApplyWorkers {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(number) => number.fmt(f),
        }
    }
}

impl Value for ApplyWorkers {
    fn parse(text: &str, setting: &Setting) -> std::result::Result<Self, String> {
        if text == setting.word {
            return Ok(Self::Auto);
        }
        usize::parse(text, setting).map(Self::Fixed)
    }
}

/// Whether commits are tagged with a replication origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagCommits {
    /// Only if tags are of use: see [`crate::subscriber::tagging`].
    Auto,
    Always,
    Never,
}

impl Value for TagCommits {
    const SHAPE: Shape = Shape::Boolean;

    fn parse(text: &str, setting: &Setting) -> std::result::Result<Self, String> {
        if text == setting.word {
            return Ok(Self::Auto);
        }
        bool::parse(text, setting).map(|tag| if tag { Self::Always } else { Self::Never })
    }
}

/// Source transactions that may become one subscriber transaction; `None` is as many as wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct GroupTransactions(pub(crate) Option<NonZeroUsize>);

impl Value for GroupTransactions {
    fn parse(text: &str, _: &Setting) -> std::result::Result<Self, String> {
        if text == "auto" {
            return Ok(Self(None));
        }
        let number = text.parse().map_err(|_| format!("{text:?} is neither auto nor 1 or more"))?;
        Ok(Self(Some(number)))
    }
}

impl Value for Rate {
    fn parse(text: &str, _: &Setting) -> std::result::Result<Self, String> {
        text.parse()
    }
}

impl Value for Policy {
    const SHAPE: Shape = Shape::List;
    const QUOTED: Quoted = Quoted::Parts;

    fn parse(text: &str, _: &Setting) -> std::result::Result<Self, String> {
        Rule::from_str(text).map(|rule| Self::new(vec![rule]))
    }

    fn parse_all(texts: &[String], _: &Setting) -> std::result::Result<Self, String> {
        let rules: std::result::Result<_, _> = texts.iter().map(|text| text.parse()).collect();
        rules.map(Self::new)
    }

    fn absent() -> Option<Self> {
        Some(Self::default())
    }
}

/// The form in which the publisher sends values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Binary {
    /// Binary if both sides have the same types and read their binary forms alike, otherwise text.
    Auto,
    /// Text.
    Off,
}

/// The treatment of subscriber tables that hold rows before they are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IfNotEmpty {
    /// The start fails, and nothing is changed.
    Refuse,
    /// Tables that --truncate names are truncated; the start fails if others hold rows.
    Truncate,
    /// The copied rows are added to the existing ones.
    Keep,
    /// The rows are compared with the publisher's, and made equal where they differ.
    Rebase,
}

impl IfNotEmpty {
    /// Whether a table with rows is an error.
    pub(crate) fn refuses(self) -> bool {
        matches!(self, Self::Refuse | Self::Truncate)
    }
}

/// The consequence for a table that may lack changes, because it was not published all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnMissedChanges {
    /// The table is copied again at once.
    Resync,
    /// The table is blocked until pgapace resync copies it again.
    Stop,
    /// Later changes of the table are applied.
    Ignore,
}

/// The consequence for a table of which a change cannot be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTableError {
    /// The subscription stops.
    Stop,
    /// The table is blocked until pgapace resync copies it again; other tables continue.
    Block,
}

/// Whether rows are read before changes are applied to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Prefetch {
    /// If samples show that reads are slow.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// When the publisher sends large transactions, and when they are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Streaming {
    /// Sent and applied after their commit.
    Off,
    /// Sent while they run, applied after their commit.
    On,
    /// Sent and applied while they run, committed in their turn.
    Parallel,
}

impl Streaming {
    /// The value of the `streaming` option for a publisher of this major version.
    pub(crate) fn of_publisher(self, major: u32) -> pgoutput::Streaming {
        match self {
            Self::Off => pgoutput::Streaming::Off,
            Self::Parallel if major >= 16 => pgoutput::Streaming::Parallel,
            Self::On | Self::Parallel => pgoutput::Streaming::On,
        }
    }
}
