//! Every conflict is recorded and counted under PostgreSQL's name for it, whatever its resolution.

use std::fmt::Write;

use crate::support::{Case, Tool, on_versions};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];
/// The apply settings with which each test runs.
const MODES: [&[&str]; 3] = [&[], &["--apply-mode", "row"], &["--preserve-commit-order=false"]];

pub(super) fn in_every_mode(body: impl Fn(Case)) {
    for mode in MODES {
        on_versions(&BOTH, |mut case| {
            case.tool.args = mode.iter().map(|arg| (*arg).to_owned()).collect();
            body(case);
        });
    }
}

fn is_ordered(case: &Case) -> bool {
    !case.tool.args.iter().any(|arg| arg == "--preserve-commit-order=false")
}

/// Runs each statement as a separate transaction.
pub(super) fn transactions(case: &Case, statements: &[&str]) {
    let mut sql = String::new();
    for statement in statements {
        write!(sql, "BEGIN; {statement}; COMMIT; ").expect("a string");
    }
    case.publisher.sql(&sql);
}

pub(super) fn conflicts(case: &Case) -> Vec<String> {
    case.subscriber.rows(
        "SELECT concat_ws(' ', c.conflict, c.action, c.applied, c.operation, c.table_name, c.key, c.sqlstate) \
         FROM pgapace.conflict c JOIN pgapace.subscription s ON s.id = c.subscription ORDER BY c.id",
    )
}

/// The counters that are not 0, with their names.
pub(super) fn counted(case: &Case) -> String {
    case.subscriber.value(
        "SELECT string_agg(key || '=' || value, ' ' ORDER BY key) \
         FROM pgapace.stat_subscription t, jsonb_each_text(to_jsonb(t)) \
         WHERE value <> '0' AND key ~ '_(exists|missing|differs|conflicts|violation)$'",
    )
}

/// Skips the transaction that stopped the run.
fn skip(case: &Case) {
    let lsn = case.subscriber.value("SELECT max(commit_lsn) FROM pgapace.conflict");
    let tool = Tool { args: Vec::new(), ..case.tool.clone() };
    tool.finish("skip", &["--lsn", &lsn]).expect(0, &[]);
}

/// A conflict that stops the run is counted once, even if it recurs at every start. Nothing of its
/// transaction remains.
#[test]
fn a_conflict_that_stops_is_counted_once() {
    in_every_mode(|case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE)");
        case.publisher.sql("INSERT INTO t VALUES (1, 1), (2, 2)");
        case.run_until_current();
        case.subscriber.sql("INSERT INTO t VALUES (8, 8), (9, 9)");
        transactions(
            &case,
            &[
                "INSERT INTO t VALUES (3, 3)",
                "INSERT INTO t VALUES (4, 4); INSERT INTO t VALUES (9, 5)",
                "INSERT INTO t VALUES (6, 6)",
            ],
        );
        let stop = |kind: &str, named: &[&str]| {
            let failed = case.run();
            let conflict = format!("conflict={kind}");
            failed.expect(9, &[&conflict, "23505", &format!("an action for {kind}")]);
            failed.expect(9, named);
        };
        stop("insert_exists", &["(id)=(9)"]);
        assert_eq!(counted(&case), "insert_exists=1");
        stop("insert_exists", &["(id)=(9)"]);
        assert_eq!(counted(&case), "insert_exists=1");
        let existing = "insert_exists error f INSERT t (id)=(9) 23505";
        assert_eq!(conflicts(&case), [existing]);
        let rows = "SELECT string_agg(id::text, ',' ORDER BY id) FROM t";
        let applied = case.subscriber.value(rows);
        // Without commit order, a later transaction may be committed while an earlier one stops.
        let ahead = applied == "1,2,3,6,8,9" && !is_ordered(&case);
        assert!(applied == "1,2,3,8,9" || ahead, "{applied}");
        skip(&case);
        transactions(&case, &["UPDATE t SET u = 8 WHERE id = 2"]);
        stop("update_exists", &["(id)=(2)"]);
        assert_eq!(counted(&case), "insert_exists=1 update_exists=1");
        skip(&case);
        case.run_until_current();
        assert_eq!(counted(&case), "insert_exists=1 update_exists=1");
        assert_eq!(conflicts(&case), [existing, "update_exists error f UPDATE t (id)=(2) 23505"]);
        assert_eq!(case.subscriber.value(rows), "1,2,3,6,8,9");
    });
}

/// Errors of other classes are not conflicts.
#[test]
fn other_errors_are_not_counted() {
    on_versions(&BOTH, |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.subscriber.sql(
            "ALTER TABLE t ADD CHECK (v <> 'bad'); CREATE TABLE log (id int PRIMARY KEY); \
             INSERT INTO log VALUES (2); \
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
               'BEGIN INSERT INTO public.log VALUES (NEW.id); RETURN NEW; END'; \
             CREATE TRIGGER note AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); \
             ALTER TABLE t ENABLE ALWAYS TRIGGER note",
        );
        transactions(&case, &["INSERT INTO t VALUES (1, 'bad')"]);
        case.run().expect(9, &["23514", "(id)=(1)"]);
        case.subscriber.sql("ALTER TABLE t DROP CONSTRAINT t_v_check");
        // A violation in another table, which a trigger changed.
        transactions(&case, &["INSERT INTO t VALUES (2, 'p')"]);
        case.run().expect(9, &["23505", "(id)=(2)"]);
        assert_eq!(counted(&case), "∅");
        assert_eq!(conflicts(&case).len(), 0);
        case.subscriber.sql("DELETE FROM log WHERE id = 2");
        case.run_until_current();
    });
}

/// A row violates several unique indexes of various kinds. The existing rows are one or several, in
/// a plain or a partitioned table.
#[test]
fn violations_of_several_unique_indexes_are_one_conflict() {
    in_every_mode(|case| {
        case.both(
            "CREATE TABLE t (id int PRIMARY KEY, a int, b text, c int, big text); \
             CREATE TABLE part (id int PRIMARY KEY, a int) PARTITION BY RANGE (id); \
             CREATE TABLE part1 PARTITION OF part FOR VALUES FROM (0) TO (100)",
        );
        case.publish("FOR ALL TABLES WITH (publish_via_partition_root)");
        case.subscriber.sql(
            "CREATE UNIQUE INDEX ON t (lower(b)); CREATE UNIQUE INDEX ON t (a) WHERE c > 0; \
             CREATE UNIQUE INDEX ON part (id, a); \
             ALTER TABLE t ADD UNIQUE (c) DEFERRABLE INITIALLY DEFERRED",
        );
        transactions(
            &case,
            &[
                "INSERT INTO t SELECT g, g, 'p' || g, g, repeat(md5(g::text), 1000) FROM generate_series(1, 3) g",
                "INSERT INTO part VALUES (1, 1)",
            ],
        );
        case.run_until_current();
        case.subscriber.sql(
            "INSERT INTO t SELECT g, g, 'b' || g, g FROM generate_series(10, 25) g; \
             UPDATE t SET c = -1 WHERE id = 15; INSERT INTO part VALUES (10, 10), (11, 11)",
        );
        let mut expected = Vec::new();
        let mut stops = |sql: &str, kind: &str, recorded: &str| {
            transactions(&case, &[sql]);
            case.run().expect(9, &[&format!("conflict={kind}: ")]);
            expected.push(format!("{kind} error f {recorded} 23505"));
            assert_eq!(conflicts(&case), expected, "{sql}");
            skip(&case);
        };
        let several = "multiple_unique_conflicts";
        let insert = |id| format!("INSERT t (id)=({id})");
        // Violations by one row of the subscriber, and by several.
        stops("INSERT INTO t VALUES (10, 50, 'B10', 50)", several, &insert(10));
        stops("INSERT INTO t VALUES (11, 12, 'x', 51)", several, &insert(11));
        stops("INSERT INTO t VALUES (52, 13, 'B14', 52)", several, &insert(52));
        // One index does not contain the row, the other may be violated until COMMIT.
        stops("INSERT INTO t VALUES (15, 15, 'y', 53)", "insert_exists", &insert(15));
        stops("INSERT INTO t VALUES (16, 54, 'z', 17)", "insert_exists", &insert(16));
        // A violation by a row that the same transaction inserted.
        stops(
            "INSERT INTO t VALUES (55, 55, 'v', 55); UPDATE t SET a = 18, b = 'B19' WHERE id = 55",
            several,
            "UPDATE t (id)=(55)",
        );
        // An update does not conflict with its own row. The value of an unchanged TOAST column is
        // unknown.
        let update = |id| format!("UPDATE t (id)=({id})");
        stops("UPDATE t SET b = 'B20' WHERE id = 1", "update_exists", &update(1));
        stops("UPDATE t SET b = 'B21', a = 22 WHERE id = 2", several, &update(2));
        stops("UPDATE t SET id = 23, a = 24 WHERE id = 3", several, &update(3));
        stops("INSERT INTO part VALUES (10, 10)", several, "INSERT part (id)=(10)");
        stops("INSERT INTO part VALUES (11, 10)", "insert_exists", "INSERT part (id)=(11)");
        assert_eq!(counted(&case), format!("insert_exists=3 {several}=7 update_exists=1"));
        case.run_until_current();
    });
}

/// The rule for several unique indexes applies even if the rule for one index is to stop.
#[test]
fn a_rule_for_several_unique_indexes() {
    on_versions(&BOTH, |mut case| {
        case.tool.args =
            ["--on-conflict", "multiple_unique_conflicts=skip"].map(str::to_owned).to_vec();
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE)");
        case.publisher.sql("INSERT INTO t VALUES (1, 1)");
        case.run_until_current();
        case.subscriber.sql("INSERT INTO t SELECT g, g FROM generate_series(10, 16) g");
        transactions(
            &case,
            &[
                "INSERT INTO t VALUES (2, 2), (10, 11), (12, 12), (3, 3)",
                "UPDATE t SET id = 13, u = 14 WHERE id = 1",
                "INSERT INTO t VALUES (4, 4), (15, 5)",
            ],
        );
        case.run().expect(9, &["conflict=insert_exists", "(id)=(15)"]);
        let skipped = |rest: &str| format!("multiple_unique_conflicts skip f {rest} 23505");
        assert_eq!(
            conflicts(&case),
            [
                skipped("INSERT t (id)=(10)"),
                skipped("INSERT t (id)=(12)"),
                skipped("UPDATE t (id)=(1)"),
                "insert_exists error f INSERT t (id)=(15) 23505".to_owned(),
            ]
        );
        assert_eq!(counted(&case), "insert_exists=1 multiple_unique_conflicts=3");
        let rows = "SELECT string_agg(id || ':' || u, ' ' ORDER BY id) FROM t WHERE id < 12";
        assert_eq!(case.subscriber.value(rows), "1:1 2:2 3:3 10:10 11:11");
    });
}
