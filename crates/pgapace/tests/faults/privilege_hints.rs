//! The hint about a missing privilege is SQL that removes the error when it is executed as it is.

use testbed::compare::{TableName, expect_equal};
use testbed::{Program, Result};

use crate::support::{PATIENCE, Site, finish, pgapace};

/// More errors than any of these runs has steps.
const ERRORS: usize = 10;
const TABLES: &str = "CREATE SCHEMA app; CREATE TABLE app.t (id int PRIMARY KEY, v text); \
                      CREATE TABLE app.u (id int PRIMARY KEY)";
/// Roles whose names need quotes, with all privileges.
const READER: &str = "CREATE ROLE \"Reader 1\" LOGIN REPLICATION; GRANT USAGE ON SCHEMA app TO \"Reader 1\"; \
                      GRANT SELECT ON ALL TABLES IN SCHEMA app TO \"Reader 1\"";
const WRITER: &str = "CREATE ROLE \"Writer 1\" LOGIN; GRANT CREATE ON DATABASE shop TO \"Writer 1\"; \
                      GRANT SET ON PARAMETER session_replication_role TO \"Writer 1\"; \
                      GRANT USAGE ON SCHEMA app TO \"Writer 1\"; \
                      GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA app TO \"Writer 1\"";
const DATABASE: &str = "shop";

struct Case {
    site: Site,
    program: Program,
}

impl Case {
    fn new(arguments: &[&str]) -> Result<Self> {
        let site = Site::start(&[], &[])?;
        for (cluster, role) in [(&site.publisher, READER), (&site.subscriber, WRITER)] {
            cluster.create_database(DATABASE)?;
            cluster.sql(DATABASE, TABLES)?;
            cluster.sql(DATABASE, role)?;
        }
        site.publisher.sql(
            DATABASE,
            "INSERT INTO app.t VALUES (1, 'a'), (2, 'b'); INSERT INTO app.u VALUES (1); \
             CREATE PUBLICATION pub FOR ALL TABLES",
        )?;
        let role = |conninfo: String, role: &str| {
            conninfo.replace("user=postgres", &format!("user='{role}'"))
        };
        let program = pgapace("run")
            .args(["--publisher", &role(site.publisher.conninfo(DATABASE), "Reader 1")])
            .args(["--subscriber", &role(site.subscriber.conninfo(DATABASE), "Writer 1")])
            .args(["--publication", "pub", "--name", "sub", "--until", "current"])
            .args(arguments.iter().copied());
        Ok(Self { site, program })
    }

    /// Runs pgapace, and executes the hint of each error, until there is none. Returns the errors.
    fn run_as_the_hints_say(&self) -> Result<Vec<String>> {
        let mut errors: Vec<String> = Vec::new();
        for _ in 0..=ERRORS {
            let mut run = self.site.spawn(&self.program)?;
            run.wait(PATIENCE)?;
            let log = run.log();
            let Some((_, error)) = log.rsplit_once("pgapace: error: ") else {
                return Ok(errors);
            };
            assert_ne!(errors.last().map(String::as_str), Some(error), "the hint did not help");
            let (_, hint) = error.split_once("HINT:  ").unwrap_or_else(|| panic!("{error}"));
            let on_publisher = error.starts_with("publisher");
            let site = &self.site;
            let cluster = if on_publisher { &site.publisher } else { &site.subscriber };
            cluster.sql(DATABASE, hint)?;
            errors.push(error.to_owned());
        }
        panic!("more errors than steps: {errors:#?}");
    }

    /// Expects errors with these texts, in this order.
    fn expect(errors: &[String], texts: &[&str]) {
        assert_eq!(errors.len(), texts.len(), "{errors:#?}");
        for (error, text) in errors.iter().zip(texts) {
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    fn expect_equal(&self) -> Result<()> {
        let site = &self.site;
        let (mut publisher, mut subscriber) =
            (site.publisher.connect(DATABASE)?, site.subscriber.connect(DATABASE)?);
        expect_equal(&mut publisher, &mut subscriber, &["app.t", "app.u"].map(TableName::from))
    }
}

/// Login, connection, settings, state and tables: the role lacks everything.
#[test]
fn executing_the_hint_removes_each_error() -> Result<()> {
    let case = Case::new(&[])?;
    let (publisher, subscriber) = (&case.site.publisher, &case.site.subscriber);
    for (cluster, revoke) in [
        (publisher, "DROP OWNED BY \"Reader 1\"; ALTER ROLE \"Reader 1\" NOLOGIN NOREPLICATION"),
        (subscriber, "DROP OWNED BY \"Writer 1\"; ALTER ROLE \"Writer 1\" NOLOGIN"),
    ] {
        cluster.sql(DATABASE, revoke)?;
        cluster.sql(DATABASE, "REVOKE CONNECT ON DATABASE shop FROM PUBLIC")?;
    }
    let errors = case.run_as_the_hints_say()?;
    Case::expect(
        &errors,
        &[
            "ALTER ROLE \"Writer 1\" LOGIN",
            "GRANT CONNECT ON DATABASE \"shop\" TO \"Writer 1\"",
            "GRANT SET ON PARAMETER session_replication_role TO \"Writer 1\"",
            "ALTER ROLE \"Reader 1\" LOGIN",
            "ALTER ROLE \"Reader 1\" REPLICATION",
            "GRANT CONNECT ON DATABASE \"shop\" TO \"Reader 1\"",
            "CREATE SCHEMA pgapace AUTHORIZATION \"Writer 1\";\n       GRANT USAGE",
            "GRANT USAGE ON SCHEMA \"app\" TO \"Reader 1\"",
        ],
    );
    case.expect_equal()?;
    for (privilege, change) in [
        ("INSERT", "INSERT INTO app.t VALUES (3, 'c')"),
        ("UPDATE", "UPDATE app.t SET v = 'd' WHERE id = 3"),
        ("DELETE", "DELETE FROM app.t WHERE id = 3"),
        ("TRUNCATE", "TRUNCATE app.t"),
    ] {
        subscriber.sql(DATABASE, &format!("REVOKE {privilege} ON app.t FROM \"Writer 1\""))?;
        publisher.sql(DATABASE, change)?;
        let hint = format!("GRANT {privilege} ON TABLE");
        Case::expect(&case.run_as_the_hints_say()?, &[&hint]);
        case.expect_equal()?;
    }
    Ok(())
}

/// Of many tables that lack a privilege, the hint shows the one at which the run has failed.
#[test]
fn the_statement_for_the_failing_table_is_not_cut_off() -> Result<()> {
    let case = Case::new(&[])?;
    let (publisher, subscriber) = (&case.site.publisher, &case.site.subscriber);
    for (cluster, grant) in [(publisher, READER), (subscriber, WRITER)] {
        for number in 1..=14 {
            cluster.sql(DATABASE, &format!("CREATE TABLE app.z{number} (id int PRIMARY KEY)"))?;
        }
        let (_, on_tables) = grant.rsplit_once("; ").expect("several statements");
        cluster.sql(DATABASE, on_tables)?;
    }
    assert_eq!(case.run_as_the_hints_say()?, Vec::<String>::new());
    subscriber.sql(DATABASE, "REVOKE INSERT ON ALL TABLES IN SCHEMA app FROM \"Writer 1\"")?;
    publisher.sql(DATABASE, "INSERT INTO app.z9 VALUES (1)")?;
    let first = "HINT:  GRANT INSERT ON TABLE \"app\".\"z9\"";
    Case::expect(&case.run_as_the_hints_say()?, &[first]);
    case.expect_equal()
}

/// `ALTER ROLE … SET role`: the group needs the privileges, not the role that logs in.
#[test]
fn hints_name_the_group_under_which_a_role_acts() -> Result<()> {
    let case = Case::new(&["--origin", "none"])?;
    for (cluster, role) in [(&case.site.publisher, "Reader 1"), (&case.site.subscriber, "Writer 1")]
    {
        let act = format!(
            "CREATE ROLE \"Group 1\"; GRANT \"Group 1\" TO \"{role}\"; ALTER ROLE \"{role}\" SET role = \"Group 1\""
        );
        cluster.sql(DATABASE, &act)?;
    }
    case.site.subscriber.sql(DATABASE, "ALTER TABLE app.t ENABLE ROW LEVEL SECURITY")?;
    Case::expect(
        &case.run_as_the_hints_say()?,
        &[
            "GRANT SET ON PARAMETER session_replication_role TO \"Group 1\"",
            "CREATE SCHEMA pgapace AUTHORIZATION \"Group 1\";\n       GRANT",
            "GRANT USAGE ON SCHEMA \"app\" TO \"Group 1\"",
        ],
    );
    let functions = "pg_replication_origin_session_setup(text), pg_replication_origin_drop(text)";
    let revoke = format!("REVOKE EXECUTE ON FUNCTION {functions} FROM \"Group 1\"");
    case.site.subscriber.sql(DATABASE, &revoke)?;
    case.site.publisher.sql(DATABASE, "DELETE FROM app.t")?;
    Case::expect(
        &case.run_as_the_hints_say()?,
        &["TO \"Group 1\"; -- or pass --tag-commits=false if there is no other direction"],
    );
    case.expect_equal()
}

/// Of a role that only looks.
#[test]
fn verbs_that_show_the_state_name_the_grant_that_they_need() -> Result<()> {
    let case = Case::new(&[])?;
    let errors = case.run_as_the_hints_say()?;
    assert!(errors.len() < ERRORS, "{errors:?}");
    let subscriber = &case.site.subscriber;
    subscriber.sql(DATABASE, "CREATE ROLE \"Watcher 1\" LOGIN")?;
    let conninfo = subscriber.conninfo(DATABASE).replace("user=postgres", "user='Watcher 1'");
    let verb = |verb: &[&str]| {
        finish(&pgapace(verb[0]).args(["--subscriber", &conninfo]).args(verb[1..].iter().copied()))
    };
    let verbs: [&[&str]; 3] = [&["status"], &["top", "--once"], &["report", "-"]];
    for one in verbs {
        verb(one).expect(5, &["GRANT pg_monitor TO \"Watcher 1\""]);
    }
    let denied = verb(verbs[0]).log;
    let (_, hint) = denied.split_once("HINT:  ").unwrap_or_else(|| panic!("{denied}"));
    subscriber.sql(DATABASE, hint)?;
    for one in verbs {
        verb(one).expect(0, &[]);
    }
    Ok(())
}
