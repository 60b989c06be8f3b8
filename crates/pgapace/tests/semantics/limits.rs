//! Large sizes and numbers, and transactions that fail at COMMIT.

use testbed::{Result, TableName};

use crate::support::small_disk::SmallDisk;
use crate::support::{
    DB, PATIENCE, Site, VERSIONS, expect_exit, must, on_versions, one_or_all, wait_for_event,
    wait_while_running,
};

/// Values larger than the memory limit, and a transaction that is applied in parts.
#[test]
fn large_values_and_large_transactions_are_applied() {
    on_versions(&[(15, 18)], |case| {
        let mut case = case;
        case.tool.args = vec!["--memory-limit".to_owned(), "16".to_owned()];
        case.both(
            "CREATE TABLE big (id int PRIMARY KEY, t text, b bytea); \
             CREATE TABLE f (v text, n int); ALTER TABLE f REPLICA IDENTITY FULL; \
             CREATE TABLE many (id int PRIMARY KEY, v text)",
        );
        case.publish("FOR ALL TABLES");
        let big = "repeat('0123456789', 1700000)";
        case.publisher.sql(&format!(
            "INSERT INTO big VALUES (1, {big}, decode(repeat('00ff', 500000), 'hex'))"
        ));
        case.run_until_current();
        case.publisher.sql(&format!(
            "INSERT INTO big VALUES (2, {big} || 'x', NULL); UPDATE big SET b = 'y' WHERE id = 2; \
             UPDATE big SET t = t || 'z' WHERE id = 1; \
             INSERT INTO f VALUES ({big}, 1), ('small', 2); UPDATE f SET n = 3 WHERE n = 1; DELETE FROM f WHERE n = 2"
        ));
        case.run_until_current();
        case.expect_equal(&["big", "f"]);

        // A transaction in several parts, of which the last fails: nothing of it remains.
        case.subscriber.sql("INSERT INTO many VALUES (-1, 'in the way')");
        case.publisher.sql(
            "BEGIN; INSERT INTO many SELECT g, 'v' || g FROM generate_series(1, 20000) g; \
             UPDATE many SET v = v || '!' WHERE id % 3 = 0; DELETE FROM many WHERE id % 5 = 0; \
             INSERT INTO many VALUES (-1, 'collides'); COMMIT",
        );
        case.run().expect(9, &["23505", "public.many", "(id)=(-1)"]);
        assert_eq!(case.subscriber.rows("SELECT id FROM many"), ["-1"]);
        case.subscriber.sql("TRUNCATE many");
        case.run_until_current();
        case.expect_equal(&["many"]);
    });
}

/// The values of a set are larger than work_mem and than the temporary files that the subscriber allows. Rows need none.
#[test]
fn a_set_that_needs_temporary_files_is_applied_by_rows() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.tool.args = vec!["--memory-limit=16".to_owned(), "--workers=1".to_owned()];
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v int, pad text)");
        case.publisher
            .sql("INSERT INTO t SELECT g, 0, repeat('x', 100) FROM generate_series(1, 40000) g");
        case.run_until_current();
        let name = &case.subscriber.name;
        case.subscriber.sql(&format!(
            "ALTER DATABASE {name} SET temp_file_limit = '1MB'; ALTER DATABASE {name} SET work_mem = '64kB'"
        ));
        let mut process = case.start();
        let retries =
            "SELECT coalesce(sum(retries), 0) FROM pgapace.stat_retry WHERE sqlstate = '53400'";
        let retries = || case.subscriber.value(retries).parse::<u32>().expect("a number");
        // A transaction, and one of several parts, which are rolled back one by one.
        for (changes, least) in [("id <= 6000", 1), ("true", 3)] {
            case.publisher
                .sql(&format!("UPDATE t SET pad = pad || repeat('y', 400) WHERE {changes}"));
            case.wait_until_applied(&mut process);
            must(wait_while_running(&mut process, "the retries", PATIENCE, || {
                Ok(retries() >= least)
            }));
        }
        case.stop(process);
        case.expect_equal(&["t"]);
        // A trigger needs one in any case.
        case.subscriber.sql(
            "CREATE FUNCTION spill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN \
               PERFORM count(*) FROM generate_series(1, 100000); RETURN NEW; END'; \
             CREATE TRIGGER spill BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION spill(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER spill",
        );
        case.publisher.sql("INSERT INTO t VALUES (0, 0, 'spills')");
        case.run().expect(
            9,
            &["53400", "public.t", "HINT:  On the subscriber: ALTER ROLE … SET temp_file_limit"],
        );
        case.subscriber.sql(&format!("ALTER DATABASE {name} RESET temp_file_limit"));
        case.run_until_current();
        case.expect_equal(&["t"]);
    });
}

/// Sets need temporary files, and their disk is full. Rows need none. A trigger that needs one waits for more room.
#[test]
fn a_set_that_fills_the_disk_of_temporary_files_is_applied_by_rows() -> Result<()> {
    for &major in one_or_all(&[18, 15]) {
        let site = Site::new(major, major)?;
        let data = site.subscriber.query_one_text(DB, "SHOW data_directory")?;
        let Some(disk) = SmallDisk::mount(&data, 1) else { return Ok(()) };
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v int, pad text)")?;
        site.publisher.sql(
            DB,
            "INSERT INTO t SELECT g, 0, repeat('x', 100) FROM generate_series(1, 20000) g",
        )?;
        let place = format!("CREATE TABLESPACE tight LOCATION '{}'", disk.path().display());
        site.subscriber.sql(DB, &place)?;
        site.subscriber.sql(
            DB,
            &format!(
                "ALTER DATABASE {DB} SET temp_tablespaces = 'tight'; ALTER DATABASE {DB} SET work_mem = '64kB'"
            ),
        )?;
        let program = site.program().args(["--memory-limit=16", "--workers=1"]);
        let mut run = site.spawn_streaming(&program)?;
        site.publisher.sql(DB, "UPDATE t SET v = 1, pad = pad || 'y'")?;
        site.wait_until_applied(&mut run)?;
        let by_rows =
            "SELECT coalesce(sum(retries), 0) > 0 FROM pgapace.stat_retry WHERE sqlstate = '53100'";
        wait_while_running(&mut run, "the retry to be counted", PATIENCE, || {
            Ok(site.subscriber.query_one_text(DB, by_rows)? == "t")
        })?;
        assert!(!run.log().contains("run_failed"), "{}", run.log());
        site.expect_equal(&[TableName::from("t")])?;

        site.subscriber.sql(
            DB,
            "CREATE FUNCTION spill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN \
               PERFORM count(*) FROM generate_series(1, 1000000); RETURN NEW; END'; \
             CREATE TRIGGER spill BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION spill(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER spill",
        )?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (0, 0, 'spills')")?;
        wait_for_event(&mut run, "run_failed", PATIENCE)?;
        for said in ["53100", "public.t", "Make room where temp_tablespaces has them"] {
            assert!(run.log().contains(said), "{said}:\n{}", run.log());
        }
        disk.grow();
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("t")])?;
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        // Drop this before the file system is unmounted.
        site.subscriber.sql(DB, &format!("ALTER DATABASE {DB} RESET temp_tablespaces"))?;
        site.subscriber.sql(DB, "DROP TABLESPACE tight")?;
    }
    Ok(())
}

/// More statement shapes than a session keeps prepared: every combination of NULLs is a separate
/// shape.
#[test]
fn more_statement_shapes_than_prepared_statements() {
    on_versions(&[(18, 18)], |case| {
        let columns: Vec<String> = (0..12).map(|c| format!("c{c} int")).collect();
        case.replicate(&format!(
            "CREATE TABLE f ({}, n int); ALTER TABLE f REPLICA IDENTITY FULL",
            columns.join(", ")
        ));
        let values: Vec<String> =
            (0..12).map(|c| format!("CASE WHEN g >> {c} & 1 = 1 THEN g END")).collect();
        case.publisher.sql(&format!(
            "INSERT INTO f SELECT {}, g FROM generate_series(0, 4095) g; \
             UPDATE f SET n = -n; DELETE FROM f WHERE abs(n) % 3 = 0; \
             UPDATE f SET c0 = NULL WHERE abs(n) % 7 = 0",
            values.join(", ")
        ));
        case.run_until_current();
        case.expect_equal(&["f"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
    });
}

/// An error at COMMIT fails the transaction and is reported.
#[test]
fn an_error_at_commit_fails_the_transaction() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v int); \
             CREATE TABLE p (id int PRIMARY KEY); \
             CREATE TABLE c (id int PRIMARY KEY, p int)",
        );
        case.subscriber.sql(
            "CREATE FUNCTION check_sum() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
               IF (SELECT sum(v) FROM public.t) <> 0 THEN RAISE 'not balanced' USING ERRCODE = 'check_violation'; END IF; \
               RETURN NULL; END $$; \
             CREATE CONSTRAINT TRIGGER balanced AFTER INSERT OR UPDATE ON t DEFERRABLE INITIALLY DEFERRED \
               FOR EACH ROW EXECUTE FUNCTION check_sum(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER balanced; \
             ALTER TABLE c ADD FOREIGN KEY (p) REFERENCES p DEFERRABLE INITIALLY DEFERRED; \
             DO $$ DECLARE r record; BEGIN \
               FOR r IN SELECT tgname, tgrelid::regclass AS rel FROM pg_trigger WHERE tgisinternal LOOP \
                 EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', r.rel, r.tgname); END LOOP; END $$",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql("INSERT INTO t VALUES (1, 5), (2, -5); BEGIN; INSERT INTO c VALUES (1, 1); INSERT INTO p VALUES (1); COMMIT");
        case.run_until_current();
        case.expect_equal(&["t", "c", "p"]);
        case.publisher.sql("INSERT INTO t VALUES (3, 1)");
        case.publisher.sql("INSERT INTO t VALUES (4, -1)");
        case.run().expect(9, &["23514", "not balanced", "commit LSN"]);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "2");
        case.subscriber.sql("ALTER TABLE t DISABLE TRIGGER balanced");
        case.run_until_current();
        case.publisher.sql("INSERT INTO c VALUES (2, 404)");
        case.run().expect(9, &["23503", "commit LSN"]);
        case.subscriber.sql("ALTER TABLE c DISABLE TRIGGER ALL");
        case.run_until_current();
        case.expect_equal(&["t", "c", "p"]);
    });
}
