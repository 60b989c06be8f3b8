//! More subscriptions than a subscriber with PostgreSQL's default limit has replication origins for.

use testbed::program::Process;
use testbed::wait_until;

use super::auto::few_origins;
use crate::support::{
    Case, Database, PATIENCE, Tool, must, one_or_all, pgapace, servers, wait_for_events,
    wait_until_log,
};

const ORIGINS: &str = "SELECT count(*) FROM pg_replication_origin";

/// Leaves no origin to anybody.
const TAKE_ALL: &str = "DO $$ BEGIN FOR i IN 1..10 LOOP BEGIN \
      PERFORM pg_replication_origin_create('other_' || i); \
      PERFORM pg_replication_origin_advance('other_' || i, '0/1'); \
    EXCEPTION WHEN configuration_limit_exceeded THEN EXIT; END; END LOOP; END $$";

/// Subscriptions `1..=9` of two configuration files, each of one table.
struct Many {
    case: Case,
    directory: tempfile::TempDir,
}

impl Many {
    fn new(case: Case, subscriber: &Database) -> Self {
        for number in 1..=10 {
            let ddl = format!("CREATE TABLE t{number} (id int PRIMARY KEY)");
            case.publisher.sql(&ddl);
            subscriber.sql(&ddl);
            case.publisher.sql(&format!(
                "INSERT INTO t{number} VALUES (1); CREATE PUBLICATION p{number} FOR TABLE t{number}"
            ));
        }
        let directory = must(tempfile::tempdir());
        for (file, numbers) in [("first", 1..=6), ("second", 7..=9), ("all", 1..=9)] {
            let mut config = format!(
                "publisher = \"{}\"\nsubscriber = \"{}\"\n",
                case.tool.publisher,
                subscriber.conninfo()
            );
            for number in numbers {
                config.push_str(&format!(
                    "[[subscription]]\nname = \"{}_{number}\"\npublication = [\"p{number}\"]\n",
                    case.tool.name
                ));
            }
            must(std::fs::write(directory.path().join(file), config));
        }
        Self { case, directory }
    }

    fn config(&self, file: &str) -> String {
        self.directory.path().join(file).display().to_string()
    }

    fn start(&self, file: &str) -> Process {
        let program = pgapace("run").args(["--config", &self.config(file)]);
        must(program.spawn_logged(self.directory.path().join(format!("{file}.log"))))
    }
}

impl Drop for Many {
    fn drop(&mut self) {
        self.case.drop_slots_of_its_subscriptions();
    }
}

#[test]
fn processes_together_leave_origins_to_a_native_subscription() {
    for &major in one_or_all(&[15, 18]) {
        let cluster = few_origins(major, &[]);
        let publisher = servers(major, major).publisher;
        let subscriber = Database::create(&cluster, "many", "");
        let many = Many::new(Case::new(major, major), &subscriber);
        let checked = must(pgapace("check").args(["--config", &many.config("all")]).output());
        let checked = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert!(checked.contains("9 of them need a first replication origin"), "{checked}");
        assert!(checked.contains("2 subscriptions do not tag their commits"), "{checked}");

        let mut processes = [many.start("first"), many.start("second")];
        for (process, count) in processes.iter_mut().zip([6, 3]) {
            must(wait_until_log(process, "the streams", PATIENCE, |log| {
                log.matches("event=\"streaming\"").count() >= count
            }));
        }
        // Ten, of which three are left.
        let used: u32 = must(subscriber.value(ORIGINS).parse());
        assert!((1..=7).contains(&used), "{used} of 10");
        let logs: String = processes.iter().map(Process::log).collect();
        let warnings: Vec<_> =
            logs.lines().filter(|line| line.contains("event=\"origins_short\"")).collect();
        assert!(warnings.iter().all(|line| line.contains("WARN")), "{logs}");
        for number in 1..=9 {
            let name = format!("subscription=\"{}_{number}\"", many.case.tool.name);
            let tags: u32 = must(
                subscriber
                    .value(&format!(
                        "SELECT count(*) FROM pg_replication_origin o, pgapace.subscription s \
                         WHERE s.name = '{}_{number}' AND o.roname LIKE 'pgapace\\_%\\_' || s.id || '\\_%'",
                        many.case.tool.name
                    ))
                    .parse(),
            );
            let warned = warnings.iter().any(|line| line.contains(&name));
            assert!(tags > 0 || warned, "subscription {number} says nothing: {logs}");
        }
        let slot = format!("{}_native", many.case.tool.name);
        subscriber.sql(&format!(
            "CREATE SUBSCRIPTION beside CONNECTION '{}' PUBLICATION p10 WITH (slot_name = '{slot}')",
            publisher.conninfo(&many.case.publisher.name).replace('\'', "''")
        ));
        for number in 1..=10 {
            many.case.publisher.sql(&format!("INSERT INTO t{number} VALUES (2)"));
        }
        for number in 1..=10 {
            must(wait_until(PATIENCE, "the rows", || {
                Ok(subscriber.value(&format!("SELECT count(*) FROM t{number}")) == "2")
            }));
        }
        subscriber.sql("DROP SUBSCRIPTION beside");
        for mut process in processes {
            must(process.terminate());
            must(process.wait(PATIENCE));
        }
    }
}

/// A rebase that could not write its tables is refused while the slot is there.
#[test]
fn a_rebase_without_an_origin_drops_nothing() {
    let cluster = few_origins(18, &[]);
    let case = Case::new(18, 18);
    let subscriber = Database::create(&cluster, "no_origin", "");
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)");
    subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR TABLE t");
    let mut tool = Tool { subscriber: subscriber.conninfo(), ..case.tool.clone() };
    tool.args.push("--tag-commits=true".to_owned());
    tool.run().expect(0, &[]);
    subscriber.sql(&format!("DELETE FROM t; {TAKE_ALL}"));
    let slot = "SELECT slot_name, confirmed_flush_lsn FROM pg_replication_slots \
                WHERE database = current_database()";
    let before = case.publisher.rows(slot);
    assert_eq!(before.len(), 1);
    tool.finish("rebase", &[]).expect(5, &["tagged"]);
    assert_eq!(case.publisher.rows(slot), before);
    assert_eq!(subscriber.value("SELECT rebasing FROM pgapace.subscription"), "f");
    subscriber.sql(
        "SELECT pg_replication_origin_drop(roname) FROM pg_replication_origin \
         WHERE roname LIKE 'other%'",
    );
    tool.finish("rebase", &[]).expect(0, &[]);
    assert_eq!(subscriber.rows("TABLE t"), ["1"]);
}

/// Each run finds the same.
#[test]
fn that_commits_are_not_tagged_is_logged_once() {
    let cluster = few_origins(18, &[]);
    let case = Case::new(18, 18);
    let subscriber = Database::create(&cluster, "untagged", "");
    for side in [&case.publisher, &subscriber] {
        side.sql("CREATE TABLE t (id int PRIMARY KEY)");
    }
    case.publish("FOR TABLE t");
    subscriber.sql(TAKE_ALL);
    let tool = Tool { subscriber: subscriber.conninfo(), ..case.tool.clone() };
    let mut process = tool.start(case.log_file("untagged"));
    for run in 1..=3 {
        must(wait_for_events(&mut process, "streaming", run, PATIENCE));
        case.publisher.sql(&format!(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
             WHERE slot_name = '{}' AND active",
            tool.name
        ));
    }
    assert_eq!(process.events("origins_short"), 1, "{}", process.log());
    case.stop(process);
}
