//! Types that both sides have under one name, and define in different ways: what the hint of a value that does not fit says.

use super::errors::VERSIONS;
use crate::support::{Case, on_versions};

/// The value stops the run, until the subscriber's definition is changed as `mend` says.
fn stops_until(case: &Case, insert: &str, (said, unsaid): (&[&str], &[&str]), mend: &str) {
    case.publisher.sql(insert);
    let failed = case.run();
    failed.expect(9, said);
    let error = failed.log.rsplit("pgapace: error").next().unwrap_or_default();
    for text in unsaid {
        assert!(!error.contains(text), "{text}: {error}");
    }
    case.subscriber.sql(mend);
    case.run_until_current();
    case.expect_equal(&["t"]);
}

#[test]
fn a_type_that_is_defined_in_another_way_is_named_instead_of_a_change_of_the_column() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE TYPE c AS (a int, b text); CREATE DOMAIN d AS varchar(5); CREATE TYPE r AS RANGE (subtype = int8)",
        );
        case.subscriber.sql(
            "CREATE TYPE c AS (a int); CREATE DOMAIN d AS varchar(3); CREATE TYPE r AS RANGE (subtype = int4)",
        );
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, c c, d d, r r, cs c[], s varchar(5))");
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        for said in [
            "composite type public.c has the attributes a integer, b text on the publisher and a integer on the",
            "domain public.d is over character varying(5) on the publisher and character varying(3) on",
            "range type public.r is a range of bigint on the publisher and integer on",
            "ALTER TYPE public.c ADD ATTRIBUTE b text;",
        ] {
            assert!(checked.stdout.contains(said), "{said}:\n{}", checked.stdout);
        }
        let said = ["types of the same names", "(public.c, public.c[], public.d, public.r)"];
        let unsaid = ["ALTER COLUMN"];
        let expected = |state| [state, said[0], said[1]];
        stops_until(
            &case,
            "INSERT INTO t (id, c) VALUES (1, '(1,x)')",
            (&expected("22P02"), &unsaid),
            "ALTER TYPE c ADD ATTRIBUTE b text",
        );
        stops_until(
            &case,
            "INSERT INTO t (id, d) VALUES (2, 'abcde')",
            (&expected("22001"), &unsaid),
            "ALTER TABLE t ALTER d TYPE varchar(5)",
        );
        // A column whose type is another one is still named, and no other column.
        case.subscriber.sql("ALTER TABLE t ALTER s TYPE varchar(3)");
        stops_until(
            &case,
            "INSERT INTO t (id, s) VALUES (3, 'abcde')",
            (&["22001", "ALTER COLUMN \"s\" TYPE character varying(5)"], &["public.c"]),
            "ALTER TABLE t ALTER s TYPE varchar(5)",
        );
    });
}

#[test]
fn a_label_is_added_to_the_enum_below_a_domain() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql("CREATE TYPE e AS ENUM ('a', 'b')");
        case.subscriber.sql("CREATE TYPE e AS ENUM ('a')");
        case.both("CREATE TYPE other AS ENUM ('a'); CREATE DOMAIN d AS e");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v d, o other)");
        let add = "ALTER TYPE public.e ADD VALUE 'b'";
        stops_until(&case, "INSERT INTO t VALUES (1, 'b')", (&["22P02", add], &[]), add);
    });
}
