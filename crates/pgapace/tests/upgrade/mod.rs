//! A run continues from the state that an earlier version wrote on the subscriber.

use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions, wait_for_event};
use crate::tablesync::requests::{CHANGE, COPY, wait_for_part, wide};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

const VERSION_0_1: &str = include_str!("version_0_1.sql");

/// Gives renamed columns the names that they had in version 0.1.
const RENAMED_BACK: &str = "
ALTER TABLE saved_relation RENAME sync_lsn TO gate_lsn;
ALTER TABLE saved_relation RENAME snapshot_lsn TO sync_lsn;
ALTER TABLE saved_relation RENAME publisher_bytes TO source_bytes;
ALTER TABLE saved_stat_subscription RENAME wait_subscriber_lock TO wait_target_lock;
ALTER TABLE saved_stat_subscription RENAME wait_publisher TO wait_source;
ALTER TABLE saved_stat_subscription RENAME tables_serialized TO demotions";

/// Replaces the state by the one that version 0.1 would have written: its schema, with its columns
/// of every row.
fn as_of_0_1(case: &Case) {
    let tables = ["subscription", "relation", "progress", "stat_subscription", "prepared"];
    let number = case.subscriber.value("SELECT nextval('pgapace.catch_up')");
    for table in tables {
        case.subscriber.sql(&format!("CREATE TABLE saved_{table} AS TABLE pgapace.{table}"));
    }
    case.subscriber.sql(RENAMED_BACK);
    case.subscriber.sql("DROP SCHEMA pgapace CASCADE");
    case.subscriber.sql(VERSION_0_1);
    for table in tables {
        let columns = case.subscriber.value(&format!(
            "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute \
             WHERE attrelid = 'pgapace.{table}'::regclass AND attnum > 0 AND NOT attisdropped"
        ));
        case.subscriber.sql(&format!(
            "INSERT INTO pgapace.{table} ({columns}) SELECT {columns} FROM saved_{table}; \
             DROP TABLE saved_{table}"
        ));
    }
    case.subscriber.sql(&format!(
        "SELECT setval('pgapace.catch_up', {number}); \
         SELECT setval(pg_get_serial_sequence('pgapace.subscription', 'id'), \
           (SELECT max(id) FROM pgapace.subscription))"
    ));
}

#[test]
fn upgrade_during_the_first_copy() {
    on_versions(&VERSIONS, |mut case| {
        wide(&mut case);
        case.both("CREATE TABLE small (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO small SELECT i, 'x' FROM generate_series(1, 10) i");
        case.publish("FOR ALL TABLES");
        let copying = holder(&case, &format!("SELECT pg_advisory_lock({COPY})"));
        let mut process = case.tool.start(case.log_file("first"));
        let begun = "SELECT to_regclass('pgapace.relation') IS NOT NULL";
        wait_for(&case, &mut process, "the state", begun);
        wait_for_part(&case, &mut process);
        must(process.kill9());
        drop(copying);
        as_of_0_1(&case);
        case.publisher.sql("UPDATE wide SET v = 'new' WHERE id % 1000 = 0; DELETE FROM small");
        case.run_until_current();
        case.expect_equal(&["wide", "small"]);
    });
}

#[test]
fn upgrade_while_a_table_catches_up() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate("CREATE TABLE other (id int PRIMARY KEY)");
        wide(&mut case);
        let changing = holder(&case, &format!("SELECT pg_advisory_lock({CHANGE})"));
        let mut process = case.start();
        let behind = "SELECT count(*) = 1 FROM pgapace.relation WHERE table_name = 'wide' \
                      AND state IN ('catchup', 'ready')";
        let update = "UPDATE wide SET v = v || '.' WHERE id < 4";
        case.publisher.sql(update);
        wait_for(&case, &mut process, "the copy", behind);
        case.publisher.sql(update);
        wait_for_a_waiter(&case, &mut process, "advisory");
        must(process.kill9());
        as_of_0_1(&case);
        drop(changing);
        case.publisher.sql("INSERT INTO other VALUES (1)");
        case.publisher.sql(update);
        case.run_until_current();
        case.expect_equal(&["other", "wide"]);
        // The publications are recorded from now on; earlier publications are accepted as they are.
        case.publisher.sql("INSERT INTO other VALUES (2)");
        case.run_until_current();
        case.expect_equal(&["other", "wide"]);
    });
}

/// Only the owner of the tables upgrades them. `check` says so before a run fails, and both say how.
#[test]
fn a_role_that_cannot_upgrade_the_state_is_told_whose_member_it_must_be() {
    on_versions(&[(18, 18)], |mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        as_of_0_1(&case);
        let role = format!("applier_{}", case.tool.name);
        case.subscriber.change_setting_privileges(&format!(
            "CREATE ROLE {role} LOGIN; GRANT ALL ON t TO {role}; \
             GRANT SET ON PARAMETER session_replication_role TO {role}; \
             GRANT USAGE, CREATE ON SCHEMA pgapace TO {role}"
        ));
        case.tool.subscriber = format!("{} user={role}", case.tool.subscriber);
        // What it says is executed, until nothing is missing.
        for missing in ["ALL SEQUENCES IN SCHEMA pgapace", "GRANT postgres"] {
            let checked = case.tool.finish("check", &[]);
            checked.expect(6, &[]);
            let said = "SQL on the subscriber: ";
            let mut statements =
                checked.stdout.lines().filter_map(|line| line.trim().strip_prefix(said));
            let grant = statements.find(|sql| sql.contains(missing));
            let grant = grant.unwrap_or_else(|| panic!("{missing}: {}", checked.stdout));
            if missing.ends_with("postgres") {
                case.run().expect(5, &["upgrading schema pgapace", grant]);
            }
            case.subscriber.sql(grant);
        }
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run_until_current();
        case.expect_equal(&["t"]);
        case.subscriber
            .change_setting_privileges(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    });
}

#[test]
fn verbs_that_only_read_name_the_version_of_an_older_state() {
    on_versions(&[(15, 15)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        as_of_0_1(&case);
        let version = || case.subscriber.value("SELECT version FROM pgapace.schema_version");
        let before = version();
        let said = format!("schema pgapace of the subscriber is of version {before}; ");
        let file = case.log_file("report").display().to_string();
        for (verb, args) in
            [("status", &["--json"]), ("top", &["--once"]), ("report", &[file.as_str()])]
        {
            case.tool.finish(verb, args).expect(5, &[&said, "pgapace run of this program"]);
        }
        case.subscriber.sql("INSERT INTO t VALUES (1)");
        let checked = case.tool.finish("check", &[]);
        let said = format!("schema pgapace is of version {before}; pgapace run upgrades it");
        assert!(checked.expect(0, &[]).stdout.contains(&said), "{}", checked.stdout);
        // The slot and the rows are those of the subscription.
        for advice in ["pg_drop_replication_slot", "TRUNCATE"] {
            assert!(!checked.stdout.contains(advice), "{}", checked.stdout);
        }
        assert_eq!(version(), before);
    });
}

/// A session has read the state for hours, as pg_dump does. The upgrade is tried again and again, and others can
/// read the state meanwhile.
#[test]
fn an_upgrade_does_not_stand_in_the_way_of_readers() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        as_of_0_1(&case);
        let reading = holder(&case, "BEGIN; SELECT FROM pgapace.subscription");
        let mut process = case.tool.start(case.log_file("upgrade"));
        must(wait_for_event(&mut process, "schema_upgrade_waits", PATIENCE));
        wait_for_a_waiter(&case, &mut process, "relation");
        case.subscriber.sql("SET statement_timeout = '30s'; SELECT FROM pgapace.subscription");
        drop(reading);
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t"]);
        assert!(process.log().contains("upgrading schema pgapace"), "{}", process.log());
        case.stop(process);
    });
}
