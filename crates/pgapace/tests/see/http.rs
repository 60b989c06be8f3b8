//! `run --http`: what is served is what SQL says, and nobody can hold up the applier with it.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use testbed::program::Process;
use testbed::wait_until;

use super::alerts::promtool;
use super::http_client::{Samples, free_port, get, parse, request};
use crate::support::{Case, PATIENCE, must};

/// The value of a metric of the case's subscription.
fn value(case: &Case, samples: &Samples, name: &str, label: Option<(&str, &str)>) -> Option<f64> {
    let mut labels = BTreeMap::from([("subscription".to_owned(), case.tool.name.clone())]);
    labels.extend(label.map(|(label, text)| (label.to_owned(), text.to_owned())));
    samples.get(&(name.to_owned(), labels)).copied()
}

fn start(case: &mut Case, args: &[&str]) -> (u16, Process) {
    let port = free_port();
    case.tool.args.extend(["--http".to_owned(), format!("127.0.0.1:{port}")]);
    case.tool.args.extend(args.iter().map(|arg| (*arg).to_owned()));
    let process = case.start();
    (port, process)
}

#[test]
fn metrics_and_status_are_what_sql_says() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE u (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let (port, mut process) = start(&mut case, &[]);
    case.publisher.sql("INSERT INTO t SELECT i, i FROM generate_series(1, 500) i");
    case.publisher.sql("UPDATE t SET v = 0 WHERE id <= 20");
    case.wait_until_applied(&mut process);
    case.subscriber.sql("DELETE FROM t WHERE id = 7");
    case.publisher.sql("DELETE FROM t WHERE id IN (7, 8)");
    case.wait_until_applied(&mut process);
    let rows = |samples: &Samples, operation| {
        value(&case, samples, "pgapace_rows_total", Some(("operation", operation)))
    };
    let mut text = String::new();
    let waited = wait_until(PATIENCE, "the metrics", || {
        text = get(port, "/metrics").body;
        let samples = parse(&text);
        Ok(rows(&samples, "insert") == Some(500.0)
            && rows(&samples, "update") == Some(20.0)
            && rows(&samples, "delete") == Some(2.0)
            && value(&case, &samples, "pgapace_transactions_total", None) == Some(3.0)
            && value(&case, &samples, "pgapace_conflicts_total", Some(("type", "delete_missing")))
                == Some(1.0)
            && value(&case, &samples, "pgapace_lag_bytes", Some(("stage", "committed"))).is_some()
            && value(&case, &samples, "pgapace_lag_seconds", Some(("stage", "durable")))
                .is_some_and(|seconds| seconds < 8.0)
            && value(&case, &samples, "pgapace_tables", Some(("state", "ready"))) == Some(2.0)
            && value(&case, &samples, "pgapace_phase", Some(("phase", "streaming"))) == Some(1.0)
            && value(&case, &samples, "pgapace_phase", Some(("phase", "retrying"))) == Some(0.0)
            && value(&case, &samples, "pgapace_last_error_timestamp_seconds", None) == Some(0.0)
            && value(&case, &samples, "pgapace_slot_retained_bytes", None).is_some())
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{text}"));
    promtool(&["check", "metrics"], &text);
    let status: serde_json::Value = must(serde_json::from_str(&get(port, "/api/v1/status").body));
    let one = &status["subscriptions"][0];
    assert_eq!(
        (&one["name"], &one["phase"]),
        (&case.tool.name.clone().into(), &"streaming".into())
    );
    assert_eq!(one["counters"]["inserts"], 500, "{status:#}");
    assert_eq!(one["figures"]["stages"][2]["stage"], "committed", "{status:#}");
    let history: serde_json::Value = must(serde_json::from_str(&get(port, "/api/v1/history").body));
    assert!(
        history[0]["points"].as_array().is_some_and(|points| !points.is_empty()),
        "{history:#}"
    );
    let events: serde_json::Value = must(serde_json::from_str(&get(port, "/api/v1/events").body));
    let named =
        |name: &str| events.as_array().is_some_and(|all| all.iter().any(|e| e["event"] == name));
    assert!(named("streaming") && named("conflict"), "{events:#}");
    assert_eq!(get(port, "/livez").body, "ok\n");
    assert_eq!(get(port, "/readyz").body, "ok\n");
    let page = get(port, "/");
    assert_eq!(page.status, 200);
    assert!(page.headers["content-security-policy"].starts_with("default-src 'none'"));
    assert_eq!(get(port, "/nothing").status, 404);
    let post = format!("POST /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    assert_eq!(must(request(port, &post)).status, 405);
    // A page of another site cannot read, whatever name it gives to this address.
    let rebound = "GET /api/v1/status HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    assert_eq!(must(request(port, rebound)).status, 403);
    case.stop(process);
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "nothing listens after the end");
}

/// A probe does not wait until clients that send nothing are closed for their silence: all places are taken, and most
/// of these clients are still connected when it is answered.
fn answers_beside_idle_clients(port: u16) {
    const CLIENTS: usize = 40;
    const PLACES: usize = 32;
    must(wait_until(PATIENCE, "an answer before the others time out", || {
        let idle = [(); CLIENTS].map(|()| must(TcpStream::connect(("127.0.0.1", port))));
        assert_eq!(get(port, "/livez").status, 200);
        let is_open = |client: &&TcpStream| {
            must(client.set_nonblocking(true));
            client.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        };
        Ok(idle.iter().filter(is_open).count() > CLIENTS - PLACES)
    }));
}

#[test]
fn slow_readers_hold_up_nothing_and_retries_are_shown() {
    let mut case = Case::new(15, 15);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let (port, mut process) = start(&mut case, &[]);
    // More clients than places: half of them send nothing, the others read nothing.
    let clients: Vec<_> = (0..100)
        .map(|number| {
            let mut client = must(TcpStream::connect(("127.0.0.1", port)));
            if number % 2 == 0 {
                must(client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"));
            }
            client
        })
        .collect();
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.wait_until_applied(&mut process);
    drop(clients);
    answers_beside_idle_clients(port);
    case.subscriber.sql("ALTER TABLE t RENAME TO away");
    case.subscriber.sql(
        "ALTER TABLE away RENAME TO t; \
         CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$; \
         CREATE TRIGGER full_disk BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION full_disk(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER full_disk",
    );
    case.publisher.sql("INSERT INTO t VALUES (2)");
    let mut text = String::new();
    let waited = wait_until(PATIENCE, "the retries in the metrics", || {
        text = get(port, "/metrics").body;
        let samples = parse(&text);
        let phase = value(&case, &samples, "pgapace_phase", Some(("phase", "retrying")));
        let retries = value(&case, &samples, "pgapace_retries_total", Some(("sqlstate", "53100")));
        // The publisher is well, and the slot retains WAL.
        let slot = value(&case, &samples, "pgapace_slot_retained_bytes", None);
        Ok(phase == Some(1.0) && retries.is_some_and(|retries| retries >= 1.0) && slot.is_some())
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{text}"));
    let ready = get(port, "/readyz");
    assert!(ready.status == 503 && ready.body.contains("retrying"), "{}", ready.body);
    assert_eq!(get(port, "/livez").status, 200, "a restart would not help");
    case.subscriber.sql("DROP TRIGGER full_disk ON t");
    case.wait_until_applied(&mut process);
    must(wait_until(PATIENCE, "ready again", || Ok(get(port, "/readyz").status == 200)));
    case.stop(process);
}

/// Processor time of the threads with this name, as the scheduler counts it.
fn thread_time(pid: u32, name: &str) -> Duration {
    let tasks = must(std::fs::read_dir(format!("/proc/{pid}/task")));
    let of = |task: std::path::PathBuf| {
        let comm = std::fs::read_to_string(task.join("comm")).ok()?;
        let times = std::fs::read_to_string(task.join("schedstat")).ok()?;
        let nanos = times.split(' ').next()?.parse::<u64>().ok()?;
        (comm.trim() == name).then(|| Duration::from_nanos(nanos))
    };
    tasks.filter_map(|task| of(task.ok()?.path())).sum()
}

#[test]
fn a_scrape_under_load_takes_less_than_a_millisecond() {
    const SCRAPES: u32 = 200;
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publish("FOR ALL TABLES");
    let (port, mut process) = start(&mut case, &[]);
    let mut session = case.publisher.connect();
    let writer = std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            for id in 0..2000 {
                must(session.batch_execute(&format!("INSERT INTO t VALUES ({id}, 0)")));
            }
        });
        get(port, "/metrics");
        let before = thread_time(process.pid(), "http");
        for _ in 0..SCRAPES {
            assert_eq!(get(port, "/metrics").status, 200);
        }
        let scrape = (thread_time(process.pid(), "http") - before) / SCRAPES;
        println!("a scrape takes {scrape:?} of processor time");
        // The tests run a program that is not optimized.
        let most = if cfg!(debug_assertions) { 5 } else { 1 };
        assert!(scrape > Duration::ZERO && scrape < Duration::from_millis(most), "{scrape:?}");
        writer.join()
    });
    assert!(writer.is_ok());
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn the_slot_is_shown_during_the_first_copy() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t SELECT generate_series(1, 20000)");
    case.publish("FOR ALL TABLES");
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE"));
    let port = free_port();
    case.tool.args.extend(["--http".to_owned(), format!("127.0.0.1:{port}")]);
    let mut process = case.tool.start(case.log_file("copying"));
    let mut text = String::new();
    let waited = wait_until(PATIENCE, "the slot", || {
        assert!(process.is_running(), "{}", process.log());
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return Ok(false);
        }
        text = get(port, "/metrics").body;
        let samples = parse(&text);
        Ok(value(&case, &samples, "pgapace_phase", Some(("phase", "copying"))) == Some(1.0)
            && value(&case, &samples, "pgapace_slot_retained_bytes", None).is_some()
            && value(&case, &samples, "pgapace_lag_bytes", Some(("stage", "committed"))).is_none())
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{text}"));
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn tables_that_are_added_are_shown_while_they_are_copied() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let (port, mut process) = start(&mut case, &[]);
    case.both("CREATE TABLE added (id int PRIMARY KEY, v text)");
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; LOCK TABLE added IN SHARE MODE"));
    case.publisher
        .sql("INSERT INTO added SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i");
    let mut one = serde_json::Value::Null;
    let waited = wait_until(PATIENCE, "the copy to be shown", || {
        let body = get(port, "/api/v1/status").body;
        let status: serde_json::Value = must(serde_json::from_str(&body));
        one = status["subscriptions"][0].clone();
        Ok(one["copy"]["running"][0]["name"] == "public.added")
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{one:#}\n{}", process.log()));
    assert_eq!(one["phase"], "streaming", "{one:#}");
    assert!(one["copy"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{one:#}");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    must(wait_until(PATIENCE, "the end of the copy", || {
        let body = get(port, "/api/v1/status").body;
        let status: serde_json::Value = must(serde_json::from_str(&body));
        Ok(status["subscriptions"][0]["copy"].is_null())
    }));
    case.stop(process);
}

#[test]
fn other_addresses_and_tokens() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let refused = case.tool.finish("run", &["--http", "0.0.0.0:0"]);
    refused.expect(3, &["needs --http-token-file"]);
    let occupied = must(TcpListener::bind("127.0.0.1:0"));
    let address = must(occupied.local_addr()).to_string();
    case.tool.finish("run", &["--http", &address]).expect(3, &["in use", "a free port"]);
    let file = case.log_file("token");
    must(std::fs::write(&file, "short\n"));
    must(std::fs::set_permissions(&file, Permissions::from_mode(0o600)));
    let path = file.to_string_lossy().into_owned();
    let args = ["--http", "127.0.0.1:0", "--http-token-file", &path];
    case.tool.finish("run", &args).expect(3, &["fewer than 16 characters", "/dev/urandom"]);
    let token = "s3cret-s3cret-s3cret";
    must(std::fs::write(&file, format!("{token}\n")));
    must(std::fs::set_permissions(&file, Permissions::from_mode(0o644)));
    case.tool.finish("run", &args).expect(3, &["has a token", "0644", "chmod 0600"]);
    must(std::fs::set_permissions(&file, Permissions::from_mode(0o600)));
    let (port, process) = start(&mut case, &["--http-token-file", &path]);
    assert_eq!(get(port, "/metrics").status, 401);
    assert_eq!(get(port, "/").headers["www-authenticate"].split(' ').next(), Some("Basic"));
    assert_eq!(get(port, "/livez").status, 200);
    let with =
        format!("GET /metrics HTTP/1.1\r\nHost: any\r\nAuthorization: Bearer {token}\r\n\r\n");
    let answer = must(request(port, &with));
    assert_eq!(answer.status, 200);
    parse(&answer.body);
    let log = case.stop(process);
    assert!(!log.contains(token), "{log}");
}
