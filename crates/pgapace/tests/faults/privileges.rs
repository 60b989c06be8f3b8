//! Roles with exactly the privileges of docs/privileges.sql.

use testbed::compare::{TableName, expect_equal};
use testbed::{Program, Result};

use crate::support::{DB, NAME, Site, Tool, expect_exit, one_or_all, pgapace, wait_while_running};

const SQL: &str = include_str!("../../../../docs/privileges.sql");
/// The database that this file names.
pub(super) const SHOP: &str = "shop";

/// The statements under a heading of this file.
pub(crate) fn part(heading: &str) -> &'static str {
    let start = SQL.find(&format!("\n-- {heading}: ")).expect("the heading");
    let end = SQL[start + 1..].find("\n\n").map_or(SQL.len(), |length| start + 1 + length);
    &SQL[start..end]
}

fn site() -> Result<Site> {
    let site = Site::start(&[], &[])?;
    let ddl = "CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); \
               CREATE TABLE parent (id int PRIMARY KEY); \
               CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)";
    for cluster in [&site.publisher, &site.subscriber] {
        cluster.create_database(SHOP)?;
        cluster.sql(SHOP, ddl)?;
    }
    site.publisher.sql(
        SHOP,
        "CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t (v) VALUES ('copied'); \
         INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1)",
    )?;
    site.publisher.sql(SHOP, part("publisher"))?;
    Ok(site)
}

/// Connection arguments with the roles of this file.
pub(super) fn arguments(site: &Site) -> [String; 8] {
    let role = |conninfo: String, role| conninfo.replace("user=postgres", &format!("user={role}"));
    [
        "--publisher".to_owned(),
        role(site.publisher.conninfo(SHOP), "pgapace_publisher"),
        "--subscriber".to_owned(),
        role(site.subscriber.conninfo(SHOP), "pgapace_subscriber"),
        "--publication".to_owned(),
        "pub".to_owned(),
        "--name".to_owned(),
        NAME.to_owned(),
    ]
}

fn program(site: &Site) -> Program {
    pgapace("run").args(arguments(site)).args(["--until", "current"])
}

/// All kinds of changes, one of them while pgapace does not run.
fn change(site: &Site) -> Result<()> {
    site.publisher.sql(
        SHOP,
        "INSERT INTO t (v) VALUES ('a'), ('b'), ('c'); UPDATE t SET v = 'd' WHERE v = 'b'; \
         DELETE FROM t WHERE v = 'c'; DELETE FROM child; DELETE FROM parent; \
         INSERT INTO parent VALUES (2); TRUNCATE child; INSERT INTO child VALUES (2, 2)",
    )
}

fn expect_equal_tables(site: &Site) -> Result<()> {
    let tables = ["t", "parent", "child"].map(TableName::from);
    let (mut publisher, mut subscriber) =
        (site.publisher.connect(SHOP)?, site.subscriber.connect(SHOP)?);
    expect_equal(&mut publisher, &mut subscriber, &tables)
}

#[test]
fn the_documented_privileges_are_enough() -> Result<()> {
    let site = site()?;
    site.subscriber.sql(SHOP, part("subscriber"))?;
    let untagged = "event=\"commits_not_tagged\"";
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 0, &[untagged])?;
    change(&site)?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 0, &[untagged])?;
    expect_equal_tables(&site)?;
    // `--origin none` requires replication origins.
    let mut run = site.spawn(&program(&site).args(["--origin", "none"]))?;
    expect_exit(&mut run, 5, &["cannot tag commits", "--tag-commits=false"])?;

    site.subscriber.sql(SHOP, part("subscriber, optional"))?;
    change(&site)?;
    let mut run = site.spawn(&program(&site).args(["--workers", "4"]))?;
    expect_exit(&mut run, 0, &[])?;
    assert!(!run.log().contains(untagged), "{}", run.log());
    expect_equal_tables(&site)?;
    let origins = "SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'pgapace%'";
    // One origin for each worker.
    assert_eq!(site.subscriber.query_one_text(SHOP, origins)?, "4");

    // Terminating the sessions of another process needs no additional privilege.
    let endless = pgapace("run").args(arguments(&site));
    let mut first = site.spawn_streaming(&endless.clone().args(["--busy-timeout", "1"]))?;
    let mut second = site.spawn_streaming(&endless.clone().arg("--take-over"))?;
    expect_exit(&mut first, 8, &["run by another process"])?;
    change(&site)?;
    wait_while_running(&mut second, "the change", crate::support::PATIENCE, || {
        Ok(expect_equal_tables(&site).is_ok())
    })?;
    second.terminate()?;
    expect_exit(&mut second, 0, &[])?;

    let mut drop = site.spawn(&pgapace("drop").args(arguments(&site)))?;
    expect_exit(&mut drop, 0, &["dropped subscription sub", "dropped replication slot sub"])?;
    assert_eq!(site.subscriber.query_one_text(SHOP, origins)?, "0");
    Ok(())
}

/// Each privilege is necessary: without it an error names the privilege, and nothing is created.
#[test]
fn each_missing_privilege_is_named() -> Result<()> {
    let site = site()?;
    site.subscriber.sql(SHOP, part("subscriber"))?;
    let missing = [
        (
            "REVOKE SET ON PARAMETER session_replication_role FROM pgapace_subscriber",
            "GRANT SET ON PARAMETER session_replication_role TO pgapace_subscriber",
            5,
            vec!["session_replication_role", "HINT:", "GRANT SET ON PARAMETER"],
        ),
        (
            "REVOKE CREATE ON DATABASE shop FROM pgapace_subscriber",
            "GRANT CREATE ON DATABASE shop TO pgapace_subscriber",
            5,
            vec!["permission denied for database shop", "CREATE SCHEMA pgapace AUTHORIZATION"],
        ),
        (
            "REVOKE CREATE ON DATABASE shop FROM pgapace_subscriber; REVOKE INSERT ON t FROM pgapace_subscriber",
            "GRANT CREATE ON DATABASE shop TO pgapace_subscriber; GRANT INSERT ON t TO pgapace_subscriber",
            5,
            vec!["HINT:  CREATE SCHEMA pgapace AUTHORIZATION", "GRANT INSERT ON TABLE"],
        ),
        (
            "REVOKE SELECT ON t FROM pgapace_subscriber",
            "GRANT SELECT ON t TO pgapace_subscriber",
            5,
            vec!["permission denied for table t"],
        ),
        (
            "REVOKE INSERT ON t FROM pgapace_subscriber",
            "GRANT INSERT ON t TO pgapace_subscriber",
            5,
            vec!["permission denied for table t"],
        ),
    ];
    for (revoke, grant, code, messages) in &missing {
        site.subscriber.sql(SHOP, revoke)?;
        let mut run = site.spawn(&program(&site))?;
        expect_exit(&mut run, *code, messages)?;
        site.subscriber.sql(SHOP, grant)?;
    }
    site.publisher.sql(SHOP, "ALTER ROLE pgapace_publisher NOREPLICATION")?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 4, &["HINT:", "REPLICATION"])?;
    site.publisher.sql(SHOP, "ALTER ROLE pgapace_publisher REPLICATION")?;
    site.publisher.sql(SHOP, "REVOKE SELECT ON t FROM pgapace_publisher")?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 4, &["permission denied for table t"])?;
    site.publisher.sql(SHOP, "GRANT SELECT ON t TO pgapace_publisher")?;

    // An administrator may create the schema instead.
    site.subscriber.sql(
        SHOP,
        "TRUNCATE t, parent, child; DROP SCHEMA pgapace CASCADE; CREATE SCHEMA pgapace AUTHORIZATION pgapace_subscriber; \
         REVOKE CREATE ON DATABASE shop FROM pgapace_subscriber",
    )?;
    site.publisher
        .sql(SHOP, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 0, &[])?;
    expect_equal_tables(&site)
}

/// Neither the first tables nor added ones need a query on the table to find that out.
#[test]
fn a_table_in_a_schema_without_usage_is_named() -> Result<()> {
    let site = site()?;
    site.subscriber.sql(SHOP, part("subscriber"))?;
    let (revoke, grant) = (
        "REVOKE USAGE ON SCHEMA closed FROM pgapace_subscriber",
        "GRANT USAGE ON SCHEMA closed TO pgapace_subscriber",
    );
    let create = |names: &[&str]| -> Result<()> {
        for name in names {
            let table = format!("CREATE TABLE {name} (id int PRIMARY KEY)");
            site.publisher.sql(
                SHOP,
                &format!(
                    "{table}; INSERT INTO {name} VALUES (1); \
                     GRANT SELECT ON {name} TO pgapace_publisher"
                ),
            )?;
            // Its file is not empty, so pgapace looks whether it has rows.
            site.subscriber.sql(
                SHOP,
                &format!(
                    "{table}; INSERT INTO {name} VALUES (7); DELETE FROM {name}; \
                     GRANT ALL ON {name} TO pgapace_subscriber"
                ),
            )?;
        }
        Ok(())
    };
    site.publisher
        .sql(SHOP, "CREATE SCHEMA closed; GRANT USAGE ON SCHEMA closed TO pgapace_publisher")?;
    site.subscriber.sql(SHOP, "CREATE SCHEMA closed")?;
    create(&["closed.first"])?;
    let mut run = site.spawn(&program(&site))?;
    let named = ["permission denied for table first", "GRANT USAGE ON SCHEMA \"closed\" TO"];
    expect_exit(&mut run, 5, &named)?;
    site.subscriber.sql(SHOP, grant)?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 0, &[])?;
    // An added table is blocked, and another one is copied.
    site.subscriber.sql(SHOP, revoke)?;
    create(&["closed.late", "late"])?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 6, &["all tables but these: closed.late"])?;
    let rows =
        |name: &str| site.subscriber.query_one_text(SHOP, &format!("SELECT count(*) FROM {name}"));
    assert_eq!((rows("late")?, rows("closed.late")?), ("1".to_owned(), "0".to_owned()));
    site.subscriber.sql(SHOP, grant)?;
    let mut run = site.spawn(&program(&site))?;
    expect_exit(&mut run, 0, &[])?;
    assert_eq!(rows("closed.late")?, "1");
    Ok(())
}

/// `ALTER ROLE … SET role` has the sessions act as a group, from which the server hides the sessions of the login
/// role.
#[test]
fn sessions_that_act_as_a_group_are_found_and_terminated() -> Result<()> {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let site = Site::new(publisher, subscriber)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        site.publisher.sql(
            DB,
            "CREATE ROLE source; GRANT SELECT ON t TO source; INSERT INTO t VALUES (1); \
             CREATE ROLE login LOGIN REPLICATION; GRANT source TO login; \
             ALTER ROLE login SET role = source",
        )?;
        let owner = format!(
            "CREATE ROLE owner; ALTER TABLE t OWNER TO owner; \
             GRANT CREATE ON DATABASE {DB} TO owner; \
             GRANT SET ON PARAMETER session_replication_role TO owner; \
             CREATE ROLE login LOGIN NOINHERIT; GRANT owner TO login; \
             ALTER ROLE login SET role = owner"
        );
        site.subscriber.sql(DB, &owner)?;
        let role = |conninfo: String| conninfo.replace("user=postgres", "user=login");
        let tool = Tool {
            publisher: role(site.publisher.conninfo(DB)),
            subscriber: role(site.subscriber.conninfo(DB)),
            ..site.tool()
        };
        let privilege = "SET ON PARAMETER session_replication_role";
        site.subscriber.sql(DB, &format!("REVOKE {privilege} FROM owner"))?;
        let mut refused = site.spawn(&tool.program("run"))?;
        expect_exit(&mut refused, 5, &["GRANT SET ON PARAMETER", "TO \"owner\""])?;
        site.subscriber.sql(DB, &format!("GRANT {privilege} TO owner"))?;
        let mut check = site.spawn(&tool.program("check"))?;
        expect_exit(&mut check, 0, &[])?;
        let program = tool.program("run").args(["--busy-timeout", "1"]);
        let mut first = site.spawn_streaming(&program)?;
        first.freeze()?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (2)")?;
        let mut second = site.spawn_streaming(&program.arg("--take-over"))?;
        site.wait_until_applied(&mut second)?;
        site.expect_equal(&[TableName::from("t")])?;
        first.thaw()?;
        expect_exit(&mut first, 8, &["run by another process"])?;
        second.terminate()?;
        expect_exit(&mut second, 0, &[])?;
        let mut drop = site.spawn(&tool.program("drop"))?;
        expect_exit(&mut drop, 0, &["dropped replication slot sub"])?;
    }
    Ok(())
}
