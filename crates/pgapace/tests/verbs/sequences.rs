//! Sequences: which of them are set by the first copy and by `sequences`, to what, and when not.

use serde_json::Value;

use super::json;
use crate::support::{Case, VERSIONS, must, on_versions};

/// The output of `sequences --json` about each sequence, by `schema.name`.
pub(super) struct Said(pub(super) Value);

impl Said {
    #[track_caller]
    pub(super) fn run(case: &Case, code: i32, more: &[&str]) -> Self {
        let args: Vec<&str> = ["--json"].iter().chain(more).copied().collect();
        let finished = case.tool.finish("sequences", &args);
        finished.expect(code, &[]);
        Self(json(&finished)[0].clone())
    }

    pub(super) fn of(&self, name: &str) -> &Value {
        let (schema, name) = name.split_once('.').expect("a schema");
        let all = self.0["sequences"].as_array().expect("an array");
        let one = all.iter().find(|one| one["schema"] == schema && one["name"] == name);
        one.unwrap_or(&Value::Null)
    }

    #[track_caller]
    pub(super) fn expect(&self, states: &[(&str, &str)]) -> &Self {
        for (name, state) in states {
            assert_eq!(self.of(name)["state"], *state, "{name} in {:#}", self.0);
        }
        self
    }

    #[track_caller]
    pub(super) fn expect_reason(&self, name: &str, part: &str) -> &Self {
        let reason = self.of(name)["reason"].as_str().unwrap_or_default();
        assert!(reason.contains(part), "{name}: {reason:?} does not say {part:?}");
        self
    }
}

/// `last_value` and `is_called` on the subscriber.
pub(super) fn at(case: &Case, name: &str) -> String {
    case.subscriber.value(&format!("SELECT last_value, is_called FROM {name}"))
}

#[test]
fn the_copy_sets_all_of_the_published_schemas() {
    on_versions(&VERSIONS, |case| {
        let ddl = "CREATE SCHEMA \"odd Schema\"; CREATE TABLE serial (id serial PRIMARY KEY, v text); \
                   CREATE TABLE \"odd Schema\".ident (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY); \
                   CREATE SEQUENCE shared INCREMENT -3 START -10 MAXVALUE -1; \
                   CREATE TABLE uses (id int PRIMARY KEY DEFAULT nextval('shared')); \
                   CREATE SEQUENCE invoice; CREATE SCHEMA lonely; CREATE SEQUENCE lonely.free; \
                   CREATE TABLE not_called (id serial PRIMARY KEY)";
        case.both(ddl);
        case.publisher.sql(
            "INSERT INTO serial (v) SELECT 'x' FROM generate_series(1, 10); \
             INSERT INTO \"odd Schema\".ident DEFAULT VALUES; \
             INSERT INTO uses DEFAULT VALUES; INSERT INTO uses DEFAULT VALUES; \
             SELECT nextval('invoice'), nextval('invoice'), setval('lonely.free', 77); \
             SELECT setval('not_called_id_seq', 100, false)",
        );
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        let next = "SELECT nextval('serial_id_seq'), nextval('\"odd Schema\".ident_id_seq'), \
                    nextval('shared'), nextval('not_called_id_seq'), nextval('invoice'), \
                    nextval('lonely.free')";
        assert_eq!(case.subscriber.value(next), "11|2|-16|100|3|78");
        case.publisher.sql("SELECT setval('serial_id_seq', 5000)");
        Said::run(&case, 0, &[])
            .expect(&[("public.serial_id_seq", "set"), ("public.shared", "ahead")])
            .expect(&[("public.invoice", "ahead"), ("lonely.free", "ahead")]);
        assert_eq!(case.subscriber.value("SELECT nextval('serial_id_seq')"), "5001");
        // Statistics for the planner.
        let analyzed = "SELECT reltuples FROM pg_class WHERE relname = 'serial'";
        assert_eq!(case.subscriber.value(analyzed), "10");
        case.subscriber
            .sql("ALTER TABLE uses ALTER id DROP DEFAULT; DROP SEQUENCE shared, lonely.free");
        let finished = case.tool.finish("sequences", &[]);
        finished.expect(6, &["public.shared: the subscriber does not have it", "lonely.free"]);
        // The schema is missing, so nothing says which one is not to be set.
        case.publisher.sql("SELECT setval('serial_id_seq', 6000)");
        let refused = case.tool.finish("sequences", &["--exclude", "shared", "--exclude", "free"]);
        refused.expect(6, &["no sequence public.free", "Qualify sequences"]);
        assert_eq!(at(&case, "serial_id_seq"), "5001|t");
        Said::run(&case, 0, &["--exclude", "shared", "--exclude", "lonely.free"])
            .expect(&[("public.shared", "left_out"), ("lonely.free", "left_out")])
            .expect_reason("public.shared", "excluded");
    });
}

#[test]
fn schemas_follow_from_what_is_published() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(
            "CREATE SCHEMA s; CREATE SCHEMA whole; CREATE SCHEMA elsewhere; CREATE SCHEMA other; \
             CREATE TABLE s.t (id serial PRIMARY KEY); CREATE SEQUENCE s.free; \
             CREATE SEQUENCE elsewhere.used; CREATE SEQUENCE elsewhere.unused; \
             CREATE TABLE s.u (id int PRIMARY KEY DEFAULT nextval('elsewhere.used')); \
             CREATE TABLE s.unpublished (id serial PRIMARY KEY); \
             CREATE SEQUENCE whole.free; CREATE SEQUENCE other.free",
        );
        let all = ["s.t_id_seq", "s.free", "s.unpublished_id_seq", "elsewhere.used", "whole.free"];
        let unpublished = ["elsewhere.unused", "other.free"];
        for name in all.iter().chain(&unpublished) {
            case.publisher.sql(&format!("SELECT setval('{name}', 50)"));
        }
        case.publish("FOR TABLE s.t, s.u, TABLES IN SCHEMA whole");
        case.run_until_current();
        for name in all {
            assert_eq!(at(&case, name), "50|t", "{name}");
        }
        for name in unpublished {
            assert_eq!(at(&case, name), "1|f", "{name}");
        }
        // Of a table that is nobody's business here, the sequence may be missing.
        case.subscriber.sql("DROP TABLE s.unpublished");
        Said::run(&case, 0, &[]).expect(&[("s.unpublished_id_seq", "left_out")]);
        case.publisher.sql("SELECT setval('s.t_id_seq', 60), setval('s.free', 60)");
        let said = Said::run(&case, 0, &["--table", "s.t"]);
        assert_eq!(said.0["sequences"].as_array().map(Vec::len), Some(1));
        assert_eq!(
            (at(&case, "s.t_id_seq").as_str(), at(&case, "s.free").as_str()),
            ("60|t", "50|t")
        );
        Said::run(&case, 0, &["--sequence", "s.free"]).expect(&[("s.free", "set")]);
        case.tool.finish("sequences", &["--sequence", "other.free"]).expect(6, &["other.free"]);
        case.tool.finish("sequences", &["--table", "s.unpublished"]).expect(6, &["unpublished"]);
    });
}

#[test]
fn the_sequence_of_a_column_may_have_another_name() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TABLE t (id serial PRIMARY KEY); SELECT setval('t_id_seq', 9)");
    case.subscriber.sql(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE SEQUENCE by_hand AS int OWNED BY t.id; \
         ALTER TABLE t ALTER id SET DEFAULT nextval('by_hand')",
    );
    case.publish("FOR TABLE t");
    case.run_until_current();
    assert_eq!(at(&case, "by_hand"), "9|t");
}

#[test]
fn nothing_goes_back_unless_asked() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE SEQUENCE up; \
             CREATE SEQUENCE down INCREMENT -2 MINVALUE -100 MAXVALUE -1; \
             CREATE SEQUENCE ring MAXVALUE 10 CYCLE; CREATE SEQUENCE near MAXVALUE 1000",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.publisher.sql(
            "SELECT setval('up', 100), setval('down', -11), setval('ring', 2), setval('near', 998)",
        );
        case.subscriber.sql("SELECT setval('up', 101), setval('down', -13), setval('ring', 9)");
        let all = ["public.up", "public.down", "public.ring"];
        Said::run(&case, 0, &[]).expect(&all.map(|name| (name, "ahead")));
        assert_eq!(at(&case, "up"), "101|t");
        // Values of the margin are left out, in the direction of each, as far as there are any.
        let said = Said::run(&case, 0, &["--margin", "10"]);
        said.expect(&[("public.up", "set"), ("public.down", "set"), ("public.ring", "set")]);
        assert_eq!((at(&case, "up").as_str(), at(&case, "down").as_str()), ("110|t", "-31|t"));
        assert_eq!((at(&case, "near").as_str(), at(&case, "ring").as_str()), ("1000|t", "10|t"));
        assert_eq!(said.of("public.near")["margin_cut"], true);
        assert_eq!(said.of("public.up")["margin_cut"], false);
        Said::run(&case, 0, &["--margin", "10"]).expect(&all.map(|name| (name, "unchanged")));
        Said::run(&case, 0, &["--allow-backwards"]).expect(&all.map(|name| (name, "set")));
        assert_eq!(at(&case, "up"), "100|t");
        assert_eq!(case.subscriber.value("SELECT nextval('down'), nextval('ring')"), "-13|3");
    });
}

#[test]
fn sequences_that_cannot_be_set_are_listed_with_their_reason() {
    on_versions(&[(15, 15), (18, 18)], |mut case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE SEQUENCE turned; CREATE SEQUENCE good",
        );
        case.publisher.sql(
            "CREATE SEQUENCE big; CREATE SEQUENCE hidden; CREATE SEQUENCE kept; CREATE SEQUENCE view; \
             SELECT setval('big', 3000000000), setval('hidden', 5), setval('kept', 5), setval('good', 5)",
        );
        case.subscriber.sql(
            "CREATE SEQUENCE big AS int; CREATE SEQUENCE hidden; CREATE SEQUENCE kept; CREATE VIEW view AS SELECT 1 AS a; \
             ALTER SEQUENCE turned INCREMENT -1 MINVALUE -100",
        );
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.publisher.sql("SELECT setval('good', 7)");
        let role = |name: &str| format!("{name}_{}", case.tool.name);
        let (source, sink) = (role("source"), role("sink"));
        case.publisher.sql(&format!(
            "CREATE ROLE {source} LOGIN REPLICATION; GRANT USAGE ON SCHEMA public TO {source}; \
             GRANT SELECT ON good, big, kept, turned, view TO {source}"
        ));
        case.subscriber.change_setting_privileges(&format!(
            "CREATE ROLE {sink} LOGIN; GRANT SET ON PARAMETER session_replication_role TO {sink}; \
             GRANT ALL ON SCHEMA pgapace TO {sink}; GRANT ALL ON ALL TABLES IN SCHEMA pgapace TO {sink}; \
             GRANT SELECT, UPDATE ON good, big, turned TO {sink}; GRANT SELECT ON kept TO {sink}"
        ));
        case.tool.publisher =
            case.tool.publisher.replace("user=postgres", &format!("user={source}"));
        case.tool.subscriber =
            case.tool.subscriber.replace("user=postgres", &format!("user={sink}"));
        let said = Said::run(&case, 6, &["--dry-run"]);
        said.expect(&[("public.good", "set"), ("public.big", "left_out")]);
        assert_eq!(at(&case, "good"), "5|t");
        let checked = case.tool.finish("check", &["--json"]);
        for name in ["public.big: ", "public.kept: ", "public.turned: "] {
            assert!(checked.stdout.contains(name), "{}", checked.stdout);
        }
        let said = Said::run(&case, 6, &[]);
        said.expect(&[("public.good", "set")])
            .expect_reason("public.big", "2147483647")
            .expect_reason("public.hidden", "lacks SELECT")
            .expect_reason("public.kept", "GRANT SELECT, UPDATE ON SEQUENCE")
            .expect_reason("public.turned", "increment")
            .expect_reason("public.view", "a view");
        assert_eq!(at(&case, "good"), "7|t");
        case.subscriber
            .change_setting_privileges(&format!("DROP OWNED BY {sink}; DROP ROLE {sink}"));
        case.publisher.sql(&format!("DROP OWNED BY {source}; DROP ROLE {source}"));
    });
}

/// Transactions that are open for long have locked a sequence of the publisher, and another one of the subscriber.
#[test]
fn sequences_that_are_locked_do_not_delay_the_others_for_long() {
    let case = Case::new(18, 18);
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE SEQUENCE good; CREATE SEQUENCE here; \
         CREATE SEQUENCE there",
    );
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.publisher.sql("SELECT setval('good', 7), setval('here', 7), setval('there', 7)");
    let (mut publisher, mut subscriber) = (case.publisher.connect(), case.subscriber.connect());
    must(publisher.batch_execute("BEGIN; DROP SEQUENCE there"));
    must(subscriber.batch_execute("BEGIN; DROP SEQUENCE here"));
    Said::run(&case, 6, &[])
        .expect(&[("public.good", "set")])
        .expect_reason("public.here", "another session holds a conflicting lock")
        .expect_reason("public.there", "another session of the publisher holds a conflicting lock");
    must(publisher.batch_execute("ROLLBACK"));
    must(subscriber.batch_execute("ROLLBACK"));
    Said::run(&case, 0, &[]).expect(&[("public.here", "set"), ("public.there", "set")]);
}
