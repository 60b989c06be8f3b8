//! Writes move from the publisher to the subscriber and back: no acknowledged commit is lost, and a
//! failure leaves the state before or after.

mod failures;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use testbed::postgres::{Client, NoTls};
use testbed::{Cluster, wait_until};

use crate::support::{Case, Finished, PATIENCE, Tool, VERSIONS, must};

const DDL: &str = "CREATE TABLE orders (id bigserial PRIMARY KEY, client int, n int)";

/// A case with a publication for each direction.
fn two_way_case(publisher: u16, subscriber: u16) -> Case {
    let case = Case::new(publisher, subscriber);
    case.both(DDL);
    case.publish("FOR TABLE orders");
    case.subscriber.sql("CREATE PUBLICATION pgapace_back FOR TABLE orders");
    case
}

fn switchover(tool: &Tool, args: &[&str]) -> Finished {
    tool.finish("switchover", args)
}

/// A value, in a session of its own: a switchover ends sessions.
fn value(cluster: &Cluster, database: &str, sql: &str) -> String {
    must(cluster.query_one_text(database, sql))
}

/// Rows that a client knows to be committed.
type Acknowledged = Arc<Mutex<BTreeSet<(i32, i32)>>>;

/// Clients that insert rows, and reconnect after errors: to the new side once the file is there.
struct Clients {
    stop: Arc<AtomicBool>,
    acknowledged: Acknowledged,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    fn start(number: i32, (old, new): (String, String), moved: &Path, round: i32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Acknowledged::default();
        let client = |client: i32| {
            let (stop, acknowledged) = (Arc::clone(&stop), Arc::clone(&acknowledged));
            let (old, new, moved) = (old.clone(), new.clone(), PathBuf::from(moved));
            std::thread::spawn(move || {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    let side = if moved.exists() { &new } else { &old };
                    let Ok(mut session) = Client::connect(side, NoTls) else {
                        std::thread::sleep(Duration::from_millis(10));
                        continue;
                    };
                    while !stop.load(Ordering::Relaxed) {
                        n += 1;
                        let sql = "INSERT INTO orders (client, n) VALUES ($1, $2)";
                        if session.execute(sql, &[&client, &n]).is_err() {
                            std::thread::sleep(Duration::from_millis(5));
                            break;
                        }
                        let mut known = acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
                        known.insert((client, n));
                        drop(known);
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
            })
        };
        let threads = (0..number).map(|one| client(round * 1000 + one)).collect();
        Self { stop, acknowledged, threads }
    }

    fn count(&self) -> usize {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn wait_for_more(&self) {
        let enough = self.count() + 100;
        must(wait_until(PATIENCE, "acknowledged rows", || Ok(self.count() >= enough)));
    }

    fn stop(self) -> BTreeSet<(i32, i32)> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().expect("a client");
        }
        let known = self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        known.clone()
    }
}

/// The rows of a side, as clients know them.
fn rows(cluster: &Cluster, database: &str) -> Vec<(i32, i32)> {
    let mut client = must(cluster.connect(database));
    let rows = client.query("SELECT client, n FROM orders ORDER BY id", &[]);
    let rows = rows.unwrap_or_else(|error| panic!("{error}"));
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[test]
fn clients_move_over_and_back() {
    for (publisher, subscriber) in VERSIONS {
        let case = two_way_case(publisher, subscriber);
        let (old, new) = (case.publisher.cluster, case.subscriber.cluster);
        let database = case.publisher.name.as_str();
        let sides = (case.publisher.conninfo(), case.subscriber.conninfo());
        let mut process = case.start();
        let moved = case.log_file("moved");
        let open = format!("touch {}", moved.display());
        switchover(&case.tool, &["--plan"]).expect(0, &[]);

        let clients = Clients::start(20, sides.clone(), &moved, 0);
        clients.wait_for_more();
        let done = switchover(&case.tool, &["--go", "--open", &open]);
        done.expect(0, &["event=\"subscription_switched_over\""]);
        assert!(done.stdout.contains("nobody could write for"), "{}", done.stdout);
        clients.wait_for_more();
        let acknowledged = clients.stop();
        let there = rows(new, database);
        let missing: Vec<_> =
            acknowledged.iter().filter(|row| !there.contains(row)).take(5).collect();
        assert!(missing.is_empty(), "lost: {missing:?}\n{}", process.log());
        assert_eq!(there.iter().collect::<BTreeSet<_>>().len(), there.len(), "twice");
        must(process.wait(PATIENCE));
        assert_eq!(process.exit_code(), Some(13), "{}", process.log());
        case.run().expect(13, &["was switched over at"]);
        switchover(&case.tool, &["--abort"]).expect(3, &["nothing can be undone"]);

        // The way back: what clients have written since is on the old side too.
        let back = format!("{}_back", case.tool.name);
        let mut tool = Tool::new(sides.1.clone(), sides.0.clone(), &back);
        tool.publications = "pgapace_back".to_owned();
        tool.args = vec!["--create-slot=false".to_owned(), "--copy-data=false".to_owned()];
        tool.run_until_current();
        assert_eq!(rows(old, database), rows(new, database));

        let mut process = tool.start(case.log_file("back"));
        must(wait_until(
            PATIENCE,
            "the way back to stream",
            || Ok(process.events("streaming") > 0),
        ));
        let returned = case.log_file("returned");
        let open = format!("touch {}", returned.display());
        let clients = Clients::start(20, (sides.1.clone(), sides.0.clone()), &returned, 1);
        clients.wait_for_more();
        tool.args.clear();
        let again = format!("{}_again", case.tool.name);
        let done = switchover(
            &tool,
            &["--go", "--open", &open, "--back-name", &again, "--back-publication", "pub"],
        );
        done.expect(0, &[]);
        clients.wait_for_more();
        let acknowledged = clients.stop();
        let here = rows(old, database);
        let missing: Vec<_> =
            acknowledged.iter().filter(|row| !here.contains(row)).take(5).collect();
        assert!(missing.is_empty(), "lost on the way back: {missing:?}\n{}", process.log());
        must(process.wait(PATIENCE));
        let read_only = "SELECT current_setting('default_transaction_read_only')";
        assert_eq!(value(old, database, read_only), "off");
        assert_eq!(value(new, database, read_only), "on");
        // These servers are shared by tests.
        let drop = format!("SELECT pg_drop_replication_slot('{again}')");
        must(old.sql(database, &drop));
    }
}
