//! Conflict rules that need the origin and the commit time of a row.

use crate::support::{Case, Database, on_versions};

const BOTH: [(u16, u16); 2] = [(15, 15), (18, 18)];

fn with_rules(case: &mut Case, rules: &[&str]) {
    for rule in rules {
        case.tool.args.extend(["--on-conflict".to_owned(), (*rule).to_owned()]);
    }
}

/// Rows 1 and 2 were copied, 3 and 4 applied; afterwards the subscriber changed 2 and 4.
fn four_rows(case: &Case) {
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publish("FOR TABLE t");
    case.publisher.sql("INSERT INTO t VALUES (1, 'p'), (2, 'p')");
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (3, 'p'), (4, 'p')");
    case.run_until_current();
    case.subscriber.sql("UPDATE t SET v = 't' WHERE id IN (2, 4)");
}

fn rows(case: &Case) -> String {
    case.subscriber.value("SELECT string_agg(id || v, ' ' ORDER BY id) FROM t")
}

fn conflicts(case: &Case) -> Vec<String> {
    case.subscriber.rows(
        "SELECT concat_ws(' ', conflict, action, applied, key) FROM pgapace.conflict ORDER BY id",
    )
}

#[test]
fn changes_of_rows_of_another_origin_are_skipped() {
    on_versions(&BOTH, |mut case| {
        with_rules(&mut case, &["update_origin_differs=skip", "delete_origin_differs=apply"]);
        four_rows(&case);
        case.publisher.sql("UPDATE t SET v = 'x'; UPDATE t SET v = v || 'y'");
        // A row that the same transaction inserted.
        case.publisher.sql(
            "BEGIN; INSERT INTO t VALUES (5, 'p'); UPDATE t SET v = 'z' WHERE id = 5; COMMIT; \
             DELETE FROM t WHERE id IN (1, 2)",
        );
        case.run_until_current();
        assert_eq!(rows(&case), "3xy 4t 5z");
        let skipped = |id: u8| format!("update_origin_differs skip f (id)=({id})");
        assert_eq!(
            conflicts(&case),
            [
                skipped(2),
                skipped(4),
                skipped(2),
                skipped(4),
                "delete_origin_differs apply t (id)=(2)".to_owned(),
            ]
        );
        let counted = "update_origin_differs || ',' || t.delete_origin_differs";
        assert_eq!(case.statistic(counted), "4,1");
    });
}

#[test]
fn changes_of_rows_of_another_origin_stop() {
    on_versions(&BOTH, |mut case| {
        with_rules(&mut case, &["public.t:update_origin_differs=error"]);
        four_rows(&case);
        case.publisher.sql("UPDATE t SET v = 'x' WHERE id IN (1, 3)");
        case.run_until_current();
        case.publisher.sql("UPDATE t SET v = 'x' WHERE id = 4");
        case.run().expect(9, &["conflict=update_origin_differs", "(id)=(4)", "public.t"]);
        assert_eq!(rows(&case), "1x 2t 3x 4t");
    });
}

#[test]
fn the_later_change_wins() {
    on_versions(&BOTH, |mut case| {
        let rules = ["insert_exists", "update_origin_differs", "delete_origin_differs"]
            .map(|kind| format!("{kind}=last_update_wins"));
        with_rules(&mut case, &rules.each_ref().map(String::as_str));
        four_rows(&case);
        case.subscriber.sql("INSERT INTO t VALUES (6, 't')");
        // The publisher's changes are later than the subscriber's.
        case.publisher.sql("INSERT INTO t VALUES (6, 'p'), (7, 'p')");
        case.publisher.sql("UPDATE t SET v = 'x' WHERE id = 2");
        // The publisher's changes are earlier.
        case.publisher.sql("UPDATE t SET v = 'x' WHERE id IN (1, 4)");
        case.publisher.sql("DELETE FROM t WHERE id = 3");
        case.subscriber
            .sql("INSERT INTO t VALUES (7, 't'); UPDATE t SET v = 'u' WHERE id IN (3, 4)");
        case.run_until_current();
        assert_eq!(rows(&case), "1x 2x 3u 4u 6p 7t");
        assert_eq!(
            conflicts(&case),
            [
                "insert_exists last_update_wins t (id)=(6)",
                "insert_exists last_update_wins f (id)=(7)",
                "update_origin_differs last_update_wins t (id)=(2)",
                "update_origin_differs last_update_wins f (id)=(4)",
                "delete_origin_differs last_update_wins f (id)=(3)",
            ]
        );
        // Applied rows have the commit time of their transaction on the publisher. The publisher
        // sends whole rows, even if an earlier change of the row was skipped.
        case.publisher.sql("UPDATE t SET v = v || '!' WHERE id < 7");
        case.run_until_current();
        assert_eq!(rows(&case), "1x! 2x! 3u 4x! 6p! 7t");
    });
}

/// Each part of a large transaction is executed at once, except the changes beside those that conflict. Each change by
/// itself would take a round trip and a subtransaction.
#[test]
fn few_changes_of_a_large_transaction_are_executed_one_by_one() {
    on_versions(&[(15, 18)], |mut case| {
        with_rules(&mut case, &["update_origin_differs=last_update_wins"]);
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publish("FOR TABLE t");
        case.publisher.sql("INSERT INTO t SELECT g, 'p' FROM generate_series(1, 33000) g");
        case.run_until_current();
        case.subscriber.sql("UPDATE t SET v = 't' WHERE id = 20000");
        case.publisher.sql("UPDATE t SET v = 'x'");
        case.subscriber.sql("UPDATE t SET v = 'u' WHERE id = 32900");
        case.run_until_current();
        // Each subtransaction writes its own.
        let xids = case.subscriber.value("SELECT count(DISTINCT xmin::text::int8) FROM t");
        let xids: u64 = xids.parse().expect("a number");
        assert!(xids < 10_000, "{xids} subtransactions");
        let found = case.subscriber.value("SELECT string_agg(v, '' ORDER BY id) FROM t");
        assert_eq!(found.len(), 33_000);
        assert_eq!(found.find(|v| v != 'x'), Some(32_899));
        assert_eq!(
            conflicts(&case),
            [
                "update_origin_differs last_update_wins t (id)=(20000)",
                "update_origin_differs last_update_wins f (id)=(32900)",
            ]
        );
        assert_eq!(case.statistic("updates || ',' || t.update_origin_differs"), "32999,2");
    });
}

#[test]
fn servers_without_commit_times_are_refused() {
    on_versions(&BOTH, |mut case| {
        case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        let name = format!("{}_subscriber", case.tool.name);
        let subscriber = Database::create(case.publisher.cluster, &name, "");
        subscriber.sql("CREATE TABLE t (id int PRIMARY KEY)");
        case.tool.subscriber = subscriber.conninfo();
        with_rules(&mut case, &["insert_exists=last_update_wins"]);
        case.run().expect(3, &["track_commit_timestamp", "insert_exists=last_update_wins"]);
    });
    let mut case = Case::new(15, 15);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    with_rules(&mut case, &["update_origin_differs=skip"]);
    case.tool.args.push("--tag-commits=false".to_owned());
    case.run().expect(3, &["tagged", "update_origin_differs=skip"]);
}
