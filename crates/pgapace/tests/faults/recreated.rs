//! The publisher's database is dropped, and created again under the same name. The server goes on: its system identifier,
//! timeline and WAL show nothing.

use crate::support::{Case, Database, on_versions};

const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];
const TABLES: &str = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int)";

/// Only the subscriber has the rows of the day.
#[test]
fn a_database_that_was_created_again_is_refused() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 'of the day'); INSERT INTO u VALUES (1)");
        case.run_until_current();
        let (cluster, name) = (case.publisher.cluster, case.publisher.name.clone());
        let dropped = cluster.sql("postgres", &format!("DROP DATABASE {name} WITH (FORCE)"));
        assert!(dropped.is_ok(), "{dropped:?}");
        case.publisher = Database::create(cluster, &name, "");
        case.publisher.sql(&format!("{TABLES}; INSERT INTO t VALUES (2, 'of a dump')"));
        case.publish("FOR ALL TABLES");
        expect_refused(&case, "rebase", 10);
        expect_refused(&case, "check", 6);
        expect_refused(&case, "status", 0);
        // A start records nothing of the new tables: the next one finds the same.
        expect_refused(&case, "run", 10);
        expect_refused(&case, "run", 10);
        expect_refused(&case, "rebase", 10);
        expect_refused(&case, "check", 6);
        case.tool.finish("drop", &[]).expect(0, &[]);
        let compare = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &compare).expect(0, &["table_rebased"]);
        case.expect_equal(&["t", "u"]);
    });
}

/// The database is created again as a copy of another one, with the OIDs of all its tables. Nor does a slot help that
/// somebody has created there.
#[test]
fn a_database_that_was_copied_from_a_template_is_refused() {
    on_versions(&VERSIONS, |mut case| {
        case.replicate(TABLES);
        let (cluster, name) = (case.publisher.cluster, case.publisher.name.clone());
        let server = |sql: &str| {
            let done = cluster.sql("postgres", sql);
            assert!(done.is_ok(), "{sql}: {done:?}");
        };
        let saved = format!("{name}_saved");
        server(&format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        ));
        drop(Database::create(cluster, &saved, &format!("TEMPLATE {name}")));
        let of_the_day = cluster.sql(&name, "INSERT INTO t VALUES (1, 'of the day')");
        assert!(of_the_day.is_ok(), "{of_the_day:?}");
        case.run_until_current();
        server(&format!("DROP DATABASE {name} WITH (FORCE)"));
        case.publisher = Database::create(cluster, &name, &format!("TEMPLATE {saved}"));
        server(&format!("DROP DATABASE {saved} WITH (FORCE)"));
        for (verb, code) in [("rebase", 10), ("check", 6), ("run", 10), ("run", 10), ("rebase", 10)]
        {
            expect_refused(&case, verb, code);
        }
        let slot = &case.tool.name;
        case.publisher
            .sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
        for (verb, code) in [("run", 10), ("check", 6), ("rebase", 10)] {
            expect_refused(&case, verb, code);
        }
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{slot}')"));
        case.tool.finish("drop", &[]).expect(0, &[]);
        let compare = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &compare).expect(0, &["table_rebased"]);
        case.expect_equal(&["t", "u"]);
    });
}

#[track_caller]
fn expect_refused(case: &Case, verb: &str, code: i32) {
    let finished = case.tool.finish(verb, &[]);
    let said = format!("{}{}", finished.stdout, finished.log);
    assert_eq!(finished.code, Some(code), "{said}");
    for text in
        ["was dropped and created again, or restored", "pgapace drop", "--if-not-empty rebase"]
    {
        assert!(said.contains(text), "{verb} does not say {text:?}: {said}");
    }
    for text in ["Empty it", "pgapace rebase"] {
        assert!(!said.contains(text), "{verb} says {text:?}: {said}");
    }
    assert_eq!(case.subscriber.value("SELECT string_agg(v, ' ') FROM t"), "of the day");
}

/// A table that is there as it was shows the same database.
#[test]
fn one_table_that_stays_shows_the_same_database() {
    on_versions(&VERSIONS, |case| {
        case.replicate(TABLES);
        case.publisher.sql("INSERT INTO t VALUES (1, 'x'); INSERT INTO u VALUES (1)");
        case.run_until_current();
        case.publisher.sql(&format!(
            "SELECT pg_drop_replication_slot('{}'); DROP TABLE t; \
             CREATE TABLE t (id int PRIMARY KEY, v text)",
            case.tool.name
        ));
        case.run().expect(7, &["table_stale", "pgapace rebase"]);
        // The table waits for a copy, but a rebase compares it.
        let check = case.tool.finish("check", &[]);
        assert!(check.stdout.contains("pgapace rebase"), "{}", check.stdout);
        assert!(!check.stdout.contains("Empty it"), "{}", check.stdout);
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        case.expect_equal(&["t", "u"]);
    });
}
