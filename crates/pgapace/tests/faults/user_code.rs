//! Errors that triggers and other objects of the subscriber raise: their CONTEXT, and a HINT that fits.

use super::errors::VERSIONS;
use crate::support::{Case, on_versions};

const AT_STATEMENT: &str = "\nPL/pgSQL function public.f() line 1 at ";
const TABLE: &str = "CREATE TABLE t (k int PRIMARY KEY, v text)";

/// A trigger of table t that fires whenever a row is inserted.
fn trigger(body: &str) -> String {
    format!(
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN new; END $$; \
         CREATE TRIGGER f BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER f"
    )
}

/// One row stops with `said` and without `unsaid`, and is applied after `mend`.
fn stops_until(case: &Case, (said, unsaid): (&[&str], &[&str]), mend: &str) {
    let next = case.subscriber.value("SELECT coalesce(max(k), 0) + 1 FROM t");
    case.publisher.sql(&format!("INSERT INTO t VALUES ({next}, 'abcd')"));
    let failed = case.run();
    failed
        .expect(9, &["INSERT on public.t, key (k)=", "pgapace skip --lsn", "start pgapace again"]);
    failed.expect(9, said);
    let error = failed.log.rsplit("pgapace: error").next().unwrap_or_default();
    let status = case.tool.finish("status", &[]).stdout;
    for text in unsaid {
        assert!(!error.contains(text), "{text}: {error}");
    }
    if said.contains(&AT_STATEMENT) {
        assert!(status.contains(AT_STATEMENT.trim()), "{status}");
        let recorded = "SELECT (SELECT full_text LIKE '%public.f() line 1%' FROM pgapace.error_detail \
                        WHERE about = '')";
        assert_eq!(case.subscriber.value(recorded), "t", "{error}");
    }
    case.subscriber.sql(mend);
    case.run_until_current();
    case.expect_equal(&["t"]);
}

#[test]
fn an_error_of_the_table_of_a_trigger_is_named_with_that_table() {
    on_versions(&VERSIONS, |case| {
        case.replicate(TABLE);
        case.subscriber.sql("CREATE TABLE audit (k int, who text NOT NULL) PARTITION BY RANGE (k)");
        case.subscriber
            .sql(&trigger("EXECUTE format('INSERT INTO public.audit VALUES (%s)', new.k)"));
        // The server's CONTEXT also has the statement, with its values.
        let unsaid =
            ["PARTITION OF \"public\".\"t\"", "ALTER TABLE \"public\".\"t\"", "SQL statement \""];
        let partition = "CREATE TABLE … PARTITION OF \"public\".\"audit\" FOR VALUES …; or DEFAULT";
        let said =
            ["23514", AT_STATEMENT, "a trigger or a rule of \"public\".\"t\" writes to", partition];
        let mend = "CREATE TABLE audit1 PARTITION OF audit DEFAULT; ALTER TABLE audit ALTER who DROP NOT NULL";
        stops_until(&case, (&said, &unsaid), mend);

        case.subscriber.sql("ALTER TABLE audit ADD n int; UPDATE audit SET n = 0");
        case.subscriber.sql("ALTER TABLE audit1 ALTER n SET NOT NULL");
        let nullable = "ALTER TABLE \"public\".\"audit1\" ALTER COLUMN \"n\" DROP NOT NULL";
        stops_until(&case, (&["23502", AT_STATEMENT, nullable], &unsaid), nullable);

        case.subscriber.sql("ALTER TABLE audit ADD CONSTRAINT who_ok CHECK (k < 0) NOT VALID");
        let said = ["23514", AT_STATEMENT, "DROP CONSTRAINT \"who_ok\""];
        stops_until(&case, (&said, &unsaid), "ALTER TABLE audit DROP CONSTRAINT who_ok");
    });
}

#[test]
fn a_value_that_other_code_refuses_is_not_named_with_the_type_of_a_column() {
    on_versions(&VERSIONS, |case| {
        case.replicate(TABLE);
        let unsaid = ["ALTER COLUMN", "PARTITION OF"];
        case.subscriber.sql(&trigger("PERFORM new.v::int"));
        let said = ["22P02", AT_STATEMENT, "perhaps that of a trigger of \"public\".\"t\""];
        stops_until(&case, (&said, &unsaid), "DROP FUNCTION f CASCADE");
        case.subscriber.sql(&trigger("RAISE 'not so' USING errcode = 'check_violation'"));
        let said =
            ["not so", "23514", AT_STATEMENT, "Correct on the subscriber what the message names"];
        stops_until(&case, (&said, &unsaid), "DROP FUNCTION f CASCADE");

        let said = ["22P02", "The columns of \"public\".\"t\" have the publisher's types"];
        for (made, mend) in [
            ("CREATE INDEX of_v ON t ((v::int))", "DROP INDEX of_v"),
            ("ALTER TABLE t ADD CHECK (v::int > 0)", "ALTER TABLE t DROP CONSTRAINT t_v_check"),
            ("ALTER TABLE t ADD g int GENERATED ALWAYS AS (v::int) STORED", "ALTER TABLE t DROP g"),
        ] {
            case.both("TRUNCATE t");
            case.run_until_current();
            case.subscriber.sql(made);
            stops_until(&case, (&said, &unsaid), mend);
        }
    });
}

#[test]
fn a_function_that_needs_a_search_path_is_named() {
    on_versions(&VERSIONS, |case| {
        case.replicate(TABLE);
        case.subscriber.sql("CREATE TABLE audit (k int); CREATE FUNCTION g(text) RETURNS int LANGUAGE sql AS 'SELECT 1'");
        for (body, code) in
            [("INSERT INTO audit VALUES (1)", "42P01"), ("PERFORM g('x'::text)", "42883")]
        {
            case.subscriber.sql(&trigger(body));
            let said = [code, AT_STATEMENT, "ALTER FUNCTION public.f() SET search_path = …;"];
            stops_until(&case, (&said, &[]), "ALTER FUNCTION public.f() SET search_path = public");
            case.subscriber.sql("DROP FUNCTION f CASCADE");
        }
    });
}

#[test]
fn a_hint_of_the_server_is_followed_by_the_way_out() {
    on_versions(&VERSIONS, |case| {
        case.replicate(TABLE);
        case.subscriber.sql(&trigger(
            "RAISE 'no way' USING hint = 'Ask postgres://u:secret@h/db.', detail = 'password=secret', errcode = 'P0123'",
        ));
        let said = [
            "DETAIL:  password=****",
            "HINT:  Ask postgres://u:****@h/db. Correct the cause on the subscriber; or skip the transaction",
        ];
        stops_until(&case, (&said, &["secret"]), "DROP FUNCTION f CASCADE");
    });
}
