//! Updates of tables with many columns, which send whole rows of the subscriber's row type.

use crate::support::{PATIENCE, must, on_versions, wait_while_running};

const UPDATES: &str = "DO $$ BEGIN FOR i IN 1..2000 LOOP \
    UPDATE t SET c1 = c1 + 1, c5 = i WHERE id = 1 + i % 500; COMMIT; END LOOP; END $$";

/// A row value has a field for each column. Until the description of the table is read again, the subscriber refuses
/// those of the earlier columns.
#[test]
fn columns_that_come_and_go_on_the_subscriber_stop_nothing() {
    columns_come_and_go("PRIMARY KEY (id)", "");
}

#[test]
fn columns_that_come_and_go_where_rows_have_no_key_stop_nothing() {
    let without = "CREATE INDEX ON t (id); ALTER TABLE t REPLICA IDENTITY FULL";
    columns_come_and_go("CHECK (id > 0)", without);
}

fn columns_come_and_go(constraint: &str, others: &str) {
    on_versions(&[(14, 14), (18, 18)], |mut case| {
        // The transactions that change all rows are streamed.
        case.tool.publisher += " options='-c logical_decoding_work_mem=64kB'";
        case.tool.args.extend(["--workers".to_owned(), "2".to_owned()]);
        let columns: Vec<_> = (0..10).map(|number| format!("c{number} int DEFAULT 1")).collect();
        let columns = columns.join(", ");
        case.replicate(&format!("CREATE TABLE t (id int, {columns}, {constraint}); {others}"));
        case.publisher.sql("INSERT INTO t SELECT g FROM generate_series(1, 5000) g");
        let mut process = case.start();
        let mut user = case.publisher.connect();
        // The last two leave as many columns of the same types, at other places: each value must reach its column.
        let actions = [
            "ADD own int",
            "ADD other text DEFAULT 'o'",
            "DROP own",
            "ADD third int",
            "DROP third, ADD fourth int",
            "DROP c3, ADD c3 int DEFAULT 1",
        ];
        for action in actions {
            user.batch_execute(UPDATES).expect("updates");
            case.subscriber.sql(&format!("ALTER TABLE t {action}"));
            user.batch_execute("UPDATE t SET c2 = c2 + 1").expect("a large transaction");
            user.batch_execute(UPDATES).expect("updates");
        }
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE t DROP other, DROP fourth");
        case.expect_equal(&["t"]);
        // Once for each new set of columns and worker, and halves of groups; not each group for a second.
        let retries =
            case.subscriber.value("SELECT coalesce(sum(retries), 0) FROM pgapace.stat_retry");
        assert!(retries.parse::<u32>().expect("a number") <= 16, "{retries}");
        let log = case.stop(process);
        assert!(!log.contains("WARN"), "{log}");
    });
}

/// The server reads the values of a statement before it locks the table, and takes rows apart afterwards.
#[test]
fn a_column_may_change_its_type_while_rows_wait_for_the_table() {
    on_versions(&[(14, 14), (18, 18)], |mut case| {
        case.tool.args.extend([
            "--workers".to_owned(),
            "1".to_owned(),
            "--log-level=debug".to_owned(),
        ]);
        let columns: Vec<_> =
            (0..8).map(|number| format!("c{number} int DEFAULT {number}")).collect();
        let columns = columns.join(", ");
        case.replicate(&format!(
            "CREATE TABLE keyed (id int PRIMARY KEY, {columns}); CREATE TABLE plain (id int, {columns}); \
             ALTER TABLE plain REPLICA IDENTITY FULL"
        ));
        for table in ["keyed", "plain"] {
            case.publisher
                .sql(&format!("INSERT INTO {table} SELECT g FROM generate_series(1, 100) g"));
        }
        let mut process = case.start();
        for (table, column, to) in [
            ("keyed", "c2", "bigint"),
            ("keyed", "c3", "text"),
            ("plain", "c2", "bigint"),
            ("plain", "c3", "numeric"),
        ] {
            let update =
                format!("UPDATE {table} SET c1 = c1 + 1, c2 = c2 + 1, c3 = c3 + 1, c7 = c7 + 1");
            // The session has the row type in its cache.
            for _ in 0..3 {
                case.publisher.sql(&update);
                case.wait_until_applied(&mut process);
            }
            let mut user = case.subscriber.connect();
            let lock = format!("BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE");
            user.batch_execute(&lock).expect("a lock");
            case.publisher.sql(&update);
            let waiting = format!(
                "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid \
                 WHERE l.relation = '{table}'::regclass AND NOT l.granted \
                   AND a.application_name = 'pgapace {} apply'",
                case.tool.name
            );
            must(wait_while_running(&mut process, "the update to wait", PATIENCE, || {
                Ok(case.subscriber.value(&waiting) != "0")
            }));
            let alter = format!("ALTER TABLE {table} ALTER {column} TYPE {to}; COMMIT");
            user.batch_execute(&alter).expect("another type");
            case.wait_until_applied(&mut process);
            let rows = format!("SELECT * FROM {table} ORDER BY id");
            let (expected, there) = (case.publisher.rows(&rows), case.subscriber.rows(&rows));
            assert_eq!(there, expected, "{table}.{column}");
        }
        case.stop(process);
    });
}

/// Single transactions, each of which changes one of several equal rows of a table.
fn changes(table: &str) -> String {
    let row = format!(
        "ctid = (SELECT ctid FROM {table} WHERE a = i % 40 ORDER BY ctid OFFSET 2 LIMIT 1)"
    );
    format!(
        "DO $$ BEGIN FOR i IN 1..400 LOOP \
           UPDATE {table} SET v = v + 1, t = CASE WHEN i % 3 > 0 THEN i::text END, n = n + 0.0 WHERE {row}; \
           IF i % 20 = 0 THEN DELETE FROM {table} WHERE {row}; END IF; \
           COMMIT; \
         END LOOP; END $$"
    )
}

/// Rows are found by all columns. The subscriber has columns of its own, generated and dropped ones between them, or
/// another order, or a domain.
#[test]
fn one_of_equal_rows_without_a_key_is_changed() {
    const COLUMNS: [&str; 10] = [
        "a int",
        "n numeric",
        "f float8",
        "t text",
        "d date",
        "r int4range",
        "x text[]",
        "b bool",
        "z timestamptz(3)",
        "v int",
    ];
    for binary in ["auto", "off"] {
        on_versions(&[(14, 14), (15, 18), (18, 18)], |mut case| {
            let all = COLUMNS.join(", ");
            let (left, right) = COLUMNS.split_at(3);
            let (left, right) = (left.join(", "), right.join(", "));
            let mut turned = COLUMNS;
            turned.reverse();
            for table in ["among", "turned", "other"] {
                case.publisher.sql(&format!(
                    "CREATE TABLE {table} ({all}); ALTER TABLE {table} REPLICA IDENTITY FULL; \
                     INSERT INTO {table} SELECT i % 40, ('1.' || repeat('0', i % 2))::numeric, '-0', \
                       CASE WHEN i % 3 = 0 THEN 't' END, NULL, '[1,3)', ARRAY['x', NULL], i % 80 < 40, now(), 0 \
                     FROM generate_series(1, 400) i"
                ));
            }
            case.subscriber.sql(&format!(
                "CREATE TABLE among (gone text, {left}, lost int, own text DEFAULT 'own', {right}, \
                   twice int GENERATED ALWAYS AS (a * 2) STORED); \
                 ALTER TABLE among DROP gone, DROP lost; CREATE INDEX ON among (a); \
                 CREATE TABLE turned ({}); \
                 CREATE DOMAIN year AS date; CREATE TABLE other ({})",
                turned.join(", "),
                all.replace("d date", "d year")
            ));
            case.tool.args = vec![format!("--binary={binary}")];
            case.publish("FOR ALL TABLES");
            case.run_until_current();
            for table in ["among", "turned", "other"] {
                case.publisher.sql(&changes(table));
                case.publisher.sql(&format!("UPDATE {table} SET v = -v, d = '2000-01-01' WHERE b"));
            }
            case.run_until_current();
            for table in ["among", "turned", "other"] {
                let rows = format!(
                    "SELECT a, n, f, t, d, r, x, b, z, v FROM {table} ORDER BY a, n::text, t, b, v"
                );
                assert_eq!(case.publisher.rows(&rows), case.subscriber.rows(&rows), "{table}");
            }
            let own = "SELECT count(*) FROM among WHERE own <> 'own' OR twice <> a * 2";
            assert_eq!(case.subscriber.value(own), "0");
            let missing =
                case.statistic("update_missing || '|' || delete_missing || '|' || fallbacks");
            assert_eq!(missing, "0|0|0");
        });
    }
}
