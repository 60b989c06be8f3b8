//! Pipelines of extended-protocol messages.

use std::time::{Duration, Instant};

use wire::{Error, Param, Reply, Session, TransactionStatus};

use super::{MAJORS, connect, server, value};

/// Takes replies up to the next Ready: the number of completed statements and rows, and the error
/// if any.
fn drain(session: &mut Session) -> (usize, usize, Option<String>) {
    let (mut done, mut rows, mut failed) = (0, 0, None);
    loop {
        match session.next_reply().unwrap() {
            Reply::CommandComplete(_) => done += 1,
            Reply::DataRow(_) => rows += 1,
            Reply::Error(error) => failed = Some(error.code.clone()),
            Reply::Ready(_) => return (done, rows, failed),
            _ => {}
        }
    }
}

/// Both directions carry more data than all socket buffers hold. A client that only writes would
/// wait for a server that waits for room to send its replies.
#[test]
fn a_long_pipeline_does_not_deadlock() {
    const STATEMENTS: usize = 200_000;
    for major in MAJORS {
        for info in [server(major).local(), server(major).tcp("postgres", "sslmode=require")] {
            let mut session = connect(&info).unwrap();
            session.queue_parse("s", "SELECT $1, repeat('x', 60)", &[23]);
            for number in 0..STATEMENTS {
                let value = i32::try_from(number).unwrap().to_be_bytes();
                session.queue_bind("s", [Param::Binary(&value)].into_iter()).unwrap();
                session.queue_execute();
            }
            session.queue_sync();
            assert!(session.queued() > STATEMENTS * 10);
            assert_eq!(session.pending_ready(), 1);
            session.flush().unwrap();
            assert_eq!(session.queued(), 0);
            assert_eq!(drain(&mut session), (STATEMENTS, STATEMENTS, None));
            assert_eq!(session.pending_ready(), 0);
        }
    }
}

/// While the server waits for a lock, it reads nothing. The client takes the replies that the server has sent before,
/// and takes back a message that it has not begun to send.
#[test]
fn replies_are_taken_while_messages_wait_to_be_sent() {
    const LARGE: usize = 24 << 20;
    for info in [server(18).local(), server(18).tcp("postgres", "sslmode=require")] {
        let mut holder = connect(&info).unwrap();
        holder.simple("SELECT pg_advisory_lock(4712)").unwrap();
        let mut session = connect(&info).unwrap();
        let large = vec![b'x'; LARGE];
        session.queue_statement("SELECT 1", &[], [].into_iter()).unwrap();
        session.queue_sync();
        session.queue_statement("SELECT pg_advisory_lock(4712)", &[], [].into_iter()).unwrap();
        session
            .queue_statement("SELECT length($1)", &[25], [Param::Text(&large)].into_iter())
            .unwrap();
        session.queue_sync();
        session.send_queued().unwrap();
        while session.pending_ready() > 1 {
            assert!(session.wait_readable(None, Duration::from_secs(10)).unwrap());
            while session.pending_ready() > 1 && session.try_reply().unwrap().is_some() {}
        }
        let left = session.queued();
        assert!(left > 0, "the server has read everything while it waited");
        let before = session.pending_ready();
        session.queue_simple("SELECT generate_series(1, 3)");
        let aside = session.set_aside(before);
        assert_eq!((session.queued(), session.pending_ready()), (left, before));
        session.queue_simple("SELECT generate_series(1, 2)");
        session.queue_set_aside(aside);
        holder.simple("SELECT pg_advisory_unlock(4712)").unwrap();
        session.send_queued().unwrap();
        let mut rows = Vec::new();
        while session.pending_ready() > 0 {
            assert!(session.wait_readable(None, Duration::from_secs(10)).unwrap());
            while let Some(reply) = session.try_reply().unwrap() {
                if let Reply::DataRow(row) = reply {
                    rows.extend(
                        row.get(0).map(|value| String::from_utf8_lossy(value).into_owned()),
                    );
                }
            }
        }
        assert_eq!(rows, ["", &LARGE.to_string(), "1", "2", "1", "2", "3"]);
        assert_eq!(session.queued(), 0);
    }
}

/// A caller that only reads sends what the socket did not take at once.
#[test]
fn reading_replies_sends_the_rest() {
    const LOCK: &str = "SELECT pg_advisory_lock(4711)";
    for info in [server(18).local(), server(18).tcp("postgres", "sslmode=require")] {
        let mut holder = connect(&info).unwrap();
        holder.simple(LOCK).unwrap();
        let mut session = connect(&info).unwrap();
        session.set_read_timeout(Some(Duration::from_secs(10)));
        let large = vec![b'x'; 24 << 20];
        session.queue_simple(LOCK);
        session
            .queue_statement("SELECT length($1)", &[25], [Param::Text(&large)].into_iter())
            .unwrap();
        session.queue_sync();
        session.send_queued().unwrap();
        assert!(session.queued() > 0, "the socket has taken everything");
        holder.simple("SELECT pg_advisory_unlock(4711)").unwrap();
        assert_eq!(drain(&mut session), (1, 1, None));
        assert_eq!(drain(&mut session), (1, 1, None));
        assert_eq!(session.queued(), 0);
    }
}

#[test]
fn parameters_of_all_forms() {
    let mut session = server(18).session();
    session.queue_parse("", "SELECT $1::int4, $2::text, $3::int4, $4::text", &[]);
    let params = [
        Param::Binary(&7_i32.to_be_bytes()),
        Param::Text(b"te\0xt".split(|&byte| byte == 0).next().unwrap()),
        Param::Null,
        Param::Text(b""),
    ];
    session.queue_bind("", params.into_iter()).unwrap();
    session.queue_describe_portal();
    session.queue_execute();
    session.queue_sync();
    session.flush().unwrap();
    assert_eq!(session.next_reply().unwrap(), Reply::ParseComplete);
    assert_eq!(session.next_reply().unwrap(), Reply::BindComplete);
    assert!(matches!(session.next_reply().unwrap(), Reply::RowDescription(_)));
    match session.next_reply().unwrap() {
        Reply::DataRow(row) => {
            let values: Vec<_> = row.values().collect();
            assert_eq!(values, [Some(&b"7"[..]), Some(b"te"), None, Some(b"")]);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(session.next_reply().unwrap(), Reply::CommandComplete("SELECT 1"));
    assert_eq!(session.next_reply().unwrap(), Reply::Ready(TransactionStatus::Idle));
}

#[test]
fn an_error_skips_to_the_sync() {
    let mut session = server(15).session();
    session.queue_parse("d", "SELECT 10 / $1::int", &[]);
    for divisor in ["1", "0", "2"] {
        session.queue_bind("d", [Param::Text(divisor.as_bytes())].into_iter()).unwrap();
        session.queue_execute();
    }
    session.queue_sync();
    session.queue_bind("d", [Param::Text(b"5")].into_iter()).unwrap();
    session.queue_execute();
    session.queue_close_statement("d");
    session.queue_sync();
    session.flush().unwrap();
    assert!(matches!(session.query("SELECT 1", &[]), Err(Error::Protocol(_))));
    assert_eq!(drain(&mut session), (1, 1, Some("22012".to_owned())));
    assert_eq!(drain(&mut session), (1, 1, None));
    assert_eq!(value(&mut session, "SELECT 1"), "1");
}

#[test]
fn flush_and_poll_without_a_sync() {
    let mut session = server(18).session();
    session.queue_parse("", "SELECT pg_sleep(0.3)", &[]);
    session.queue_bind("", [].into_iter()).unwrap();
    session.queue_flush();
    assert!(session.try_reply().unwrap().is_none());
    session.flush().unwrap();
    for _ in 0..2 {
        assert!(session.poll_reply(Duration::from_secs(10)).unwrap());
        session.next_reply().unwrap();
    }
    session.queue_execute();
    session.queue_flush();
    session.flush().unwrap();
    let start = Instant::now();
    assert!(!session.poll_reply(Duration::from_millis(20)).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(20));
    assert!(session.try_reply().unwrap().is_none());
    assert!(session.poll_reply(Duration::from_secs(10)).unwrap());
    assert!(matches!(session.try_reply().unwrap(), Some(Reply::DataRow(_))));
    session.queue_sync();
    session.flush().unwrap();
    assert_eq!(drain(&mut session), (1, 0, None));

    session.set_read_timeout(Some(Duration::from_millis(50)));
    session.queue_simple("SELECT pg_sleep(0.5)");
    session.flush().unwrap();
    assert!(matches!(session.next_reply(), Err(Error::Timeout)));
    assert!(!session.is_broken());
    session.set_read_timeout(None);
    assert_eq!(drain(&mut session), (1, 1, None));
}

#[test]
fn too_large_or_too_many_is_an_error_and_queues_nothing() {
    let mut session = server(18).session();
    let value = vec![b'x'; 512 << 20];
    let params = [Param::Text(&value), Param::Text(&value)];
    let error = session.queue_bind("s", params.into_iter()).unwrap_err();
    assert!(matches!(error, Error::MessageTooLarge { .. }), "{error}");
    let error = session.queue_bind("s", (0..70_000).map(|_| Param::Null)).unwrap_err();
    assert!(error.to_string().contains("65535"), "{error}");
    assert_eq!(session.queued(), 0);
    assert_eq!(super::value(&mut session, "SELECT 1"), "1");
}
