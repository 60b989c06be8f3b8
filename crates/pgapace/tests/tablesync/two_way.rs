//! Two subscriptions in opposite directions, both with `--origin none`: what pgapace itself writes to a
//! table (TRUNCATE, COPY, repair, rebase) is not sent back.

use testbed::program::Process;
use testbed::wait_until;

use crate::support::{Case, PATIENCE, Tool, must, on_versions};
use crate::tablesync::while_streaming::{holder, wait_for, wait_for_a_waiter};

/// Rows and tables that the way back changes on the publisher appear in `echo`.
const ECHO: &str = "\
CREATE TABLE echo (made text);
CREATE FUNCTION echoed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO public.echo VALUES (TG_OP || ' ' || TG_TABLE_NAME);
  RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER echo AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION echoed();
CREATE TRIGGER echo AFTER INSERT OR UPDATE OR DELETE ON u FOR EACH ROW EXECUTE FUNCTION echoed();
CREATE TRIGGER emptied AFTER TRUNCATE ON t FOR EACH STATEMENT EXECUTE FUNCTION echoed();
CREATE TRIGGER emptied AFTER TRUNCATE ON u FOR EACH STATEMENT EXECUTE FUNCTION echoed();
ALTER TABLE t ENABLE REPLICA TRIGGER echo, ENABLE REPLICA TRIGGER emptied;
ALTER TABLE u ENABLE REPLICA TRIGGER echo, ENABLE REPLICA TRIGGER emptied;";

/// The way back, which must never stop and never apply anything.
struct WayBack<'c> {
    case: &'c Case,
    tool: Tool,
    process: Process,
}

impl<'c> WayBack<'c> {
    fn start(case: &'c Case) -> Self {
        let (from, to) = (case.subscriber.conninfo(), case.publisher.conninfo());
        let mut tool = Tool::new(from, to, &format!("{}_back", case.tool.name));
        tool.publications = "back".to_owned();
        tool.args = ["--origin", "none", "--copy-data=false"].map(str::to_owned).to_vec();
        let mut process = tool.start(case.log_file("back"));
        must(wait_until(PATIENCE, "the way back to stream", || {
            assert!(process.is_running(), "the way back ended:\n{}", process.log());
            Ok(process.events("streaming") == 1)
        }));
        Self { case, tool, process }
    }

    /// Waits until it has received all that the subscriber has committed.
    #[track_caller]
    fn expect_nothing_sent(&mut self, after: &str) {
        let end = self.case.subscriber.value("SELECT pg_current_wal_lsn()");
        let sql = format!(
            "SELECT count(*) FROM pg_stat_replication \
             WHERE application_name = '{}' AND replay_lsn >= '{end}'",
            self.tool.name
        );
        must(wait_until(PATIENCE, "the way back to catch up", || {
            assert!(self.process.is_running(), "{after}: it ended:\n{}", self.process.log());
            Ok(self.case.subscriber.value(&sql) == "1")
        }));
        let echo = self.case.publisher.rows("SELECT made FROM echo LIMIT 10");
        assert!(echo.is_empty(), "{after} was sent back: {echo:?}");
        assert_eq!(self.process.events("streaming"), 1, "{after}:\n{}", self.process.log());
    }
}

/// Waits for the copy of a table, while the publisher writes to it.
fn wait_for_copy(case: &Case, process: &mut Process, table: &str) {
    must(wait_until(PATIENCE, "the table to be copied", || {
        assert!(process.is_running(), "pgapace ended:\n{}", process.log());
        case.publisher.sql(&format!("INSERT INTO {table} SELECT max(id) + 1, 'new' FROM {table}"));
        Ok(case.subscriber.value(&format!(
            "SELECT count(*) FROM pgapace.relation WHERE table_name = '{table}' \
             AND sync_lsn IS NOT NULL AND requested IS NULL AND state = 'ready'"
        )) == "1")
    }));
    case.wait_until_applied(process);
    case.expect_equal(&[table]);
}

/// Makes rows of the subscriber different. These writes are tagged, so that the way back does not send them.
fn damage(case: &Case) {
    let origin = format!("damage_{}", case.tool.name);
    let mut session = case.subscriber.connect();
    must(session.batch_execute(&format!(
        "SELECT pg_replication_origin_create('{origin}'); \
         SELECT pg_replication_origin_session_setup('{origin}')"
    )));
    must(session.batch_execute(
        "UPDATE t SET v = 'damaged' WHERE id = 1; DELETE FROM t WHERE id = 2; \
         INSERT INTO t VALUES (-1, 'extra')",
    ));
    must(session.batch_execute(&format!(
        "SELECT pg_replication_origin_session_reset(); SELECT pg_replication_origin_drop('{origin}')"
    )));
}

#[test]
fn changes_by_pgapace_itself_are_not_sent_back() {
    on_versions(&[(16, 17), (18, 18)], |mut case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)",
        );
        case.publisher.sql(ECHO);
        case.publisher.sql("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 1000) i; INSERT INTO u SELECT * FROM t");
        case.publish("FOR TABLE t");
        case.subscriber.sql("CREATE PUBLICATION back FOR TABLE t, u");
        case.tool.args = ["--origin", "none"].map(str::to_owned).to_vec();
        let mut back = WayBack::start(&case);
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        back.expect_nothing_sent("the first copy");

        case.tool.finish("resync", &["t"]).expect(0, &["opposite_direction"]);
        wait_for_copy(&case, &mut process, "t");
        assert_eq!(process.events("opposite_direction"), 1);
        back.expect_nothing_sent("resync");

        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE u");
        case.tool.finish("refresh", &[]).expect(0, &[]);
        wait_for_copy(&case, &mut process, "u");
        back.expect_nothing_sent("the copy of an added table");

        // Killed while it empties or copies the table.
        let holds = holder(&case, "BEGIN; LOCK TABLE t IN ACCESS SHARE MODE");
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        wait_for_a_waiter(&case, &mut process, "relation");
        must(process.kill9());
        drop(holds);
        let mut process = case.start();
        wait_for_copy(&case, &mut process, "t");
        back.expect_nothing_sent("a copy that was interrupted");

        damage(&case);
        case.publisher.sql("UPDATE t SET v = 'newer' WHERE id = 3");
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &["--delete-extra"]).expect(0, &["opposite_direction"]);
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "u"]);
        back.expect_nothing_sent("repair");
        case.stop(process);

        damage(&case);
        let slot = format!("SELECT pg_drop_replication_slot('{}')", case.tool.name);
        case.publisher.sql(&slot);
        case.tool.finish("rebase", &[]).expect(0, &["opposite_direction"]);
        let mut process = case.start();
        case.wait_until_applied(&mut process);
        case.expect_equal(&["t", "u"]);
        back.expect_nothing_sent("rebase");

        // The other direction works all the time.
        case.subscriber.sql("INSERT INTO t VALUES (-5, 'back')");
        let sql = "SELECT count(*) FROM t WHERE id = -5";
        must(wait_until(
            PATIENCE,
            "a row of the way back",
            || Ok(case.publisher.value(sql) == "1"),
        ));
        let left = "SELECT count(*) = 0 FROM pg_replication_origin \
                    WHERE roname ~ '_(copy|repair)' AND roname ~ (SELECT '^pgapace_' || oid || '_' \
                      FROM pg_database WHERE datname = current_database())";
        if case.subscriber.value("SHOW track_commit_timestamp") == "off" {
            wait_for(&case, &mut process, "origins of copies to go", left);
        }
        case.stop(process);
        must(back.process.terminate());
        must(back.process.wait(PATIENCE));
        back.tool.finish("drop", &[]).expect(0, &[]);
    });
}

/// Without an origin, nothing is written.
#[test]
fn a_copy_fails_that_could_not_be_tagged() {
    on_versions(&[(18, 18)], |mut case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        // Another session has the origin of the first copy worker.
        let mut other = case.subscriber.connect();
        let name = case.subscriber.value(
            "SELECT 'pgapace_' || d.oid || '_' || s.id || '_copy0' FROM pgapace.subscription s, \
             pg_database d WHERE d.datname = current_database()",
        );
        must(other.batch_execute(&format!("SELECT pg_replication_origin_create('{name}')")));
        must(other.batch_execute(&format!("SELECT pg_replication_origin_session_setup('{name}')")));
        case.tool.args = ["--origin", "none"].map(str::to_owned).to_vec();
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.run_until_current();
        case.tool.finish("resync", &["t"]).expect(0, &[]);
        let mut process = case.start();
        must(wait_until(PATIENCE, "the refusal", || {
            Ok(process.log().contains("cannot be tagged with a replication origin"))
        }));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "1");
        drop(other);
        must(process.kill9());
    });
}

/// Each server has values of its own. A copy would set both sequences to the same ones.
#[test]
fn sequences_of_two_writers_are_left_alone() {
    on_versions(&[(16, 16), (18, 18)], |mut case| {
        for (side, start) in [(&case.publisher, 1), (&case.subscriber, 2)] {
            side.sql(&format!(
                "CREATE TABLE t (id int GENERATED BY DEFAULT AS IDENTITY (START {start} INCREMENT 2) PRIMARY KEY)"
            ));
        }
        case.publisher.sql("INSERT INTO t SELECT FROM generate_series(1, 9)");
        case.publish("FOR ALL TABLES");
        case.subscriber.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        case.tool.args = ["--origin", "none"].map(str::to_owned).to_vec();
        assert!(case.run_until_current().contains("sequences_left"));
        case.subscriber.sql("INSERT INTO t SELECT FROM generate_series(1, 20)");
        let (from, to) = (case.subscriber.conninfo(), case.publisher.conninfo());
        // The option counts, and so does the opposite direction.
        for origin in ["none", "any"] {
            let mut back =
                Tool::new(from.clone(), to.clone(), &format!("{}_{origin}", case.tool.name));
            back.args = ["--origin", origin, "--if-not-empty", "keep"].map(str::to_owned).to_vec();
            case.publisher.sql("DELETE FROM t");
            assert!(back.run_until_current().contains("sequences_left"), "{origin}");
            back.finish("drop", &[]).expect(0, &[]);
        }
        assert_eq!(case.publisher.value("INSERT INTO t DEFAULT VALUES RETURNING id"), "19");
        assert_eq!(case.subscriber.value("INSERT INTO t DEFAULT VALUES RETURNING id"), "42");
    });
}
