//! Tests of clusters: start, stop, crash, restart, and cleanup.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use testbed::{Cluster, Stop, servers, wait_until};

const OLD: u16 = 15;
const NEW: u16 = 18;

#[test]
fn finds_or_fetches_both_majors() {
    for major in [OLD, NEW] {
        let found = servers::find_or_fetch(major).unwrap();
        assert_eq!(found.major(), major);
        assert!(found.version().starts_with(&major.to_string()), "{}", found.version());
        assert!(found.has("postgres") && found.has("initdb") && !found.has("no such program"));
        assert_eq!(servers::find_local(major).unwrap().version(), found.version());
    }
    assert!(servers::newest_local().unwrap().major() >= NEW);
}

#[test]
fn an_unpublished_major_version_is_a_clear_error() {
    let error = servers::find_or_fetch(77).unwrap_err().to_string();
    assert!(error.contains("postgresql-77") && error.contains("PGAPACE_PG77_BIN"), "{error}");
}

#[test]
fn a_cluster_starts_stops_crashes_and_restarts() {
    for major in [OLD, NEW] {
        let binaries = servers::find_or_fetch(major).unwrap();
        let mut cluster = Cluster::builder(&binaries)
            .name("life")
            .setting("work_mem", "5MB")
            .hba(["host all nobody_known 127.0.0.1/32 reject"])
            .file("note", "it's here")
            .start()
            .unwrap();
        let one = |cluster: &Cluster, sql: &str| cluster.query_one_text("postgres", sql).unwrap();
        assert_eq!(one(&cluster, "SHOW work_mem"), "5MB");
        assert_eq!(one(&cluster, "SHOW wal_level"), "logical");
        assert_eq!(one(&cluster, "SELECT pg_read_file('note')"), "it's here");
        let version = one(&cluster, "SELECT current_setting('server_version_num')::int / 10000");
        assert_eq!(version, major.to_string());
        let mut client = testbed::postgres::Client::connect(
            &cluster.conninfo_tcp("postgres"),
            testbed::postgres::NoTls,
        )
        .unwrap();
        client.batch_execute("CREATE TABLE t AS SELECT 1 AS a").unwrap();

        cluster.set("work_mem", "6MB").unwrap();
        assert_eq!(one(&cluster, "SHOW work_mem"), "6MB");
        let port = cluster.port();
        for mode in [Stop::Fast, Stop::Immediate] {
            cluster.restart(mode).unwrap();
            assert_eq!(one(&cluster, "SELECT a FROM t"), "1");
        }
        cluster.kill9().unwrap();
        assert!(!cluster.is_running() && cluster.connect("postgres").is_err());
        cluster.start().unwrap();
        assert_eq!((cluster.port(), one(&cluster, "SELECT a FROM t").as_str()), (port, "1"));

        cluster.create_database("an \"odd\" name").unwrap();
        assert!(cluster.connect("an \"odd\" name").is_ok());

        let (data, home) = (cluster.data_dir().to_path_buf(), cluster.socket_dir().to_path_buf());
        drop(cluster);
        assert!(!data.exists() && !home.exists());
    }
}

#[test]
fn a_server_that_cannot_start_shows_its_log() {
    let binaries = servers::find_or_fetch(OLD).unwrap();
    let error = Cluster::builder(&binaries).setting("work_mem", "much").start().unwrap_err();
    assert!(error.to_string().contains("work_mem"), "{error}");
}

#[test]
fn two_servers_have_two_system_identifiers() {
    let pair = testbed::Pair::start(OLD, OLD).unwrap();
    let identifier = |cluster: &Cluster| {
        let sql = "SELECT system_identifier FROM pg_control_system()";
        cluster.query_one_text("postgres", sql).unwrap()
    };
    assert_ne!(identifier(&pair.publisher), identifier(&pair.subscriber));
}

#[test]
fn the_guardian_cleans_up_after_a_killed_owner() {
    let mut command = Command::new(example("start_and_die"));
    let output = command.arg(OLD.to_string()).output().unwrap();
    expect_cleaned_up(&output);
}

#[test]
fn an_ordinary_user_can_run_servers() {
    if !rustix::process::geteuid().is_root() {
        return; // The other tests already run as an ordinary user.
    }
    let mut command = Command::new(example("start_and_die"));
    command.arg(OLD.to_string()).uid(65534).gid(65534).current_dir("/");
    match command.output() {
        Ok(output) => expect_cleaned_up(&output),
        Err(error) => eprintln!("skipped: user nobody cannot enter the build directory: {error}"),
    }
}

/// The example has printed what it started and was killed: the guardian must remove all of it.
fn expect_cleaned_up(output: &Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines();
    let pid = lines
        .next()
        .unwrap_or_else(|| panic!("no postmaster: {}", String::from_utf8_lossy(&output.stderr)));
    let directories: Vec<&Path> = lines.map(Path::new).collect();
    assert_eq!(directories.len(), 2, "{text}");
    wait_until(Duration::from_secs(10), "the guardian to clean up", || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let runs = status.contains("postgres") && !status.contains("State:\tZ");
        Ok(!runs && directories.iter().all(|directory| !directory.exists()))
    })
    .unwrap();
}

/// The path of an example, which Cargo builds next to the tests.
fn example(name: &str) -> std::path::PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).expect("target/<profile>/deps/<test>");
    profile.join("examples").join(name)
}
