//! Bad input gets one clear message before anything is compared.

use super::{BOTH_WAYS, refused};
use crate::support::{Case, must, on_versions};

fn replicated(case: &Case) {
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
}

#[test]
fn names_and_options() {
    on_versions(&[(15, 18)], |case| {
        refused(&case, 3, &[], &["the subscriber has no subscription"]);
        replicated(&case);
        refused(
            &case,
            6,
            &["--table", "nothing"],
            &["the publications have no table public.nothing"],
        );
        refused(&case, 3, &["--except-column", "v"], &["does not name a table and a column"]);
        refused(&case, 3, &["--except-column", "t.w"], &["no published column public.t.w"]);
        refused(&case, 2, &["--sample", "5"], &["is not a share"]);
        refused(&case, 2, &["--sample", "0%"], &["is not a share"]);
        refused(&case, 2, &["--max-rate", "fast"], &["is not a rate"]);
        refused(&case, 3, &["--where", "nothing = 1"], &["42703", "--where"]);
        refused(&case, 3, &["--where", "true) OR (true"], &["42601"]);
        refused(&case, 3, &["--where", "true THEN true WHEN true"], &["42601"]);
        refused(&case, 3, &["--where", "true; DROP TABLE t"], &["42601"]);
        refused(&case, 3, &["--resume"], &["was not one of table public.t"]);
        let mut wrong = case.tool.clone();
        wrong.publisher = wrong.subscriber.clone();
        let named = ["another database system", "HINT:  Check --publisher"];
        wrong.finish("verify", &[]).expect(10, &named);
    });
}

#[test]
fn tables_that_cannot_be_compared() {
    on_versions(&BOTH_WAYS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE odd (id int PRIMARY KEY, v text); CREATE TABLE alone (v point)",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.subscriber.sql(
            "CREATE TYPE shape AS (a int, b int); ALTER TABLE odd ALTER v TYPE shape USING NULL; \
             ALTER TABLE alone ALTER v TYPE shape USING NULL",
        );
        refused(&case, 6, &[], &["table public.alone has no comparable columns", "public.shape"]);
        let odd = refused(
            &case,
            6,
            &["--table", "odd"],
            &["columns could not be compared: public.odd.v"],
        );
        assert!(odd.stdout.contains("v was not compared"), "{}", odd.stdout);
        refused(&case, 0, &["--table", "odd", "--except-column", "odd.v"], &[]);
        case.publisher.sql("CREATE TABLE fresh (id int PRIMARY KEY)");
        refused(&case, 6, &["--table", "fresh"], &["not part of the subscription yet", "refresh"]);
        case.subscriber.sql(
            "UPDATE pgapace.relation SET state = 'init', sync_lsn = NULL WHERE table_name = 't'",
        );
        refused(&case, 6, &["--table", "t"], &["table public.t is in state init"]);
    });
}

/// A part of the changes, and a transaction that keeps a slot from being made.
#[test]
fn partial_publications_and_slots_that_must_wait() {
    on_versions(&[(18, 15)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publish("FOR TABLE t WITH (publish = 'insert, update')");
        case.run_until_current();
        let named =
            ["publication pub does not publish delete of table public.t", "ALTER PUBLICATION"];
        refused(&case, 6, &[], &named);
        case.publisher.sql("ALTER PUBLICATION pub SET (publish = 'insert, update, delete')");
        case.tool
            .finish("run", &["--until", "current", "--on-missed-changes", "ignore"])
            .expect(0, &[]);
        let mut writer = case.publisher.connect();
        must(writer.batch_execute(
            "SET application_name = 'long one'; BEGIN; INSERT INTO t VALUES (1, 'open')",
        ));
        let pid: i32 = must(writer.query_one("SELECT pg_backend_pid()", &[])).get(0);
        let process = format!("of process {pid} (user ");
        let named = [
            "a new slot on the publisher waits for transaction",
            &process,
            "application long one, since 20",
        ];
        let asked = || -> i64 {
            must(case.subscriber.value("SELECT last_value FROM pgapace.barrier_id_seq").parse())
        };
        let before = asked();
        refused(&case, 8, &["--barrier-timeout", "1", "--jobs", "16"], &named);
        // The first request may be older than the run that fulfils it.
        assert!(asked() - before <= 2, "each session pair waited");
        must(writer.batch_execute("COMMIT"));
        refused(&case, 0, &["--on-missed-changes", "ignore"], &[]);
    });
}

#[test]
fn privileges_and_policies() {
    on_versions(&[(15, 18)], |mut case| {
        replicated(&case);
        let (publisher, subscriber) = (case.tool.publisher.clone(), case.tool.subscriber.clone());
        let role = format!("reader_{}", case.publisher.name);
        let as_role = |conninfo: &str| format!("{conninfo} user={role}");
        case.both(&format!("CREATE ROLE {role} LOGIN REPLICATION"));
        case.subscriber.change_setting_privileges(&format!(
            "GRANT ALL ON SCHEMA pgapace TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA pgapace TO {role}; \
             GRANT ALL ON ALL SEQUENCES IN SCHEMA pgapace TO {role}; GRANT SET ON PARAMETER session_replication_role TO {role}"
        ));
        case.tool.publisher = as_role(&publisher);
        refused(&case, 4, &[], &["42501", "On the publisher: GRANT SELECT ON \"public\".\"t\" TO"]);
        case.tool.publisher = publisher;
        case.tool.subscriber = as_role(&subscriber);
        refused(
            &case,
            5,
            &[],
            &["42501", "On the subscriber: GRANT SELECT ON \"public\".\"t\" TO"],
        );
        case.subscriber.sql(&format!("GRANT SELECT ON t TO {role}"));
        refused(&case, 0, &[], &[]);
        case.subscriber.sql("ALTER TABLE t ENABLE ROW LEVEL SECURITY");
        refused(&case, 6, &[], &["row-level security is active"]);
        for database in [&case.publisher, &case.subscriber] {
            database.change_setting_privileges(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
        }
    });
}

/// Privileges on columns, and on a partitioned table but not on its partitions, are enough.
#[test]
fn the_privileges_that_are_enough() {
    on_versions(&[(15, 18), (18, 15)], |mut case| {
        case.both(
            "CREATE TABLE t (id int, v text, secret text); \
             CREATE TABLE root (k text PRIMARY KEY, v text) PARTITION BY HASH (k); \
             CREATE TABLE p0 PARTITION OF root FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
             CREATE TABLE p1 PARTITION OF root FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series(1, 20000) i; \
             INSERT INTO root SELECT 'k' || i, repeat('x', 1000) FROM generate_series(1, 10000) i; \
             CREATE PUBLICATION rooted FOR TABLE root WITH (publish_via_partition_root)",
        );
        case.publish("FOR TABLE t (id, v)");
        case.tool.publications = "pub,rooted".to_owned();
        case.run_until_current();
        let role = format!("columns_{}", case.publisher.name);
        case.both(&format!(
            "CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT (id, v) ON t TO {role}; GRANT SELECT ON root TO {role}"
        ));
        let publisher = case.tool.publisher.clone();
        case.tool.publisher = format!("{publisher} user={role}");
        super::expect_equal(&case, &["root", "t"], &[]);
        case.subscriber.sql("DELETE FROM t WHERE id = 7; UPDATE root SET v = 'y' WHERE k = 'k77'");
        super::verify(&case, 18, &[]);
        assert_eq!(super::differences(&case).len(), 2);
        // The owner reads the tables in several pieces.
        case.tool.publisher = publisher;
        let result = super::verify(&case, 18, &["--max-rate", "1GB"]);
        assert_eq!(super::differences(&case).len(), 2);
        let rows = |table: usize| result["tables"][table]["rows"].as_u64();
        assert_eq!((rows(0), rows(1)), (Some(10_000), Some(20_000)));
        case.both(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    });
}

/// A verb that has to run the subscription itself does not do so with the settings of another stream.
#[test]
fn a_stopped_subscription_keeps_its_settings() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)");
    case.publish("FOR TABLE t");
    case.publisher.sql("CREATE PUBLICATION other FOR TABLE u");
    case.tool.publications = "pub,other".to_owned();
    let args = vec!["--origin".to_owned(), "none".to_owned()];
    case.tool.args.clone_from(&args);
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (1); INSERT INTO u VALUES (1)");
    let state = "SELECT publications, sent_as FROM pgapace.subscription";
    let (before, rows) = (case.subscriber.rows(state), "SELECT count(*) FROM t");
    for (publications, args) in [("pub,other", &[][..]), ("pub", &args[..])] {
        case.tool.publications = publications.to_owned();
        case.tool.args = args.to_vec();
        let refused = case.tool.finish("verify", &[]);
        refused.expect(3, &["does not run now", "origin none", "Start pgapace run"]);
        assert_eq!(case.subscriber.rows(state), before);
        assert_eq!(case.subscriber.value(rows), "0");
    }
    // Their order does not matter.
    case.tool.publications = "other,pub".to_owned();
    case.tool.finish("verify", &[]).expect(0, &[]);
    assert_eq!(case.subscriber.value(rows), "1");
}

/// Waiting does not make a table ready where no process runs the subscription.
#[test]
fn tables_that_are_not_ready_while_no_process_runs() {
    let case = Case::new(15, 18);
    let tables = (0..12).map(|n| format!("CREATE TABLE t{n} (id int PRIMARY KEY);"));
    case.replicate(&tables.collect::<String>());
    case.subscriber.sql(
        "UPDATE pgapace.subscription SET phase = 'copying'; DELETE FROM pgapace.relation WHERE table_name <> 't0'; \
         UPDATE pgapace.relation SET state = 'init', sync_lsn = NULL",
    );
    let start = ["No process runs the subscription", "pgapace run"];
    let said = refused(&case, 6, &[], &[&start[..], &["12 tables", "and 2 more"]].concat());
    assert!(!said.log.contains("pgapace refresh"), "{}", said.log);
    assert_eq!(said.log.matches(start[0]).count(), 10, "{}", said.log);
    refused(&case, 6, &["--table", "t0"], &start);
    case.subscriber.sql("UPDATE pgapace.subscription SET rebasing = true");
    for table in ["t0", "t1"] {
        let rebase = ["A rebase was interrupted", "pgapace rebase again"];
        refused(&case, 6, &["--table", table], &rebase);
    }
}

#[test]
fn a_condition_that_fails_for_a_row_is_named() {
    on_versions(&BOTH_WAYS, |case| {
        replicated(&case);
        case.publisher.sql("INSERT INTO t VALUES (1, 'p')");
        refused(
            &case,
            4,
            &["--where", "1 / (id - id) = 1"],
            &["SQLSTATE 22012", "--where may fail"],
        );
    });
}
