//! `check`: finds everything that would keep a subscription from working, in one pass.
//!
//! The checks only read; they change nothing on either server. The groups of checks are
//! independent: if one fails, the failure becomes a finding, and the others continue.

mod asked;
mod both;
mod connections;
mod definitions;
mod disk;
mod indexes;
pub(crate) mod limits;
pub(crate) mod opposite;
pub(crate) mod origins;
pub(crate) mod partitions;
mod password_expiry;
mod program;
mod protection;
mod publisher;
mod publisher_settings;
pub(crate) mod report;
mod row_filters;
pub(crate) mod same_rows;
mod schema_tools;
mod service;
mod subscriber;
mod tables;
mod types;
mod uncarried;

use std::collections::HashMap;

use engine::table_sync::TableSyncState;
use pgoutput::Lsn;
use wire::{ConnInfo, Session};

use crate::config::Subscription as Config;
use crate::error::{Class, Failure, Result};
use crate::product::Product;
use crate::publisher::dump_command::shell_quoted;
use crate::publisher::publication::PublishedTable;
use crate::publisher::recreated::FollowedDatabase;
use crate::publisher::session::{Publisher, is_standby};
use crate::publisher::slot;
use crate::subscriber::catalogue::field;
use crate::subscriber::session::{self, Purpose, Subscriber};
use crate::subscriber::state::ownership::OwnerProcess;
use crate::subscriber::state::progress::Followed;
use crate::subscriber::state::{Phase, RelationState, SchemaCopy, Subscription};
use crate::switchover::lost::check_without_slot;
pub(crate) use subscriber::replica_role_remedy;

use report::{Fix, Report, Reporter, Side};
use service::Service;

/// The subscription's state on the subscriber.
#[derive(Debug, Default)]
struct SubscriptionState {
    /// The quoted name of the subscriber session's role.
    role: String,
    /// The managed service that runs the subscriber, if any.
    service: Service,
    /// Whether it was read, or there is none yet. Otherwise the subscriber cannot be reached, or schema pgapace is
    /// older or not readable for this role. Then `check` does not know whether the subscription exists, what it has
    /// done, nor what it would do.
    is_read: bool,
    row: Option<Subscription>,
    relations: Vec<RelationState>,
    applied: Option<Lsn>,
    followed: Option<Followed>,
    publisher_database: FollowedDatabase,
    /// Why a rebase, which a missing slot would need, is no way: this database has rows that the publisher lacks.
    moved: Option<Failure>,
    /// The last error, if it was another history of the publisher, and no run has gone beyond it since.
    other_history: Option<String>,
    owner: Option<OwnerProcess>,
    /// Whether a switchover has ended the subscription, so that its slot is gone.
    has_ended: bool,
    /// Why a first run must not use the slot: a native subscription of this subscriber does, or has.
    native: Option<Failure>,
}

impl SubscriptionState {
    /// The row, if its settings count. Until its slot exists, those of the next start replace them.
    fn settled(&self) -> Option<&Subscription> {
        let is_settled = |row: &&Subscription| {
            self.owner.is_some() || !row.is_first_start() || row.slot_made_at.is_some()
        };
        self.row.as_ref().filter(is_settled)
    }

    /// Whether the publisher with this identifier is another system than the one that the subscription follows. In phase
    /// `creating`, it has read nothing from it.
    fn follows_another(&self, publisher: Option<&str>) -> bool {
        let row = self.row.as_ref().filter(|row| row.phase != Phase::Creating);
        let recorded = row.and_then(|row| row.system_identifier.as_deref());
        recorded.zip(publisher).is_some_and(|(recorded, publisher)| recorded != publisher)
    }

    /// Whether a run would copy this table.
    fn to_copy(&self, config: &Config, table: &PublishedTable) -> bool {
        let copy_data = self.settled().map_or(config.copies_data(), |row| row.copy_data);
        let same = |r: &&RelationState| r.name == table.name;
        self.is_read
            && copy_data
            && self.relations.iter().find(same).is_none_or(|r| r.sync_lsn.is_none())
    }

    /// Whether a run creates the published tables (`--copy-schema`).
    fn creates_tables(&self, config: &Config) -> bool {
        let made = |row: &Subscription| row.schema_copy == Some(SchemaCopy::After);
        match self.settled() {
            Some(row) => row.schema_copy == Some(SchemaCopy::Before),
            None => config.copy_schema && self.is_read && !self.row.as_ref().is_some_and(made),
        }
    }

    /// Whether a run refuses to copy tables that hold rows. A rebase compares them.
    fn refuses_rows(&self, config: &Config) -> bool {
        config.if_not_empty.refuses() && !self.settled().is_some_and(|row| row.rebasing)
    }

    /// Whether a running process has decided to copy this table, which may be locked meanwhile, and not empty.
    fn is_judged(&self, table: &PublishedTable) -> bool {
        let same = |r: &&RelationState| r.name == table.name;
        let found = self.relations.iter().find(same);
        self.owner.is_some() && found.is_some_and(|one| one.state != TableSyncState::Blocked)
    }

    /// Whether a run would empty this table of the subscriber first, because an interrupted copy left rows in it.
    fn is_emptied(&self, table: &PublishedTable, oid: u32) -> bool {
        let same = |r: &&RelationState| r.name == table.name;
        self.relations.iter().find(same).is_some_and(|state| state.is_partly_copied_into(oid))
    }
}

/// Returns [`SubscriptionState::moved`], and `None` if a query for it fails: other checks report that failure.
fn moved(
    control: &mut Session,
    source: &mut Session,
    known: &SubscriptionState,
) -> Option<Failure> {
    let row = known.row.as_ref().filter(|row| row.phase == Phase::Streaming)?;
    let is_missing = slot::find(source, &row.slot_name).is_ok_and(|found| found.is_none());
    if !is_missing || is_standby(source).unwrap_or(true) {
        return None;
    }
    let checked = check_without_slot(control, source, row);
    checked.err().filter(|failure| failure.class == Class::History)
}

/// Checks one subscription.
pub(crate) fn check(config: &Config) -> Report {
    let mut report = Report::new(&config.name);
    let subscriber = Subscriber::new(config.subscriber.clone(), &config.name);
    let on_subscriber = subscriber.connect(Purpose::Look);
    // A run reads the publisher's names as the subscriber's encoding needs.
    let encoding = on_subscriber.as_ref().ok().and_then(|it| it.parameter("server_encoding"));
    let encoding = session::client_encoding(encoding.unwrap_or_default());
    let publisher = Publisher::new(config.publisher.clone(), &config.name, encoding);
    let mut publisher_session =
        reach(&mut report, Side::Publisher, &config.publisher, publisher.connect_to_look());
    let subscriber_session =
        reach(&mut report, Side::Subscriber, &config.subscriber, on_subscriber);

    program::check(config, &mut Reporter { report: &mut report, side: Side::Program });
    let mut subscriber_side = None;
    if let Some(mut session) = subscriber_session {
        let mut reporter = Reporter { report: &mut report, side: Side::Subscriber };
        protection::check(&session, &mut reporter);
        if let Some(known) = subscriber::check(&mut session, config, &mut reporter) {
            subscriber_side = Some((session, known));
        }
    }
    if let (Some(source), Some((control, known))) = (&mut publisher_session, &mut subscriber_side) {
        known.moved = moved(control, source, known);
    }
    let nothing = SubscriptionState::default();
    let known = subscriber_side.as_ref().map_or(&nothing, |(_, known)| known);
    let mut publisher_side = None;
    let mut settings = None;
    if let (Some(_), Some(row)) = (&publisher_session, &known.row) {
        let mut reporter = Reporter { report: &mut report, side: Side::Publisher };
        let look = || publisher.connect_to_look();
        settings = reporter.group("slot", |_| config.with_slot_of_way_back(row, look)).flatten();
    }
    let config = settings.as_ref().unwrap_or(config);
    if let Some(row) = &known.row {
        let mut reporter = Reporter { report: &mut report, side: Side::Subscriber };
        subscriber::slot_name(row, config, &mut reporter);
    }
    if let Some(mut session) = publisher_session {
        let mut reporter = Reporter { report: &mut report, side: Side::Publisher };
        protection::check(&session, &mut reporter);
        if let Some(tables) =
            publisher::check(&mut session, &publisher, config, known, &mut reporter)
        {
            publisher_side = Some((session, tables));
        }
    }
    if let (Some((control, known)), Some((source, published))) =
        (&mut subscriber_side, &mut publisher_side)
    {
        both::check((source, control), config, known, published, &mut report);
    }
    report
}

/// The topic of the role that replicates.
pub(crate) const REPLICATION: &str = "replication";

/// How a role may replicate from this subscriber, which becomes a publisher, in the words of its managed service.
pub(crate) fn replication_fix(session: &mut Session, role: &str) -> Result<Fix> {
    Ok(Service::read(session, Side::Subscriber)?.replication(role))
}

fn reach(
    report: &mut Report,
    side: Side,
    info: &ConnInfo,
    session: Result<Session>,
) -> Option<Session> {
    match session {
        Ok(session) => Some(session),
        Err(failure) => {
            let finding = report.failure(side, "connection", &failure);
            if let Some(fix) = info.get("host").and_then(service::direct_endpoint) {
                finding.fix(fix);
            }
            report.unreachable.get_or_insert(failure);
            None
        }
    }
}

/// Recognizes a managed service, and names the page about it.
fn service(session: &mut Session, side: Side, reporter: &mut Reporter<'_>) -> Result<Service> {
    let service = Service::read(session, side)?;
    if service != Service::Own {
        let (name, page) = (service.name(), service.page());
        let message = format!("the server is {name}; docs/services/{page} has its parameters");
        reporter.ok("service", message);
    }
    Ok(service)
}

/// Reports a server that is derived from PostgreSQL, and functions that the server lacks. To a
/// server that is not PostgreSQL, there is no session to check.
fn genuine(
    session: &mut Session,
    side: Side,
    functions: &[&str],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let version = one(session, side, "SELECT pg_catalog.version()", "reading its version")?;
    if let Product::Changed(name) = Product::of(&version) {
        reporter.warn(
            "product",
            format!(
                "the server is {name}, derived from PostgreSQL ({version}): pgapace is \
                 not tested with it"
            ),
        );
    }
    let names = format!("{{{}}}", functions.join(","));
    let rows = session
        .query(
            "SELECT w.name FROM pg_catalog.unnest($1::pg_catalog.text[]) AS w (name) \
             WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_proc p WHERE p.proname = w.name \
               AND p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace)",
            &[Some(&names)],
        )
        .map_err(|e| failed(side, &e, "looking for functions"))?;
    let missing: Vec<_> = rows.iter().filter_map(|row| row.get(0).map(str::to_owned)).collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        reporter.block(
            "product",
            format!("the server lacks functions of PostgreSQL: {missing}. Is it PostgreSQL?"),
        );
    }
    Ok(())
}

/// Server settings by name: the raw value, and the text for output.
#[derive(Debug)]
struct Settings(HashMap<String, (String, String)>);

impl Settings {
    fn read(session: &mut Session, side: Side, names: &[&str]) -> Result<Self> {
        let array = format!("{{{}}}", names.join(","));
        let rows = session
            .query(
                "SELECT name, setting, pg_catalog.current_setting(name) \
                 FROM pg_catalog.pg_settings WHERE name = ANY ($1::pg_catalog.text[])",
                &[Some(&array)],
            )
            .map_err(|e| failed(side, &e, "reading its settings"))?;
        let entry = |row: wire::Row<'_>| Ok((field(&row, 0)?, (field(&row, 1)?, shown(&row))));
        Ok(Self(rows.iter().map(entry).collect::<Result<_>>()?))
    }

    fn number(&self, name: &str) -> Option<i64> {
        self.0.get(name)?.0.parse().ok()
    }

    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |(_, text)| text)
    }
}

fn shown(row: &wire::Row<'_>) -> String {
    row.get(2).unwrap_or_default().to_owned()
}

fn failed(side: Side, error: &wire::Error, doing: &str) -> Failure {
    match side {
        Side::Publisher => Failure::publisher(error, doing),
        Side::Subscriber | Side::Program => Failure::subscriber(error, doing),
    }
}

/// Returns the first value of the first row.
fn one(session: &mut Session, side: Side, sql: &str, doing: &str) -> Result<String> {
    let rows = session.query(sql, &[]).map_err(|e| failed(side, &e, doing))?;
    let row =
        rows.first().ok_or_else(|| Failure::internal("a query for one value returned no row"))?;
    field(&row, 0)
}

/// Tells a server from others, whatever connection strings call it.
fn server(session: &mut Session, side: Side) -> Result<String> {
    const SQL: &str = "SELECT pg_catalog.concat(pg_catalog.date_part('epoch', \
         pg_catalog.pg_postmaster_start_time()), ' ', pg_catalog.current_setting('port'))";
    one(session, side, SQL, "identifying the server")
}

/// The first of these, for a message.
fn listed(all: &[String]) -> String {
    const SHOWN: usize = 10;
    let more = if all.len() > SHOWN { "; …" } else { "" };
    format!("{}{more}", all[..all.len().min(SHOWN)].join("; "))
}

/// A connection string without secrets, for commands in the output.
fn shown_conninfo(info: &ConnInfo) -> String {
    let keys = ["host", "hostaddr", "port", "user", "dbname"];
    let parts: Vec<_> = keys
        .iter()
        .filter_map(|key| info.get(key).map(|value| (key, value)))
        .map(|(key, value)| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "._-/,:@".contains(c);
            if !value.is_empty() && value.chars().all(plain) {
                format!("{key}={value}")
            } else {
                format!("{key}='{}'", value.replace('\\', "\\\\").replace('\'', "\\'"))
            }
        })
        .collect();
    shell_quoted(&parts.join(" "))
}
