//! Column lists in several publications: refused when a native subscription between the same
//! servers is refused, otherwise with the same resulting rows.

use crate::support::native::Native;
use crate::support::{Case, Database, long, on_versions};

const BOTH: &str = "\
    CREATE TABLE t (id int PRIMARY KEY, a int, b int); \
    CREATE TABLE d (id int PRIMARY KEY, gone int, a int); ALTER TABLE d DROP gone; \
    CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY, a int, b int);";
const PUBLISHER: &str = "\
    CREATE TABLE g (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED); \
    CREATE TABLE p (id int, k int, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k); \
    CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1); \
    CREATE TABLE s.p2 PARTITION OF p FOR VALUES IN (2);";
/// A separate table for each name, which shows what arrives under that name.
const SUBSCRIBER: &str = "\
    CREATE TABLE g (id int PRIMARY KEY, a int, g int); \
    CREATE TABLE p (id int, k int, v text, PRIMARY KEY (id, k)); \
    CREATE TABLE p1 (LIKE p INCLUDING ALL); CREATE TABLE s.p2 (LIKE p INCLUDING ALL)";

/// The result of a combination of publications on a publisher of version 15.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On15 {
    /// The same as with a native subscription.
    Native,
    /// A native subscription copies partitions in addition to their root, which sends all of their
    /// changes. Since PostgreSQL 16 only the root is published; pgapace does the same for version
    /// 15.
    RootOnly,
    /// Like `RootOnly`. In addition, CREATE SUBSCRIPTION refuses the combination because of the
    /// partition's column lists, which the walsender ignores.
    Accepted,
}
use On15::{Accepted, Native as Same, RootOnly};

const COMBINATIONS: &[(On15, &[&str])] = &[
    (Same, &["FOR ALL TABLES", "FOR TABLE t (id, a, b)"]),
    (Same, &["FOR ALL TABLES", "FOR TABLE t (id, a)"]),
    (Same, &["FOR TABLE t", "FOR TABLE t (id, b, a)"]),
    (Same, &["FOR TABLE t", "FOR TABLE t (id)"]),
    (Same, &["FOR TABLE t (id, a)", "FOR TABLE t (a, id)"]),
    (Same, &["FOR TABLE t (id, a, b)", "FOR TABLE t (a, id)"]),
    (Same, &["FOR TABLES IN SCHEMA s", "FOR TABLE s.t (id, b, a)"]),
    (Same, &["FOR TABLES IN SCHEMA s", "FOR TABLE s.t (id, b)"]),
    (
        Same,
        &["FOR TABLE t (id, a) WITH (publish = 'insert')", "FOR TABLE t WITH (publish = 'delete')"],
    ),
    // A list of all columns: version 15 also counts dropped columns.
    (Same, &["FOR TABLE d", "FOR TABLE d (id, a)"]),
    (Same, &["FOR ALL TABLES", "FOR TABLE d (a, id)"]),
    (Same, &["FOR TABLE g", "FOR TABLE g (id, a)"]),
    (RootOnly, &["FOR TABLE p VIA ROOT", "FOR TABLE p1 (id, k)"]),
    (RootOnly, &["FOR TABLES IN SCHEMA public VIA ROOT", "FOR TABLE p1 (id, k)"]),
    (RootOnly, &["FOR TABLES IN SCHEMA public VIA ROOT", "FOR TABLE p1 (id, k) VIA ROOT"]),
    (RootOnly, &["FOR ALL TABLES VIA ROOT", "FOR TABLE p1 (id, k)"]),
    (RootOnly, &["FOR ALL TABLES", "FOR TABLE p (id, k) VIA ROOT"]),
    (RootOnly, &["FOR TABLE p (id, k) VIA ROOT", "FOR TABLE p"]),
    (Same, &["FOR TABLES IN SCHEMA public", "FOR TABLE p1 (id, k) VIA ROOT"]),
    (Same, &["FOR TABLES IN SCHEMA s VIA ROOT", "FOR TABLE s.p2 (id, k)"]),
    (Same, &["FOR TABLES IN SCHEMA s VIA ROOT", "FOR TABLE s.p2 (id, k, v)"]),
    (Accepted, &["FOR TABLES IN SCHEMA s", "FOR TABLE s.p2 (id, k)", "FOR TABLE p VIA ROOT"]),
    (Accepted, &["FOR TABLE p1", "FOR TABLE p1 (id, k)", "FOR TABLE p VIA ROOT"]),
    (Same, &["FOR TABLE p (id, k) VIA ROOT", "FOR TABLE p VIA ROOT"]),
    (Same, &["FOR TABLE p (id, k, v) VIA ROOT", "FOR TABLE p VIA ROOT"]),
];

fn rows(from: i32) -> String {
    let to = from + 1;
    ["t (id, a)", "d (id, a)", "s.t (id, a)", "g (id, a)"]
        .map(|table| format!("INSERT INTO {table} VALUES ({from}, 1), ({to}, 2);"))
        .concat()
        + &format!("INSERT INTO p VALUES ({from}, 1, 'one'), ({from}, 2, 'two');")
}

fn content(database: &Database<'_>, tables: &[&str]) -> Vec<String> {
    let rows = |table| database.rows(&format!("SELECT * FROM {table} ORDER BY 1, 2"));
    tables.iter().map(|table| format!("{table}: {:?}", rows(table))).collect()
}

#[test]
fn column_lists_in_several_publications_are_combined_as_natively() {
    for (number, (on_15, publications)) in COMBINATIONS.iter().enumerate() {
        let all = [15, 16, 18];
        let newer = 1 + number % 2;
        // Combinations whose result is the same on all versions run on one of them. Publications mean the same since 16.
        let versions = match on_15 {
            _ if long() => all.to_vec(),
            Same => vec![all[number % 3]],
            RootOnly | Accepted => vec![15, all[newer]],
        };
        versions.into_iter().for_each(|version| combination(version, *on_15, publications));
    }
}

fn combination(version: u16, on_15: On15, publications: &[&str]) {
    let mut case = Case::new(version, version);
    case.publisher.sql(&format!("{BOTH}{PUBLISHER}{}", rows(1)));
    case.subscriber.sql(&format!("{BOTH}{SUBSCRIBER}"));
    let mut names = Vec::new();
    for (number, publication) in publications.iter().enumerate() {
        let publication = publication.replace("VIA ROOT", "WITH (publish_via_partition_root)");
        case.publisher.sql(&format!("CREATE PUBLICATION pub{number} {publication}"));
        names.push(format!("pub{number}"));
    }
    case.tool.publications = names.join(",");
    let native = Native::subscribe(&case, &format!("{BOTH}{SUBSCRIBER}"), &names.join(","));
    let said = native.as_ref().map_err(String::clone).and_then(Native::wait);
    let first = case.run();
    let what = format!("{version}: {publications:?}: {said:?}");
    let beyond = version == 15 && on_15 == Accepted;
    assert!(!beyond || said.is_err(), "{what}");
    if said.is_err() && !beyond {
        first.expect(6, &["different column lists"]);
        return;
    }
    assert_eq!(first.code, Some(0), "{what}: {}", first.log);
    case.publisher.sql(&rows(11));
    case.run_until_current();
    let mut compared = vec!["t", "d", "s.t", "g", "p"];
    if version > 15 || on_15 == Same {
        compared.extend(["p1", "s.p2"]);
    }
    if let Ok(native) = &native {
        assert_eq!(native.wait(), Ok(()), "{what}");
        assert_eq!(
            content(&case.subscriber, &compared),
            content(&native.database, &compared),
            "{what}"
        );
    } else {
        let all = ["p: [\"1|1|one\", \"1|2|two\", \"11|1|one\", \"11|2|two\"]"];
        assert_eq!(content(&case.subscriber, &["p"]), all, "{what}");
    }
}

/// A partition and its root are in different publications: rows are copied once.
#[test]
fn a_partition_and_its_root_in_two_publications_are_copied_once() {
    on_versions(&[(15, 15), (18, 18), (15, 18), (18, 15)], |mut case| {
        case.both(
            "CREATE TABLE p (id int, k int) PARTITION BY LIST (k); \
             CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1) PARTITION BY LIST (id); \
             CREATE TABLE p11 PARTITION OF p1 FOR VALUES IN (1, 2, 3); \
             CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)",
        );
        case.publisher.sql("INSERT INTO p VALUES (1, 1), (1, 2)");
        case.publish("FOR TABLE p11, p2");
        case.publisher.sql(
            "CREATE PUBLICATION middle FOR TABLE p1 WITH (publish_via_partition_root); \
             CREATE PUBLICATION top FOR TABLE p WITH (publish_via_partition_root, publish = 'insert')",
        );
        case.tool.publications = "pub,middle,top".to_owned();
        case.run_until_current();
        case.publisher.sql("INSERT INTO p VALUES (2, 1), (2, 2)");
        case.run_until_current();
        case.expect_equal(&["p"]);
        let tables = "SELECT string_agg(table_name, ' ') FROM pgapace.relation";
        assert_eq!(case.subscriber.value(tables), "p");
    });
}
