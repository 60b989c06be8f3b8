//! Tests of the comparison, the workloads, the proxy and the program runner on one server.

use std::time::{Duration, Instant};

use testbed::compare::{DifferenceKind, TableName, compare_tables, expect_equal, table_checksum};
use testbed::workload::ledger::{self, Violation};
use testbed::workload::tpcb::{self, Load, Script, TpcbOptions};
use testbed::{Cluster, Program, Proxy, Stop, servers, wait_until};

fn cluster(major: u16) -> Cluster {
    Cluster::builder(&servers::find_or_fetch(major).unwrap()).start().unwrap()
}

#[test]
fn the_comparison_ignores_the_order_of_rows() {
    let cluster = cluster(15);
    cluster.create_database("other").unwrap();
    let ddl = "CREATE TABLE t (a int, b text, f float8, at timestamptz)";
    cluster.sql("postgres", ddl).unwrap();
    cluster
        .sql("other", "CREATE TABLE t (at timestamptz, x int DEFAULT 7, b text, a int, f float8)")
        .unwrap();
    let (first, last) = ("(1, NULL, 0.1, '2024-01-01 00:00Z')", "(2, 'ab,c', NULL, 'infinity')");
    let twice = "(1, '', 1e300, NULL)";
    let rows = format!("{first}, {twice}, {twice}, {last}");
    let back = format!("{last}, {twice}, {first}, {twice}");
    cluster.sql("postgres", &format!("INSERT INTO t (a, b, f, at) VALUES {rows}")).unwrap();
    cluster.sql("other", &format!("INSERT INTO t (a, b, f, at) VALUES {back}")).unwrap();
    let mut publisher = cluster.connect("postgres").unwrap();
    let mut subscriber = cluster.connect("other").unwrap();
    publisher.batch_execute("SET timezone = 'Asia/Tokyo'; SET datestyle = 'SQL'").unwrap();
    let t = TableName::from("t");
    let tables = [t.clone()];
    expect_equal(&mut publisher, &mut subscriber, &tables).unwrap();
    assert_eq!(table_checksum(&mut publisher, &t).unwrap().rows, 4);

    // The same number of rows, but a different row is duplicated.
    subscriber
        .batch_execute("DELETE FROM t WHERE ctid = (SELECT max(ctid) FROM t WHERE b = '')")
        .unwrap();
    subscriber.batch_execute("INSERT INTO t (a, b, at) VALUES (2, 'ab,c', 'infinity')").unwrap();
    let differences = compare_tables(&mut publisher, &mut subscriber, &tables).unwrap();
    let DifferenceKind::Rows { publisher: 4, subscriber: 4, examples } = &differences[0].kind
    else {
        panic!("{differences:?}")
    };
    let times: Vec<(i64, i64)> = examples.iter().map(|e| (e.publisher, e.subscriber)).collect();
    assert_eq!(times, [(2, 1), (1, 2)], "{}", differences[0]);

    // Null is not the empty string.
    subscriber.batch_execute("TRUNCATE t").unwrap();
    publisher.batch_execute("TRUNCATE t; INSERT INTO t VALUES (1, NULL)").unwrap();
    subscriber.batch_execute("INSERT INTO t (a, b) VALUES (1, '')").unwrap();
    assert!(expect_equal(&mut publisher, &mut subscriber, &tables).is_err());
    subscriber.batch_execute("DROP TABLE t").unwrap();
    let missing = expect_equal(&mut publisher, &mut subscriber, &tables).unwrap_err().to_string();
    assert!(missing.contains("missing on the Subscriber"), "{missing}");
}

/// Long texts are compared by hashes if both sides have them as texts, else in full.
#[test]
fn the_comparison_finds_one_character_of_a_long_text() {
    let cluster = cluster(18);
    cluster.create_database("other").unwrap();
    cluster.sql("postgres", "CREATE TABLE t (a text, b varchar, c text)").unwrap();
    cluster.sql("other", "CREATE TABLE t (c char(9000), b text, a text)").unwrap();
    let long = |last: char| format!("{}{last}", "ü, \"".repeat(1500));
    let row = |a: char, b: char, c: char| {
        format!("INSERT INTO t (a, b, c) VALUES ('{}', '{}', '{}')", long(a), long(b), long(c))
    };
    cluster.sql("postgres", &row('x', 'y', 'z')).unwrap();
    let mut publisher = cluster.connect("postgres").unwrap();
    let mut subscriber = cluster.connect("other").unwrap();
    let tables = [TableName::from("t")];
    for (a, b, c, equal) in [
        ('x', 'y', 'z', true),
        ('-', 'y', 'z', false),
        ('x', '-', 'z', false),
        ('x', 'y', '-', false),
    ] {
        subscriber.batch_execute("TRUNCATE t").unwrap();
        subscriber.batch_execute(&row(a, b, c)).unwrap();
        let compared = expect_equal(&mut publisher, &mut subscriber, &tables);
        assert_eq!(compared.is_ok(), equal, "{a}{b}{c}");
    }
}

#[test]
fn tpcb_fills_its_tables_and_runs_transactions() {
    let mut cluster = cluster(15);
    let mut client = cluster.connect("postgres").unwrap();
    let begun = Instant::now();
    tpcb::create_tables(&mut client, 2).unwrap();
    eprintln!("scale 2 in {:.1?}", begun.elapsed());
    let accounts = table_checksum(&mut client, &"pgbench_accounts".into()).unwrap().rows;
    assert_eq!(accounts, 200_000);

    let limited = TpcbOptions { transactions: Some(500), ..TpcbOptions::default() };
    let summary = Load::start(&cluster.conninfo("postgres"), 4, limited).unwrap().wait().unwrap();
    assert_eq!(summary.stats.transactions + summary.stats.failures, 500, "{summary:?}");
    assert_eq!(summary.stats.failures, 0, "{summary:?}");
    assert!(summary.stats.latency_p50 <= summary.stats.latency_max);
    let sums = "SELECT count(*) = 500
            AND sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts)
            AND sum(delta) = (SELECT sum(bbalance) FROM pgbench_branches)
            AND sum(delta) = (SELECT sum(tbalance) FROM pgbench_tellers)
        FROM pgbench_history";
    assert_eq!(cluster.query_one_text("postgres", sums).unwrap(), "t");

    // The load keeps its rate and survives a restart of the server.
    let options =
        TpcbOptions { script: Script::SimpleUpdate, rate: Some(200.0), ..TpcbOptions::default() };
    let load = Load::start(&cluster.conninfo("postgres"), 2, options).unwrap();
    let more = |count: u64| {
        let before = load.stats().transactions;
        wait_until(Duration::from_secs(20), "transactions", || {
            Ok(load.stats().transactions > before + count)
        })
    };
    more(20).unwrap();
    cluster.restart(Stop::Immediate).unwrap();
    wait_until(Duration::from_secs(20), "a failure", || Ok(load.stats().failures > 0)).unwrap();
    more(100).unwrap();
    let summary = load.stop().unwrap();
    assert!(summary.stats.tps() <= 210.0 && summary.last_failure.is_some(), "{summary:?}");
}

#[test]
fn the_ledger_check_names_each_violation() {
    let mut cluster = cluster(18);
    let conninfo = cluster.conninfo("postgres");
    let mut client = cluster.connect("postgres").unwrap();
    ledger::create(&mut client, 3).unwrap();
    let options = ledger::WriterOptions {
        large_every: 50,
        two_phase_every: 5,
        ..ledger::WriterOptions::default()
    };
    let writer = ledger::Writer::start_with(&conninfo, 4, options).unwrap();
    let enough = |count: u64| {
        wait_until(Duration::from_secs(20), "ledger transactions", || {
            Ok(writer.committed() >= count)
        })
    };
    enough(150).unwrap();
    ledger::check(&mut client).unwrap();
    // A crash empties the counter and leaves prepared transactions.
    cluster.kill9().unwrap();
    cluster.start().unwrap();
    let before = writer.committed();
    enough(before + 150).unwrap();
    let committed = writer.stop().unwrap();
    let mut client = cluster.connect("postgres").unwrap();
    let report = ledger::check(&mut client).unwrap();
    let known = i64::try_from(committed).unwrap();
    assert!((known..=known + 4).contains(&report.transactions), "{report:?} {known}");

    let mut after = |sql: &str| {
        client.batch_execute("BEGIN").unwrap();
        client.batch_execute(sql).unwrap();
        // The check runs its own transaction, so the damage must be committed and repaired.
        client.batch_execute("COMMIT").unwrap();
        ledger::check(&mut client).unwrap_err()
    };
    let torn = after(
        "CREATE TABLE gone AS SELECT * FROM ledger_entry_1 LIMIT 1;
         DELETE FROM ledger_entry_1 e USING gone g WHERE e.txn = g.txn AND e.seq = g.seq",
    );
    assert!(matches!(torn, Violation::Torn { .. }), "{torn}");
    let orphan = after(
        "INSERT INTO ledger_entry_1 SELECT * FROM gone;
         INSERT INTO ledger_entry_1 VALUES (-7, 1, '')",
    );
    assert!(matches!(orphan, Violation::Orphan { txn: -7, found: 1 }), "{orphan}");
    let balance = after(
        "DELETE FROM ledger_entry_1 WHERE txn = -7;
         UPDATE ledger_account SET balance = balance + 1 WHERE id = 3",
    );
    assert!(matches!(balance, Violation::Balance { .. }), "{balance}");
    let gap = after(
        "UPDATE ledger_account SET balance = balance - 1 WHERE id = 3;
         CREATE TABLE ninth AS SELECT txn FROM ledger_header WHERE id = 9;
         DELETE FROM ledger_entry_1 WHERE txn IN (SELECT txn FROM ninth);
         DELETE FROM ledger_entry_2 WHERE txn IN (SELECT txn FROM ninth);
         DELETE FROM ledger_entry_3 WHERE txn IN (SELECT txn FROM ninth);
         DELETE FROM ledger_header WHERE id = 9",
    );
    assert!(matches!(gap, Violation::Gap { missing: 9, .. }), "{gap}");
    assert!(ledger::check_atomicity(&mut client).is_ok());
}

#[test]
fn the_proxy_delays_freezes_cuts_and_refuses() {
    let cluster = cluster(15);
    let proxy = Proxy::in_front_of(&cluster).unwrap();
    let connect = || {
        testbed::postgres::Client::connect(&proxy.conninfo("postgres"), testbed::postgres::NoTls)
    };
    let mut client = connect().unwrap();
    let mut time_of_one = || {
        let begun = Instant::now();
        client.batch_execute("SELECT 1").map(|()| begun.elapsed())
    };
    assert!(time_of_one().unwrap() < Duration::from_millis(100));
    proxy.set_delay(Duration::from_millis(50));
    let delayed = time_of_one().unwrap();
    assert!((100..2000).contains(&delayed.as_millis()), "{delayed:?}");
    proxy.set_delay(Duration::ZERO);
    std::thread::scope(|scope| {
        proxy.freeze();
        let held = scope.spawn(time_of_one);
        // Nothing passes the proxy for so long.
        std::thread::sleep(Duration::from_millis(200));
        assert!(!held.is_finished());
        proxy.unfreeze();
        assert!(held.join().unwrap().unwrap() >= Duration::from_millis(150));
    });
    assert_eq!(proxy.connections(), 1);
    proxy.cut_all();
    assert!(client.batch_execute("SELECT 1").is_err());
    proxy.refuse(true);
    assert!(connect().is_err());
    proxy.refuse(false);
    assert!(connect().is_ok());
    assert!(proxy.forwarded_bytes() > 0);
}

#[test]
fn a_program_is_logged_terminated_and_killed() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let script =
        "echo started $WORD; echo error >&2; trap 'exit 3' TERM; while :; do sleep 0.01; done";
    let program = Program::new("/bin/sh").args(["-c", script]).env("WORD", "well");
    let mut process = program.spawn_logged(&log).unwrap();
    wait_until(Duration::from_secs(5), "the output", || Ok(process.log().contains("error")))
        .unwrap();
    assert!(process.log().starts_with("started well\n"));
    assert!(process.is_running() && process.wait_timeout(Duration::from_millis(50)).is_none());
    process.terminate().unwrap();
    process.wait(Duration::from_secs(5)).unwrap();
    assert_eq!(process.exit_code(), Some(3));

    let mut process = program.spawn_logged(&log).unwrap();
    process.kill9().unwrap();
    assert_eq!(process.exit_code(), None);
    let process = program.spawn_logged(&log).unwrap();
    let pid = process.pid();
    drop(process);
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}
