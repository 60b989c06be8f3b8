//! Subscriptions that follow the same publisher's database, and receive the same rows of a table.

use crate::adopt::NativeSubscription;
use crate::support::{Case, PATIENCE, Tool, finish, must, on_versions, pgapace, wait_for_event};
use crate::tablesync::while_streaming::{holder, wait_for};

const ROWS: &str = "INSERT INTO log SELECT i, 'x' FROM generate_series(1, 1000) i";
const VERSIONS: [(u16, u16); 2] = [(15, 15), (18, 18)];

/// Another subscription of the case.
fn other(case: &Case, publications: &str) -> Tool {
    let name = format!("{}_other", case.tool.name);
    Tool { name, publications: publications.to_owned(), ..case.tool.clone() }
}

/// The case and another subscription have copied a table each, neither of them `log`, whose rows only the publisher has.
fn subscribed_to_others(case: &Case) -> Tool {
    case.both(
        "CREATE TABLE a (id int); CREATE TABLE b (id int); CREATE TABLE log (id int, v text)",
    );
    case.publisher.sql(ROWS);
    case.publish("FOR TABLE a");
    case.publisher.sql("CREATE PUBLICATION second FOR TABLE b");
    let second = other(case, "second");
    case.run_until_current();
    second.run_until_current();
    second
}

fn rows(case: &Case) -> String {
    case.subscriber.value("SELECT count(*), count(DISTINCT id) FROM log")
}

/// Both first runs begin at the same time, so neither finds the other one before it creates its slot.
#[test]
fn a_table_of_two_subscriptions_of_a_configuration_is_copied_once() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE log (id int, v text)");
        case.publisher.sql(ROWS);
        case.publish("FOR ALL TABLES");
        case.publisher.sql("CREATE PUBLICATION logs FOR TABLE log");
        let name = &case.tool.name;
        let config = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n\
             [[subscription]]\nname = \"{name}_all\"\npublication = \"pub\"\n\
             [[subscription]]\nname = \"{name}_logs\"\npublication = \"logs\"\n",
            case.tool.publisher, case.tool.subscriber
        );
        let file = must(tempfile::NamedTempFile::new());
        must(std::fs::write(file.path(), config));
        let path = file.path().display().to_string();
        let with = |verb| pgapace(verb).args(["--config", &path]);
        let checked = finish(&with("check"));
        checked.expect(6, &[]);
        let said = format!("table public.log is published to subscription {name}_all, too");
        assert!(checked.stdout.contains(&said), "{}", checked.stdout);
        let refused = finish(&with("run").args(["--until", "current"]));
        refused.expect(6, &["copies the same rows of this publisher's database: public.log"]);
        assert_eq!(rows(&case), "1000|1000");
        // A decision of the user.
        let kept = finish(&with("run").args(["--until", "current", "--if-not-empty", "keep"]));
        kept.expect(0, &["same_rows"]);
        assert_eq!(rows(&case), "2000|1000");
        case.drop_slots_of_its_subscriptions();
    });
}

#[test]
fn a_subscription_with_another_name_does_not_copy_the_rows_again() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE log (id int PRIMARY KEY, v text)");
        case.publisher.sql(ROWS);
        // The filter of both is the same one.
        case.publish("FOR TABLE log WHERE (id > 0)");
        case.run_until_current();
        let renamed = other(&case, "pub");
        let said = "A subscription cannot be renamed";
        let checked = renamed.finish("check", &[]);
        checked.expect(6, &[]);
        assert!(checked.stdout.contains(said), "{}", checked.stdout);
        let refused = renamed.run();
        refused.expect(6, &["copies the same rows", said]);
        for text in [&checked.stdout, &refused.log] {
            assert!(!text.contains("--if-not-empty keep"), "{text}");
        }
        // Empty tables are no reason to copy the rows twice.
        case.subscriber.sql("TRUNCATE log");
        renamed.run().expect(6, &["copies the same rows", said]);
        assert_eq!(
            case.publisher.value(
                "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
            ),
            "1"
        );
        // As the hint says.
        case.tool.finish("drop", &[]).expect(0, &[]);
        let rebase = ["--until", "current", "--if-not-empty", "rebase"];
        renamed.finish("run", &rebase).expect(0, &[]);
        case.expect_equal(&["log"]);
        renamed.finish("drop", &[]).expect(0, &[]);
    });
}

#[test]
fn disjoint_row_filters_and_other_operations_are_fine() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE log (id int PRIMARY KEY, v text)");
        case.publisher.sql(ROWS);
        case.publish("FOR TABLE log WHERE (id <= 400)");
        case.publisher.sql(
            "CREATE PUBLICATION rest FOR TABLE log WHERE (id > 400); \
             CREATE PUBLICATION deletes FOR TABLE log WITH (publish = 'delete')",
        );
        case.run_until_current();
        let rest = other(&case, "rest");
        let checked = rest.finish("check", &["--if-not-empty", "keep"]);
        checked.expect(0, &[]);
        assert!(checked.stdout.contains("rows that both receive"), "{}", checked.stdout);
        let copied = rest.finish("run", &["--until", "current", "--if-not-empty", "keep"]);
        copied.expect(0, &[]);
        assert!(!copied.log.contains("same_rows"), "{}", copied.log);
        let deletes =
            Tool { name: format!("{}_deletes", case.tool.name), ..other(&case, "deletes") };
        let begun = deletes.finish("run", &["--until", "current", "--copy-data=false"]);
        begun.expect(0, &[]);
        assert!(!begun.log.contains("same_rows"), "{}", begun.log);
        assert_eq!(rows(&case), "1000|1000");
        case.drop_slots_of_its_subscriptions();
    });
}

#[test]
fn a_native_subscription_of_the_same_rows_is_adopted() {
    on_versions(&VERSIONS, |case| {
        case.both("CREATE TABLE log (id int PRIMARY KEY, v text)");
        case.publisher.sql(ROWS);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let tool = other(&case, "pub");
        let checked = tool.finish("check", &[]);
        checked.expect(6, &[]);
        let said =
            format!("table public.log: native subscription {} applies the same rows", native.name);
        for said in [said.as_str(), "pgapace adopt"] {
            assert!(checked.stdout.contains(said), "{}", checked.stdout);
        }
        assert!(!checked.stdout.contains("--if-not-empty keep"), "{}", checked.stdout);
        tool.run().expect(6, &["copies the same rows", "pgapace adopt"]);
        let begun = tool.finish("run", &["--until", "current", "--copy-data=false"]);
        begun.expect(0, &["same_rows"]);
        assert_eq!(rows(&case), "1000|1000");
        tool.finish("drop", &[]).expect(0, &[]);
    });
}

#[test]
fn an_added_table_of_another_subscription_is_blocked() {
    // An empty table is no reason to copy the rows twice, and that a table is not empty is not the whole reason.
    for is_empty in [true, false] {
        let case = Case::new(18, 18);
        let second = subscribed_to_others(&case);
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE log");
        case.run_until_current();
        assert_eq!(rows(&case), "1000|1000");
        if is_empty {
            case.subscriber.sql("TRUNCATE log");
        }
        case.publisher.sql("ALTER PUBLICATION second ADD TABLE log; INSERT INTO b VALUES (1)");
        let log = second.run().log;
        for said in ["table_blocked", "copies the same rows"] {
            assert!(log.contains(said), "{log}");
        }
        assert_eq!(rows(&case), if is_empty { "0|0" } else { "1000|1000" });
        assert_eq!(case.subscriber.value("SELECT count(*) FROM b"), "1");
        case.drop_slots_of_its_subscriptions();
    }
}

/// Both subscriptions get the first change of the table at the same time.
#[test]
fn a_table_that_is_added_to_two_subscriptions_at_once_is_copied_once() {
    on_versions(&VERSIONS, |case| {
        let second = subscribed_to_others(&case);
        let mut one = case.start();
        let mut two = second.start(case.log_file("second"));
        must(wait_for_event(&mut two, "streaming", PATIENCE));
        // Both copies wait until they see whether the table is empty, and have found no other copy.
        let mut lock = holder(&case, "BEGIN; LOCK TABLE log IN ACCESS EXCLUSIVE MODE");
        let add = ["pub", "second"].map(|name| format!("ALTER PUBLICATION {name} ADD TABLE log"));
        case.publisher.sql(&format!("BEGIN; {}; COMMIT", add.join("; ")));
        case.publisher.sql("INSERT INTO log VALUES (1001, 'y')");
        let both =
            "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted AND relation = 'log'::regclass";
        wait_for(&case, &mut one, "both copies", both);
        must(lock.batch_execute("COMMIT"));
        let decided = "SELECT count(*) = 2 FROM pgapace.relation \
                       WHERE table_name = 'log' AND state IN ('ready', 'blocked')";
        wait_for(&case, &mut one, "the table to be copied or blocked", decided);
        case.publisher.sql("INSERT INTO log VALUES (1002, 'z')");
        wait_for(&case, &mut one, "the last row", "SELECT count(*) > 0 FROM log WHERE id = 1002");
        let states = "SELECT string_agg(state, ' ' ORDER BY state) FROM pgapace.relation WHERE table_name = 'log'";
        assert_eq!(case.subscriber.value(states), "blocked ready", "{}\n{}", one.log(), two.log());
        assert_eq!(rows(&case), "1002|1002");
        case.stop(one);
        case.stop(two);
        case.drop_slots_of_its_subscriptions();
    });
}
