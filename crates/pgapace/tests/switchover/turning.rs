//! The process that applies dies while it turns round. A later one with the old settings goes on from there.

use testbed::{Cluster, wait_until};

use super::{LATE, Slots, expect_equal_soon, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, must, one_or_all};

/// Keeps a session in the statement that gives a subscription the phase of table `held_phase`.
const HOLD: &str = "CREATE TABLE public.held_phase (phase text); \
    CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
      WHILE EXISTS (SELECT FROM public.held_phase h WHERE h.phase = NEW.phase) \
        LOOP PERFORM pg_catalog.pg_sleep(0.05); END LOOP; RETURN NEW; END $$; \
    CREATE TRIGGER hold BEFORE INSERT OR UPDATE ON pgapace.subscription \
      FOR EACH ROW EXECUTE FUNCTION public.hold(); \
    ALTER TABLE pgapace.subscription ENABLE ALWAYS TRIGGER hold";

/// Writes also while the database is read-only.
pub(super) fn write(cluster: &Cluster, database: &str, sql: &str) {
    let mut client = must(cluster.connect(database));
    must(client.batch_execute("SET default_transaction_read_only = off"));
    must(client.batch_execute(sql));
}

/// The new side's row of the subscription that begins anew.
fn row(case: &Case, column: &str) -> String {
    let name = &case.tool.name;
    let sql = format!("SELECT {column} FROM pgapace.subscription WHERE name = '{name}'");
    value(case.subscriber.cluster, &case.publisher.name, &sql)
}

#[test]
fn a_process_that_dies_while_it_turns_round_is_followed_by_another_one() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
        let database = case.publisher.name.as_str();
        let mut process = case.start();
        write(new, database, HOLD);
        // Before the old row is gone; before the slot is recorded; before it streams.
        for (number, phase) in ["creating", "copying", "streaming"].into_iter().enumerate() {
            switchover(&case.tool, &["--go"]).expect(0, &[]);
            write(new, database, &format!("INSERT INTO public.held_phase VALUES ('{phase}')"));
            let back = case.tool.program("switchover").args(["--back", "--deadline", LATE]);
            let mut back = must(back.spawn_logged(case.log_file(phase)));
            let held = "SELECT coalesce(min(pid), 0) FROM pg_stat_activity WHERE wait_event = 'PgSleep' \
                        AND datname = current_database()";
            let mut pid = String::new();
            let waited = wait_until(PATIENCE, "the process to turn round", || {
                assert!(process.is_running(), "{phase}: {}", process.log());
                // The verb ends other sessions.
                pid = new.query_one_text(database, held).unwrap_or_default();
                Ok(pid.parse::<u32>().is_ok_and(|pid| pid > 0))
            });
            waited.unwrap_or_else(|error| panic!("{phase}: {error}\n{}", back.log()));
            must(process.kill9());
            let ended = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}");
            write(new, database, &format!("SELECT pg_terminate_backend({pid})"));
            must(wait_until(PATIENCE, "the session to end", || {
                Ok(value(new, database, &ended) == "0")
            }));
            // It only waits for a process that applies.
            must(back.kill9());
            write(new, database, "DELETE FROM public.held_phase");
            assert_eq!(row(&case, "count(*)"), "1", "{phase}");
            case.run().expect(13, &["pgapace run without --until"]);

            let sql = format!("INSERT INTO orders (client, n) VALUES (1, {number})");
            must(old.sql(database, &sql));
            process = case.start();
            assert_eq!(process.events("applies_way_back"), 2, "{phase}: {}", process.log());
            expect_equal_soon(&case, &mut process);
            assert_eq!(row(&case, "owns_slot"), "t", "{phase}");
            let done = switchover(&case.tool, &["--back"]);
            done.expect(0, &[]);
            assert!(done.stdout.contains("was already switched over at"), "{}", done.stdout);
            assert!(done.stdout.contains("is applied (backend"), "{}", done.stdout);
        }
        case.stop(process);
    }
}

/// The slot of a way back has the subscription's name; the settings of the service stay.
#[test]
fn a_slot_of_another_name_is_no_obstacle_after_the_way_back() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let mut case = two_way_case(publisher, subscriber);
        let slot = format!("{}_own", case.tool.name);
        case.tool.args = vec!["--slot".to_owned(), slot];
        let _slots = Slots(&case);
        let mut process = case.start();
        for direction in ["--go", "--back"] {
            switchover(&case.tool, &[direction]).expect(0, &[]);
            expect_equal_soon(&case, &mut process);
        }
        case.stop(process);
        case.tool.finish("check", &[]).expect(0, &[]);
        let sql = "INSERT INTO orders (client, n) VALUES (1, 1)";
        write(case.publisher.cluster, &case.publisher.name, sql);
        process = case.start();
        expect_equal_soon(&case, &mut process);
        case.stop(process);
    }
}
