//! Copies beside the stream that fail for a reason that may pass by itself. Only their tables wait.

use testbed::Result;
use testbed::compare::TableName;

use crate::support::{
    Case, DB, PATIENCE, Site, expect_exit, must, on_versions, wait_for_event, wait_while_running,
};
use crate::tablesync::blocked::with_state;
use crate::tablesync::catching_up::expect_all;
use crate::tablesync::while_streaming::{holder, other_has, wait_for, wait_for_a_waiter};

/// Two tables cannot be copied: their tablespaces are full, or a limit is reached.
#[test]
fn a_copy_that_fails_for_now_keeps_no_other_table_waiting() {
    on_versions(&[(18, 18)], |mut case| {
        case.replicate("CREATE TABLE first (id int PRIMARY KEY)");
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        let mut process = case.start();
        let restarts = case.statistic("restarts");
        let ddl = "CREATE TABLE crowded (id int PRIMARY KEY); CREATE TABLE short (id int PRIMARY KEY); \
                   CREATE TABLE fine (id int PRIMARY KEY)";
        case.subscriber.sql(&format!(
            "{ddl}; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               RAISE EXCEPTION 'no room' USING ERRCODE = TG_ARGV[0]; END $$; \
             CREATE TRIGGER refuse BEFORE INSERT ON crowded FOR EACH ROW EXECUTE FUNCTION refuse('53100'); \
             CREATE TRIGGER refuse BEFORE INSERT ON short FOR EACH ROW EXECUTE FUNCTION refuse('53400'); \
             ALTER TABLE crowded ENABLE ALWAYS TRIGGER refuse; ALTER TABLE short ENABLE ALWAYS TRIGGER refuse"
        ));
        case.publisher.sql(&format!(
            "{ddl}; INSERT INTO crowded VALUES (1); INSERT INTO short VALUES (1); INSERT INTO fine VALUES (1)"
        ));
        // The reason stays until the table is copied again, which is tried now and then.
        for (table, code) in [("crowded", "53100"), ("short", "53400")] {
            let reason = format!(
                "SELECT count(*) > 0 FROM pgapace.relation WHERE table_name = '{table}' \
                   AND reason LIKE '%{code}%'"
            );
            wait_for(&case, &mut process, "the table to be blocked", &reason);
        }
        wait_for(&case, &mut process, "the other table", &with_state("ready", "fine first"));
        case.publisher.sql("INSERT INTO first VALUES (1); INSERT INTO short VALUES (2)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "fine"]);
        case.subscriber.sql("DROP TRIGGER refuse ON crowded; DROP TRIGGER refuse ON short");
        let ready = with_state("ready", "crowded fine first short");
        wait_for(&case, &mut process, "the copies", &ready);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["first", "fine", "crowded", "short"]);
        assert_eq!(case.statistic("restarts"), restarts, "{}", process.log());
        case.stop(process);
    });
}

/// The publisher has no slot left for the snapshot of an added table.
#[test]
fn an_added_table_waits_for_a_slot_of_the_publisher() -> Result<()> {
    let site = Site::start(&[("max_replication_slots", "2")], &[])?;
    site.publish_tables("CREATE TABLE first (id int PRIMARY KEY)")?;
    let mut run = site.spawn_streaming(&site.program().args(["--refresh-interval", "1"]))?;
    site.publisher.sql(DB, "SELECT pg_create_physical_replication_slot('other', true)")?;
    site.subscriber.sql(DB, "CREATE TABLE later (id int PRIMARY KEY)")?;
    site.publisher
        .sql(DB, "CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (1)")?;
    let state = "SELECT coalesce(string_agg(state || coalesce(' ' || reason, ''), ''), '') \
                 FROM pgapace.relation WHERE table_name = 'later'";
    let is = |part: &str| Ok(site.subscriber.query_one_text(DB, state)?.contains(part));
    wait_while_running(&mut run, "the table to be blocked", PATIENCE, || is("53400"))?;
    site.publisher.sql(DB, "INSERT INTO first VALUES (1); INSERT INTO later VALUES (2)")?;
    site.wait_until_applied(&mut run)?;
    site.publisher.sql(DB, "SELECT pg_drop_replication_slot('other')")?;
    wait_while_running(&mut run, "the copy", PATIENCE, || is("ready"))?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("first"), TableName::from("later")])?;
    let restarts = "SELECT restarts FROM pgapace.stat_subscription";
    assert_eq!(site.subscriber.query_one_text(DB, restarts)?, "0", "{}", run.log());
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}

/// The subscriber has no connection left for the session that applies the deferred changes of a copied table.
#[test]
fn a_copied_table_waits_for_a_connection_of_the_subscriber() {
    let mut case = Case::new(18, 18);
    let role = format!("{}_limited", case.tool.name);
    case.subscriber.change_setting_privileges(&format!(
        "CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {} TO {role}; \
         GRANT SET ON PARAMETER session_replication_role TO {role}",
        case.subscriber.name
    ));
    case.tool.subscriber = case.tool.subscriber.replace("user=postgres", &format!("user={role}"));
    case.both("CREATE TABLE other (id int PRIMARY KEY, v int)");
    case.subscriber.sql(&format!("ALTER TABLE other OWNER TO {role}"));
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    case.both("CREATE TABLE late (id int PRIMARY KEY, v int)");
    case.subscriber.sql(&format!("ALTER TABLE late OWNER TO {role}"));
    case.publisher.sql("INSERT INTO late VALUES (1, 0)");
    let change = |number: u32| {
        let other = format!("INSERT INTO other VALUES ({number}, 0)");
        case.publisher.sql(&format!("BEGIN; UPDATE late SET v = v + 1; {other}; COMMIT"));
    };
    let mut copying = holder(&case, "BEGIN; LOCK TABLE late IN SHARE MODE");
    let mut process = case.start();
    let restarts = case.statistic("restarts");
    wait_for_a_waiter(&case, &mut process, "relation");
    change(1);
    other_has(&case, &mut process, 1);

    case.subscriber.sql(&format!("ALTER ROLE {role} CONNECTION LIMIT 1"));
    must(copying.batch_execute("COMMIT"));
    must(wait_for_event(&mut process, "catch_up_worker_not_started", PATIENCE));
    change(2);
    other_has(&case, &mut process, 2);
    assert_eq!(case.subscriber.value("SELECT v FROM late"), "0", "{}", process.log());

    case.subscriber.sql(&format!("ALTER ROLE {role} CONNECTION LIMIT -1"));
    case.wait_until_applied(&mut process);
    expect_all(&case, &["other", "late"]);
    assert_eq!(case.statistic("restarts"), restarts, "{}", process.log());
    case.stop(process);
}

/// The publisher streams, and refuses every other session: a walsender does not count against the limit.
#[test]
fn an_added_table_waits_for_a_connection_of_the_publisher() {
    on_versions(&[(18, 18)], |mut case| {
        let role = format!("{}_limited", case.tool.name);
        case.publisher
            .sql(&format!("CREATE ROLE {role} LOGIN REPLICATION IN ROLE pg_read_all_data"));
        let user = format!("user={role}");
        let limit = |case: &Case, most: i32| {
            case.publisher.sql(&format!("ALTER ROLE {role} CONNECTION LIMIT {most}"));
        };
        case.tool.publisher = case.tool.publisher.replace("user=postgres", &user);
        case.tool.args = vec!["--refresh-interval=1".to_owned()];
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, v int)");
        let mut process = case.start();
        let restarts = case.statistic("restarts");
        limit(&case, 0);
        case.both("CREATE TABLE late (id int PRIMARY KEY, v int)");
        case.publisher.sql("INSERT INTO late VALUES (1, 0); INSERT INTO other VALUES (1, 0)");
        wait_for(&case, &mut process, "the table to wait", &with_state("blocked", "late"));
        case.publisher.sql("UPDATE late SET v = 1; INSERT INTO other VALUES (2, 0)");
        other_has(&case, &mut process, 2);

        limit(&case, -1);
        wait_for(&case, &mut process, "the copy", &with_state("ready", "late other"));
        case.publisher.sql("UPDATE late SET v = 2; INSERT INTO late VALUES (2, 0)");
        case.wait_until_applied(&mut process);
        expect_all(&case, &["other", "late"]);
        assert_eq!(case.statistic("restarts"), restarts, "{}", process.log());
        case.stop(process);
    });
}
