//! The context and the hint of errors when changes are applied.

use crate::support::{Case, Finished, expect_exit, must, on_versions, one_or_all};

pub(super) const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

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

/// Nobody needs its values any more, but the stream has some until the publisher drops the column.
#[test]
fn a_column_that_the_subscriber_dropped_first_is_added_again_for_a_while() {
    on_versions(&VERSIONS, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int, w text)");
        case.publisher.sql("INSERT INTO t VALUES (1, 1, 'w')");
        case.run_until_current();
        case.subscriber.sql("ALTER TABLE t DROP w");
        let named =
            ["lacks published columns: w", "add them again until the publisher has dropped them"];
        stops(&case, 6, "INSERT INTO t VALUES (2, 1, 'w')", &named);
        case.publisher.sql("ALTER TABLE t DROP w; INSERT INTO t VALUES (3, 1)");
        case.run().expect(6, &named);
        case.subscriber.sql("ALTER TABLE t ADD w text");
        case.run_until_current();
        case.subscriber.sql("ALTER TABLE t DROP w");
        case.publisher.sql("UPDATE t SET v = 2");
        case.run_until_current();
        case.expect_equal(&["t"]);
        let stale = "SELECT count(*) FROM pgapace.relation WHERE stale_lsn IS NOT NULL";
        assert_eq!(case.subscriber.value(stale), "0");
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

/// pgapace's own statements notice by the same SQLSTATE that rows of its state are gone.
#[test]
fn null_values_are_told_from_rows_of_the_state() {
    on_versions(one_or_all(&VERSIONS), |case| {
        case.publisher
            .sql("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, NULL)");
        case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL)");
        case.publish("FOR TABLE t");
        let run = |policy: &str, said: &str| {
            let run = case.tool.finish("run", &["--until", "current", "--if-not-empty", policy]);
            let error = run.log.split("pgapace: error").nth(1);
            let error = error.unwrap_or_else(|| panic!("it must fail: {}", run.log));
            assert!(error.contains(said) && !error.contains("were deleted"), "{}", run.log);
        };
        run("refuse", "violates not-null constraint");
        case.tool.finish("drop", &[]).expect(0, &[]);
        case.subscriber.sql("INSERT INTO t VALUES (1, 1)");
        run("rebase", "violates not-null constraint");
        case.publisher.sql("UPDATE t SET v = 2");
        let rebase = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.subscriber.sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS \
               $$ BEGIN RAISE 'not at COMMIT' USING errcode = '23502'; END $$; \
             CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED \
               FOR EACH ROW EXECUTE FUNCTION refuse(); ALTER TABLE t ENABLE ALWAYS TRIGGER refuse",
        );
        case.publisher.sql("INSERT INTO t VALUES (2, 2)");
        run("refuse", "not at COMMIT");
        case.subscriber.sql("DROP TRIGGER refuse ON t");
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

#[test]
fn a_damaged_schema_pgapace_is_named_with_the_way_out() {
    on_versions(one_or_all(&VERSIONS), |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let anew = "DROP SCHEMA pgapace CASCADE";
        let drop = format!("SELECT pg_drop_replication_slot('{}')", case.tool.name);

        // All but the version is there.
        case.publisher.sql("INSERT INTO t VALUES (0)");
        case.run_until_current();
        let version = case.subscriber.value("SELECT version FROM pgapace.schema_version");
        case.subscriber.sql("DELETE FROM pgapace.schema_version");
        let insert = format!("INSERT INTO pgapace.schema_version VALUES ({version})");
        let named = ["is damaged: pgapace.schema_version has no row", &insert, anew];
        case.run().expect(5, &named);
        for verb in ["status", "drop"] {
            case.tool.finish(verb, &[]).expect(5, &named);
        }
        let checked = case.tool.finish("check", &[]);
        assert!(checked.stdout.contains(named[0]), "{}", checked.stdout);
        for wrong in ["already exists", "not empty"] {
            assert!(!checked.stdout.contains(wrong), "{}", checked.stdout);
        }
        case.subscriber.sql(&insert);
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run_until_current();

        // A table is dropped while it runs.
        let mut run = case.start();
        case.subscriber.sql("DROP TABLE pgapace.stat_table CASCADE");
        case.publisher.sql("INSERT INTO t VALUES (2)");
        must(expect_exit(&mut run, 5, &["is damaged", "pgapace.stat_table", anew, &drop]));
        let checked = case.tool.finish("check", &[]);
        let missing = "is damaged: table pgapace.stat_table is missing";
        assert!(checked.stdout.contains(missing), "{}", checked.stdout);
        case.publisher.sql(&drop);
        case.subscriber.sql(anew);
        let rebase = ["--until", "current", "--if-not-empty", "rebase"];
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["t"]);

        // All of it.
        let mut run = case.start();
        case.subscriber.sql(anew);
        case.publisher.sql("INSERT INTO t VALUES (3)");
        must(expect_exit(&mut run, 5, &["schema pgapace was dropped", &drop, "keeps WAL"]));
        assert!(!run.log().contains("pgapace skip"), "{}", run.log());
        assert_eq!(
            case.subscriber.value("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'"),
            "0"
        );
        case.publisher.sql(&drop);
        case.tool.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["t"]);
    });
}
