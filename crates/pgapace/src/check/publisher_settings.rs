//! Checks of the publisher's settings: logical decoding, room for a subscription, WAL of the slot.

use wire::Session;

use crate::check::limits::{Limit, LimitNeed, Raise};
use crate::check::report::{Reporter, Side};
use crate::check::service::Service;
use crate::check::{Settings, SubscriptionState, connections, failed, one, server};
use crate::config::Subscription as Config;
use crate::error::{Failure, Result};
use crate::publisher::watch;
use crate::subscriber::catalogue::{boolean, field};
use crate::subscriber::state::{Phase, name_array};

const SIDE: Side = Side::Publisher;

/// The settings that are read.
const NAMES: [&str; 12] = [
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "max_connections",
    "superuser_reserved_connections",
    "reserved_connections",
    "max_slot_wal_keep_size",
    "idle_replication_slot_timeout",
    "logical_decoding_work_mem",
    "wal_sender_timeout",
    STANDBY_SLOTS,
    "server_encoding",
];

/// Slots of standbys that must have WAL before it is sent to a slot with failover.
const STANDBY_SLOTS: &str = "synchronized_standby_slots";

pub(super) fn check(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    (role, service): (&str, Service),
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let settings = Settings::read(session, SIDE, &NAMES)?;
    let major = session.server_version().major();
    let level = settings.text("wal_level");
    // Since version 19, creating the first logical slot raises the level from replica to logical.
    if level == "logical" || (major >= 19 && level == "replica") {
        reporter.ok("wal_level", format!("wal_level is {level}"));
    } else {
        reporter
            .block("wal_level", format!("wal_level is {level}; it must be logical"))
            .fix(service.logical_decoding(SIDE));
    }
    let recovers =
        one(session, SIDE, "SELECT pg_catalog.pg_is_in_recovery()", "asking whether it recovers")?;
    let recovers = recovers == "t";
    room(session, (config, &settings), known, (service, recovers), reporter)?;
    if recovers {
        standby(major, reporter);
    } else {
        standby_slots(session, (config, &settings), reporter)?;
    }
    hosts(config, reporter);
    retention(&settings, reporter);
    walsender(&settings, config, role, reporter);
    waiting_commits(session, config, known, reporter)?;
    let encoding = settings.text("server_encoding");
    if encoding == "SQL_ASCII" {
        reporter.note(
            "encoding",
            "its encoding is SQL_ASCII: text is sent unchanged, and must be valid in a \
             subscriber's database with UTF8",
        );
    }
    Ok(())
}

/// Whether commits wait for the subscription although nothing answers them.
fn waiting_commits(
    session: &mut Session,
    config: &Config,
    known: &SubscriptionState,
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let streams = known.row.as_ref().is_some_and(|row| row.phase == Phase::Streaming);
    if !known.is_read || streams && known.owner.is_some() {
        return Ok(());
    }
    let name = watch::standby_name(session, &config.name);
    if !watch::needs(session, &name)? {
        return Ok(());
    }
    let why = match streams {
        true => "which no process runs: start pgapace run",
        false => {
            "which answers none before its first copy is complete: take it out until it streams"
        }
    };
    let topic = "synchronous_standby_names";
    reporter.warn(topic, format!("commits wait for {name}, which {topic} names, and {why}"));
    Ok(())
}

/// Whether a slot with failover gets nothing, because a standby for which the publisher waits is away. Standbys do not
/// wait.
fn standby_slots(
    session: &mut Session,
    (config, settings): (&Config, &Settings),
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let names = settings.text(STANDBY_SLOTS).split(',').map(|name| name.trim().trim_matches('"'));
    let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let sql = "SELECT n.name, s.active, \
                 coalesce((SELECT o.failover FROM pg_catalog.pg_replication_slots o \
                   WHERE o.slot_name = $2), $3::pg_catalog.bool) \
               FROM pg_catalog.unnest($1::pg_catalog.text[]) n (name) \
               LEFT JOIN pg_catalog.pg_replication_slots s \
                 ON s.slot_name = n.name::pg_catalog.name AND s.slot_type = 'physical'";
    let creates = (config.create_slot && config.failover).to_string();
    let arguments = [name_array(&names), config.slot.clone(), creates];
    let arguments: Vec<_> = arguments.iter().map(|text| Some(text.as_str())).collect();
    let rows = session
        .query(sql, &arguments)
        .map_err(|e| failed(SIDE, &e, "reading the slots of its standbys"))?;
    for row in rows.iter() {
        let (name, has_failover): (String, bool) = (field(&row, 0)?, boolean(&row, 2)?);
        let what = match row.get(1) {
            _ if !has_failover => continue,
            Some("t") => continue,
            Some(_) => "which its standby does not use: start the standby",
            None => "which does not exist: create it for the standby",
        };
        let message = format!(
            "{STANDBY_SLOTS} names {name}, {what}, or take it out. Until then, the publisher sends nothing to slots \
             with failover, as that of the subscription"
        );
        reporter.warn(STANDBY_SLOTS, message).on(name);
    }
    Ok(())
}

/// Whether slots, walsenders and connections are left for a subscription.
fn room(
    session: &mut Session,
    (config, settings): (&Config, &Settings),
    known: &SubscriptionState,
    (service, recovers): (Service, bool),
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let counts = session
        .query(
            "SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots), \
                    (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication)",
            &[],
        )
        .map_err(|e| failed(SIDE, &e, "counting its slots"))?;
    let row = counts
        .first()
        .ok_or_else(|| Failure::internal("the query for its slots returned no row"))?;
    let (slots, senders): (i64, i64) = (field(&row, 0)?, field(&row, 1)?);
    let connections = connections::limits(session, SIDE, settings, service)?;
    let new = known.is_read && known.row.as_ref().is_none_or(|row| row.phase != Phase::Streaming);
    let running = known.owner.is_some();
    let copies = config.copies_data() && !running;
    let limit = |name: &'static str, used| {
        let raise = Raise::Setting { service, side: SIDE, name, reserved: 0 };
        let most = settings.number(name).unwrap_or(0);
        Limit { topic: name, of: String::new(), used, most, raise }
    };
    // A copy with a snapshot of its own needs a temporary slot, and a walsender that holds it.
    let slots_needed = i64::from(new && config.create_slot);
    let senders_needed = match (running, new && config.copies_data()) {
        (true, _) => 0,
        // The slot's walsender holds the snapshot; a table that changes during the copy needs
        // another one.
        (false, true) => 2,
        // For a standby, the watch needs a walsender too: only that tells the timeline.
        (false, false) => 1 + i64::from(recovers),
    };
    let senders_later = i64::from(copies && !new);
    // Sessions that copy, one that reads the publications, and one that watches
    // `synchronous_standby_names`.
    let workers = i64::try_from(config.copy_workers).unwrap_or(i64::MAX);
    let looks = i64::from(copies) + i64::from(!running);
    let copying = workers * i64::from(copies);
    let mut needs = vec![
        (limit("max_replication_slots", slots), (slots_needed, i64::from(copies)), 0),
        (limit("max_wal_senders", senders), (senders_needed, senders_later), 1),
    ];
    needs.extend(connections.into_iter().map(|limit| {
        let walsenders = i64::from(limit.counts_walsenders());
        let (now, later) = (senders_needed * walsenders, senders_later * walsenders);
        (limit, (looks + now, copying + later), walsenders)
    }));
    // Beside other subscriptions, a second walsender of a first copy may have to wait.
    let waiting = i64::from(senders_needed > 1);
    let server = server(session, SIDE)?;
    for (limit, (needed, later), walsenders) in needs {
        room_of(&limit, (needed, later), reporter);
        let waiting = waiting * walsenders;
        reporter.report.limits.push(LimitNeed {
            side: SIDE,
            server: server.clone(),
            limit,
            needed: needed - waiting,
            later: later + waiting,
            workers: [0, 0],
        });
    }
    Ok(())
}

/// `later`: the need of tables that are copied later, or again, in addition.
fn room_of(limit: &Limit, (needed, later): (i64, i64), reporter: &mut Reporter<'_>) {
    let Limit { topic, used, most, .. } = limit;
    let what = format!("{topic}: {used} of {most} are in use");
    let fix = limit.raise_by(needed + later);
    if most - used < needed {
        reporter.block(topic, format!("{what}; {needed} more are needed")).fix(fix);
    } else if most - used < needed + later {
        let needed = needed + later;
        let message = format!("{what}; {needed} more are needed to copy tables");
        reporter.warn(topic, message).fix(fix);
    } else {
        reporter.ok(topic, what);
    }
}

fn standby(major: u32, reporter: &mut Reporter<'_>) {
    if major < 16 {
        reporter.block(
            "standby",
            "the server is a standby, which can decode only since PostgreSQL 16. Connect to \
             its primary, or list both hosts with target_session_attrs=primary",
        );
    } else {
        reporter.note(
            "standby",
            "the server is a standby: creating the slot waits for the primary's next \
             checkpoint or pg_log_standby_snapshot() on the primary",
        );
    }
}

/// Whether a run may reach a standby instead of the primary.
fn hosts(config: &Config, reporter: &mut Reporter<'_>) {
    let several = |key| config.publisher.get(key).is_some_and(|hosts| hosts.contains(','));
    let any = config.publisher.get("target_session_attrs").is_none_or(|value| value == "any");
    if any && (several("host") || several("hostaddr")) {
        reporter.warn(
            "target_session_attrs",
            "the connection string names several hosts, and a run may reach a standby, which does not \
             have the slot or cannot use it. Add target_session_attrs=primary",
        );
    }
}

/// For how long the server keeps the WAL of a slot.
fn retention(settings: &Settings, reporter: &mut Reporter<'_>) {
    let keep = settings.text("max_slot_wal_keep_size");
    if settings.number("max_slot_wal_keep_size").is_some_and(|value| value >= 0) {
        reporter.warn(
            "max_slot_wal_keep_size",
            format!(
                "max_slot_wal_keep_size is {keep}: a subscription that falls further behind loses \
                 its slot"
            ),
        );
    } else {
        reporter.note(
            "max_slot_wal_keep_size",
            "max_slot_wal_keep_size is not set: a stopped subscription retains WAL until the \
             publisher's disk is full",
        );
    }
    if settings.number("idle_replication_slot_timeout").is_some_and(|value| value > 0) {
        let value = settings.text("idle_replication_slot_timeout");
        reporter.warn(
            "idle_replication_slot_timeout",
            format!(
                "idle_replication_slot_timeout is {value}: a subscription that is stopped for \
                 longer loses its slot. A process that copies, or that waits for the subscriber, uses the \
                 slot now and then. Set the limit to 0, or above the longest time for which pgapace may be \
                 stopped"
            ),
        );
    }
}

/// Settings of the session that decodes.
fn walsender(settings: &Settings, config: &Config, role: &str, reporter: &mut Reporter<'_>) {
    if settings.number("logical_decoding_work_mem").is_some_and(|kilobytes| kilobytes < 64 << 10) {
        let value = settings.text("logical_decoding_work_mem");
        reporter
            .note(
                "logical_decoding_work_mem",
                format!(
                    "logical_decoding_work_mem is {value}: large transactions are streamed in \
                     smaller pieces than with the default of 64MB"
                ),
            )
            .sql(format!("ALTER ROLE {role} SET logical_decoding_work_mem = '64MB';"));
    }
    match settings.number("wal_sender_timeout") {
        Some(0) => {
            reporter
                .warn(
                    "wal_sender_timeout",
                    "wal_sender_timeout is 0: a lost connection may hold the slot for \
                     ever",
                )
                .sql(format!("ALTER ROLE {role} SET wal_sender_timeout = '60s';"));
        }
        Some(timeout)
            if u128::try_from(timeout).is_ok_and(|t| t > config.busy_timeout.as_millis()) =>
        {
            let value = settings.text("wal_sender_timeout");
            reporter.note(
                "wal_sender_timeout",
                format!(
                    "wal_sender_timeout is {value}, longer than --busy-timeout: a lost connection \
                     may hold the slot longer than a run waits for it"
                ),
            );
        }
        _ => {}
    }
}
