//! Verbs that work on several subscriptions: one that fails does not stop the others.

use std::fs;

use super::json;
use super::sequences::at;
use crate::support::{Case, Finished, executable, finish, must};

/// Two subscriptions of one configuration file, with tables `a` and `other.b`.
struct Two {
    case: Case,
    config: String,
    first: String,
    second: String,
}

impl Two {
    fn new() -> Self {
        let case = Case::new(15, 18);
        case.both(
            "CREATE SCHEMA other; CREATE TABLE a (id serial PRIMARY KEY); \
             CREATE TABLE other.b (id serial PRIMARY KEY)",
        );
        case.publisher.sql(
            "CREATE PUBLICATION pa FOR TABLE a; CREATE PUBLICATION pb FOR TABLE other.b; \
             INSERT INTO a DEFAULT VALUES; INSERT INTO other.b DEFAULT VALUES",
        );
        let name = &case.tool.name;
        let (first, second) = (format!("{name}a"), format!("{name}b"));
        let file = case.log_file("two.toml");
        let text = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n\
             [[subscription]]\nname = \"{first}\"\npublication = \"pa\"\n\
             [[subscription]]\nname = \"{second}\"\npublication = \"pb\"\n",
            case.tool.publisher, case.tool.subscriber
        );
        must(fs::write(&file, text));
        let two = Self { case, config: file.display().to_string(), first, second };
        two.finish("run", &["--until", "current"]).expect(0, &[]);
        two
    }

    fn finish(&self, verb: &str, args: &[&str]) -> Finished {
        finish(&executable().args([verb, "--config", &self.config]).args(args))
    }

    fn end(self) {
        for name in [&self.first, &self.second] {
            self.finish("drop", &["--name", name]).expect(0, &[]);
        }
    }
}

#[track_caller]
fn expect_said(finished: &Finished, texts: &[&str]) {
    for text in texts {
        assert!(finished.stdout.contains(text), "no {text:?} in {}", finished.stdout);
    }
}

#[test]
fn sequences_are_set_behind_a_subscription_that_lags() {
    let two = Two::new();
    two.case.publisher.sql(
        "INSERT INTO a SELECT nextval('a_id_seq') FROM generate_series(1, 9); \
         INSERT INTO other.b SELECT nextval('other.b_id_seq') FROM generate_series(1, 9)",
    );
    // The second one has everything; the first one does not.
    two.finish("run", &["--name", &two.second, "--until", "current"]).expect(0, &[]);
    let set = two.finish("sequences", &["--wait", "0"]);
    set.expect(14, &["no sequence was set"]);
    expect_said(
        &set,
        &[&format!("{}: not set: ", two.first), &format!("{}: 1 sequences set", two.second)],
    );
    assert_eq!(at(&two.case, "a_id_seq"), "1|t");
    assert_eq!(at(&two.case, "other.b_id_seq"), "10|t");
    let again = two.finish("sequences", &["--wait", "0", "--json"]);
    again.expect(14, &[]);
    let said = json(&again);
    assert!(said[0]["error"].is_string() && said[1]["error"].is_null(), "{said:#}");
    assert_eq!(said[1]["sequences"][0]["state"], "unchanged", "{said:#}");
    two.end();
}

#[test]
fn tables_are_compared_behind_a_subscription_that_cannot_be() {
    let two = Two::new();
    two.case.subscriber.sql("DELETE FROM other.b; DROP TABLE a");
    let verified = two.finish("verify", &[]);
    let both = format!("subscription {}, subscription {}", two.first, two.second);
    verified.expect(6, &[&both, "public.a", "1 row differs, in other.b"]);
    expect_said(&verified, &[&format!("{}: not compared: ", two.first), "other.b", "different"]);
    let again = two.finish("verify", &["--json"]);
    again.expect(6, &[]);
    let said = json(&again);
    assert!(said[0]["error"].is_string() && said[1]["error"].is_null(), "{said:#}");
    assert_eq!(said[1]["tables"][0]["missing"], 1, "{said:#}");
    two.end();
}

#[test]
fn tables_are_added_behind_a_subscription_whose_table_is_missing() {
    let two = Two::new();
    two.case.publisher.sql(
        "CREATE TABLE a2 (id int PRIMARY KEY); CREATE TABLE b2 (id int PRIMARY KEY); \
         ALTER PUBLICATION pa ADD TABLE a2; ALTER PUBLICATION pb ADD TABLE b2",
    );
    two.case.subscriber.sql("CREATE TABLE b2 (id int PRIMARY KEY)");
    let refreshed = two.finish("refresh", &[]);
    refreshed.expect(6, &["public.a2"]);
    expect_said(
        &refreshed,
        &[&format!("{}: not refreshed: ", two.first), &format!("{}: public.b2: ", two.second)],
    );
    let known = "SELECT string_agg(table_name, ' ' ORDER BY table_name) FROM pgapace.relation";
    assert_eq!(two.case.subscriber.value(known), "a b b2");
    two.end();
}
