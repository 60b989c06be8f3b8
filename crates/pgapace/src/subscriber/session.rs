//! Sessions on the subscriber: what every one of them has set, and why.

use wire::{ConnInfo, ServerVersion, Session, Startup};

use crate::connecting;
use crate::error::{Class, Failure, Result};
use crate::pooler::{self, Asked, BACKEND_SQL};
use crate::product;
use crate::subscriber::catalogue::{boolean, field};

/// Oldest server that a subscription can be applied to.
pub(crate) const OLDEST_MAJOR: u32 = 14;

/// Settings of every session. Roles and databases can carry defaults
/// that would change what a change means, so nothing is left to them (reference 7.2).
const SETTINGS: &[(&str, &str)] = &[
    ("search_path", ""),
    // Row-level security becomes an error instead of silently hiding rows.
    ("row_security", "off"),
    ("default_transaction_read_only", "off"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_deferrable", "off"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    // How the publisher's text form is to be read (its session has the same ones).
    ("datestyle", "ISO"),
    ("intervalstyle", "postgres"),
    ("timezone", "UTC"),
    ("lc_monetary", "C"),
    ("xmloption", "content"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("array_nulls", "on"),
    // One plan per statement, by index: a table that was empty when the plan was made must not be
    // scanned for ever. Without a usable index the scan is still there.
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("jit", "off"),
];

/// From 17 on.
const NEWER_SETTINGS: &[(&str, &str)] = &[("transaction_timeout", "0")];

/// Only triggers and rules meant for replication fire; foreign keys are the publisher's. The one
/// setting that needs a privilege, so sessions that only look do without.
const REPLICA_ROLE: (&str, &str) = ("session_replication_role", "replica");

/// A backend that waits for a lock notices that we are gone. Not on every platform.
const WATCH: (&str, &str) = ("client_connection_check_interval", "2s");

/// How long the leader may wait for a lock. While it does, nothing is applied; and whoever holds the
/// lock may wait for an open transaction of ours, which only the leader can give up.
const LEADER_PATIENCE: &str = "3s";

/// What a session is for: part of its `application_name`, and its durability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// State, catalogue, ownership of the subscription.
    Control,
    /// Applies changes; durability comes from [`Purpose::Durability`].
    Apply,
    /// Applies changes, each commit durable by itself.
    DurableApply,
    /// Makes what was committed durable.
    Durability,
    /// Copies tables.
    Copy,
    /// Looks who waits for whom, and changes nothing.
    Monitor,
    /// Looks at state and tables, and changes nothing.
    Look,
    /// Reads rows that others will change.
    ReadAhead,
}

impl Purpose {
    fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Apply | Self::DurableApply => "apply",
            Self::Durability => "durability",
            Self::Copy => "copy",
            Self::Monitor => "monitor",
            Self::Look => "look",
            Self::ReadAhead => "read ahead",
        }
    }

    /// Whether it may change tables.
    fn writes(self) -> bool {
        !matches!(self, Self::Monitor | Self::Look | Self::ReadAhead)
    }

    /// What is known by then or not at all.
    fn statement_timeout(self) -> &'static str {
        match self {
            Self::Monitor | Self::ReadAhead => "1s",
            _ => "0",
        }
    }

    /// Who waits for a report does not wait for a copy that has locked its table; and what others
    /// rely on is given up, with the run, rather than waited for.
    fn lock_timeout(self) -> &'static str {
        match self {
            Self::Look => "5s",
            Self::Durability => LEADER_PATIENCE,
            _ => "0",
        }
    }

    fn synchronous_commit(self) -> &'static str {
        match self {
            // A copied table is lost together with its sync LSN; the next commit of the control session
            // makes both durable.
            Self::Apply | Self::Copy => "off",
            // State changes are few, and later steps rely on them.
            Self::DurableApply
            | Self::Control
            | Self::Durability
            | Self::Monitor
            | Self::Look
            | Self::ReadAhead => "on",
        }
    }
}

/// How to open sessions on the subscriber of one subscription.
#[derive(Debug, Clone)]
pub(crate) struct Subscriber {
    info: ConnInfo,
    subscription: String,
    encoding: &'static str,
}

impl Subscriber {
    /// `encoding`: `UTF8`, or `SQL_ASCII` for a subscriber that stores bytes as they come.
    pub(crate) fn new(info: ConnInfo, subscription: &str) -> Self {
        Self { info, subscription: subscription.to_owned(), encoding: "UTF8" }
    }

    pub(crate) fn encoding(&self) -> &'static str {
        self.encoding
    }

    /// Opens the first session, checks that the server can be a subscriber, and learns its encoding.
    pub(crate) fn connect_first(&mut self) -> Result<Session> {
        let (session, look) = self.open(Purpose::Control)?;
        if look.in_recovery {
            return Err(Failure::new(
                Class::Subscriber,
                "the subscriber is a standby: it cannot be written",
            )
            .hint("Connect to its primary, or list both hosts with target_session_attrs=primary.")
            // It may be about to be promoted, if it is one of several hosts.
            .transient(true));
        }
        if look.encoding == "SQL_ASCII" && self.encoding != "SQL_ASCII" {
            self.encoding = "SQL_ASCII";
            return self.connect(Purpose::Control);
        }
        Ok(session)
    }

    /// Opens a session with all settings made.
    pub(crate) fn connect(&self, purpose: Purpose) -> Result<Session> {
        Ok(self.open(purpose)?.0)
    }

    fn open(&self, purpose: Purpose) -> Result<(Session, Look)> {
        let startup = Startup {
            application_name: Some(format!("pgapace {} {}", self.subscription, purpose.name())),
            replication: false,
            settings: vec![("client_encoding".to_owned(), self.encoding.to_owned())],
        };
        let asked = Asked::now();
        let mut session = Session::connect(&self.info, &startup).map_err(|e| {
            let failure = Failure::subscriber(&e, "connecting");
            connecting::explain(pooler::Side::Subscriber, failure, &e, &self.info, false)
        })?;
        check_version(session.server_version())?;
        let settings = settings(purpose, session.server_version().major());
        let look = match prepare(&mut session, asked, &settings) {
            // One message, because it is one round trip; and once more where [`WATCH`] cannot be had.
            Err(Refusal::Statement(error)) if error.sqlstate() == Some("22023") => {
                prepare(&mut session, asked, &settings[..settings.len() - 1])
            }
            look => look,
        };
        let look = look.map_err(|refusal| match refusal {
            Refusal::Session(failure) => failure,
            Refusal::Statement(error) => {
                let failure = Failure::subscriber(&error, "preparing the session");
                if failure.sqlstate.as_deref() != Some("42501") {
                    return failure;
                }
                failure.hint(format!(
                    "The role must be allowed to act as a replica: GRANT SET ON PARAMETER \
                     session_replication_role TO {} (PostgreSQL 15 and later), else it must be a \
                     superuser.",
                    wire::quote_ident(self.info.user())
                ))
            }
        })?;
        Ok((session, look))
    }
}

/// From now on the control session gives up on a lock that it cannot have: the run fails, with all
/// that it holds, and the next one tries again. Its queries take no locks on tables of users; this
/// is for what nobody has thought of.
pub(crate) fn give_up_locks(control: &mut Session) -> Result<()> {
    control
        .simple(&format!("SET lock_timeout = '{LEADER_PATIENCE}'"))
        .map_err(|e| Failure::subscriber(&e, "preparing the session"))?;
    Ok(())
}

/// What is seen of the server by the statement that makes a session's settings.
struct Look {
    in_recovery: bool,
    encoding: String,
}

/// Why a session is of no use.
enum Refusal {
    Session(Failure),
    Statement(wire::Error),
}

/// The settings of a session, [`WATCH`] last.
fn settings(purpose: Purpose, major: u32) -> Vec<(&'static str, &'static str)> {
    let role = purpose.writes().then_some(&REPLICA_ROLE);
    let own = [
        ("synchronous_commit", purpose.synchronous_commit()),
        ("statement_timeout", purpose.statement_timeout()),
        ("lock_timeout", purpose.lock_timeout()),
    ];
    let newer = if major >= 17 { NEWER_SETTINGS } else { &[] };
    role.into_iter().chain(SETTINGS).chain(newer).chain(&own).chain([&WATCH]).copied().collect()
}

/// Makes settings, unless the session is a pooler's: all of them or none.
fn prepare(
    session: &mut Session,
    asked: Asked,
    settings: &[(&str, &str)],
) -> std::result::Result<Look, Refusal> {
    // Not joined to pg_settings, to leave out what the server does not have: reading that view costs
    // more than all the rest of a connection.
    let calls: Vec<String> = settings
        .iter()
        .map(|(name, value)| {
            let (name, value) = (wire::quote_literal(name), wire::quote_literal(value));
            format!("pg_catalog.set_config({name}, {value}, false)")
        })
        .collect();
    loop {
        let sql = format!(
            "SELECT pid, age, product, pg_catalog.pg_is_in_recovery(), \
               pg_catalog.current_setting('server_encoding'), \
               CASE WHEN {} THEN pg_catalog.num_nulls({}) = 0 ELSE false END \
             FROM ({BACKEND_SQL}) backend",
            asked.own_sql(session),
            calls.join(", ")
        );
        let rows = session.query(&sql, &[]).map_err(Refusal::Statement)?;
        let look = || {
            let row = rows.first().ok_or_else(|| Failure::internal("our own session is gone"))?;
            if let Some(reason) = asked.judge(session, &row)? {
                return Err(pooler::refused(pooler::Side::Subscriber, reason));
            }
            product::check(pooler::Side::Subscriber, &field::<String>(&row, 2)?)?;
            let look = Look { in_recovery: boolean(&row, 3)?, encoding: field(&row, 4)? };
            Ok(boolean(&row, 5)?.then_some(look))
        };
        // Where nothing is set although all is well, the query took long to arrive.
        if let Some(look) = look().map_err(Refusal::Session)? {
            return Ok(look);
        }
    }
}

fn check_version(version: ServerVersion) -> Result<()> {
    if version.major() < OLDEST_MAJOR {
        return Err(Failure::new(
            Class::Subscriber,
            format!(
                "the subscriber runs PostgreSQL {version}; {OLDEST_MAJOR} is the oldest supported"
            ),
        ));
    }
    Ok(())
}
