//! The first change of each table after a start: tables are read from the subscriber's catalogue
//! together, and one that cannot be read does not stop the others.

use std::fs;

use testbed::program::events;

use crate::support::{Case, PATIENCE, VERSIONS, must, on_versions, wait_for_event};

/// Tables of each kind.
const EACH: usize = 60;

/// A table with a default, a partitioned table with two leaves, a table whose changes run user code,
/// and one with a domain and a foreign key.
fn ddl() -> String {
    format!(
        "CREATE DOMAIN short AS varchar(8) CHECK (VALUE <> ''); \
         CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN NEW.v := NEW.v || '!'; RETURN NEW; END $$; \
         DO $$ BEGIN FOR i IN 1..{EACH} LOOP \
           EXECUTE format('CREATE TABLE plain%s (id int PRIMARY KEY, v text, at timestamptz DEFAULT now())', i); \
           EXECUTE format('CREATE TABLE parted%s (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)', i); \
           EXECUTE format('CREATE TABLE parted%s_a PARTITION OF parted%s FOR VALUES FROM (0) TO (100)', i, i); \
           EXECUTE format('CREATE TABLE parted%s_b PARTITION OF parted%s FOR VALUES FROM (100) TO (200)', i, i); \
           EXECUTE format('CREATE TABLE hooked%s (id int PRIMARY KEY, v text)', i); \
           EXECUTE format('CREATE TABLE child%s (id int PRIMARY KEY REFERENCES plain%s, v short)', i, i); \
         END LOOP; END $$"
    )
}

fn each(sql: &str) -> String {
    format!("DO $$ BEGIN FOR i IN 1..{EACH} LOOP {sql} COMMIT; END LOOP; END $$")
}

fn all_tables() -> Vec<String> {
    let kinds = ["plain", "parted", "child"];
    kinds.iter().flat_map(|kind| (1..=EACH).map(move |i| format!("{kind}{i}"))).collect()
}

fn insert(id: usize) -> String {
    each(&format!(
        "EXECUTE format('INSERT INTO plain%s VALUES ({id}, ''x'')', i); \
         EXECUTE format('INSERT INTO parted%s VALUES ({id}, ''x''), ({id} + 100, ''y'')', i); \
         EXECUTE format('INSERT INTO hooked%s VALUES ({id}, ''x'')', i); \
         EXECUTE format('INSERT INTO child%s VALUES ({id}, ''x'')', i);"
    ))
}

#[track_caller]
fn expect_all_equal(case: &Case) {
    let tables = all_tables();
    case.expect_equal(&tables.iter().map(String::as_str).collect::<Vec<_>>());
}

/// How often the subscriber's log names a statement.
fn executions(case: &Case, statement: &str) -> usize {
    executions_with(case, &format!("execute {statement}:"))
}

/// How many executions in the subscriber's log contain a text.
pub(super) fn executions_with(case: &Case, text: &str) -> usize {
    let log = fs::read(case.subscriber.cluster.log_file()).expect("the server's log");
    let log = String::from_utf8_lossy(&log);
    log.lines().filter(|line| line.contains(" execute ") && line.contains(text)).count()
}

#[test]
fn tables_of_a_backlog_are_read_together() {
    on_versions(&VERSIONS, |case| {
        case.replicate(&ddl());
        case.subscriber.sql(&each(
            "EXECUTE format('CREATE TRIGGER noted BEFORE INSERT ON hooked%s FOR EACH ROW EXECUTE FUNCTION noted()', i); \
             EXECUTE format('ALTER TABLE hooked%s ENABLE ALWAYS TRIGGER noted', i);",
        ));
        let log = "SET log_min_duration_statement";
        case.subscriber.sql(&format!("ALTER DATABASE {} {log} = 0", case.subscriber.name));
        let before = executions(&case, "catalogue_tables");
        case.publisher.sql(&insert(1));
        case.run_until_current();
        case.subscriber.sql(&format!(
            "ALTER DATABASE {} RESET log_min_duration_statement",
            case.subscriber.name
        ));
        let reads = executions(&case, "catalogue_tables") - before;
        // 60 transactions change 300 tables. In how many pieces they arrive depends on the network
        // and on the machine, but the tables of one transaction come together.
        assert!((1..=100).contains(&reads), "the catalogue was read {reads} times");
        expect_all_equal(&case);
        let hooked = each("EXECUTE format('INSERT INTO found SELECT v FROM hooked%s', i);");
        case.subscriber.sql("CREATE TABLE found (v text)");
        case.subscriber.sql(&hooked);
        assert_eq!(
            case.subscriber.rows("SELECT v, count(*) FROM found GROUP BY v"),
            [format!("x!|{EACH}")]
        );
        let modes = "SELECT rtrim(substring(table_name, '^[a-z]+')), apply_mode, count(*) \
             FROM pgapace.relation GROUP BY 1, 2 ORDER BY 1";
        assert_eq!(
            case.subscriber.rows(modes),
            [("child", "set", 1), ("hooked", "row", 1), ("parted", "set", 2), ("plain", "set", 1)]
                .map(|(kind, mode, leaves)| format!("{kind}|{mode}|{}", leaves * EACH))
        );
    });
}

/// The leader reads at most 1000 tables at once. When it reads the first ones, the descriptions of all have arrived.
#[test]
fn more_tables_than_are_read_at_once_are_read_in_their_order() {
    const TABLES: usize = 1600;
    on_versions(&[(18, 15)], |mut case| {
        let each = |sql: &str, together: usize| {
            format!(
                "DO $$ BEGIN FOR i IN 1..{TABLES} LOOP EXECUTE format('{sql}', i); \
                   IF i % {together} = 0 THEN COMMIT; END IF; END LOOP; END $$"
            )
        };
        case.both(&each("CREATE TABLE t%s (id int PRIMARY KEY)", 50));
        case.publish("FOR ALL TABLES");
        case.tool.args = vec!["--copy-data=false".to_owned()];
        case.run_until_current();
        let log = "SET log_min_duration_statement";
        case.subscriber.sql(&format!("ALTER DATABASE {} {log} = 0", case.subscriber.name));
        let before = executions(&case, "catalogue_tables");
        case.publisher.sql(&each("INSERT INTO t%s VALUES (1)", 1));
        case.run_until_current();
        let reads = executions(&case, "catalogue_tables") - before;
        assert!((1..=100).contains(&reads), "the catalogue was read {reads} times");
        let tables: Vec<_> = (1..=TABLES).map(|i| format!("t{i}")).collect();
        case.expect_equal(&tables.iter().map(String::as_str).collect::<Vec<_>>());
    });
}

#[test]
fn a_table_that_cannot_be_read_does_not_stop_the_others() {
    on_versions(&VERSIONS[..2], |mut case| {
        case.replicate(&ddl());
        case.subscriber
            .sql("ALTER TABLE plain7 RENAME TO kept; CREATE VIEW plain7 AS SELECT * FROM kept");
        case.subscriber.sql("ALTER TABLE plain9 DROP v; ALTER TABLE child8 RENAME TO gone");
        case.publisher.sql(&insert(1));
        case.tool.args.extend(["--on-table-error".to_owned(), "block".to_owned()]);
        let finished = case.run();
        for table in ["plain7", "plain9", "child8"] {
            finished.expect(finished.code.unwrap_or(-1), &[&format!("public.{table}")]);
        }
        assert_ne!(finished.code, Some(0), "{}", finished.log);
        let mut tables = all_tables();
        tables.retain(|table| !["plain7", "plain9", "child8"].contains(&table.as_str()));
        case.expect_equal(&tables.iter().map(String::as_str).collect::<Vec<_>>());
    });
}

/// A user adds a column on the subscriber, and then on the publisher. A definition that was read
/// before would lack the column.
#[test]
fn a_table_is_read_after_the_publisher_has_described_it() {
    on_versions(&VERSIONS, |case| {
        case.replicate(
            "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); \
             CREATE TABLE c (id int PRIMARY KEY)",
        );
        let mut process = case.start();
        case.publisher.sql("INSERT INTO a VALUES (1)");
        case.wait_until_applied(&mut process);
        for (table, id) in [("b", 1), ("c", 1), ("b", 2), ("a", 2)] {
            let add = format!("ALTER TABLE {table} ADD v{id} text");
            case.subscriber.sql(&add);
            case.publisher.sql(&add);
            case.publisher.sql(&format!(
                "INSERT INTO a (id) VALUES ({id} * 100 + (SELECT count(*) FROM a)); \
                 INSERT INTO {table} (id, v{id}) VALUES (50 + {id}, 'x')"
            ));
            case.wait_until_applied(&mut process);
        }
        case.stop(process);
        case.expect_equal(&["a", "b", "c"]);
        // The old and the new version of a table in one chunk.
        case.publisher.sql("INSERT INTO c VALUES (200)");
        case.subscriber.sql("ALTER TABLE c ADD w int DEFAULT 7");
        case.publisher.sql("ALTER TABLE c ADD w int DEFAULT 7");
        case.publisher.sql("INSERT INTO c VALUES (201, 'x', 8)");
        case.run_until_current();
        case.expect_equal(&["a", "b", "c"]);
    });
}

/// Rows of an index of pg_class on schema and name that the subscriber has read so far.
fn class_rows_read(case: &Case) -> i64 {
    // The counts of a session are published when it ends.
    let read = "SELECT idx_tup_read FROM pg_stat_sys_indexes WHERE indexrelname = 'pg_class_relname_nsp_index'";
    case.subscriber.rows(read)[0].parse().expect("a number of rows")
}

/// Each tenant has a schema with tables of the same names. A query that looks for the name alone finds the tables of all
/// of them.
#[test]
fn tables_of_one_name_in_many_schemas_are_not_read_for_each_other() {
    const SCHEMAS: i64 = 120;
    on_versions(&VERSIONS, |case| {
        let each = |sql: &str| {
            format!(
                "DO $$ BEGIN FOR i IN 1..{SCHEMAS} LOOP EXECUTE format('{sql}', i); END LOOP; END $$"
            )
        };
        for sql in
            ["CREATE SCHEMA s%1$s", "CREATE TABLE s%1$s.t (id serial PRIMARY KEY, v int UNIQUE)"]
        {
            case.both(&each(sql));
        }
        case.publisher.sql(&each("INSERT INTO s%1$s.t VALUES (%1$s, 7)"));
        case.publish("FOR ALL TABLES");
        let before = class_rows_read(&case);
        case.tool.finish("check", &[]).expect(0, &[]);
        case.run_until_current();
        case.publisher.sql(&each("UPDATE s%1$s.t SET v = 8"));
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        let read = class_rows_read(&case) - before;
        // Of each table, some 20 queries of ours and of the server read one row each.
        assert!(read < SCHEMAS * SCHEMAS, "{read} rows were read for {SCHEMAS} tables");
        let tables: Vec<_> = (1..=SCHEMAS).map(|i| format!("s{i}.t")).collect();
        case.expect_equal(&tables.iter().map(String::as_str).collect::<Vec<_>>());
    });
}

/// Each ALTER TABLE of the publisher is another version of the relation, and all of them are one table of the subscriber.
#[test]
fn versions_of_the_publishers_table_are_no_change_on_the_subscriber() {
    let case = Case::new(18, 18);
    case.replicate(
        "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE u (id int PRIMARY KEY)",
    );
    let mut process = case.start();
    for identity in ["FULL", "DEFAULT", "FULL"] {
        case.publisher.sql(&format!(
            "INSERT INTO t SELECT count(*) FROM t; ALTER TABLE t REPLICA IDENTITY {identity}; \
             UPDATE t SET v = id; INSERT INTO u SELECT count(*) FROM u"
        ));
    }
    case.wait_until_applied(&mut process);
    case.subscriber.sql("ALTER TABLE u ADD here int");
    must(wait_for_event(&mut process, "table_definition_changed", PATIENCE));
    case.publisher.sql("UPDATE t SET v = 7");
    case.wait_until_applied(&mut process);
    case.expect_equal(&["t"]);
    let log = case.stop(process);
    assert_eq!(events(&log, "table_definition_changed"), 1, "{log}");
}
