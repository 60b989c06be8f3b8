//! Writes move from the publisher to the subscriber and back: no acknowledged commit is lost, and a
//! failure leaves the state before or after.

mod adopted;
mod altered;
mod application_roles;
mod arena;
mod clients;
mod deadlines;
mod expected;
mod failures;
mod faults;
mod gaps;
mod kills;
mod late;
mod lost;
mod machines;
mod old_side;
mod plan;
mod pooled;
mod privileges;
mod refused;
mod returned;
mod settings_afterwards;
mod several;
mod signals;
mod silent;
mod standbys;
mod synchronous;
mod turning;
mod two_phase;
mod unflushed;
mod unread;

use std::collections::BTreeSet;

use testbed::program::Process;
use testbed::{Cluster, wait_until};

use self::clients::Clients;
use self::deadlines::{LATE, switchover, until_deadline_runs_out};
use crate::support::{Case, Finished, PATIENCE, VERSIONS, must, one_or_all};
use crate::verbs::json;

/// How many of the replication origins belong to a subscription that is gone: each takes the place of a worker.
const FORGOTTEN: &str = "SELECT count(*) FILTER (WHERE s.id IS NULL) || ' of ' || (count(*) > 0) \
    FROM pg_replication_origin JOIN pg_database d ON starts_with(roname, 'pgapace_' || d.oid || '_') \
    LEFT JOIN pgapace.subscription s ON starts_with(roname, concat('pgapace_', d.oid, '_', s.id, '_')) \
    WHERE d.datname = current_database()";
const DDL: &str = "CREATE TABLE orders (id bigserial PRIMARY KEY, client int, n int)";

/// A case with a publication for each direction.
fn two_way_case(publisher: u16, subscriber: u16) -> Case {
    let case = Case::new(publisher, subscriber);
    case.both(DDL);
    case.publish("FOR TABLE orders");
    case.subscriber.sql("CREATE PUBLICATION pgapace_back FOR TABLE orders");
    case
}

/// A value, in a session of its own: a switchover ends sessions.
fn value(cluster: &Cluster, database: &str, sql: &str) -> String {
    must(cluster.query_one_text(database, sql))
}

/// The rows of a side, as clients know them.
fn rows(cluster: &Cluster, database: &str) -> Vec<(i32, i32)> {
    let mut client = must(cluster.connect(database));
    let rows = client.query("SELECT client, n FROM orders ORDER BY id", &[]);
    let rows = rows.unwrap_or_else(|error| panic!("{error}"));
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Drops the slots of both directions: these servers are shared by tests.
struct Slots<'c>(&'c Case);

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        let name = &self.0.tool.name;
        let sql = format!(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE slot_name IN ('{name}', '{name}_back') AND NOT active"
        );
        for cluster in [self.0.publisher.cluster, self.0.subscriber.cluster] {
            let _ = cluster.sql("postgres", &sql);
        }
    }
}

/// The applied rows of a moment, in both databases.
fn expect_equal_soon(case: &Case, process: &mut Process) {
    let database = case.publisher.name.as_str();
    let count =
        |cluster: &Cluster| value(cluster, database, "SELECT count(*), max(id) FROM orders");
    let equal = wait_until(PATIENCE, "both sides to be equal", || {
        assert!(process.is_running(), "{}", process.log());
        Ok(count(case.publisher.cluster) == count(case.subscriber.cluster))
    });
    equal.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    let there = rows(case.subscriber.cluster, database);
    assert_eq!(rows(case.publisher.cluster, database), there);
    assert_eq!(there.iter().collect::<BTreeSet<_>>().len(), there.len(), "twice");
}

/// Everything that clients know to be committed is on the side to which they moved.
fn expect_there(cluster: &Cluster, database: &str, acknowledged: &BTreeSet<(i32, i32)>) {
    let there: BTreeSet<_> = rows(cluster, database).into_iter().collect();
    let missing: Vec<_> = acknowledged.difference(&there).take(5).collect();
    assert!(missing.is_empty(), "lost: {missing:?}");
}

/// The milliseconds for which nobody could write.
fn outage(done: &Finished) -> u64 {
    let line =
        done.stdout.lines().find_map(|line| line.trim().strip_prefix("nobody could write for "));
    let digits = line.and_then(|line| line.strip_suffix(" ms"));
    must(digits.unwrap_or_else(|| panic!("no outage: {}", done.stdout)).parse::<u64>())
}

/// The slot of the way back belongs to its subscription, and is synchronised to standbys where the server can.
fn expect_slot_of_way_back(case: &Case) {
    let (new, database) = (case.subscriber.cluster, case.publisher.name.as_str());
    let name = format!("{}_back", case.tool.name);
    let owns = format!("SELECT owns_slot FROM pgapace.subscription WHERE name = '{name}'");
    assert_eq!(value(case.publisher.cluster, database, &owns), "t");
    if new.binaries().major() >= 17 {
        let failover =
            format!("SELECT failover FROM pg_replication_slots WHERE slot_name = '{name}'");
        assert_eq!(value(new, database, &failover), "t");
    }
}

/// Over, back, and over again, with one process that turns round each time.
#[test]
fn clients_move_over_and_back() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
        let database = case.publisher.name.as_str();
        let sides = (case.publisher.conninfo(), case.subscriber.conninfo());
        let read_only = "SELECT current_setting('default_transaction_read_only')";
        let mut process = case.start();
        switchover(&case.tool, &["--plan"]).expect(0, &[]);
        switchover(&case.tool, &["--back"]).expect(3, &["was not switched over"]);
        let mut turns = 0;
        for round in 0..2 {
            let moved = case.log_file(&format!("moved{round}"));
            let open = format!("touch {}", moved.display());
            let clients = Clients::start(20, sides.clone(), &moved, 2 * round);
            clients.wait_for_more();
            let args = ["--go", "--open", &open, "--max-lag", "10s", "--lag-for", "1"];
            let all: &[&str] =
                if round == 0 { &["--verify", "all", "--margin", "1000"] } else { &[] };
            let done = switchover(&case.tool, &[&args[..], all].concat());
            done.expect(0, &["event=\"subscription_switched_over\""]);
            for step in ["stopping writes", "stands aside", "takes writes", "is applied (backend"] {
                assert!(done.stdout.contains(step), "{step}: {}", done.stdout);
            }
            assert_eq!(done.stdout.contains("rows are equal"), round == 0, "{}", done.stdout);
            assert!(outage(&done) > 0, "{}", done.stdout);
            clients.wait_for_more();
            if round == 0 {
                let last: i64 =
                    must(value(old, database, "SELECT last_value FROM orders_id_seq").parse());
                let first = format!("SELECT min(id) FROM orders WHERE id > {last}");
                let first: i64 = must(value(new, database, &first).parse());
                assert!(first > last + 1000, "{first} after {last}");
            }
            expect_there(new, database, &clients.stop());
            turns += 1;
            assert_eq!(process.events("applies_way_back"), turns, "{}", process.log());
            expect_slot_of_way_back(&case);
            assert_eq!(value(old, database, read_only), "on");
            case.run().expect(13, &["was switched over at"]);
            let refused: [(&str, &[&str]); 5] = [
                ("rebase", &[]),
                ("resync", &["orders"]),
                ("refresh", &[]),
                ("skip", &["--lsn", "7/1"]),
                ("sequences", &["--force"]),
            ];
            for (verb, args) in refused {
                case.tool.finish(verb, args).expect(13, &["was switched over at"]);
            }
            let requests = "SELECT (SELECT count(*) FROM pgapace.relation WHERE requested IS NOT NULL) \
                + (SELECT count(*) FROM pgapace.subscription WHERE skip_lsn IS NOT NULL)";
            assert_eq!(value(new, database, requests), "0");
            let checked = case.tool.finish("check", &[]).stdout;
            assert!(checked.contains("was switched over at"), "{checked}");
            assert!(checked.contains("a switchover has ended the subscription"), "{checked}");
            for wrong in ["BLOCKER", "pgapace rebase", ".. "] {
                assert!(!checked.contains(wrong), "{wrong}: {checked}");
            }
            let said = ["was switched over", "HINT:", "applies the way back"];
            let status = case.tool.finish("status", &["--check"]);
            status.expect(13, &said);
            // The way back writes WAL there, which is no lag.
            let ended = format!("{}: switched over\n", case.tool.name);
            let none = "none: everything up to its end is applied";
            let said = status.stdout.starts_with(&ended) && status.stdout.contains(none);
            assert!(said, "{}", status.stdout);
            let shown = json(&case.tool.finish("status", &["--json"]));
            assert_eq!(
                (&shown[0]["lag_bytes"], &shown[0]["lag_seconds"]),
                (&0.into(), &0.0.into())
            );
            assert!(!status.stdout.contains("pgapace rebase"), "{}", status.stdout);
            let undone = switchover(&case.tool, &["--abort"]);
            undone.expect(3, &["nothing can be undone", "No switchover was begun since"]);
            // There is no lag to wait for.
            let again = switchover(&case.tool, &["--go", "--max-lag", "10s"]);
            again.expect(0, &[]);
            assert!(again.stdout.contains("was already switched over at"), "{}", again.stdout);
            assert!(!again.stdout.contains("nobody could write"), "{}", again.stdout);
            expect_equal_soon(&case, &mut process);
            if round == 1 {
                // A new process with the old settings finds the way back by itself.
                case.stop(process);
                process = case.start();
                assert_eq!(process.events("applies_way_back"), 1, "{}", process.log());
                turns = 1;
            }

            let returned = case.log_file(&format!("returned{round}"));
            let open = format!("touch {}", returned.display());
            let swapped = (sides.1.clone(), sides.0.clone());
            let clients = Clients::start(20, swapped, &returned, 2 * round + 1);
            clients.wait_for_more();
            let done = switchover(&case.tool, &["--back", "--open", &open]);
            done.expect(0, &[]);
            assert!(done.stdout.contains(" of the new side)"), "{}", done.stdout);
            clients.wait_for_more();
            expect_there(old, database, &clients.stop());
            turns += 1;
            assert_eq!(process.events("applies_way_back"), turns, "{}", process.log());
            expect_equal_soon(&case, &mut process);
            assert_eq!(value(old, database, read_only), "off");
            assert_eq!(value(new, database, read_only), "on");
            let undone = switchover(&case.tool, &["--abort"]);
            undone.expect(3, &["nothing can be undone", "No switchover was begun since"]);
            let again = switchover(&case.tool, &["--back", "--max-lag", "10s"]);
            again.expect(0, &[]);
            let already = format!("{}_back was already switched over at", case.tool.name);
            assert!(again.stdout.contains(&already), "{}", again.stdout);
            // One that was begun and undone changes nothing.
            let failed = switchover(
                &case.tool,
                &["--go", "--stop-writes", "exit 7", "--resume-writes", "true"],
            );
            failed.expect(3, &["Everything was undone"]);
            switchover(&case.tool, &["--back"]).expect(0, &[]);
        }
        for cluster in [old, new] {
            assert_eq!(value(cluster, database, FORGOTTEN), "0 of true");
        }
        case.stop(process);
        let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
        assert_eq!(
            (value(old, database, slots), value(new, database, slots)),
            ("1".into(), "0".into())
        );
    }
}
