//! The checks that look at both servers, or that need to know what both have.

use wire::Session;

use crate::check::report::{Report, Reporter, Side};
use crate::check::{
    Settings, SubscriptionState, definitions, disk, indexes, listed, opposite, partitions,
    same_rows, schema_tools, tables, uncarried,
};
use crate::config::Subscription as Config;
use crate::error::Result;
use crate::publisher::publication::PublishedTable;
use crate::publisher::slot;
use crate::same_database;
use crate::sequences::{self, Chosen, SetOptions};
use crate::subscriber::session::refuse_unlike_bytes;
use crate::subscriber::state::exposed;
use crate::switchover::lost::ReadOnly;

/// Checks both servers. It ends at once if both are the same database.
pub(super) fn check(
    (publisher_session, subscriber_session): (&mut Session, &mut Session),
    config: &Config,
    known: &SubscriptionState,
    published: &[PublishedTable],
    report: &mut Report,
) {
    let mut reporter = Reporter { report, side: Side::Subscriber };
    let differ = reporter.group("database", |reporter| {
        same_database::refuse(publisher_session, subscriber_session)?;
        reporter.ok("database", "publisher and subscriber are different databases");
        Ok(())
    });
    if differ.is_none() {
        // Other findings would propose changes of the publisher's tables.
        return;
    }
    reporter.group("encoding", |_| refuse_unlike_bytes(publisher_session, subscriber_session));
    reporter.group("own_schema", |reporter| {
        let found = exposed::find(subscriber_session, publisher_session)?;
        if let Some(found) = found {
            let message = format!("{}: {}", found.message(), found.hint());
            reporter.warn("own_schema", message);
        }
        Ok(())
    });
    reporter.group("read_only", |reporter| {
        let Some(row) = &known.row else { return Ok(()) };
        if let Some(found) = ReadOnly::find(subscriber_session, publisher_session, row)? {
            reporter.warn("read_only", found.line());
        }
        Ok(())
    });
    reporter.group("two_phase", |reporter| {
        two_phase(publisher_session, subscriber_session, (config, known), reporter)
    });
    reporter.group("opposite", |reporter| {
        opposite::check(publisher_session, subscriber_session, config, published, reporter)
    });
    reporter.group("shared", |reporter| {
        let sessions = (&mut *publisher_session, &mut *subscriber_session);
        let received = same_rows::Received::read(sessions, config, known, published)?;
        reporter.report.received = Some(received);
        Ok(())
    });
    let sessions = (&mut *publisher_session, &mut *subscriber_session);
    tables::check(sessions, config, known, published, &mut reporter);
    reporter.group("partitions", |reporter| {
        let sessions = (&mut *publisher_session, &mut *subscriber_session);
        partitions::check(sessions, config, published, reporter)
    });
    reporter.group("indexes", |reporter| {
        indexes::check(publisher_session, subscriber_session, published, reporter)
    });
    reporter.group("materialized_views", |reporter| {
        let sessions = (&mut *publisher_session, &mut *subscriber_session);
        let created = known.creates_tables(config);
        uncarried::materialized_views(sessions, published, created, reporter)
    });
    reporter.group("columns", |reporter| {
        let sessions = (&mut *publisher_session, &mut *subscriber_session);
        uncarried::generated_columns(sessions, published, reporter)
    });
    reporter.group("types", |reporter| {
        definitions::check(publisher_session, subscriber_session, published, reporter)
    });
    if known.creates_tables(config) {
        reporter.side = Side::Program;
        schema_tools::check(publisher_session.server_version().major(), &mut reporter);
        reporter.side = Side::Subscriber;
    }
    if !config.copy_schema {
        reporter.group("sequences", |reporter| {
            sequences(publisher_session, subscriber_session, config, published, reporter)
        });
    }
    reporter.side = Side::Publisher;
    reporter.group("large_objects", |reporter| {
        uncarried::large_objects(publisher_session, config, reporter)
    });
    reporter.group("disk", |reporter| {
        disk::idle_slots(publisher_session, config, reporter)?;
        disk::copied(publisher_session, config, known, published, reporter)
    });
}

/// Reports sequences that the copy and `pgapace sequences` cannot set.
fn sequences(
    publisher_session: &mut Session,
    subscriber_session: &mut Session,
    config: &Config,
    published: &[PublishedTable],
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    let found = sequences::read(publisher_session, &config.publications, published, Chosen::All)?;
    let options = SetOptions { dry_run: true, ..SetOptions::default() };
    let report = sequences::set(subscriber_session, &found, &options)?;
    let failed = report.sequences.iter().filter(|one| one.failed());
    let reasons: Vec<_> = failed.filter_map(|one| one.reason()).collect();
    match reasons.len() {
        0 => reporter.ok("sequences", format!("{} sequences can be set", found.sequences.len())),
        number => {
            let message = format!("{number} sequences cannot be set: {}", listed(&reasons));
            reporter.warn("sequences", message);
        }
    }
    uncarried::sequences_outside(publisher_session, &found.sequences, reporter)
}

/// Reports what a run with --two-phase=false does with a slot that has two_phase from an earlier run.
fn two_phase_off(name: &str, publisher_major: u32, reporter: &mut Reporter<'_>) {
    let message = if publisher_major < 18 {
        format!("slot {name} keeps two_phase: PostgreSQL before 18 cannot switch it off")
    } else {
        format!(
            "slot {name} has two_phase, which a run with --two-phase=false switches off. Transactions that \
             are prepared on the subscriber are rolled back, and sent again at COMMIT PREPARED"
        )
    };
    reporter.note("two_phase", message).on(name);
}

/// Reports whether the subscriber can prepare the publisher's prepared transactions.
fn two_phase(
    publisher_session: &mut Session,
    subscriber_session: &mut Session,
    (config, known): (&Config, &SubscriptionState),
    reporter: &mut Reporter<'_>,
) -> Result<()> {
    const NAME: &str = "max_prepared_transactions";
    let has_it = slot::find(publisher_session, &config.slot)?.is_some_and(|slot| slot.two_phase);
    let had_it = known.row.as_ref().and_then(|row| row.two_phase) == Some(true);
    if !config.two_phase.unwrap_or(has_it || had_it) {
        if has_it {
            two_phase_off(&config.slot, publisher_session.server_version().major(), reporter);
        }
        return Ok(());
    }
    let most = |session: &mut Session, side| -> Result<i64> {
        Ok(Settings::read(session, side, &[NAME])?.number(NAME).unwrap_or(0))
    };
    let (needed, available) =
        (most(publisher_session, Side::Publisher)?, most(subscriber_session, Side::Subscriber)?);
    let fix = known.service.set(Side::Subscriber, NAME, needed);
    if available == 0 && needed > 0 {
        reporter
            .warn(
                NAME,
                format!(
                    "{NAME} is 0: a transaction that stays prepared keeps the slot from advancing, \
                     and a publisher whose commits wait for this subscription is refused"
                ),
            )
            .fix(fix);
    } else if available < needed {
        let what = format!("{NAME} is {available}, and {needed} on the publisher");
        reporter.warn(NAME, what).fix(fix);
    } else {
        reporter.ok(NAME, format!("{NAME} is {available}, and {needed} on the publisher"));
    }
    Ok(())
}
