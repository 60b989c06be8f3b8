//! A switchover with a role that is no superuser, and what `drop` leaves to one that is not finished.

use testbed::postgres::{Client, NoTls};
use testbed::wait_until;

use super::failures::{Held, breakable_case, when_free};
use super::late::wait_for_lock;
use super::{LATE, Slots, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, Tool, expect_exit, must, one_or_all};

/// `pg_stat_activity` hides what sessions of other roles are: they must be ended all the same.
#[test]
fn sessions_of_other_roles_are_ended() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let mut case = two_way_case(publisher, subscriber);
        let database = case.publisher.name.clone();
        let (mover, app) = (format!("mover_{database}"), format!("app_{database}"));
        case.publisher.sql(&format!(
            "CREATE ROLE {mover} LOGIN REPLICATION; ALTER DATABASE {database} OWNER TO {mover}; \
             GRANT SELECT ON orders, orders_id_seq TO {mover}; CREATE ROLE {app} LOGIN; \
             GRANT INSERT ON orders TO {app}; GRANT USAGE ON SEQUENCE orders_id_seq TO {app}"
        ));
        let administrator = case.tool.publisher.clone();
        case.tool.publisher = format!("{administrator} user={mover}");
        let _slots = Slots(&case);
        let mut process = case.start();
        let lacks = format!("GRANT pg_read_all_stats, pg_signal_backend TO {mover};");
        switchover(&case.tool, &["--plan", "--no-back", "--ignore-roles"]).expect(3, &[&lacks]);
        case.publisher.sql(&lacks);
        // As this test has one.
        let named = ["of superuser postgres is connected", "SELECT pg_terminate_backend("];
        switchover(&case.tool, &["--plan", "--no-back", "--ignore-roles"]).expect(3, &named);
        let end = format!(
            "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity \
             WHERE datname = '{database}' AND usename = 'postgres'"
        );
        value(case.publisher.cluster, "postgres", &end);
        switchover(&case.tool, &["--plan", "--no-back", "--ignore-roles"]).expect(0, &[]);
        let mut client = must(Client::connect(&format!("{administrator} user={app}"), NoTls));
        must(client.batch_execute("BEGIN; INSERT INTO orders (client, n) VALUES (1, 1)"));
        a_superuser_connects_behind_the_checks(&case, &administrator);
        must(client.batch_execute("SELECT 1"));
        value(case.publisher.cluster, "postgres", &end);
        switchover(&case.tool, &["--go", "--no-back", "--ignore-roles"]).expect(0, &[]);
        assert!(client.batch_execute("COMMIT").is_err(), "a client writes on the old side");
        let count = |cluster| value(cluster, &database, "SELECT count(*) FROM orders");
        assert_eq!(count(case.publisher.cluster), count(case.subscriber.cluster));
        must(process.kill9());
    }
}

/// The role may not end this session: the switchover is undone before it has ended any.
fn a_superuser_connects_behind_the_checks(case: &Case, administrator: &str) {
    let mut blocker = case.subscriber.connect();
    must(blocker.batch_execute("BEGIN; LOCK TABLE pgapace.switchover IN SHARE MODE"));
    let args = ["--go", "--no-back", "--ignore-roles", "--deadline", LATE];
    let program = case.tool.program("switchover").args(args);
    let mut verb = must(program.spawn_logged(case.log_file("superuser")));
    wait_for_lock(case, &mut verb, "INSERT INTO pgapace.switchover%");
    let _superuser = must(Client::connect(administrator, NoTls));
    must(blocker.batch_execute("ROLLBACK"));
    let said = ["superusers have sessions in the publisher's database", "Everything was undone"];
    must(expect_exit(&mut verb, 4, &said));
}

/// The plan checks that the role may open the new side at the end, and names subscriptions that write on the old
/// side.
#[test]
fn a_plan_names_what_would_stop_the_last_steps() {
    let mut case = two_way_case(18, 18);
    let database = case.publisher.name.clone();
    let applier = format!("applier_{database}");
    case.subscriber.change_setting_privileges(&format!(
        "CREATE ROLE {applier} LOGIN; GRANT CREATE ON DATABASE {database} TO {applier}; \
         GRANT SET ON PARAMETER session_replication_role TO {applier}; \
         GRANT ALL ON ALL TABLES IN SCHEMA public TO {applier}; \
         GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {applier}; \
         ALTER DATABASE {database} SET default_transaction_read_only = on"
    ));
    case.tool.subscriber = format!("{} user={applier}", case.tool.subscriber);
    let _slots = Slots(&case);
    case.publisher.sql(
        "CREATE SUBSCRIPTION upstream CONNECTION 'dbname=postgres' PUBLICATION none \
           WITH (connect = false, slot_name = NONE)",
    );
    let process = case.start();
    let grant = format!("ALTER ROLE \"{applier}\" REPLICATION;");
    switchover(&case.tool, &["--plan"]).expect(
        3,
        &["may not replicate from the subscriber", &format!("{grant} or pass --no-back")],
    );
    let plan = |tool: &Tool| switchover(tool, &["--plan", "--no-back", "--ignore-roles"]);
    // A superuser owns the database. The role needs the database, not all privileges of the superuser.
    let become_owner = format!("ALTER DATABASE {database} OWNER TO {applier};");
    let planned = plan(&case.tool);
    planned.expect(3, &[&become_owner, "RESET default_transaction_read_only"]);
    assert!(!planned.log.contains("GRANT postgres"), "{}", planned.log);
    case.subscriber.sql(&format!("SET default_transaction_read_only = off; {become_owner}"));
    plan(&case.tool).expect(0, &[]);
    let publisher = format!("{} target_session_attrs=read-write", case.tool.publisher);
    plan(&Tool { publisher, ..case.tool.clone() }).expect(3, &["target_session_attrs=read-write"]);
    case.stop(process);
}

/// An administrator switches over what another role applies: the plan looks as that role.
#[test]
fn a_plan_looks_as_the_roles_of_the_process_that_applies() {
    let mut case = two_way_case(18, 18);
    let database = case.publisher.name.clone();
    let (reader, writer) = (format!("reader_{database}"), format!("writer_{database}"));
    case.publisher.sql(&format!(
        "CREATE ROLE {reader} LOGIN REPLICATION; GRANT SELECT ON orders, orders_id_seq TO {reader}"
    ));
    let may_apply = |role: &str| {
        format!(
            "GRANT CREATE ON DATABASE {database} TO {role}; \
             GRANT SET ON PARAMETER session_replication_role TO {role}; \
             GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; \
             GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}; \
             GRANT EXECUTE ON FUNCTION pg_replication_origin_create(text), \
               pg_replication_origin_drop(text), pg_replication_origin_oid(text), \
               pg_replication_origin_session_setup(text), pg_replication_origin_session_reset(), \
               pg_replication_origin_xact_setup(pg_lsn, timestamptz), \
               pg_replication_origin_xact_reset() TO {role}"
        )
    };
    case.subscriber
        .change_setting_privileges(&format!("CREATE ROLE {writer} LOGIN; {}", may_apply(&writer)));
    let administrator = case.tool.clone();
    case.tool.publisher = format!("{} user={reader}", administrator.publisher);
    case.tool.subscriber = format!("{} user={writer}", administrator.subscriber);
    let _slots = Slots(&case);
    let process = case.start();
    let replication = format!("ALTER ROLE \"{writer}\" REPLICATION;");
    let set = format!("role {reader} may not set session_replication_role");
    switchover(&administrator, &["--plan", "--ignore-roles"])
        .expect(3, &[&replication, &set, "(old side)"]);
    switchover(&administrator, &["--plan", "--no-back", "--ignore-roles"]).expect(0, &[]);
    case.subscriber.sql(&replication);
    case.publisher.change_setting_privileges(&may_apply(&reader));
    switchover(&administrator, &["--plan", "--ignore-roles"]).expect(0, &[]);
    let done = switchover(&administrator, &["--go", "--ignore-roles"]);
    done.expect(0, &[]);
    assert!(done.stdout.contains("is applied (backend"), "{}\n{}", done.stdout, process.log());
    case.stop(process);
}

/// A switchover that was killed is undone, or ended, before its subscription is forgotten.
#[test]
fn a_switchover_that_is_not_finished_is_not_forgotten() {
    let case = breakable_case(18, 18);
    let _slots = Slots(&case);
    let process = case.start();
    let mut held = Held::start(&case, "dropped", &[]);
    must(held.process.kill9());
    held.go_on();
    case.stop(process);
    let step = "SELECT count(*) FROM pgapace.switchover WHERE step = 'stopping'";
    must(wait_until(PATIENCE, "the step", || {
        Ok(value(case.subscriber.cluster, &case.publisher.name, step) == "1")
    }));
    case.tool.finish("drop", &[]).expect(3, &["is not finished", "--abort"]);
    when_free(&case, &["--abort"]).expect(0, &[]);
    case.tool.finish("drop", &[]).expect(0, &[]);
}
