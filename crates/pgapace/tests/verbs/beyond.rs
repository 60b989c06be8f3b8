//! `check` also names what logical replication does not carry, and what a switchover needs.

use serde_json::Value;

use crate::support::{Case, on_versions};
use crate::verbs::findings::mend;
use crate::verbs::json;

const PAIRS: [(u16, u16); 2] = [(15, 15), (18, 18)];

pub(super) fn found(case: &Case, topic: &str) -> Vec<Value> {
    found_with(case, topic, &[])
}

fn found_with(case: &Case, topic: &str, more: &[&str]) -> Vec<Value> {
    let args: Vec<_> = ["--json"].iter().chain(more).copied().collect();
    let lines = json(&case.tool.finish("check", &args));
    let lines = lines.as_array().cloned().unwrap_or_default();
    lines.into_iter().filter(|line| line["topic"] == topic).collect()
}

pub(super) fn message(line: &Value) -> &str {
    line["message"].as_str().unwrap_or_default()
}

#[track_caller]
pub(super) fn mend_all(case: &Case, lines: &[Value]) {
    for fix in lines.iter().filter_map(|line| line["fix"].as_str()) {
        mend(case.subscriber.cluster, &case.subscriber.name, fix);
    }
}

#[test]
fn missing_secondary_indexes() {
    on_versions(&PAIRS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, a text, b text, r int4range);
             CREATE TABLE \"P q\" (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
             CREATE TABLE p1 PARTITION OF \"P q\" FOR VALUES FROM (0) TO (10);",
        );
        case.publisher.sql(
            "CREATE INDEX t_a ON t (a); CREATE INDEX t_lower ON t (lower(a) text_pattern_ops) WHERE b <> '';
             CREATE INDEX t_a_descending ON t (a DESC) INCLUDE (b);
             CREATE UNIQUE INDEX t_b ON t (b);
             ALTER TABLE t ADD CONSTRAINT t_ab UNIQUE (a, b);
             ALTER TABLE t ADD CONSTRAINT t_r EXCLUDE USING gist (r WITH &&);
             CREATE INDEX ON \"P q\" (v);",
        );
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root = true)");
        // The same under another name.
        case.subscriber.sql("CREATE INDEX other_name ON t USING btree (a)");
        let lines = found(&case, "indexes");
        let [unique, plain] = &lines[..] else { panic!("{lines:#?}") };
        assert_eq!((&unique["severity"], &plain["severity"]), (&"warning".into(), &"note".into()));
        for name in ["t_ab on public.t", "t_b on public.t", "t_r on public.t"] {
            assert!(message(unique).contains(name), "{unique:#}");
        }
        for name in ["t_lower on", "t_a_descending on", "\"P q_v_idx on public.P q\""] {
            assert!(message(plain).contains(name.trim_matches('"')), "{plain:#}");
        }
        assert!(!message(plain).contains("t_a on"), "{plain:#}");
        mend_all(&case, &lines);
        assert_eq!(found(&case, "indexes"), Vec::<Value>::new());
        let human = case.tool.finish("check", &[]);
        human.expect(0, &[]);
        assert!(human.stdout.contains("0 warnings"), "{}", human.stdout);
    });
}

#[test]
fn objects_that_replication_does_not_carry_are_listed() {
    on_versions(&PAIRS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY);
             CREATE MATERIALIZED VIEW counted AS SELECT count(*) FROM t",
        );
        case.publisher.sql(
            "INSERT INTO t VALUES (1);
             CREATE MATERIALIZED VIEW later AS SELECT max(id) FROM t;
             CREATE SCHEMA elsewhere; CREATE SEQUENCE elsewhere.tickets; CREATE SEQUENCE loose;
             CREATE TABLE elsewhere.apart (id serial);
             SELECT lo_from_bytea(0, 'one'), lo_from_bytea(0, 'two');",
        );
        case.publish("FOR TABLE t");
        case.subscriber.sql("CREATE SEQUENCE loose");

        let views = found(&case, "materialized_views");
        assert!(message(&views[0]).contains("public.later"), "{views:#?}");
        assert!(message(&views[1]).contains("public.counted"), "{views:#?}");
        case.run_until_current();
        assert_eq!(case.subscriber.value("TABLE counted"), "0");
        mend_all(&case, &views);
        assert_eq!(case.subscriber.value("TABLE counted"), "1");

        let sequences = found(&case, "sequences");
        assert_eq!(sequences.len(), 1, "{sequences:#?}");
        assert!(message(&sequences[0]).contains("elsewhere.tickets."), "{sequences:#?}");

        let objects = found(&case, "large_objects");
        assert!(message(&objects[0]).contains("large objects (2)"), "{objects:#?}");
        if case.publisher.cluster.binaries().has("pg_dump") {
            mend_all(&case, &objects);
            let copied = "SELECT string_agg(convert_from(lo_get(oid), 'UTF8'), ',' ORDER BY oid) \
                          FROM pg_largeobject_metadata";
            assert_eq!(case.subscriber.value(copied), "one,two");
            assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "1");
        }
    });
}

/// A copy of the schema creates them, so there is nothing to create before.
#[test]
fn materialized_views_that_the_copy_creates_are_to_be_refreshed() {
    on_versions(&PAIRS, |case| {
        case.publisher.sql(
            "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1);
             CREATE MATERIALIZED VIEW counted AS SELECT count(*) FROM t",
        );
        case.publish("FOR ALL TABLES");
        let views = found_with(&case, "materialized_views", &["--copy-schema"]);
        let [view] = &views[..] else { panic!("{views:#?}") };
        assert!(message(view).contains("--copy-schema creates"), "{view:#}");
        assert!(!message(view).contains("Create them"), "{view:#}");
        if case.publisher.cluster.binaries().has("pg_dump") {
            case.tool.finish("run", &["--until", "current", "--copy-schema"]).expect(0, &[]);
            mend_all(&case, &views);
            assert_eq!(case.subscriber.value("TABLE counted"), "1");
        }
    });
}

/// Three missing tables that refer to each other are one piece of advice.
#[test]
fn missing_tables_are_one_piece_of_advice() {
    on_versions(&PAIRS, |case| {
        case.publisher.sql(
            "CREATE TABLE a (id int PRIMARY KEY); \
             CREATE TABLE \"B b\" (id int PRIMARY KEY REFERENCES a); \
             CREATE TABLE c (id int PRIMARY KEY REFERENCES \"B b\"); INSERT INTO a VALUES (1)",
        );
        case.publish("FOR ALL TABLES");
        let human = case.tool.finish("check", &[]);
        human.expect(6, &["3 blockers were found"]);
        assert_eq!(human.stdout.matches("run: ").count(), 1, "{}", human.stdout);
        assert!(human.stdout.contains("--copy-schema"), "{}", human.stdout);
        if case.publisher.cluster.binaries().has("pg_dump") {
            mend_all(&case, &found(&case, "table")[..1]);
            case.tool.finish("check", &[]).expect(0, &[]);
            case.run_until_current();
            case.expect_equal(&["a", "B b", "c"]);
        }
    });
}

/// A slot that nobody reads, and the size of what a first run copies.
#[test]
fn disk_is_looked_at() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t SELECT generate_series(1, 10000)");
    case.publish("FOR TABLE t");
    let human = case.tool.finish("check", &[]);
    human.expect(0, &[]);
    assert!(human.stdout.contains("a run copies 1 tables: "), "{}", human.stdout);
    case.run_until_current();
    let human = case.tool.finish("check", &[]);
    assert!(!human.stdout.contains("a run copies"), "{}", human.stdout);
}
