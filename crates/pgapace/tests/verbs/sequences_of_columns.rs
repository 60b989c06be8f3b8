//! The sequence of the same column takes the value of the publisher, not the one of the same name.

use super::sequences::{Said, at};
use crate::support::{Case, VERSIONS, on_versions};

/// Before t was created on the subscriber, another table had its name, and keeps the sequence.
const RENAMED: &str = "CREATE TABLE t (id serial PRIMARY KEY, v text); ALTER TABLE t RENAME TO t_old; \
                       ALTER INDEX t_pkey RENAME TO t_old_pkey";
const TABLE: &str = "CREATE TABLE t (id serial PRIMARY KEY, v text)";
const ROWS: &str = "INSERT INTO t (v) SELECT 'x' FROM generate_series(1, 100)";

#[test]
fn a_renamed_table_keeps_its_sequence() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(&format!("{TABLE}; {ROWS}"));
        case.subscriber.sql(&format!("{RENAMED}; {TABLE}"));
        case.publish("FOR TABLE t");
        case.run_until_current();
        assert_eq!(
            (at(&case, "t_id_seq1").as_str(), at(&case, "t_id_seq").as_str()),
            ("100|t", "1|f")
        );
        case.publisher.sql("SELECT setval('t_id_seq', 200)");
        for more in [&[][..], &["--table", "t"]] {
            case.subscriber.sql("SELECT setval('t_id_seq1', 100)");
            let said = Said::run(&case, 0, more);
            said.expect(&[("public.t_id_seq", "set")]);
            assert_eq!(said.of("public.t_id_seq")["subscriber"], "public.t_id_seq1");
            assert_eq!(at(&case, "t_id_seq1"), "200|t");
        }
        assert_eq!(at(&case, "t_id_seq"), "1|f");
        // Without its own sequence, the column has none that could be set.
        case.subscriber.sql("ALTER TABLE t ALTER id DROP DEFAULT; DROP SEQUENCE t_id_seq1");
        let why = "on the subscriber it belongs to public.t_old.id, not to public.t.id";
        Said::run(&case, 6, &[]).expect_reason("public.t_id_seq", why);
        let checked = case.tool.finish("check", &[]).stdout;
        assert!(checked.contains(why), "{checked}");
        assert_eq!(at(&case, "t_id_seq"), "1|f");
    });
}

/// The publisher's tables were swapped, those of the subscriber were not.
#[test]
fn tables_whose_sequences_have_each_others_names() {
    let case = Case::new(15, 18);
    case.publisher.sql(&format!("{RENAMED}; {TABLE}; {ROWS}; SELECT setval('t_id_seq', 7)"));
    case.subscriber.sql(&format!("{TABLE}; CREATE TABLE t_old (id serial PRIMARY KEY, v text)"));
    case.publish("FOR TABLE t");
    case.run_until_current();
    assert_eq!(
        (at(&case, "t_id_seq").as_str(), at(&case, "t_old_id_seq").as_str()),
        ("100|t", "7|t")
    );
    // Its table is not published, so nothing is amiss without it.
    case.subscriber.sql("DROP TABLE t_old");
    Said::run(&case, 0, &["--allow-backwards"])
        .expect_reason("public.t_id_seq", "belongs to public.t.id");
    assert_eq!(at(&case, "t_id_seq"), "100|t");
}

/// One sequence of the publisher gives the values of two tables, each of which has its own on the subscriber.
#[test]
fn a_shared_sequence_sets_those_of_all_its_tables() {
    let case = Case::new(18, 18);
    case.publisher.sql(
        "CREATE SEQUENCE shared; SELECT setval('shared', 50); CREATE SEQUENCE by_trigger; \
         SELECT setval('by_trigger', 60); CREATE TABLE a (id int PRIMARY KEY DEFAULT nextval('shared')); \
         CREATE TABLE b (id int PRIMARY KEY DEFAULT nextval('shared')); CREATE TABLE c (id int PRIMARY KEY)",
    );
    case.subscriber.sql(
        "CREATE TABLE a (id serial PRIMARY KEY); CREATE TABLE b (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY); \
         CREATE SEQUENCE by_trigger; \
         CREATE TABLE c (id int PRIMARY KEY DEFAULT nextval('by_trigger')); CREATE SEQUENCE shared",
    );
    case.publish("FOR TABLE a, b, c");
    case.run_until_current();
    let sequences = ["a_id_seq", "b_id_seq", "by_trigger", "shared"];
    assert_eq!(sequences.map(|name| at(&case, name)), ["50|t", "50|t", "60|t", "1|f"]);
    let said = Said::run(&case, 0, &[]);
    assert_eq!(said.0["sequences"].as_array().map(Vec::len), Some(3), "{:#}", said.0);
    // A table of the subscriber alone has taken it.
    case.subscriber.sql(
        "ALTER TABLE c ALTER id DROP DEFAULT; ALTER SEQUENCE by_trigger RESTART; \
         CREATE TABLE own (id int DEFAULT nextval('by_trigger'))",
    );
    Said::run(&case, 6, &[]).expect_reason("public.by_trigger", "belongs to public.own.id");
    assert_eq!(at(&case, "by_trigger"), "1|f");
}
