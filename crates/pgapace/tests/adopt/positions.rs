//! Where pgapace starts: the origin of the native subscription, its slot, and its tables.

use testbed::{Pair, Result, wait_until};

use super::{NativeSubscription, subscribe};
use crate::support::{
    DB, NAME, PATIENCE, Site, VERSIONS, expect_exit, lsn, on_versions, one_or_all, pgapace,
};

/// The origin is ahead: the publisher has lost the newest position of its slot in a crash. From the
/// slot's position, rows without a key would be inserted twice.
#[test]
fn an_origin_ahead_of_the_slot_counts() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        // No checkpoint saves the slot meanwhile.
        let pair = Pair::start_with(
            publisher,
            subscriber,
            |builder| builder.setting("checkpoint_timeout", "1h").setting("max_wal_size", "4GB"),
            |builder| builder,
        )?;
        let mut site = Site::of(pair)?;
        site.publish_tables("CREATE TABLE log (v int)")?;
        subscribe(&site, NAME)?;
        site.publisher.sql(DB, "CHECKPOINT")?;
        for value in 0..50 {
            site.publisher.sql(DB, &format!("INSERT INTO log VALUES ({value})"))?;
        }
        let rows = "SELECT count(*) FROM log";
        wait_until(PATIENCE, "the rows", || Ok(site.subscriber.query_one_text(DB, rows)? == "50"))?;
        // Without it, the native subscription would mend the slot after the crash.
        site.subscriber.sql(DB, &format!("ALTER SUBSCRIPTION {NAME} DISABLE"))?;
        site.publisher.kill9()?;
        site.publisher.start()?;
        let origin = format!(
            "SELECT pg_replication_origin_progress('pg_' || oid, true) \
             FROM pg_subscription WHERE subname = '{NAME}'"
        );
        let origin = site.subscriber.query_one_text(DB, &origin)?;
        assert!(lsn(&origin)? > site.confirmed()?, "{origin}");

        let verb = |verb: &str| {
            pgapace(verb)
                .args(["--publisher", &site.publisher.conninfo(DB)])
                .args(["--subscriber", &site.subscriber.conninfo(DB)])
                .args(["--publication", "pub", "--name", NAME])
        };
        let current = ["--until", "current"];
        let by_hand = verb("run").args(["--create-slot=false", "--copy-data=false"]).args(current);
        expect_exit(&mut site.spawn(&by_hand)?, 7, &["pgapace adopt --subscription \"sub\""])?;
        expect_exit(&mut site.spawn(&verb("run").args(current))?, 7, &["pgapace adopt"])?;
        let adopt = verb("adopt").args(["--subscription", NAME]);
        expect_exit(&mut site.spawn(&adopt)?, 0, &[&format!("start: {origin}")])?;
        site.publisher.sql(DB, "INSERT INTO log VALUES (50)")?;
        expect_exit(&mut site.spawn(&verb("run").args(current))?, 0, &[])?;
        site.expect_equal(&["log".into()])?;
        site.subscriber.sql(DB, &format!("DROP SUBSCRIPTION {NAME}"))?;
    }
    Ok(())
}

/// A subscription that has only copied has no position of its own.
#[test]
fn a_subscription_that_has_applied_nothing_starts_at_its_copies() {
    on_versions(&VERSIONS, |case| {
        case.both(super::TABLES);
        case.publisher
            .sql("INSERT INTO log SELECT generate_series(1, 100); INSERT INTO t VALUES (1, 1)");
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let adopted = native.adopt(&[]);
        adopted.expect(0, &[]);
        assert!(adopted.stdout.contains("applied by the native subscription: nothing"));
        let gates = "SELECT count(*) FROM pgapace.relation r JOIN pg_subscription_rel n \
                     ON n.srrelid = to_regclass(r.schema_name || '.' || r.table_name) \
                     WHERE r.sync_lsn = n.srsublsn";
        assert_eq!(case.subscriber.value(gates), "2");
        case.publisher.sql("INSERT INTO log VALUES (101); UPDATE t SET v = 2");
        case.run_until_current();
        case.expect_equal(&["t", "log"]);
    });
}

/// A table that the native subscription does not know yet is copied.
#[test]
fn a_table_that_was_published_later_is_copied() {
    on_versions(&[(15, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        case.both("CREATE TABLE added (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO added VALUES (1); INSERT INTO t VALUES (1)");
        let adopted = native.adopt(&[]);
        adopted.expect(0, &[]);
        assert!(
            adopted.stdout.contains("pgapace run copies them: public.added"),
            "{}",
            adopted.stdout
        );
        case.publisher.sql("INSERT INTO added VALUES (2)");
        case.run_until_current();
        case.expect_equal(&["t", "added"]);
    });
}
