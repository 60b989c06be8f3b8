//! DDL of users on the subscriber while transactions of pgapace hold locks there. An ALTER TABLE
//! that waits for a lock blocks every later session, including readers. No session of pgapace may
//! wait behind the ALTER while the ALTER waits for pgapace.

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::wait_until;

use super::parallel::{begin, on_publishers, pages, rows, wait_for_rows};
use crate::support::{Case, PATIENCE, must, on_versions, one_or_all};
use crate::verbs::json;

const DDL: &str = "CREATE TABLE t (id int PRIMARY KEY, v text, n int DEFAULT 1 + 1, \
    s bigint DEFAULT 0); \
    ALTER TABLE t ADD CONSTRAINT later CHECK (s >= 0) NOT VALID; CREATE INDEX ON t ((id + n)) WHERE s > 0; \
    CREATE TABLE small (id int PRIMARY KEY, v text DEFAULT upper('x')); \
    CREATE TABLE other (id int PRIMARY KEY, v text DEFAULT upper('x'))";

/// Waits until a session whose statement contains this text waits for a relation lock.
fn wait_until_queued(case: &Case, statement: &str) {
    let sql = format!(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() \
         AND wait_event_type = 'Lock' AND query LIKE '{statement}%'"
    );
    must(wait_until(PATIENCE, format!("{statement} to wait"), || {
        Ok(case.subscriber.value(&sql) == "t")
    }));
}

/// A user's statement on a separate thread.
struct User(std::thread::JoinHandle<()>);

impl User {
    fn runs(case: &Case, statement: &str) -> Self {
        let mut session = case.subscriber.connect();
        let sql = statement.to_owned();
        let user = Self(std::thread::spawn(move || must(session.batch_execute(&sql))));
        wait_until_queued(case, statement);
        user
    }

    /// Waits for the end of the statement: pgapace did not block it forever.
    fn ends(self) {
        self.0.join().expect("the user's statement");
    }
}

/// An open transaction that holds a lock on the subscriber's table, a change of that table that
/// makes pgapace read its definition again, and a user's ALTER that waits.
fn hold(case: &Case, process: &mut Process, change: &str) -> (Client, User) {
    let before = pages(case);
    let open = begin(case, process, &[&rows(1, 3000)]);
    wait_for_rows(case, process, before + 1);
    case.subscriber.sql(change);
    let alter = User::runs(case, "ALTER TABLE t ADD COLUMN more int");
    (open, alter)
}

fn start(case: &mut Case, args: &[&str]) -> Process {
    case.tool.args.extend(args.iter().map(|arg| (*arg).to_owned()));
    case.both(DDL);
    case.publisher.sql("INSERT INTO t VALUES (-1, 'first'), (-2, 'second')");
    case.publish("FOR ALL TABLES");
    let mut process = case.start();
    case.publisher.sql("UPDATE t SET v = v || '.'; INSERT INTO small VALUES (-1)");
    case.wait_until_applied(&mut process);
    process
}

/// Commits the open transaction, and checks that all changes are applied.
fn settle(case: &Case, mut process: Process, mut open: Client) {
    must(open.batch_execute("COMMIT"));
    case.wait_until_applied(&mut process);
    case.expect_equal(&["small"]);
    let sums = "SELECT count(*), sum(id), md5(string_agg(v, ',' ORDER BY id)) FROM t";
    assert_eq!(case.publisher.value(sums), case.subscriber.value(sums));
    case.stop(process);
}

/// Statements that lock the table like VACUUM, which pgapace's changes do not block.
const CHANGES: [&str; 2] =
    ["ALTER TABLE t ALTER v SET STATISTICS 200", "ALTER TABLE t VALIDATE CONSTRAINT later"];

/// Makes changes while `t` is locked, until the leader has seen the new definition of `t`.
fn wait_until_seen(case: &Case, process: &mut Process, from: &mut u32) {
    must(wait_until(PATIENCE, "the leader to see the change", || {
        *from += 1;
        case.publisher.sql(&format!("INSERT INTO small VALUES ({from})"));
        Ok(process.events("table_definition_changed") > 0)
    }));
}

/// The leader reads the catalogue of a table again. It would wait behind the ALTER, which waits for
/// the open transaction.
#[test]
fn an_alter_behind_an_open_transaction_makes_the_stream_abandon() {
    for change in CHANGES {
        on_publishers(|mut case| {
            let mut process = start(&mut case, &[]);
            let (open, alter) = hold(&case, &mut process, change);
            wait_until_seen(&case, &mut process, &mut 0);
            // This change can be applied only after the ALTER, and the ALTER only after the open
            // transaction.
            case.publisher.sql("UPDATE t SET v = 'behind' WHERE id = -1");
            case.wait_until_applied(&mut process);
            alter.ends();
            assert_eq!(case.subscriber.value("SELECT v FROM t WHERE id = -1"), "behind");
            settle(&case, process, open);
        });
    }
}

/// The same with small transactions, one of which waits for a row and holds the table lock.
/// Independent changes continue.
#[test]
fn an_alter_behind_small_transactions_does_not_deadlock() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let mut process = start(&mut case, &["--preserve-commit-order=false"]);
        case.subscriber.sql(CHANGES[0]);
        let mut last = 0;
        wait_until_seen(&case, &mut process, &mut last);
        case.wait_until_applied(&mut process);
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; SELECT FROM t WHERE id = -1 FOR UPDATE"));
        case.publisher.sql("UPDATE t SET v = 'one' WHERE id = -1");
        let held = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass \
                    AND mode = 'RowExclusiveLock' AND granted";
        must(wait_until(PATIENCE, "the first to wait", || Ok(case.subscriber.value(held) == "1")));
        let alter = User::runs(&case, "ALTER TABLE t ADD COLUMN more int");
        case.publisher.sql("UPDATE t SET v = 'two' WHERE id = -2");
        let queued = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted";
        must(wait_until(PATIENCE, "both to wait", || Ok(case.subscriber.value(queued) == "2")));
        case.publisher.sql("INSERT INTO other VALUES (77)");
        must(wait_until(PATIENCE, "the other table's row", || {
            Ok(case.subscriber.value("SELECT count(*) FROM other") == "1")
        }));
        must(user.batch_execute("COMMIT"));
        alter.ends();
        case.wait_until_applied(&mut process);
        assert_eq!(case.subscriber.rows("SELECT v FROM t ORDER BY id DESC"), ["one", "two"]);
        case.stop(process);
    });
}

/// A lock on a table before its first change: only the change waits, and the wait is reported.
#[test]
fn a_wait_for_a_table_lock_is_counted() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let mut process = start(&mut case, &[]);
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; LOCK TABLE other IN ACCESS EXCLUSIVE MODE"));
        case.publisher.sql("INSERT INTO other VALUES (1)");
        must(wait_until(PATIENCE, "the wait to be counted", || {
            Ok(must(case.statistic("wait_subscriber_lock").parse::<f64>()) > 0.5)
        }));
        assert!(process.events("lock_wait") > 0, "{}", process.log());
        must(user.batch_execute("COMMIT"));
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        case.stop(process);
    });
}

/// A lock on a table of pgapace blocks the leader itself. The monitor detects and logs it, and the
/// run ends before others wait for it.
#[test]
fn a_lock_that_blocks_the_leader_ends_the_run() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        let process = start(&mut case, &[]);
        let noted = "SELECT count(*) FROM pgapace.relation WHERE apply_mode IS NOT NULL";
        must(wait_until(PATIENCE, "modes", || Ok(case.subscriber.value(noted) == "2")));
        let mut user = case.subscriber.connect();
        must(user.batch_execute("BEGIN; LOCK TABLE pgapace.relation IN ACCESS EXCLUSIVE MODE"));
        for seen in ["waiting=\"control session\"", "retry_in_ms"] {
            must(wait_until(PATIENCE, seen, || Ok(process.log().contains(seen))));
        }
        must(user.batch_execute("COMMIT"));
        must(wait_until(PATIENCE, "the next run", || Ok(process.events("streaming") == 2)));
        let mut process = process;
        case.publisher.sql("INSERT INTO other VALUES (1)");
        case.wait_until_applied(&mut process);
        case.expect_equal(&["other"]);
        case.stop(process);
        let waited = case.statistic("wait_subscriber_lock");
        assert!(must(waited.parse::<f64>()) > 0.5, "{waited} s");
    });
}

/// Verbs that only read do not wait for a lock.
#[test]
fn verbs_that_read_do_not_wait_for_a_lock() {
    for &major in one_or_all(&[15, 18]) {
        let mut case = super::streaming_case(major, major, super::Trigger::Size);
        let mut process = start(&mut case, &[]);
        let (open, alter) = hold(&case, &mut process, CHANGES[0]);
        let status = case.tool.finish("status", &["--json"]);
        status.expect(0, &[]);
        assert!(json(&status)[0]["owner"].is_object(), "{}", status.stdout);
        case.tool.finish("check", &[]).expect(0, &[]);
        case.tool.finish("refresh", &[]).expect(0, &[]);
        case.tool.finish("sequences", &["--dry-run"]).expect(0, &[]);
        assert!(process.is_running());
        case.publisher.sql("UPDATE t SET v = 'behind' WHERE id = -1");
        alter.ends();
        settle(&case, process, open);
    }
}
