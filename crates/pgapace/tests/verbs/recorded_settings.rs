//! Verbs that are not told the publications and the slot of a subscription that exists.

use crate::support::{Case, Finished, finish, must, pgapace};

const SLOT: &str = "recorded_settings_slot";

fn verb(case: &Case, verb: &str, args: &[&str]) -> Finished {
    let tool = &case.tool;
    let servers = ["--publisher", &tool.publisher, "--subscriber", &tool.subscriber];
    finish(&pgapace(verb).args(servers).args(["--name", &tool.name]).args(args))
}

#[test]
fn verbs_take_the_publications_and_the_slot_that_the_subscription_has() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE SEQUENCE s");
    case.publisher.sql("INSERT INTO t VALUES (1, 1), (2, 2)");
    case.publish("FOR TABLE t");
    let unknown = verb(&case, "verify", &[]);
    unknown.expect(3, &["has no subscription", "pgapace status lists"]);
    case.tool.finish("run", &["--until", "current", "--slot", SLOT]).expect(0, &[]);

    verb(&case, "verify", &[]).expect(0, &[]);
    case.subscriber.sql("UPDATE t SET v = 7 WHERE id = 1");
    verb(&case, "verify", &[]).expect(18, &["1 row differs"]);
    verb(&case, "repair", &[]).expect(0, &[]);
    case.expect_equal(&["t"]);
    verb(&case, "sequences", &[]).expect(0, &[]);
    verb(&case, "refresh", &[]).expect(0, &[]);
    verb(&case, "resync", &["t"]).expect(0, &[]);
    let run = ["--until", "current", "--publication", &case.tool.publications, "--slot", SLOT];
    verb(&case, "run", &run).expect(0, &[]);

    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{SLOT}')"));
    case.publisher.sql("INSERT INTO t VALUES (3, 3)");
    verb(&case, "rebase", &[]).expect(0, &[]);
    case.expect_equal(&["t"]);
    let slots = "SELECT string_agg(slot_name, ' ') FROM pg_replication_slots \
                 WHERE database = current_database()";
    assert_eq!(case.publisher.value(slots), SLOT);
    // A first run has nothing recorded.
    verb(&case, "run", &["--until", "current"]).expect(3, &["--publication is not given"]);
    verb(&case, "drop", &[]).expect(0, &[]);
}

#[test]
fn each_subscription_of_a_file_has_its_own() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO a VALUES (1); INSERT INTO b VALUES (1), (2)");
    case.publish("FOR TABLE a");
    case.publisher.sql("CREATE PUBLICATION other FOR TABLE b");
    let name = &case.tool.name;
    let file = |with: bool| {
        let of = |publication: &str| match with {
            true => format!("publication = \"{publication}\"\n"),
            false => String::new(),
        };
        let file = must(tempfile::NamedTempFile::new());
        let text = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n\
             [[subscription]]\nname = \"{name}_a\"\n{}[[subscription]]\nname = \"{name}_b\"\n{}",
            case.tool.publisher,
            case.tool.subscriber,
            of("pub"),
            of("other")
        );
        must(std::fs::write(file.path(), text));
        file
    };
    let (whole, short) = (file(true), file(false));
    let with = |verb: &str, file: &tempfile::NamedTempFile| {
        pgapace(verb).args(["--config", &file.path().display().to_string()])
    };
    finish(&with("run", &whole).args(["--until", "current"])).expect(0, &[]);
    let verified = finish(&with("verify", &short));
    verified.expect(0, &[]);
    for table in ["public.a", "public.b"] {
        assert!(verified.stdout.contains(table), "{}", verified.stdout);
    }
    case.drop_slots_of_its_subscriptions();
}
