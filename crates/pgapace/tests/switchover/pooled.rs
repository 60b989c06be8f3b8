//! The script of contrib/pgbouncer moves clients that are connected to PgBouncer: they wait, and see no error.

use std::path::{Path, PathBuf};

use testbed::{PoolMode, Pooler};

use super::{Clients, Slots, expect_equal_soon, expect_there, outage, switchover, two_way_case};
use crate::support::{Case, Finished, VERSIONS, must, one_or_all, skipped};

/// Longest outage without lag.
const GOAL_MS: u64 = 2000;
/// A busy machine may need several attempts for it.
const ATTEMPTS: usize = 4;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/pgbouncer/switchover.sh");

/// PgBouncer for one case, which leads to the publisher first.
struct Pooled {
    pooler: Pooler,
    /// The environment of the script.
    environment: String,
    directory: PathBuf,
}

impl Pooled {
    fn start(case: &Case) -> Self {
        let name = case.tool.name.as_str();
        let directory = case.publisher.cluster.socket_dir().join(format!("pooled-{name}"));
        must(std::fs::create_dir(&directory));
        for (side, database) in [("old", &case.publisher), ("new", &case.subscriber)] {
            let entry = format!("{name} = {}\n", Pooler::entry(database.cluster));
            must(std::fs::write(directory.join(format!("databases.{side}.ini")), entry));
        }
        let included = directory.join("databases.ini");
        must(std::os::unix::fs::symlink("databases.old.ini", &included));
        let include = format!("%include {}", included.display());
        let settings = [("admin_users", "postgres"), ("ignore_startup_parameters", "options")];
        let mode = PoolMode::Transaction;
        let pooler = must(Pooler::start_for(case.publisher.cluster, mode, &include, &settings));
        let environment = format!(
            "PGBOUNCER_DATABASE={name} PGBOUNCER_DIRECTORY={} PGBOUNCER_ADMIN='{}'",
            directory.display(),
            pooler.conninfo("pgbouncer")
        );
        Self { pooler, environment, directory }
    }

    fn command(&self, arguments: &str) -> String {
        format!("{} {SCRIPT} {arguments}", self.environment)
    }

    fn switch(&self, case: &Case, action: &str, side: &str, args: &[&str]) -> Finished {
        let (pause, resume) = (self.command("pause"), self.command("resume"));
        let open = self.command(&format!("open {side}"));
        let commands = ["--stop-writes", &pause, "--resume-writes", &resume, "--open", &open];
        switchover(&case.tool, &[&[action], &commands[..], args].concat())
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn has_psql() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder: PathBuf| Path::new(&folder).join("psql").exists())
}

/// A transaction keeps the pooler from pausing. The script is killed at the deadline, and undone.
fn expect_undone(case: &Case, pooled: &Pooled, clients: &Clients) {
    let mut client = must(testbed::postgres::Client::connect(
        &pooled.pooler.conninfo(&case.publisher.name),
        testbed::postgres::NoTls,
    ));
    must(client.batch_execute("BEGIN; INSERT INTO orders (client, n) VALUES (-1, -1)"));
    let failed = pooled.switch(case, "--go", "new", &["--deadline", "6"]);
    failed.expect(14, &["--stop-writes did not end", "Everything was undone"]);
    must(client.batch_execute("COMMIT"));
    clients.wait_for_more();
}

#[test]
fn pgbouncer_moves_its_clients() {
    if Pooler::find().is_none() || !has_psql() {
        skipped("a pooler moves its clients", "PgBouncer or psql is not installed");
        return;
    }
    let mut best = u64::MAX;
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let pooled = Pooled::start(&case);
        let mut process = case.start();
        let side = pooled.pooler.conninfo(&case.publisher.name);
        let clients = Clients::start(20, (side.clone(), side), &case.log_file("never"), 0);
        clients.wait_for_more();
        if (publisher, subscriber) == (18, 18) {
            expect_undone(&case, &pooled, &clients);
        }
        for _ in 0..ATTEMPTS {
            for (action, side, cluster) in [
                ("--go", "new", case.subscriber.cluster),
                ("--back", "old", case.publisher.cluster),
            ] {
                let done = pooled.switch(&case, action, side, &[]);
                done.expect(0, &["event=\"subscription_switched_over\""]);
                println!(
                    "{publisher} to {subscriber}, {action} with 20 clients: nobody could write for \
                     {} ms",
                    outage(&done)
                );
                best = best.min(outage(&done));
                clients.wait_for_more();
                expect_there(cluster, &case.publisher.name, &clients.known());
            }
            if best < GOAL_MS {
                break;
            }
        }
        assert_eq!(clients.errors(), Vec::<String>::new());
        expect_there(case.publisher.cluster, &case.publisher.name, &clients.stop());
        expect_equal_soon(&case, &mut process);
        case.stop(process);
    }
    assert!(best < GOAL_MS, "nobody could write for {best} ms at best");
}
