//! Sessions on the target: what every one of them has set, and why.

use wire::{ConnInfo, ServerVersion, Session, Startup};

use crate::error::{Class, Failure, Result};

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

    /// Who waits for a report does not wait for a copy that has locked its table.
    fn lock_timeout(self) -> &'static str {
        match self {
            Self::Look => "5s",
            _ => "0",
        }
    }

    fn synchronous_commit(self) -> &'static str {
        match self {
            // A copied table is lost together with its gate; the next commit of the control session
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

/// How to open sessions on the target of one subscription.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    info: ConnInfo,
    subscription: String,
    encoding: &'static str,
}

impl Target {
    /// `encoding`: `UTF8`, or `SQL_ASCII` for a target that stores bytes as they come.
    pub(crate) fn new(info: ConnInfo, subscription: &str) -> Self {
        Self { info, subscription: subscription.to_owned(), encoding: "UTF8" }
    }

    pub(crate) fn encoding(&self) -> &'static str {
        self.encoding
    }

    /// Opens the first session, checks that the server can be a target, and learns its encoding.
    pub(crate) fn connect_first(&mut self) -> Result<Session> {
        let mut session = self.connect(Purpose::Control)?;
        let rows = session
            .query(
                "SELECT pg_catalog.pg_is_in_recovery(), \
                 pg_catalog.current_setting('server_encoding')",
                &[],
            )
            .map_err(|e| Failure::target(&e, "looking at the server"))?;
        if rows.first().is_some_and(|row| row.get(0) == Some("t")) {
            return Err(Failure::new(
                Class::Target,
                "the target is a standby: it cannot be written",
            )
            .hint("Connect to its primary, or list both hosts with target_session_attrs=primary.")
            // It may be about to be promoted, if it is one of several hosts.
            .transient(true));
        }
        if rows.first().is_some_and(|row| row.get(1) == Some("SQL_ASCII"))
            && self.encoding != "SQL_ASCII"
        {
            self.encoding = "SQL_ASCII";
            return self.connect(Purpose::Control);
        }
        Ok(session)
    }

    /// Opens a session with all settings made.
    pub(crate) fn connect(&self, purpose: Purpose) -> Result<Session> {
        let startup = Startup {
            application_name: Some(format!("pgapace {} {}", self.subscription, purpose.name())),
            replication: false,
            settings: vec![("client_encoding".to_owned(), self.encoding.to_owned())],
        };
        let mut session = Session::connect(&self.info, &startup)
            .map_err(|e| Failure::target(&e, "connecting"))?;
        let version = session.server_version();
        check_version(version)?;
        let role = purpose.writes().then_some(&REPLICA_ROLE);
        let own = [
            ("synchronous_commit", purpose.synchronous_commit()),
            ("statement_timeout", purpose.statement_timeout()),
            ("lock_timeout", purpose.lock_timeout()),
        ];
        let newer = if version.major() >= 17 { NEWER_SETTINGS } else { &[] };
        // Not joined to pg_settings, to leave out what the server does not have: reading that view
        // costs more than all the rest of a connection.
        let calls: Vec<String> = role
            .into_iter()
            .chain(SETTINGS)
            .chain(newer)
            .chain(&own)
            .chain([&WATCH])
            .map(|(name, value)| {
                let (name, value) = (wire::quote_literal(name), wire::quote_literal(value));
                format!("pg_catalog.set_config({name}, {value}, false)")
            })
            .collect();
        let set = |session: &mut Session, calls: &[String]| {
            session.query(&format!("SELECT {}", calls.join(", ")), &[])
        };
        let result = match set(&mut session, &calls) {
            // One message, because it is one round trip; and once more where it cannot be had.
            Err(error) if error.sqlstate() == Some("22023") => {
                set(&mut session, &calls[..calls.len() - 1])
            }
            result => result,
        };
        result.map_err(|e| {
            let failure = Failure::target(&e, "preparing the session");
            if failure.sqlstate.as_deref() == Some("42501") {
                failure.hint(
                    "The role must be allowed to act as a replica: \
                     GRANT SET ON PARAMETER session_replication_role TO <role> (PostgreSQL 15 and \
                     later), else it must be a superuser.",
                )
            } else {
                failure
            }
        })?;
        Ok(session)
    }
}

fn check_version(version: ServerVersion) -> Result<()> {
    if version.major() < OLDEST_MAJOR {
        return Err(Failure::new(
            Class::Target,
            format!("the target runs PostgreSQL {version}; {OLDEST_MAJOR} is the oldest supported"),
        ));
    }
    Ok(())
}
