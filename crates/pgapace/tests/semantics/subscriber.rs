//! Properties of the subscriber's server, database and role.

use crate::support::{Case, Database, Tool, VERSIONS, must, on_versions, one_or_all};

/// Replication origins are shared by all databases of a server: subscriptions in two databases must
/// not use the same one.
#[test]
fn commits_are_tagged_in_every_database_of_the_server() {
    let (mut one, mut two) = (Case::new(18, 18), Case::new(18, 18));
    for case in [&mut one, &mut two] {
        case.tool.args = ["--workers", "4"].map(str::to_owned).into();
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
    }
    let (mut first, mut second) = (one.start(), two.start());
    for (case, process) in [(&one, &mut first), (&two, &mut second)] {
        case.publisher.sql("INSERT INTO t VALUES (1)");
        case.wait_until_applied(process);
        assert!(process.events("commits_not_tagged") == 0, "{}", process.log());
    }
    // Dropping one subscription leaves the other's origins, which are in use.
    one.stop(first);
    one.tool.finish("drop", &[]).expect(0, &[]);
    two.publisher.sql("INSERT INTO t VALUES (2)");
    two.wait_until_applied(&mut second);
    two.expect_equal(&["t"]);
    let origins = |case: &Case| {
        case.subscriber.value(
            "SELECT count(*) FROM pg_replication_origin, pg_database d \
             WHERE datname = current_database() AND roname LIKE 'pgapace\\_' || d.oid || '\\_%'",
        )
    };
    // One origin for each worker.
    assert_eq!((origins(&one), origins(&two)), ("0".to_owned(), "4".to_owned()));
    two.stop(second);
}

/// Settings of databases and roles that affect the text of values, different on both sides.
#[test]
fn settings_of_databases_and_roles_do_not_matter() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TYPE pair AS (a text, b text); \
             CREATE TABLE t (id int PRIMARY KEY, d date, ts timestamptz, tz timetz, iv interval, \
               b bytea, f float8, r float4, m money, words text[], p pair, x text, z timestamp); \
             CREATE TABLE f (d date, ts timestamptz, iv interval, f float8, words text[]); \
             ALTER TABLE f REPLICA IDENTITY FULL; CREATE TABLE o (id int PRIMARY KEY)",
        );
        case.subscriber.sql(
            "ALTER TABLE o ADD at timestamp DEFAULT now(), ADD day text DEFAULT (date '2024-03-04')::text",
        );
        let settings = |database: &crate::support::Database<'_>, settings: &[(&str, &str)]| {
            for (name, value) in settings {
                for who in [
                    format!("DATABASE {}", database.name),
                    format!("ROLE postgres IN DATABASE {}", database.name),
                ] {
                    database.sql(&format!("ALTER {who} SET {name} = '{value}'"));
                }
            }
        };
        let common = [
            ("standard_conforming_strings", "off"),
            ("search_path", "nowhere"),
            ("default_transaction_isolation", "serializable"),
            ("default_transaction_deferrable", "on"),
            ("client_min_messages", "debug1"),
            ("client_encoding", "SQL_ASCII"),
            ("quote_all_identifiers", "on"),
            ("transform_null_equals", "on"),
            ("statement_timeout", "1min"),
            ("row_security", "on"),
            ("default_transaction_read_only", "on"),
            ("array_nulls", "off"),
        ];
        settings(&case.publisher, &common);
        settings(&case.subscriber, &common);
        settings(
            &case.publisher,
            &[
                ("datestyle", "German"),
                ("intervalstyle", "sql_standard"),
                ("timezone", "Asia/Kolkata"),
                ("bytea_output", "escape"),
                ("extra_float_digits", "-10"),
                ("xmlbinary", "hex"),
            ],
        );
        settings(
            &case.subscriber,
            &[
                ("datestyle", "SQL, DMY"),
                ("intervalstyle", "iso_8601"),
                ("timezone", "America/St_Johns"),
                ("bytea_output", "escape"),
                ("extra_float_digits", "-15"),
                ("xmloption", "document"),
                ("synchronous_commit", "off"),
                ("quote_all_identifiers", "on"),
            ],
        );
        let rows = |from: i32| {
            format!(
                "INSERT INTO t SELECT g, date '2024-03-04', timestamptz '2024-03-04 05:06:07.89+00', \
                   timetz '01:02:03+04:30', interval '-1 year 2 mons -3 days 04:05:06.7', '\\x00275c'::bytea, \
                   0.1 + 0.2, 0.1, 12.34, ARRAY['NULL', NULL, 'null'], ROW('NULL', NULL)::pair, 'back\\slash', \
                   timestamp '0044-03-15 01:02:03 BC' \
                 FROM generate_series({from}, {from} + 3) g; \
                 INSERT INTO f SELECT d, ts, iv, f, words FROM t WHERE id >= {from}; \
                 INSERT INTO o VALUES ({from})"
            )
        };
        case.publish("FOR ALL TABLES");
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        assert!(!checked.stdout.contains("converted through text"), "{}", checked.stdout);
        case.publisher.sql(&rows(1));
        case.run_until_current();
        case.expect_equal(&["t", "f"]);
        case.publisher.sql(&rows(11));
        case.publisher.sql(
            "UPDATE t SET ts = ts + interval '1 hour', words = words || NULL WHERE id IN (1, 11); \
             DELETE FROM f WHERE ctid = (SELECT min(ctid) FROM f); \
             UPDATE f SET iv = -iv WHERE ctid = (SELECT max(ctid) FROM f)",
        );
        case.run_until_current();
        case.expect_equal(&["t", "f"]);
        assert_eq!(case.statistic("update_missing || '|' || delete_missing"), "0|0");
        // Defaults of columns see the settings of the database, as natively.
        let own = "SELECT id, day, now() AT TIME ZONE 'America/St_Johns' - at < '1 hour' FROM o ORDER BY id";
        assert_eq!(case.subscriber.rows(own), ["1|04/03/2024|t", "11|04/03/2024|t"]);
    });
}

#[test]
fn different_encodings_are_converted() {
    let latin1 = "TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'";
    let ascii = "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'";
    let ddl = "CREATE TABLE \"Müller\" (id int PRIMARY KEY, \"größe\" text, j jsonb, w varchar(5)); \
               CREATE TABLE f (v text, n int); ALTER TABLE f REPLICA IDENTITY FULL";
    let rows = |from: i32| {
        format!(
            "INSERT INTO \"Müller\" VALUES ({from}, 'Motörhead', '{{\"ä\": \"ö\"}}', 'äöüßé'), ({from} + 1, 'ÿ', NULL, ''); \
             INSERT INTO f VALUES ('ä', {from}), ('ä', {from});"
        )
    };
    for (publisher, subscriber, options) in
        [(18, 18, (latin1, "")), (15, 15, ("", latin1)), (15, 18, (latin1, latin1))]
    {
        let mut case = Case::with_databases(publisher, subscriber, options.0, options.1);
        // In a group only net changes meet an encoding that the publisher does not have.
        case.tool.args = vec!["--group-transactions".to_owned(), "1".to_owned()];
        case.both(ddl);
        case.publish("FOR ALL TABLES");
        case.publisher.sql(&rows(1));
        case.run_until_current();
        case.publisher.sql(&rows(11));
        case.publisher.sql(
            "UPDATE \"Müller\" SET \"größe\" = 'Ünïcödé' WHERE \"größe\" = 'ÿ'; \
             DELETE FROM f WHERE ctid = (SELECT min(ctid) FROM f)",
        );
        case.run_until_current();
        // Compared as characters, because the bytes differ.
        for rows in ["SELECT * FROM \"Müller\" ORDER BY id", "SELECT * FROM f ORDER BY n"] {
            assert_eq!(case.publisher.rows(rows), case.subscriber.rows(rows));
        }
        if subscriber == 15 {
            // A character that the subscriber's encoding lacks is refused and named.
            case.publisher.sql("UPDATE \"Müller\" SET \"größe\" = '€' WHERE id = 1");
            case.run().expect(9, &["22P05", "public.Müller", "(id)=(1)"]);
            case.publisher.sql("UPDATE \"Müller\" SET \"größe\" = 'EUR' WHERE id = 1");
            case.run().expect(9, &["22P05"]);
        }
    }
    // Bytes without a valid encoding are replicated if neither side validates them.
    let bytes = "convert_from('\\xe4ff80'::bytea, 'SQL_ASCII')";
    let case = Case::with_databases(15, 18, ascii, ascii);
    case.both("CREATE TABLE t (v text PRIMARY KEY, w text)");
    case.publish("FOR ALL TABLES");
    case.publisher.sql(&format!("INSERT INTO t VALUES ({bytes} || '1', {bytes}), ('ü', 'x')"));
    case.run_until_current();
    case.publisher.sql(&format!("INSERT INTO t VALUES ({bytes} || '2', {bytes})"));
    case.publisher.sql(&format!("UPDATE t SET w = v || w WHERE v = {bytes} || '1'"));
    case.publisher.sql(&format!("UPDATE t SET w = {bytes} WHERE v = 'ü'"));
    case.run_until_current();
    case.expect_equal(&["t"]);
    let all = "SELECT string_agg(encode(convert_to(v || '=' || w, 'SQL_ASCII'), 'hex'), ' ' ORDER BY v) FROM t";
    assert_eq!(case.publisher.value(all), case.subscriber.value(all));
    // A subscriber with SQL_ASCII accepts the publisher's bytes.
    for publisher in ["", latin1] {
        let case = Case::with_databases(18, 18, publisher, ascii);
        case.both("CREATE TABLE t (v text PRIMARY KEY, w text)");
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t VALUES ('ä', 'ö')");
        case.run_until_current();
        case.publisher.sql("UPDATE t SET w = 'ü' WHERE v = 'ä'; INSERT INTO t VALUES ('é', 'x')");
        case.run_until_current();
        let encoding = case.publisher.value("SHOW server_encoding");
        let hex = |as_: &str| {
            format!(
                "SELECT string_agg(encode(convert_to(v || w, '{as_}'), 'hex'), ' ' ORDER BY w COLLATE \"C\") FROM t"
            )
        };
        let (publisher_rows, subscriber_rows) =
            (case.publisher.value(&hex(&encoding)), case.subscriber.value(&hex("SQL_ASCII")));
        assert_eq!(publisher_rows, subscriber_rows, "{encoding}");
    }
    // Valid bytes of an SQL_ASCII database are accepted by a database with an encoding.
    let case = Case::with_databases(15, 18, ascii, "");
    case.both("CREATE TABLE t (v text PRIMARY KEY, w text)");
    case.publish("FOR ALL TABLES");
    case.publisher.sql("INSERT INTO t VALUES ('ä', 'ö')");
    case.run_until_current();
    case.publisher.sql("UPDATE t SET w = 'ü' WHERE v = 'ä'");
    case.run_until_current();
    case.expect_equal(&["t"]);
}

/// The subscriber also publishes all of its tables. Changes of pgapace's state in schema pgapace
/// are neither copied nor applied.
#[test]
fn state_of_a_subscriber_that_is_a_publisher_is_never_applied() {
    for &(first, last) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = Case::new(first, last);
        let ddl = "CREATE TABLE t (id int PRIMARY KEY, v text)";
        case.both(ddl);
        // Before the state is created, so that its creation is published too.
        case.subscriber.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        case.publish("FOR ALL TABLES");
        case.publisher.sql("INSERT INTO t VALUES (1, 'copied')");
        case.run_until_current();

        let name = format!("{}_next", case.subscriber.name);
        let next = Database::create(case.subscriber.cluster, &name, "");
        next.sql(ddl);
        let onward = Tool::new(case.subscriber.conninfo(), next.conninfo(), &name);
        onward.run_until_current();
        case.publisher
            .sql("INSERT INTO t VALUES (2, 'streamed'); UPDATE t SET v = 'x' WHERE id = 1");
        case.run_until_current();
        onward.run_until_current();
        assert_eq!(next.rows("SELECT * FROM t ORDER BY id"), ["1|x", "2|streamed"]);
        assert_eq!(next.rows("SELECT name FROM pgapace.subscription"), [name.as_str()]);
        assert_eq!(next.rows("SELECT schema_name, table_name FROM pgapace.relation"), ["public|t"]);
        must(
            case.subscriber
                .cluster
                .sql("postgres", &format!("SELECT pg_drop_replication_slot('{name}')")),
        );
    }
}
