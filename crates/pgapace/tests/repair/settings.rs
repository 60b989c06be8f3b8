//! Columns of other types on the subscriber, where databases have settings by which values are read.

use crate::support::{Case, on_versions};

/// Gives the subscriber another zone, where days come first.
fn move_away(case: &Case) {
    case.subscriber.sql(&format!(
        "ALTER DATABASE {0} SET timezone = 'America/New_York'; ALTER DATABASE {0} SET datestyle = 'SQL, DMY'",
        case.subscriber.name
    ));
}

#[test]
fn times_without_an_offset_are_read_in_the_zone_of_the_subscriber() {
    on_versions(&super::VERSIONS, |case| {
        move_away(&case);
        case.publisher
            .sql("CREATE TABLE t (id int PRIMARY KEY, at timestamp, day date, seen timestamptz, v text); CREATE TABLE n (at timestamp)");
        case.subscriber.sql(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamptz(0), day timestamptz, seen timestamp, v text, \
               loaded timestamp DEFAULT now(), day_text text DEFAULT current_date::text); CREATE TABLE n (at timestamptz)",
        );
        case.publisher.sql(
            "INSERT INTO t SELECT i, '2026-01-01'::timestamp + i * interval '11 days 01:30:00.4', '2026-01-01'::date + i, now(), 'v' \
             FROM generate_series(1, 40) i; INSERT INTO t (id, at) VALUES (0, 'infinity'), (-1, NULL); INSERT INTO n SELECT at FROM t",
        );
        case.publish("FOR TABLE t, n");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        let rows =
            "SELECT id, at AT TIME ZONE 'UTC', day AT TIME ZONE 'UTC', seen, v FROM t ORDER BY id";
        let right = case.subscriber.rows(rows);
        let damage = "UPDATE t SET v = 'x', at = now() WHERE id < 9; DELETE FROM t WHERE id BETWEEN 9 AND 19; \
                      DELETE FROM n WHERE at > '2026-05-05'";
        case.subscriber.sql(damage);
        case.tool.finish("verify", &[]).expect(18, &["51 rows differ"]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        assert_eq!(case.subscriber.rows(rows), right);
        case.subscriber.sql(damage);
        case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
        case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
        assert_eq!(case.subscriber.rows(rows), right);
        case.tool.finish("verify", &[]).expect(0, &[]);
        // Defaults are those of rows that were copied.
        let defaults = "SELECT count(*), bool_and(abs(extract(epoch FROM loaded - now() AT TIME ZONE 'America/New_York')) < 3000), \
                          bool_and(day_text LIKE '__/__/____') FROM t";
        assert_eq!(case.subscriber.rows(defaults), ["42|t|t"]);
    });
}

/// The publisher would read them otherwise.
#[test]
fn text_that_the_subscriber_reads_as_times_is_not_compared() {
    let case = Case::new(15, 18);
    move_away(&case);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, day text, at text, v int)");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, day date, at timestamptz, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, '01/02/2026', '2026-01-01 12:00', 1)");
    case.publish("FOR TABLE t");
    case.run_until_current();
    let reasons = ["public.t.day", "DateStyle DMY", "public.t.at", "TimeZone America/New_York"];
    case.tool.finish("verify", &[]).expect(6, &reasons[..2]);
    case.subscriber.sql(&format!(
        "ALTER DATABASE {} RESET datestyle; ALTER TABLE t DROP day; ALTER TABLE t ADD day text DEFAULT '01/02/2026'",
        case.subscriber.name
    ));
    case.tool.finish("verify", &[]).expect(6, &reasons[2..]);
    // What is compared is repaired; the others are left alone.
    case.subscriber.sql("UPDATE t SET v = 2");
    case.tool.finish("verify", &[]).expect(18, &[]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    let row = "SELECT day, at AT TIME ZONE 'UTC', v FROM t";
    assert_eq!(case.subscriber.rows(row), ["01/02/2026|2026-01-01 17:00:00|1"]);
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    case.tool.finish("rebase", &[]).expect(6, &["column at of table public.t", "TimeZone"]);
}

/// As natively, these are settings of the subscriber alone.
#[test]
fn settings_of_the_publisher_decide_nothing() {
    on_versions(&[(15, 18), (18, 15)], |case| {
        case.publisher.sql(&format!(
            "ALTER DATABASE {0} SET array_nulls = off; ALTER DATABASE {0} SET xmloption = document; \
             CREATE TABLE t (id int PRIMARY KEY, a text, x text); INSERT INTO t VALUES (1, '{{NULL,a}}', 'a<b/>')",
            case.publisher.name
        ));
        case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, a text[], x xml)");
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(0, &[]);
        case.subscriber.sql("DELETE FROM t");
        case.tool.finish("verify", &[]).expect(18, &[]);
        case.tool.finish("repair", &[]).expect(0, &[]);
        case.tool.finish("verify", &[]).expect(0, &[]);
    });
}
