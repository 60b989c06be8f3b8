//! The replication stream, with the pgoutput plugin.

use std::time::{Duration, Instant};

use wire::{
    CopyChunk, EndReason, Error, Received, ReplicationStream, Session, Startup, WaitOutcome,
};

use super::{MAJORS, Server, connect, server, start};

/// Creates a database with a table and a publication, and streams from a temporary slot.
fn stream(server: &Server, name: &str, tcp: &str) -> (Session, ReplicationStream) {
    server.cluster.create_database(name).unwrap();
    let info = match tcp {
        "" => server.local(),
        extra => server.tcp("postgres", extra),
    };
    let info = info.with("dbname", name).unwrap();
    let mut sql = connect(&info).unwrap();
    sql.simple("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
        .unwrap();
    let startup = Startup { replication: true, ..Startup::default() };
    let mut session = Session::connect(&info, &startup).unwrap();
    let create = format!("CREATE_REPLICATION_SLOT s_{name} TEMPORARY LOGICAL pgoutput");
    session.simple(&create).unwrap();
    let command = format!(
        "START_REPLICATION SLOT s_{name} LOGICAL 0/0 (proto_version '1', publication_names 'p')"
    );
    (sql, ReplicationStream::start(session, &command).unwrap())
}

/// The message types of pgoutput in a chunk (`B`, `I`, `C`, ...), without keepalives.
fn kinds(chunk: &CopyChunk) -> Vec<u8> {
    let mut end = 0;
    let mut kinds = Vec::new();
    for (offset, payload) in chunk.frames() {
        assert_eq!(offset, end + 5);
        assert_eq!(chunk.bytes()[end], b'd');
        end = offset + payload.len();
        match payload[0] {
            b'w' => kinds.push(payload[25]),
            b'k' => {}
            other => panic!("0x{other:x}"),
        }
    }
    assert_eq!(end, chunk.len());
    kinds
}

/// Receives until `count` commits have arrived, and returns all message types in order.
fn receive_commits(stream: &mut ReplicationStream, count: usize) -> Vec<u8> {
    let mut all = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while all.iter().filter(|&&kind| kind == b'C').count() < count {
        assert!(Instant::now() < deadline, "too few commits");
        match stream.receive(Duration::from_secs(1)).unwrap() {
            Received::Chunk(chunk) => all.extend(kinds(&chunk)),
            Received::Idle => {}
            other => panic!("{other:?}"),
        }
    }
    all
}

/// A standby status update that confirms everything up to `lsn`.
fn status(lsn: u64) -> Vec<u8> {
    let mut update = vec![b'r'];
    for _ in 0..3 {
        update.extend_from_slice(&lsn.to_be_bytes());
    }
    update.extend_from_slice(&[0; 9]);
    update
}

#[test]
fn thousands_of_messages() {
    for major in MAJORS {
        for (name, tcp) in [("many_local", ""), ("many_tls", "sslmode=require")] {
            let (mut sql, mut stream) = stream(server(major), name, tcp);
            for batch in 0..10 {
                for number in 0..200 {
                    let key = batch * 200 + number;
                    sql.queue_simple(&format!("INSERT INTO t VALUES ({key}, 'x')"));
                }
                sql.flush().unwrap();
                while sql.pending_ready() > 0 {
                    sql.next_reply().unwrap();
                }
            }
            sql.simple(
                "INSERT INTO t SELECT i, repeat('y', 100) FROM generate_series(10000, 30000) i",
            )
            .unwrap();
            let all = receive_commits(&mut stream, 2001);
            let count = |kind: u8| all.iter().filter(|&&found| found == kind).count();
            assert_eq!((count(b'B'), count(b'I'), count(b'C')), (2001, 22_001, 2001));
            stream.send(&status(0)).unwrap();
            stream.finish().unwrap();
        }
    }
}

/// The values exceed every buffer and the small receive window on loopback, and must keep flowing.
/// If the sender finds the window too small for a packet, it retries only five times a second.
#[test]
fn large_messages() {
    let begun = Instant::now();
    for (name, tcp) in
        [("large", ""), ("large_tcp", "sslmode=disable"), ("large_tls", "sslmode=require")]
    {
        let (mut sql, mut stream) = stream(server(18), name, tcp);
        for (key, size) in [(1, 300_000), (2, 5_000_000), (3, 10), (4, 40_000_000), (5, 262_140)] {
            sql.simple(&format!("INSERT INTO t VALUES ({key}, repeat('z', {size}))")).unwrap();
            let mut largest = 0;
            let mut commits = 0;
            while commits == 0 {
                if let Received::Chunk(chunk) = stream.receive(Duration::from_secs(10)).unwrap() {
                    let longest = chunk.frames().map(|(_, payload)| payload.len()).max();
                    largest = longest.unwrap().max(largest);
                    commits += kinds(&chunk).iter().filter(|&&kind| kind == b'C').count();
                }
            }
            assert!(largest >= size, "{largest} of {size}");
        }
    }
    // With 16 kB five times a second, this test would take half an hour.
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
}

/// Nothing is delayed on an idle connection.
#[test]
fn a_lone_transaction_arrives_at_once() {
    let (mut sql, mut stream) = stream(server(18), "lone", "");
    let mut worst = Duration::ZERO;
    let mut total = Duration::ZERO;
    for key in 0..20 {
        while !matches!(stream.receive(Duration::from_millis(20)).unwrap(), Received::Idle) {}
        sql.simple(&format!("INSERT INTO t VALUES ({key}, '')")).unwrap();
        let committed = Instant::now();
        receive_commits(&mut stream, 1);
        worst = worst.max(committed.elapsed());
        total += committed.elapsed();
    }
    println!("single transaction: mean {:?}, worst {worst:?}", total / 20);
    assert!(total / 20 < Duration::from_millis(100));
}

#[test]
fn waker_and_timeouts() {
    let (_sql, mut stream) = stream(server(18), "waker", "");
    // Other tests write to the same server, so keepalives may arrive at any time.
    let mut start = Instant::now();
    while !matches!(stream.receive(Duration::from_millis(100)).unwrap(), Received::Idle) {
        start = Instant::now();
    }
    assert!(start.elapsed() >= Duration::from_millis(100));

    let waker = stream.waker();
    let waking = std::thread::spawn({
        let waker = waker.clone();
        move || {
            // The stream waits by then; if not, the test shows less, but does not fail.
            std::thread::sleep(Duration::from_millis(200));
            waker.wake();
            waker.wake();
        }
    });
    let start = Instant::now();
    while !matches!(stream.receive(Duration::from_secs(30)).unwrap(), Received::Woken) {}
    assert!(start.elapsed() < Duration::from_secs(10));
    waking.join().unwrap();
    // The two wake-ups may count as one or two, but none may remain afterwards.
    let _ = stream.wait_without_reading(Duration::from_millis(50)).unwrap();
    let outcome = stream.wait_without_reading(Duration::from_millis(50)).unwrap();
    assert_eq!(outcome, WaitOutcome::Timeout);
    waker.wake();
    let outcome = stream.wait_without_reading(Duration::from_secs(30)).unwrap();
    assert_eq!(outcome, WaitOutcome::Woken);
    waker.wake();
    assert!(matches!(stream.receive(Duration::from_secs(30)).unwrap(), Received::Woken));
    stream.finish().unwrap();
}

/// Back pressure: the client can send its status while it does not read the publisher's data.
#[test]
fn status_goes_out_while_nothing_is_read() {
    let server = start(18);
    server.cluster.sql("postgres", "ALTER SYSTEM SET wal_sender_timeout = '5s'").unwrap();
    server.cluster.sql("postgres", "SELECT pg_reload_conf()").unwrap();
    let (mut sql, mut stream) = stream(&server, "pressure", "sslmode=disable");
    sql.simple("INSERT INTO t SELECT i, repeat('y', 1000) FROM generate_series(1, 30000) i")
        .unwrap();
    for _ in 0..40 {
        stream.send(&status(0)).unwrap();
        let outcome = stream.wait_without_reading(Duration::from_millis(200)).unwrap();
        assert_eq!(outcome, WaitOutcome::Timeout);
    }
    let all = receive_commits(&mut stream, 1);
    assert_eq!(all.iter().filter(|&&kind| kind == b'I').count(), 30_000);
}

#[test]
fn a_bad_command_is_an_error() {
    let startup = Startup { replication: true, ..Startup::default() };
    let session = Session::connect(&server(18).local(), &startup).unwrap();
    let error =
        ReplicationStream::start(session, "START_REPLICATION SLOT nix LOGICAL 0/0").unwrap_err();
    assert_eq!(error.sqlstate(), Some("42704"));
    let session = Session::connect(&server(18).local(), &startup).unwrap();
    ReplicationStream::start(session, "SELECT 1").unwrap_err();
}

#[test]
fn a_crash_or_shutdown_of_the_server_ends_the_stream() {
    // A crash: the server sends no message.
    let mut server = start(18);
    let (_sql, mut stream) = stream(&server, "crash", "");
    while !matches!(stream.receive(Duration::from_millis(50)).unwrap(), Received::Idle) {}
    server.cluster.kill9().unwrap();
    loop {
        match stream.receive(Duration::from_secs(10)) {
            Ok(Received::Ended(EndReason::Closed)) => break,
            Ok(Received::Chunk(_)) => {}
            Err(error) if error.is_connection_loss() => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(stream.wait_without_reading(Duration::from_secs(5)), Err(Error::Closed)));
}

#[test]
fn a_terminated_walsender_reports_its_sqlstate() {
    let (mut sql, mut stream) = stream(server(15), "terminated", "");
    while !matches!(stream.receive(Duration::from_millis(50)).unwrap(), Received::Idle) {}
    sql.simple("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = 'terminated'").unwrap();
    loop {
        match stream.receive(Duration::from_secs(10)).unwrap() {
            Received::Ended(EndReason::Error(error)) => {
                assert_eq!(error.code, "57P01");
                break;
            }
            Received::Chunk(_) => {}
            other => panic!("{other:?}"),
        }
    }
}
