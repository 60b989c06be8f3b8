//! User code of the subscriber that changes settings of the session in which it runs. Natively, the apply worker keeps
//! them: ordinary triggers fire from then on.

use testbed::program::events;

use crate::support::{Case, PATIENCE, must, on_versions, wait_while_running};

const VERSIONS: [(u16, u16); 3] = [(14, 14), (15, 15), (18, 18)];

/// Those that decide about rows.
const SETTINGS: &str = "'session_replication_role', 'intervalstyle', 'lc_monetary', 'xmloption', 'array_nulls', \
    'row_security', 'default_transaction_isolation', 'transaction_isolation', 'transaction_read_only', \
    'default_transaction_read_only', 'default_transaction_deferrable', 'synchronous_commit', 'client_encoding', \
    'client_min_messages', 'extra_float_digits'";

/// On the subscriber, changes of table `hook` change settings, those of `plain` must not fire its trigger, and table
/// `notes` gets the settings that each change of `witness` sees.
fn tables(case: &Case, timing: &str) {
    case.both(
        "CREATE TABLE hook (id int PRIMARY KEY, v text DEFAULT U&'caf\\00e9'); \
         CREATE TABLE other_hook (id int PRIMARY KEY, v text DEFAULT U&'caf\\00e9'); \
         CREATE TABLE plain (id int PRIMARY KEY, i interval, f float8, b bytea, a text[]); \
         CREATE TABLE witness (id int PRIMARY KEY)",
    );
    case.subscriber.sql(&format!(
        "CREATE TABLE notes (id int, name text, value text); CREATE TABLE fired (id int); \
         CREATE FUNCTION change_settings() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN \
           PERFORM set_config(name, value, false) FROM (VALUES \
             ('session_replication_role', 'origin'), ('intervalstyle', 'sql_standard'), ('extra_float_digits', '-10'), \
             ('bytea_output', 'escape'), ('array_nulls', 'off'), ('quote_all_identifiers', 'on'), ('row_security', 'on'), \
             ('default_transaction_isolation', 'serializable'), ('default_transaction_read_only', 'on'), ('default_transaction_deferrable', 'on'), \
             ('client_min_messages', 'error'), ('lock_timeout', '1h'), ('statement_timeout', '1h'), \
             ('synchronous_commit', 'local'), ('enable_seqscan', 'on'), ('plan_cache_mode', 'auto'), \
             ('client_encoding', 'LATIN1'), \
             ('search_path', 'public, pg_catalog')) AS s (name, value); RETURN NULL; END$$; \
         CREATE CONSTRAINT TRIGGER c AFTER INSERT ON hook {timing} FOR EACH ROW EXECUTE FUNCTION change_settings(); \
         CREATE CONSTRAINT TRIGGER c AFTER INSERT ON other_hook {timing} FOR EACH ROW EXECUTE FUNCTION change_settings(); \
         ALTER TABLE hook ENABLE ALWAYS TRIGGER c; ALTER TABLE other_hook ENABLE REPLICA TRIGGER c; \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO public.notes \
           SELECT NEW.id, name, pg_catalog.current_setting(name) FROM pg_catalog.unnest(ARRAY[{SETTINGS}]) AS name; \
           RETURN NULL; END$$; \
         CREATE TRIGGER n AFTER INSERT ON witness FOR EACH ROW EXECUTE FUNCTION note(); \
         ALTER TABLE witness ENABLE ALWAYS TRIGGER n; \
         CREATE FUNCTION fire() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN \
           INSERT INTO public.fired VALUES (NEW.id); RETURN NULL; END$$; \
         CREATE TRIGGER f AFTER INSERT ON plain FOR EACH ROW EXECUTE FUNCTION fire()"
    ));
}

fn plain(id: u32) -> String {
    format!(
        "INSERT INTO plain SELECT i, '-1 day +2 h', 0.1::float8 + 0.2, '\\x00ff', ARRAY[NULL, U&'caf\\00e9'] \
         FROM generate_series({id}, {id} + 9) i"
    )
}

/// The witnesses have seen the same settings, and nothing else has happened than on the publisher.
fn expect_no_effect(case: &Case, witnesses: u32) {
    assert_eq!(case.subscriber.value("SELECT count(*) FROM fired"), "0");
    let notes = "SELECT name, string_agg(DISTINCT value, ' or ') FROM notes GROUP BY 1 \
                 HAVING count(DISTINCT value) > 1 ORDER BY 1";
    assert_eq!(case.subscriber.rows(notes), [""; 0]);
    let count = "SELECT count(DISTINCT id) FROM notes";
    assert_eq!(case.subscriber.value(count), witnesses.to_string());
    case.expect_equal(&["hook", "other_hook", "plain", "witness"]);
}

fn stream(timing: &str, in_one_transaction: bool) {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--workers=1".to_owned(), "--binary=off".to_owned()];
        tables(&case, timing);
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        let mut witness = 0..;
        let mut next = || format!("INSERT INTO witness VALUES ({})", witness.next().unwrap_or(0));
        case.publisher.sql(&next());
        for (round, hook) in (1..).zip(["hook", "other_hook"].iter().cycle().take(6)) {
            let hook = format!(
                "INSERT INTO {hook} SELECT generate_series({round} * 10, {round} * 10 + 2)"
            );
            let changes = [hook, plain(round * 10), next()];
            if in_one_transaction {
                case.publisher.sql(&format!("BEGIN; {}; COMMIT", changes.join("; ")));
            } else {
                changes.iter().for_each(|change| case.publisher.sql(change));
            }
        }
        case.wait_until_applied(&mut process);
        case.stop(process);
        expect_no_effect(&case, 7);
    });
}

#[test]
fn settings_that_a_trigger_makes_end_with_its_transaction() {
    stream("", false);
}

#[test]
fn settings_that_a_trigger_makes_do_not_reach_changes_of_other_tables_in_its_transaction() {
    stream("", true);
}

#[test]
fn settings_that_a_deferred_trigger_makes_at_commit_end_with_its_transaction() {
    stream("DEFERRABLE INITIALLY DEFERRED", false);
}

#[test]
fn settings_that_a_trigger_makes_do_not_reach_the_next_transaction_of_its_table() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--workers=1".to_owned()];
        tables(&case, "");
        case.subscriber
            .sql("CREATE TRIGGER f AFTER INSERT ON hook FOR EACH ROW EXECUTE FUNCTION fire()");
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        (1..6).for_each(|id| case.publisher.sql(&format!("INSERT INTO hook VALUES ({id})")));
        case.wait_until_applied(&mut process);
        case.stop(process);
        expect_no_effect(&case, 0);
    });
}

#[test]
fn settings_that_a_trigger_makes_do_not_reach_copies_of_other_tables() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--copy-workers=1".to_owned(), "--binary=off".to_owned()];
        tables(&case, "");
        // It is large, and so the first one; the others are copied together.
        case.publisher.sql("INSERT INTO hook SELECT generate_series(1, 10000)");
        case.publisher.sql("INSERT INTO other_hook VALUES (1); INSERT INTO witness VALUES (1)");
        case.publisher.sql(&plain(1));
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO witness VALUES (2)");
        case.wait_until_applied(&mut process);
        case.stop(process);
        // The apply session has the same settings, but waits longer for locks than a copy of several tables.
        case.subscriber.sql("DELETE FROM notes WHERE name = 'lock_timeout'");
        expect_no_effect(&case, 2);
    });
}

/// The text of the values tells rows without a key from each other.
#[test]
fn settings_that_a_trigger_makes_do_not_decide_which_row_without_a_key_is_found() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--workers=1".to_owned()];
        tables(&case, "");
        case.both("CREATE TABLE points (p point, n int); ALTER TABLE points REPLICA IDENTITY FULL");
        case.publisher.sql(
            "INSERT INTO points SELECT point(1 + i * 1e-14, 0), 0 FROM generate_series(1, 3) i",
        );
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO hook VALUES (1)");
        case.publisher.sql("UPDATE points SET n = 1 WHERE p[0] > 1 + 2.5e-14");
        case.wait_until_applied(&mut process);
        case.stop(process);
        let changed = "SELECT count(*), count(DISTINCT p[0]), sum(n) FROM points WHERE n = 0 \
                       OR p[0] > 1 + 2.5e-14";
        assert_eq!(case.subscriber.rows(changed), ["3|3|1"]);
    });
}

/// Until its definition is read again, a table has a trigger that pgapace does not know.
#[test]
fn settings_that_an_unknown_trigger_makes_end_when_the_table_is_found_to_have_changed() {
    on_versions(&VERSIONS, |mut case| {
        case.tool.args = vec!["--workers=1".to_owned()];
        tables(&case, "");
        case.subscriber.sql(
            "CREATE FUNCTION change_role() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN \
               PERFORM set_config('session_replication_role', 'origin', false); RETURN NULL; END$$; \
             CREATE TRIGGER r AFTER INSERT ON hook FOR EACH ROW EXECUTE FUNCTION change_role(); \
             ALTER TABLE hook DISABLE TRIGGER c",
        );
        case.publish("FOR ALL TABLES");
        let mut process = case.start();
        case.publisher.sql("INSERT INTO hook VALUES (1)");
        case.publisher.sql(&plain(1));
        case.wait_until_applied(&mut process);
        case.subscriber.sql("ALTER TABLE hook ENABLE ALWAYS TRIGGER r");
        case.publisher.sql("INSERT INTO hook VALUES (2)");
        let mut id = 11;
        must(wait_while_running(&mut process, "the table to be read again", PATIENCE, || {
            // A look is made soon after something was applied.
            case.publisher.sql(&plain(id));
            id += 10;
            Ok(events(
                &std::fs::read_to_string(case.log_file(&case.tool.name))?,
                "table_definition_changed",
            ) > 0)
        }));
        case.wait_until_applied(&mut process);
        let fired = case.subscriber.value("SELECT count(*) FROM fired");
        (0..3).for_each(|round| case.publisher.sql(&plain(id + round * 10)));
        case.wait_until_applied(&mut process);
        case.stop(process);
        assert_eq!(case.subscriber.value("SELECT count(*) FROM fired"), fired);
    });
}
