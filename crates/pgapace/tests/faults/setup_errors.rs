//! Errors because of roles, permissions and settings name the statement that helps.

use testbed::{Pair, Result};

use super::errors::VERSIONS;
use super::privileges::{SHOP, arguments, part};
use crate::support::{DB, Site, expect_exit, on_versions, pgapace};

const MAJORS: [u16; 2] = [15, 18];

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
