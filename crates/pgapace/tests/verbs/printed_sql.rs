//! The SQL that `check` prints is executed as it is: afterwards, both sides have the same rows and definitions.

use crate::support::{Case, VERSIONS, on_versions};
use crate::verbs::beyond::{found, mend_all, message};

/// The columns of a table on the publisher and on the subscriber.
fn declarations(case: &Case, table: &str) -> [Vec<String>; 2] {
    let sql = format!(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, k.collname, \
           pg_get_expr(d.adbin, d.adrelid) \
         FROM pg_attribute a LEFT JOIN pg_collation k ON k.oid = a.attcollation \
         LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
         WHERE a.attrelid = '{table}'::regclass AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attname"
    );
    [case.publisher.rows(&sql), case.subscriber.rows(&sql)]
}

#[track_caller]
fn expect_same_declarations(case: &Case, table: &str) {
    let [theirs, ours] = declarations(case, table);
    assert_eq!(theirs, ours);
}

/// ADD COLUMN gives rows that exist the default of that moment, on both sides the same.
#[test]
fn a_column_that_is_added_gives_rows_the_values_of_the_publisher() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 3);
             CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id);
             CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
             CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20);
             INSERT INTO p VALUES (1), (11)",
        );
        case.subscriber.sql("TRUNCATE t, p");
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql(
            "ALTER TABLE t ADD COLUMN paid boolean NOT NULL DEFAULT false,
               ADD COLUMN price numeric(10, 2) NOT NULL DEFAULT 0,
               ADD COLUMN at timestamptz NOT NULL DEFAULT now(),
               ADD COLUMN \"C c\" varchar(20) COLLATE \"C\" DEFAULT 'it''s \\ \"',
               ADD COLUMN was int DEFAULT 1, ADD COLUMN no_more box[] NOT NULL DEFAULT '{(2,2),(1,1)}',
               ADD COLUMN plain text;
             ALTER TABLE t ALTER was SET DEFAULT 2, ALTER no_more DROP DEFAULT;
             INSERT INTO t (id, no_more) VALUES (4, '{}');
             ALTER TABLE p ADD COLUMN n int NOT NULL DEFAULT 7",
        );
        let lines = found(&case, "columns");
        assert!(lines.iter().all(|line| !message(line).contains("resync")), "{lines:#?}");
        mend_all(&case, &lines);
        case.tool.finish("check", &[]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t", "p"]);
        expect_same_declarations(&case, "t");
        expect_same_declarations(&case, "p");
    });
}

/// Values that only the publisher knows come with a copy.
#[test]
fn a_column_whose_values_are_not_known_is_added_with_the_word_to_copy_the_table() {
    on_versions(&VERSIONS, |case| {
        let tables = ["many", "identity", "serial", "filled", "theirs"];
        for table in tables {
            case.both(&format!("CREATE TABLE {table} (id int PRIMARY KEY)"));
            case.publisher.sql(&format!("INSERT INTO {table} SELECT generate_series(1, 3)"));
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        case.publisher.sql(
            "CREATE FUNCTION one() RETURNS int LANGUAGE plpgsql VOLATILE AS 'BEGIN RETURN 1; END';
             ALTER TABLE many ADD COLUMN v uuid NOT NULL DEFAULT gen_random_uuid();
             ALTER TABLE identity ADD COLUMN v int GENERATED ALWAYS AS IDENTITY;
             ALTER TABLE serial ADD COLUMN v bigserial;
             ALTER TABLE filled ADD COLUMN v int;
             UPDATE filled SET v = id;
             ALTER TABLE filled ALTER v SET NOT NULL;
             ALTER TABLE theirs ADD COLUMN v int NOT NULL DEFAULT one()",
        );
        let lines = found(&case, "columns");
        let said = |table: &str| {
            let name = format!("public.{table}");
            let line = lines.iter().find(|line| line["object"] == name.as_str());
            message(line.unwrap_or_else(|| panic!("{name}: {lines:#?}"))).to_owned()
        };
        for table in ["many", "identity", "serial", "theirs"] {
            let resync = format!("pgapace resync 'public.{table}'");
            assert!(said(table).ends_with(&resync), "{}", said(table));
        }
        assert!(said("filled").ends_with("ALTER COLUMN \"v\" SET NOT NULL"), "{}", said("filled"));
        assert!(said("theirs").contains("Its default is public.one()"), "{}", said("theirs"));
        mend_all(&case, &lines);
        let resynced =
            ["many", "identity", "serial", "theirs"].map(|name| format!("public.{name}"));
        let resynced: Vec<_> = resynced.iter().map(String::as_str).collect();
        case.tool.finish("resync", &resynced).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&tables);
        for table in ["many", "identity", "serial"] {
            expect_same_declarations(&case, table);
        }
    });
}
