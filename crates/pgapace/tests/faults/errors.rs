//! The context and the hint of error messages.

use testbed::{Pair, Result};

use super::privileges::{SHOP, arguments, part};
use crate::support::{Case, DB, Finished, Site, expect_exit, must, on_versions, pgapace};

const MAJORS: [u16; 2] = [15, 18];
const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// The last change of table t fails, and the message names it.
fn stops(case: &Case, code: i32, sql: &str, named: &[&str]) -> Finished {
    case.publisher.sql(sql);
    let lsn = case.publisher.value("SELECT pg_current_wal_lsn()");
    let failed = case.run();
    failed.expect(code, &["CONTEXT:  transaction ", "with commit LSN ", " on public.t", "HINT:"]);
    failed.expect(code, named);
    assert!(!failed.log.contains("conflicting row"), "{}", failed.log);
    let status = case.tool.finish("status", &[]);
    assert!(status.stdout.contains("with commit LSN"), "{}", status.stdout);
    // The progress has not passed the failed transaction.
    let sql = format!("SELECT max(lsn) < '{lsn}' FROM pgapace.progress");
    assert_eq!(case.subscriber.value(&sql), "t");
    failed
}

#[test]
fn a_missing_column_is_named_with_the_alter_table() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TYPE mood AS ENUM ('good')");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (m mood)");
        case.publisher.sql("ALTER TABLE t ADD w numeric(7,2)[], ADD m mood");
        let hint = "ALTER TABLE \"public\".\"t\" ADD COLUMN \"w\" numeric(7,2)[], ADD COLUMN \"m\" \
                    public.mood;";
        stops(
            &case,
            6,
            "INSERT INTO t VALUES (1, 'x', '{2}')",
            &["lacks published columns: w", hint],
        );
        stops(&case, 6, "UPDATE t SET v = 'y'", &["lacks published columns: w", "INSERT on"]);
        case.subscriber.sql("ALTER TABLE t ADD w numeric(7,2)[], ADD m mood");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn values_that_do_not_fit_are_named_with_the_alter_table() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v text, n numeric)");
        case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v varchar(3), n int)");
        case.publish("FOR TABLE t");
        case.run_until_current();
        let insert = "INSERT INTO t VALUES (1, 'abcd', 1)";
        let alter = "ALTER TABLE \"public\".\"t\" ALTER COLUMN \"v\" TYPE text, ALTER COLUMN \"n\" TYPE \
                     numeric;";
        stops(&case, 9, insert, &["22001", alter, "pgapace skip --lsn"]);
        case.subscriber.sql("ALTER TABLE t ALTER v TYPE int USING v::int");
        stops(&case, 9, "INSERT INTO t VALUES (2, 'x', 1)", &["22P02", alter]);
        case.subscriber.sql("ALTER TABLE t ALTER v TYPE text");
        let alter = "ALTER TABLE \"public\".\"t\" ALTER COLUMN \"n\" TYPE numeric;";
        stops(&case, 9, "INSERT INTO t VALUES (3, 'x', 5000000000)", &["22003", alter]);
        case.subscriber.sql("ALTER TABLE t ALTER n TYPE numeric");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_label_that_the_subscriber_lacks_is_named_with_the_alter_type() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TYPE mood AS ENUM ('good', 'it''s')");
        case.subscriber.sql("CREATE TYPE mood AS ENUM ('good')");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, m mood)");
        let alter = "ALTER TYPE public.mood ADD VALUE 'it''s';";
        let rename = "ALTER TYPE public.mood RENAME VALUE … TO 'it''s';";
        stops(&case, 9, "INSERT INTO t VALUES (1, 'it''s')", &["22P02", rename, alter]);
        case.subscriber.sql(alter);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_missing_table_is_named_with_the_command_that_creates_it() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE SCHEMA \"My S\"; CREATE TABLE \"My S\".t (id int PRIMARY KEY)");
        case.subscriber.sql("DROP TABLE \"My S\".t");
        case.publisher.sql("INSERT INTO \"My S\".t VALUES (1)");
        let command = "--table='\"My S\".\"t\"' PUBLISHER | psql SUBSCRIBER";
        case.run().expect(6, &["no table My S.t", "pg_dump --schema-only", command]);
    });
}

#[test]
fn violated_constraints_of_domains_are_named_with_the_alter_domain() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE DOMAIN short AS text");
        case.subscriber
            .sql("CREATE DOMAIN short AS text NOT NULL CONSTRAINT three CHECK (length(VALUE) < 4)");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v short)");
        let alter = "ALTER DOMAIN \"public\".\"short\" DROP NOT NULL;";
        stops(&case, 9, "INSERT INTO t VALUES (1, NULL)", &["23502", alter]);
        case.subscriber.sql(alter);
        let alter = "ALTER DOMAIN \"public\".\"short\" DROP CONSTRAINT \"three\";";
        stops(&case, 9, "INSERT INTO t VALUES (2, 'abcd')", &["23514", alter]);
        case.subscriber.sql(alter);
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_truncate_that_the_subscriber_refuses_is_named_with_its_foreign_key() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.subscriber.sql("CREATE TABLE own (t int CONSTRAINT to_t REFERENCES t)");
        let hint = "HINT:  On the subscriber, a table that is not truncated references it. Drop that foreign key";
        let failed = stops(&case, 9, "TRUNCATE t", &["0A000", "\"own\" references \"t\"", hint]);
        assert!(!failed.log.contains("CASCADE"), "{}", failed.log);
        case.subscriber.sql("ALTER TABLE own DROP CONSTRAINT to_t");
        case.run_until_current();
    });
}

#[test]
fn violated_constraints_are_named_with_the_alter_table() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql(
            "CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL CONSTRAINT short \
               CHECK (length(v) < 4))",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        let insert = "INSERT INTO t VALUES (1, NULL)";
        stops(
            &case,
            9,
            insert,
            &["23502", "ALTER TABLE \"public\".\"t\" ALTER COLUMN \"v\" DROP NOT NULL"],
        );
        case.subscriber.sql("ALTER TABLE t ALTER v DROP NOT NULL");
        let insert = "INSERT INTO t VALUES (2, 'abcd')";
        stops(
            &case,
            9,
            insert,
            &["23514", "ALTER TABLE \"public\".\"t\" DROP CONSTRAINT \"short\""],
        );
        case.subscriber.sql("ALTER TABLE t DROP CONSTRAINT short");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn missing_roles_and_databases_are_named() {
    on_versions(&VERSIONS, |case| {
        let nobody = |conninfo: &str| conninfo.replace("user=postgres", "user=nobody_at_all");
        let nowhere = |conninfo: &str| conninfo.replace("dbname='case", "dbname='no_case");
        let fails = |publisher: String, subscriber: String, code, named: &[&str]| {
            let mut tool = case.tool.clone();
            (tool.publisher, tool.subscriber) = (publisher, subscriber);
            let failed = tool.run();
            failed.expect(code, named);
            assert!(!failed.log.contains("pg_hba"), "{}", failed.log);
        };
        let (publisher, subscriber) = (&case.tool.publisher, &case.tool.subscriber);
        let create = "CREATE ROLE \"nobody_at_all\" LOGIN REPLICATION;";
        fails(nobody(publisher), subscriber.clone(), 4, &["HINT:", create]);
        let create = "CREATE ROLE \"nobody_at_all\" LOGIN;";
        fails(publisher.clone(), nobody(subscriber), 5, &["HINT:", create]);
        fails(nowhere(publisher), subscriber.clone(), 4, &["HINT:", "pg_database"]);
        fails(publisher.clone(), nowhere(subscriber), 5, &["HINT:", "pg_database"]);
    });
}

#[test]
fn roles_without_permission_are_named_with_the_grant() -> Result<()> {
    for major in MAJORS {
        let site = Site::new(major, major)?;
        for cluster in [&site.publisher, &site.subscriber] {
            let hba = cluster.data_dir().join("pg_hba.conf");
            let rules = std::fs::read_to_string(&hba)?;
            std::fs::write(&hba, format!("local all turned_away reject\n{rules}"))?;
            cluster.sql(DB, "CREATE ROLE turned_away LOGIN REPLICATION; CREATE ROLE group_only")?;
            cluster.sql(DB, "CREATE ROLE plain LOGIN; CREATE ROLE stranger LOGIN REPLICATION")?;
            cluster.create_database("open")?;
            cluster.sql(DB, "REVOKE CONNECT ON DATABASE open FROM public")?;
            cluster.sql(DB, "GRANT CONNECT ON DATABASE open TO plain")?;
            cluster.sql(DB, "SELECT pg_reload_conf()")?;
        }
        site.publisher.sql("open", "CREATE PUBLICATION pub FOR ALL TABLES")?;
        let role = |conninfo: String, user: &str| {
            conninfo.replace("user=postgres", &format!("user={user}"))
        };
        let fails = |publisher: &str, subscriber: &str, code, named: &str| -> Result<()> {
            let publisher = role(site.publisher.conninfo("open"), publisher);
            let subscriber = role(site.subscriber.conninfo("open"), subscriber);
            let mut run = site.spawn(&site.program_between(&publisher, &subscriber))?;
            expect_exit(&mut run, code, &["HINT:", named])
        };
        for (user, named) in [
            ("turned_away", "pg_hba.conf"),
            ("group_only", "ALTER ROLE \"group_only\" LOGIN"),
            ("stranger", "GRANT CONNECT ON DATABASE \"open\" TO \"stranger\";"),
        ] {
            fails(user, "postgres", 4, named)?;
            fails("postgres", user, 5, named)?;
        }
        fails("plain", "postgres", 4, "ALTER ROLE \"plain\" REPLICATION;")?;
    }
    Ok(())
}

#[test]
fn settings_that_prevent_slots_are_named() -> Result<()> {
    for major in MAJORS {
        for (setting, value, hint, not) in [
            ("wal_level", "replica", "wal_level = logical", "SET max_replication_slots"),
            ("max_replication_slots", "0", "SET max_replication_slots", "wal_level = logical"),
        ] {
            let settings = |builder: testbed::ClusterBuilder| builder.setting(setting, value);
            let site = Site::of(Pair::start_with(major, major, settings, |builder| builder)?)?;
            site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
            let mut run = site.spawn(&site.program())?;
            expect_exit(&mut run, 4, &["HINT:", hint])?;
            assert!(!run.log().contains(not), "{}", run.log());
        }
    }
    Ok(())
}

/// The error prints the same GRANT as `pgapace check`.
#[test]
fn revoked_privileges_are_named_with_the_grant() -> Result<()> {
    for major in MAJORS {
        let site = Site::new(major, major)?;
        for cluster in [&site.publisher, &site.subscriber] {
            cluster.create_database(SHOP)?;
            cluster.sql(SHOP, "CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        }
        site.publisher.sql(
            SHOP,
            "INSERT INTO t VALUES (0, 'copied'); CREATE PUBLICATION pub FOR ALL TABLES",
        )?;
        site.publisher.sql(SHOP, part("publisher"))?;
        site.subscriber.sql(SHOP, part("subscriber"))?;
        let run =
            || site.spawn(&pgapace("run").args(arguments(&site)).args(["--until", "current"]));
        site.publisher.sql(SHOP, "REVOKE SELECT ON t FROM pgapace_publisher")?;
        let grant = "GRANT SELECT ON TABLE \"public\".\"t\" TO pgapace_publisher;";
        expect_exit(&mut run()?, 4, &["permission denied for table t", "HINT:", grant])?;
        site.publisher.sql(SHOP, grant)?;
        expect_exit(&mut run()?, 0, &[])?;
        for (change, privilege, code) in [
            ("INSERT INTO t VALUES (1, 'x'), (2, 'x')", "INSERT", 9),
            ("UPDATE t SET v = 'y'", "UPDATE", 9),
            ("DELETE FROM t WHERE id = 1", "DELETE", 9),
            ("TRUNCATE t", "TRUNCATE", 9),
        ] {
            site.subscriber
                .sql(SHOP, &format!("REVOKE {privilege} ON t FROM pgapace_subscriber"))?;
            site.publisher.sql(SHOP, change)?;
            let grant =
                format!("GRANT {privilege} ON TABLE \"public\".\"t\" TO pgapace_subscriber;");
            let named = ["permission denied for table t", "with commit LSN", "public.t", "HINT:"];
            let mut failed = run()?;
            expect_exit(&mut failed, code, &named)?;
            assert!(failed.log().contains(&grant), "{}", failed.log());
            site.subscriber.sql(SHOP, &grant)?;
            expect_exit(&mut run()?, 0, &[])?;
        }
        site.subscriber
            .sql(SHOP, "REVOKE USAGE ON SCHEMA public FROM pgapace_subscriber, public")?;
        site.publisher.sql(SHOP, "INSERT INTO t VALUES (3, 'x')")?;
        let grant = "GRANT USAGE ON SCHEMA \"public\" TO pgapace_subscriber;";
        let mut failed = run()?;
        failed.wait(crate::support::PATIENCE)?;
        assert!(failed.log().contains(grant), "{}", failed.log());
        site.subscriber.sql(SHOP, grant)?;
        expect_exit(&mut run()?, 0, &[])?;
    }
    Ok(())
}

#[test]
fn rows_of_the_state_that_were_deleted_are_told_from_another_process() {
    let rebase = ["--until", "current", "--if-not-empty", "rebase"];
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let mut run = case.start();
        case.subscriber.sql("TRUNCATE pgapace.progress");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let named = ["rows of pgapace.progress were deleted", "pgapace drop", "rebase"];
        must(expect_exit(&mut run, 5, &named));
        case.run().expect(5, &["the progress of the subscription is missing", "rebase"]);
        case.tool.finish("drop", &[]).expect(0, &[]);
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["t"]);

        let mut run = case.start();
        case.subscriber.sql("DELETE FROM pgapace.subscription");
        case.publisher.sql("INSERT INTO t VALUES (2)");
        let drop = format!("SELECT pg_drop_replication_slot('{}');", case.tool.name);
        must(expect_exit(&mut run, 5, &["rows of pgapace.subscription were deleted", &drop]));
        case.publisher.sql(&drop);
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}
