//! Settings under which texts are read: columns of other types, and what repair and rebase write beside them.

use crate::support::Case;

/// The types of a time on both servers, and columns that only the subscriber has.
const PUBLISHER: &str = "\
CREATE TABLE t (id int PRIMARY KEY, at timestamp, day date, n text, x text, s timestamptz, l timestamp[], r tsrange, v int); \
CREATE TABLE k (at timestamp PRIMARY KEY, v int); CREATE TABLE keyless (at timestamp, n text)";
const SUBSCRIBER: &str = "\
CREATE TABLE t (id int PRIMARY KEY, at timestamptz(0), day timestamptz, n date, x timestamptz, s timestamp, l timestamptz[], \
  r tstzrange, v int, loaded timestamp DEFAULT now(), loaded_day text DEFAULT current_date::text, seen text); \
CREATE TABLE k (at timestamptz PRIMARY KEY, v int); CREATE TABLE keyless (at timestamptz, n date); \
CREATE TABLE deleted (seen text); \
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ \
  DECLARE s text := pg_catalog.concat_ws(' ', current_setting('timezone'), current_setting('datestyle')); \
  BEGIN IF TG_OP = 'DELETE' THEN INSERT INTO public.deleted VALUES (s); RETURN OLD; END IF; NEW.seen := s; RETURN NEW; END$$; \
CREATE TRIGGER note BEFORE INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note(); \
ALTER TABLE t ENABLE ALWAYS TRIGGER note";

/// Twenty rows with times in winter and summer, and some with special values.
fn rows(from: i32) -> String {
    format!(
        "INSERT INTO t SELECT i, at, at, '01/02/2026', CASE i % 2 WHEN 0 THEN '01/02/2026 12:00' \
             ELSE to_char(at, 'YYYY-MM-DD HH24:MI:SS+05:30') END, at AT TIME ZONE 'UTC', ARRAY[at, NULL], tsrange(at, NULL), 1 \
           FROM generate_series({from}, {from} + 19) i, \
             LATERAL (SELECT '2026-01-01 12:00:00.4'::timestamp + i * interval '11 days 01:30') a (at); \
         INSERT INTO t (id, at, day, n, x) VALUES (-{from} - 1, 'infinity', '-infinity', '-infinity', 'infinity'); \
         INSERT INTO t (id) VALUES (-{from} - 2); \
         INSERT INTO k SELECT at, 1 FROM t WHERE id >= {from}; INSERT INTO keyless SELECT at, n FROM t WHERE id >= {from} OR id < 0"
    )
}

/// All values, whatever the settings of the session are.
const VALUES: &str = "\
SELECT concat_ws(' ', id, extract(epoch FROM at), extract(epoch FROM day), extract(epoch FROM n), extract(epoch FROM x), \
  extract(epoch FROM s), array_length(l, 1), extract(epoch FROM l[1]), extract(epoch FROM lower(r)), v) FROM t \
UNION ALL SELECT concat_ws(' ', 'k', extract(epoch FROM at), v) FROM k \
UNION ALL SELECT concat_ws(' ', 'keyless', extract(epoch FROM at), extract(epoch FROM n)) FROM keyless ORDER BY 1";

const DAMAGE: &str = "\
UPDATE t SET v = 2, at = now(), n = now() WHERE id IN (1, 2, 102); UPDATE t SET l = '{}', r = NULL WHERE id = 103; \
DELETE FROM t WHERE id IN (3, 4, 105, 106); INSERT INTO t (id) VALUES (-7); \
DELETE FROM k WHERE at IN (SELECT at FROM k ORDER BY at LIMIT 3); UPDATE k SET v = 2 WHERE at = (SELECT max(at) FROM k); \
DELETE FROM keyless WHERE at = 'infinity'; INSERT INTO keyless VALUES (now(), now()); TRUNCATE deleted";

/// Copies and streams rows, and has repair and rebase make rows equal. Expects what apply has left, by sessions that have
/// its settings.
fn expect_as_applied(case: &Case, zone: &str, settings: &str) {
    let set_zone = format!("ALTER DATABASE {} SET timezone = 'Asia/Kolkata'", case.publisher.name);
    case.publisher.sql(&set_zone);
    case.publisher.sql(PUBLISHER);
    case.subscriber.sql(SUBSCRIBER);
    case.publish("FOR TABLE t, k, keyless");
    case.publisher.sql(&rows(0));
    case.run_until_current();
    case.publisher.sql(&rows(100));
    case.run_until_current();
    let natively = format!(
        "SELECT n = date '2026-02-01', x = timestamp '2026-02-01 12:00' AT TIME ZONE '{zone}', \
           at = timestamp '2026-01-01 12:00' AT TIME ZONE '{zone}', s = timestamp '2026-01-01 12:00:00.4' FROM t WHERE id = 0"
    );
    assert_eq!(case.subscriber.rows(&natively), ["t|t|t|t"]);
    let applied = case.subscriber.rows(VALUES);
    case.tool.finish("verify", &[]).expect(0, &[]);
    let expect_equal = |verb: &str| {
        assert_eq!(case.subscriber.rows(VALUES), applied, "{verb}");
        case.tool.finish("verify", &[]).expect(0, &[]);
        let seen = "SELECT seen FROM t UNION SELECT seen FROM deleted";
        assert_eq!(case.subscriber.rows(seen), [settings], "{verb}");
        let defaults = "SELECT max(loaded) - min(loaded) < '50 min', \
                          count(DISTINCT regexp_replace(loaded_day, '[0-9]', '0', 'g')) FROM t";
        assert_eq!(case.subscriber.rows(defaults), ["t|1"], "{verb}");
    };
    case.subscriber.sql(DAMAGE);
    case.tool.finish("verify", &[]).expect(18, &["rows differ"]);
    case.tool.finish("repair", &["--delete-extra"]).expect(0, &[]);
    expect_equal("repair");
    case.subscriber.sql(DAMAGE);
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    case.tool.finish("rebase", &[]).expect(0, &["table_rebased"]);
    expect_equal("rebase");
}

#[test]
fn settings_of_the_database() {
    let case = Case::new(15, 18);
    case.subscriber.sql(&format!(
        "ALTER DATABASE {0} SET timezone = 'America/New_York'; ALTER DATABASE {0} SET datestyle = 'ISO, DMY'",
        case.subscriber.name
    ));
    expect_as_applied(&case, "America/New_York", "America/New_York ISO, DMY");
}

#[test]
fn settings_of_the_role() {
    let case = Case::new(18, 15);
    case.subscriber.sql(&format!(
        "ALTER ROLE postgres IN DATABASE {0} SET timezone = 'Asia/Tokyo'; \
         ALTER ROLE postgres IN DATABASE {0} SET datestyle = 'German'",
        case.subscriber.name
    ));
    expect_as_applied(&case, "Asia/Tokyo", "Asia/Tokyo German, DMY");
}

/// CET is a time zone with times in summer, and an abbreviation without.
#[test]
fn settings_of_the_connection_string() {
    let mut case = Case::new(18, 18);
    case.tool.subscriber.push_str(" options='-c timezone=CET -c datestyle=SQL,DMY'");
    expect_as_applied(&case, "CET", "CET SQL, DMY");
}

#[test]
fn settings_that_an_event_trigger_on_login_makes() {
    let case = Case::new(15, 18);
    case.subscriber.sql(
        "CREATE FUNCTION logs_in() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN \
           PERFORM set_config('timezone', 'Pacific/Auckland', false), set_config('datestyle', 'SQL, DMY', false); END$$; \
         CREATE EVENT TRIGGER logs_in ON login EXECUTE FUNCTION logs_in(); ALTER EVENT TRIGGER logs_in ENABLE ALWAYS",
    );
    expect_as_applied(&case, "Pacific/Auckland", "Pacific/Auckland SQL, DMY");
}

#[test]
fn settings_of_the_publisher_do_not_matter() {
    let case = Case::new(18, 18);
    case.publisher.sql(&format!(
        "ALTER DATABASE {0} SET array_nulls = off; ALTER DATABASE {0} SET xmloption = document; \
         ALTER DATABASE {0} SET datestyle = 'SQL, DMY'; ALTER DATABASE {0} SET timezone = 'Asia/Kolkata'",
        case.publisher.name
    ));
    case.publisher
        .sql("CREATE TABLE t (id int PRIMARY KEY, a text, x text, n text, at timestamp, v int)");
    case.subscriber
        .sql("CREATE TABLE t (id int PRIMARY KEY, a text[], x xml, n date, at timestamptz, v int)");
    case.publisher.sql(
        "INSERT INTO t SELECT i, '{NULL,a}', 'a<b/>', '01/02/2026', '2026-07-01 12:00', 1 FROM generate_series(1, 9) i",
    );
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.tool.finish("verify", &[]).expect(0, &[]);
    case.subscriber.sql("UPDATE t SET v = 2 WHERE id = 3; DELETE FROM t WHERE id = 5");
    case.tool.finish("verify", &[]).expect(18, &["2 rows differ"]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    let right = "SELECT count(*) FROM t WHERE a[1] IS NULL AND a[2] = 'a' AND x::text = 'a<b/>' AND v = 1 \
                   AND n = '2026-01-02'::date AND at = '2026-07-01 12:00+00'";
    assert_eq!(case.subscriber.value(right), "9");
    case.tool.finish("verify", &[]).expect(0, &[]);
}

/// The offset of a time depends on the day on which it is applied.
#[test]
fn a_time_that_gets_the_offset_of_the_day_is_not_compared() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, at time, v int)");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, at timetz, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, '12:00', 1)");
    case.publish("FOR TABLE t");
    case.run_until_current();
    let zone = |zone: &str| {
        let name = &case.subscriber.name;
        case.subscriber.sql(&format!("ALTER DATABASE {name} SET timezone = '{zone}'"));
    };
    zone("Etc/UTC");
    case.tool.finish("verify", &[]).expect(0, &[]);
    zone("Europe/Berlin");
    let reason = "subscriber type time with time zone, read in time zone Europe/Berlin, with the offset of the day";
    case.tool.finish("verify", &[]).expect(6, &["public.t.at", reason]);
    case.subscriber.sql("UPDATE t SET v = 2");
    case.tool.finish("verify", &[]).expect(18, &[]);
    case.tool.finish("repair", &[]).expect(0, &[]);
    assert_eq!(case.subscriber.rows("SELECT at, v FROM t"), ["12:00:00+00|1"]);
}
