//! Texts of pgapace itself in the encoding of the subscriber.

use crate::support::{Case, PATIENCE, must, wait_for_event, wait_while_running};

const LATIN1: &str = "TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'";
const SQL_ASCII: &str = "TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'";

fn recorded_keys(case: &Case) -> Vec<String> {
    case.subscriber.rows("SELECT conflict, key FROM pgapace.conflict ORDER BY id")
}

/// Keys in conflicts are cut at 64 bytes, which may be inside a character.
#[test]
fn a_key_that_is_cut_inside_a_character_is_recorded() {
    let case = Case::with_databases(18, 15, "", LATIN1);
    case.replicate("CREATE TABLE t (k text PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (repeat('a', 63) || 'éb', 1)");
    case.run_until_current();
    case.subscriber.sql("DELETE FROM t");
    case.publisher.sql("UPDATE t SET v = 2");
    case.run_until_current();
    case.publisher.sql("DELETE FROM t");
    case.run_until_current();
    let key = format!("(k)=({}...)", "a".repeat(63));
    let expected = ["update_missing", "delete_missing"].map(|kind| format!("{kind}|{key}"));
    assert_eq!(recorded_keys(&case), expected);
}

/// The type "char" has a value with byte 0, which no text can contain, and values that are not text.
#[test]
fn a_key_with_bytes_that_are_no_text_is_recorded() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (k \"char\" PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES ('', 1), (E'\\\\377', 1)");
    case.run_until_current();
    case.subscriber.sql("DELETE FROM t");
    case.publisher.sql("DELETE FROM t WHERE k = ''");
    case.run_until_current();
    case.publisher.sql("DELETE FROM t");
    case.run_until_current();
    let expected = ["\\x00", "\\xff"].map(|value| format!("delete_missing|(k)=({value})"));
    assert_eq!(recorded_keys(&case), expected);
}

/// The hint names a type of the publisher.
#[test]
fn a_subscription_is_disabled_with_a_reason_that_the_encoding_lacks() {
    let mut case = Case::with_databases(15, 18, "", LATIN1);
    case.publisher
        .sql("CREATE TYPE \"€\" AS ENUM ('long'); CREATE TABLE t (id int PRIMARY KEY, v \"€\")");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v varchar(1))");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (1, 'long')");
    case.tool.args.push("--disable-on-error".to_owned());
    case.run().expect(9, &["22001", "TYPE public.\"€\""]);
    case.run().expect(13, &["22001"]);
    let reason = case.subscriber.value("SELECT disabled_reason FROM pgapace.subscription");
    assert!(reason.contains("public.t") && reason.contains("TYPE public.\"?\""), "{reason}");
    assert_eq!(case.statistic("last_error"), reason);
}

/// A character that the encoding lacks is no matter of the type.
#[test]
fn a_change_says_what_to_do_about_characters() {
    let case = Case::with_databases(18, 18, "", LATIN1);
    case.replicate("CREATE TABLE t (k text PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t VALUES ('€')");
    let next = ["(k)=(€)", "Encoding LATIN1 lacks this character", "or skip the transaction"];
    let failed = case.run();
    assert!(!failed.log.contains("ALTER TABLE"), "{}", failed.log);
    failed.expect(9, &next);
}

/// The same, and bytes that are no text, as a database with SQL_ASCII has them.
#[test]
fn a_copy_says_what_to_do_about_characters() {
    for (publisher, subscriber, value, next) in [
        ("", LATIN1, "'€'", "Encoding LATIN1 lacks this character"),
        (SQL_ASCII, "", "E'\\351'", "bytes that are no text in this encoding"),
    ] {
        let case = Case::with_databases(18, 15, publisher, subscriber);
        case.both("CREATE TABLE t (v text)");
        case.publisher.sql(&format!("INSERT INTO t VALUES ({value})"));
        case.publish("FOR TABLE t");
        let failed = case.run();
        assert!(!failed.log.contains("ALTER TABLE"), "{}", failed.log);
        failed.expect(if publisher.is_empty() { 9 } else { 4 }, &[next, "on the publisher"]);
    }
}

/// The walsender refuses it, so there is no transaction to skip, and the WAL keeps the value.
#[test]
fn a_streamed_value_that_is_no_text_ends_with_the_way_on() {
    for major in [18, 14] {
        let case = Case::with_databases(major, 18, SQL_ASCII, "");
        case.replicate("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t VALUES (1, E'\\351'), (2, 'text')");
        for _ in 0..2 {
            case.run().expect(4, &["22021", "in the publisher's WAL", "pgapace rebase"]);
        }
        case.publisher.sql("UPDATE t SET v = 'e' WHERE id = 1");
        case.tool.finish("rebase", &[]).expect(0, &[]);
        case.run_until_current();
        case.expect_equal(&["t"]);
    }
}

/// The publisher sends bytes, and the sessions of pgapace would convert them from UTF-8.
#[test]
fn databases_between_which_text_would_not_keep_its_bytes_are_refused() {
    for major in [14, 18] {
        let case = Case::with_databases(major, 18, SQL_ASCII, LATIN1);
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t VALUES (1, E'\\303\\244')");
        case.publish("FOR TABLE t");
        let next = ["the subscriber's has LATIN1", "would not keep its bytes", "with UTF8 if all"];
        case.run().expect(6, &next);
        let check = case.tool.finish("check", &[]);
        assert_ne!(check.code, Some(0), "{}", check.stdout);
        next.iter().for_each(|text| assert!(check.stdout.contains(text), "{}", check.stdout));
        assert_eq!(case.subscriber.value("SELECT count(*) FROM t"), "0");
        let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
        assert_eq!(case.publisher.value(slots), "0");
    }
}

/// The character is one of the encoding, but no value of the type.
#[test]
fn an_escape_that_the_type_lacks_is_a_matter_of_the_type() {
    let case = Case::new(18, 18);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY, v json)");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v jsonb)");
    case.publish("FOR TABLE t");
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (1, '\"\\u0000\"')");
    case.run().expect(9, &["22P05", "ALTER COLUMN \"v\" TYPE json"]);
}

/// A warning that is written together with the statistics of the run.
#[test]
fn events_with_characters_that_the_encoding_lacks_are_written() {
    let mut case = Case::with_databases(18, 18, "", LATIN1);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.tool.args = vec!["--refresh-interval=1".to_owned()];
    let mut run = case.start();
    // The table cannot be copied, and the warning says so.
    case.publisher.sql("CREATE TABLE added (\"größe\" int PRIMARY KEY, \"preis_in_€\" int)");
    case.subscriber.sql("CREATE TABLE added (\"größe\" int PRIMARY KEY)");
    must(wait_for_event(&mut run, "table_blocked", PATIENCE));
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.wait_until_applied(&mut run);
    let reason = "SELECT reason FROM pgapace.relation WHERE table_name = 'added'";
    assert!(case.subscriber.value(reason).contains("preis_in_?"));
    case.stop(run);
    let fields = "SELECT string_agg(fields, ' ') FROM pgapace.event WHERE event = 'table_blocked'";
    assert!(case.subscriber.value(fields).contains("preis_in_?"));
}

/// Why the publications cannot be read is among the figures.
#[test]
fn figures_with_characters_that_the_encoding_lacks_are_written() {
    let mut case = Case::with_databases(18, 18, "", LATIN1);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.tool.args = vec!["--refresh-interval=1".to_owned()];
    let mut run = case.start();
    case.publisher.sql(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN \
           RAISE 'für 5 € mehr'; END $$; \
         CREATE EVENT TRIGGER refuse ON login EXECUTE FUNCTION refuse()",
    );
    must(wait_for_event(&mut run, "refresh_failed", PATIENCE));
    case.publisher.sql("INSERT INTO t VALUES (1)");
    let shown =
        "SELECT figures ->> 'refresh_error' LIKE '%für 5 ? mehr%' FROM pgapace.stat_figures";
    must(wait_while_running(&mut run, "the figures", PATIENCE, || {
        Ok(case.subscriber.value(shown) == "t")
    }));
    case.wait_until_applied(&mut run);
    case.publisher.sql("DROP EVENT TRIGGER refuse");
    case.stop(run);
}

/// Types of the publisher have names of their own.
#[test]
fn a_type_whose_name_the_encoding_lacks_is_recorded() {
    let case = Case::with_databases(18, 15, "", LATIN1);
    case.publisher
        .sql("CREATE TYPE \"€\" AS ENUM ('a'); CREATE TABLE t (id int PRIMARY KEY, v \"€\")");
    case.subscriber.sql("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publish("FOR ALL TABLES");
    case.publisher.sql("INSERT INTO t VALUES (1, 'a')");
    case.run_until_current();
    case.publisher.sql("INSERT INTO t VALUES (2, 'a')");
    case.run_until_current();
    assert_eq!(case.subscriber.value("SELECT count(*) FROM t WHERE v = 'a'"), "2");
    let reason = case.subscriber.value("SELECT format_reason FROM pgapace.subscription");
    assert!(reason.contains("\"?\", subscriber type text"), "{reason}");
}

/// Without a conversion, names are bytes of the publisher. Such a name is shown, and what to do about it.
#[test]
fn names_that_are_not_utf8_are_refused_with_the_next_step() {
    let databases = [(SQL_ASCII, SQL_ASCII), (LATIN1, SQL_ASCII), (SQL_ASCII, "")];
    for (publisher, subscriber) in databases {
        let case = Case::with_databases(18, 15, publisher, subscriber);
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        let name = if publisher == LATIN1 { "'té'" } else { "E't\\351'" };
        case.publisher.sql(&format!(
            "INSERT INTO t VALUES (1); \
             DO $$ BEGIN EXECUTE format('CREATE TABLE %I (id int PRIMARY KEY)', {name}); END $$"
        ));
        case.publish("FOR ALL TABLES");
        let named = match subscriber {
            "" => "invalid byte sequence",
            _ => "column relname: \"t\\xe9\" is not valid UTF-8",
        };
        let next =
            ["reading the publications", named, "names of schemas", "or publish other tables"];
        case.run().expect(6, &next);
        let check = case.tool.finish("check", &[]);
        assert_ne!(check.code, Some(0), "{}", check.stdout);
        next.iter().for_each(|text| assert!(check.stdout.contains(text), "{}", check.stdout));
        case.publisher.sql("DROP PUBLICATION pub");
        case.publish("FOR TABLE t");
        case.run_until_current();
        case.expect_equal(&["t"]);
    }
}

/// Nothing is known by the gid of a prepared transaction, or by the name of a replication origin.
#[test]
fn gids_and_origins_that_are_not_utf8_are_applied() {
    for major in [15, 18] {
        let mut case = Case::with_databases(major, 18, SQL_ASCII, SQL_ASCII);
        case.tool.args.extend(["--two-phase", "--two-phase-hold", "0"].map(str::to_owned));
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        case.run_until_current();
        let gid = format!("E'caf\\351_{}'", case.publisher.name);
        let prepare = format!("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION {gid}");
        case.publisher.sql(&prepare);
        case.run_until_current();
        let listed = case.tool.finish("prepared", &[]);
        assert!(listed.stdout.contains("xE9_"), "{}", listed.stdout);
        case.publisher.sql(&format!("COMMIT PREPARED {gid}"));
        let origin = gid.replace("caf", "origin");
        case.publisher.sql(&format!(
            "SELECT pg_replication_origin_create({origin}); \
             SELECT pg_replication_origin_session_setup({origin}); \
             BEGIN; SELECT pg_replication_origin_xact_setup('0/1', now()); \
             INSERT INTO t VALUES (2); COMMIT; \
             SELECT pg_replication_origin_session_reset(); \
             SELECT pg_replication_origin_drop({origin})"
        ));
        case.run_until_current();
        case.expect_equal(&["t"]);
    }
}
