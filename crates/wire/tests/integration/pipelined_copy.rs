//! COPY FROM STDIN between other statements of a pipeline.

use wire::{Reply, Session, affected_rows};

use super::{MAJORS, server, value};

/// Takes replies up to the next Ready: the affected rows of each statement, and the error if any.
fn drain(session: &mut Session) -> (Vec<u64>, Option<String>) {
    let (mut affected, mut failed) = (Vec::new(), None);
    loop {
        match session.next_reply().unwrap() {
            Reply::CommandComplete(tag) => affected.push(affected_rows(tag)),
            Reply::Error(error) => failed = Some(error.code.clone()),
            Reply::Ready(_) => return (affected, failed),
            _ => {}
        }
    }
}

fn queue(session: &mut Session, statement: &str) {
    session.queue_bind(statement, [].into_iter()).unwrap();
    session.queue_execute();
}

/// Queues a COPY of rows `0..rows`, with an invalid number at row `bad`.
fn queue_copy(session: &mut Session, rows: usize, bad: Option<usize>) {
    queue(session, "copy");
    session.queue_copy_data(|data| {
        for row in 0..rows {
            data.put(b"this row is undone");
            assert_eq!(data.row_len(), 18);
            data.undo_row();
            let number = if bad == Some(row) { "x".to_owned() } else { row.to_string() };
            data.put(number.as_bytes());
            data.put_u8(b'\t');
            data.put(&[b'y'; 100]);
            data.put_u8(b'\n');
            data.end_row();
        }
    });
}

fn prepare(session: &mut Session) {
    session.simple("CREATE TEMP TABLE t (a int, b text)").unwrap();
    session.queue_parse("copy", "COPY t (a, b) FROM STDIN", &[]);
    session.queue_parse("begin", "BEGIN", &[]);
    session.queue_parse("commit", "COMMIT", &[]);
    session.queue_parse("insert", "INSERT INTO t VALUES (-1, 'z')", &[]);
    session.queue_parse("fail", "SELECT 1 / 0", &[]);
    session.queue_sync();
    session.flush().unwrap();
    assert_eq!(drain(session), (vec![], None));
}

#[test]
fn copy_between_other_statements() {
    for major in MAJORS {
        let mut session = server(major).session();
        prepare(&mut session);
        queue(&mut session, "begin");
        queue(&mut session, "insert");
        queue_copy(&mut session, 10_000, None);
        queue(&mut session, "insert");
        queue_copy(&mut session, 0, None);
        queue(&mut session, "commit");
        session.queue_sync();
        queue(&mut session, "insert");
        session.queue_sync();
        session.flush().unwrap();
        assert_eq!(drain(&mut session), (vec![0, 1, 10_000, 1, 0, 0], None));
        assert_eq!(drain(&mut session), (vec![1], None));
        assert_eq!(value(&mut session, "SELECT count(*) FROM t"), "10003");
        assert_eq!(value(&mut session, "SELECT sum(a) FROM t"), "49994997");
    }
}

#[test]
fn copy_with_a_bad_value_fails_the_transaction() {
    for major in MAJORS {
        for bad in [0, 10, 9_999] {
            let mut session = server(major).session();
            prepare(&mut session);
            queue(&mut session, "begin");
            queue(&mut session, "insert");
            queue_copy(&mut session, 10_000, Some(bad));
            queue(&mut session, "insert");
            queue(&mut session, "commit");
            session.queue_sync();
            // The transaction has failed: the server rejects every statement, and COMMIT rolls
            // back.
            queue(&mut session, "insert");
            queue_copy(&mut session, 100, None);
            session.queue_sync();
            queue(&mut session, "commit");
            session.queue_sync();
            queue_copy(&mut session, 100, None);
            session.queue_sync();
            session.flush().unwrap();
            assert_eq!(drain(&mut session), (vec![0, 1], Some("22P02".to_owned())));
            assert_eq!(drain(&mut session), (vec![], Some("25P02".to_owned())));
            assert_eq!(drain(&mut session), (vec![0], None));
            assert_eq!(drain(&mut session), (vec![100], None));
            assert_eq!(value(&mut session, "SELECT count(*) FROM t"), "100");
        }
    }
}

#[test]
fn copy_after_a_failed_statement_is_skipped() {
    for major in MAJORS {
        let mut session = server(major).session();
        prepare(&mut session);
        queue(&mut session, "begin");
        queue(&mut session, "fail");
        queue_copy(&mut session, 10_000, None);
        queue(&mut session, "commit");
        session.queue_sync();
        session.queue_simple("ROLLBACK");
        queue_copy(&mut session, 2_000, None);
        session.queue_sync();
        session.flush().unwrap();
        assert_eq!(drain(&mut session), (vec![0], Some("22012".to_owned())));
        assert_eq!(drain(&mut session), (vec![0], None));
        assert_eq!(drain(&mut session), (vec![2_000], None));
        assert_eq!(value(&mut session, "SELECT count(*) FROM t"), "2000");
    }
}
