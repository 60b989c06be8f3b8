//! The SQL that `check` prints is executed as it is: afterwards, both sides have the same rows and definitions.

use crate::support::{Case, VERSIONS, on_versions, skipped};
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

/// Builds of other versions may be servers only.
const WITH_TOOLS: [(u16, u16); 1] = [(15, 15)];

const PARTED: &str = "
    CREATE TABLE orders (id bigint GENERATED BY DEFAULT AS IDENTITY, placed date, PRIMARY KEY (id, placed))
      PARTITION BY RANGE (placed);
    CREATE TABLE orders_2026 PARTITION OF orders FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')
      PARTITION BY RANGE (placed);
    CREATE TABLE \"orders 2026 1\" PARTITION OF orders_2026 FOR VALUES FROM ('2026-01-01') TO ('2026-07-01');
    CREATE TABLE \"orders 2026 2\" PARTITION OF orders_2026 DEFAULT;
    INSERT INTO orders (placed) VALUES ('2026-03-01'), ('2026-09-01')";

fn parted(case: &Case) -> bool {
    case.publisher.sql(PARTED);
    case.publish("FOR ALL TABLES");
    case.subscriber.cluster.binaries().has("pg_dump")
}

const ATTACHED: &str =
    "SELECT count(*) FROM pg_class WHERE relispartition AND relkind IN ('r', 'p')";

/// Without the partitioned tables, pg_dump leaves the partitions standing alone.
#[test]
fn missing_partitions_are_created_with_their_partitioned_tables() {
    on_versions(&WITH_TOOLS, |case| {
        if !parted(&case) {
            return skipped(
                "missing_partitions_are_created_with_their_partitioned_tables",
                "no pg_dump",
            );
        }
        mend_all(&case, &found(&case, "table")[..1]);
        assert_eq!(case.subscriber.value(ATTACHED), "3");
        let human = case.tool.finish("check", &[]);
        human.expect(0, &[]);
        assert!(human.stdout.contains("0 blockers, 0 warnings"), "{}", human.stdout);
        case.run_until_current();
        case.expect_equal(&["orders"]);
    });
}

#[test]
fn partitions_that_stand_alone_on_the_subscriber_are_named_and_attached() {
    on_versions(&WITH_TOOLS, |case| {
        let has_tools = parted(&case);
        case.subscriber.sql(
            "CREATE TABLE \"orders 2026 1\" (id bigint, placed date, PRIMARY KEY (id, placed));
             CREATE TABLE \"orders 2026 2\" (id bigint, placed date, PRIMARY KEY (id, placed))",
        );
        case.run_until_current();
        let said = "partitions of table public.orders_2026 of the publisher are no partitions on the subscriber \
                    (public.orders 2026 1; public.orders 2026 2): the subscriber lacks table public.orders_2026";
        let lines = found(&case, "partitions");
        let [line] = &lines[..] else { panic!("{lines:#?}") };
        assert!(message(line).starts_with(said), "{line:#}");
        let plan = case.tool.finish("switchover", &["--plan"]);
        assert!(plan.stdout.contains(&format!("warning: {said}")), "{}{}", plan.stdout, plan.log);
        if !has_tools {
            return skipped(
                "partitions_that_stand_alone_on_the_subscriber_are_named_and_attached",
                "no pg_dump",
            );
        }
        mend_all(&case, &lines);
        let lines = found(&case, "partitions");
        let [line] = &lines[..] else { panic!("{lines:#?}") };
        assert!(message(line).contains("do not find their rows"), "{line:#}");
        mend_all(&case, &lines);
        assert_eq!(case.subscriber.value(ATTACHED), "3");
        assert!(found(&case, "partitions").is_empty());
        case.publisher.sql("INSERT INTO orders (placed) VALUES ('2026-04-01')");
        case.run_until_current();
        case.expect_equal(&["orders"]);
    });
}

/// Labels cannot change their places afterwards.
#[test]
fn labels_that_an_enum_lacks_are_added_where_the_publisher_has_them() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TYPE st AS ENUM ('new', 'sent'); CREATE DOMAIN sent AS st; CREATE TYPE parcel AS (st st[]);
             CREATE TABLE t (id int PRIMARY KEY, st st); CREATE TABLE u (id int PRIMARY KEY, d sent, p parcel)",
        );
        case.publisher.sql("CREATE TYPE m AS ENUM ('a', 'b', 'c')");
        case.subscriber.sql("CREATE TYPE m AS ENUM ('c', 'a', 'own')");
        case.replicate("CREATE TABLE other (id int PRIMARY KEY, m m[])");
        case.publisher.sql(
            "ALTER TYPE st ADD VALUE 'packed' BEFORE 'sent'; ALTER TYPE st ADD VALUE 'it''s back';
             ALTER TYPE st ADD VALUE 'labelled' BEFORE 'sent'",
        );
        let lines = found(&case, "types");
        assert_eq!(lines.len(), 5, "{lines:#?}");
        mend_all(&case, &lines);
        let order = "SELECT enum_range(NULL::st)";
        assert_eq!(case.subscriber.value(order), "{new,packed,labelled,sent,\"it's back\"}");
        assert_eq!(case.subscriber.value(order), case.publisher.value(order));
        let left = found(&case, "types");
        let [line] = &left[..] else { panic!("{left:#?}") };
        assert!(
            message(line).contains("another order on the subscriber (c, a, b) than"),
            "{line:#}"
        );
    });
}

#[test]
fn domains_and_generated_columns_are_those_of_the_publisher() {
    on_versions(&VERSIONS, |case| {
        case.publisher.sql(
            "CREATE DOMAIN \"D'd\" AS text COLLATE \"C\" DEFAULT 'x''y' NOT NULL CHECK (VALUE <> '');
             CREATE TABLE t (id int PRIMARY KEY, v \"D'd\");
             CREATE TABLE g (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED)",
        );
        case.subscriber
            .sql("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE g (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        mend_all(&case, &found(&case, "types"));
        mend_all(&case, &found(&case, "columns"));
        let lines = found(&case, "generated_columns");
        assert_eq!((lines.len(), &lines[0]["severity"]), (1, &"note".into()), "{lines:#?}");
        mend_all(&case, &lines);
        assert!(found(&case, "generated_columns").is_empty());
        let domain = "SELECT typdefault, typnotnull, k.collname FROM pg_type t \
                      JOIN pg_collation k ON k.oid = t.typcollation WHERE typname = 'D''d'";
        assert_eq!(case.subscriber.rows(domain), case.publisher.rows(domain));
        expect_same_declarations(&case, "t");
        expect_same_declarations(&case, "g");
        case.publisher.sql("INSERT INTO t (id) VALUES (1); INSERT INTO g VALUES (1)");
        case.run_until_current();
        case.expect_equal(&["t", "g"]);
    });
}
