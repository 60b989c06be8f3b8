//! SIGHUP reads the connection service file again.

use std::fs;

use testbed::program::events;

use super::reload::{reload, wait_for};
use crate::support::{Case, must, pgapace};

/// The connection strings stay the same: only the service file has another password.
#[test]
fn the_service_file_is_read_again() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE a (id int PRIMARY KEY)");
    case.publisher.sql("CREATE PUBLICATION pub FOR TABLE a");
    let services = case.log_file("services");
    let write = |options: &str| {
        let text = format!(
            "[subscriber]\n{}\noptions={options}\n",
            case.tool.subscriber.replace('\'', "").replace(' ', "\n")
        );
        must(fs::write(&services, text));
    };
    write("-cwork_mem=5MB");
    let log = case.log_file("run");
    let program = pgapace("run")
        .args(["--publisher", &case.tool.publisher, "--subscriber", "service=subscriber"])
        .args(["--publication", "pub", "--name", &case.tool.name])
        .env("PGSERVICEFILE", &services);
    let mut run = must(program.spawn_logged(log));
    wait_for(&mut run, "streaming", 1);
    reload(&mut run);
    assert_eq!(run.events("settings_changed"), 0);
    write("-cwork_mem=6MB");
    reload(&mut run);
    wait_for(&mut run, "streaming", 2);
    case.publisher.sql("INSERT INTO a VALUES (1)");
    case.wait_until_applied(&mut run);
    let log = case.stop(run);
    assert_eq!(events(&log, "settings_changed"), 1, "{log}");
}
