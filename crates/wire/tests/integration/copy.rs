//! COPY in both directions.

use wire::Session;

use super::{MAJORS, connect, server, value};

const ROWS: usize = 500_000;

fn row(number: usize) -> String {
    format!("{number}\t{}\n", "a hundred bytes and a little more, ".repeat(3))
}

fn fill(session: &mut Session, rows: usize) -> u64 {
    session.simple("CREATE TEMP TABLE c (a int, b text)").unwrap();
    let mut copy = session.copy_in("COPY c FROM STDIN").unwrap();
    for number in 0..rows {
        copy.send(row(number).as_bytes()).unwrap();
    }
    copy.finish().unwrap()
}

#[test]
fn fifty_megabytes_in_and_out() {
    for major in MAJORS {
        for info in [server(major).local(), server(major).tcp("postgres", "sslmode=require")] {
            let mut session = connect(&info).unwrap();
            assert_eq!(fill(&mut session, ROWS), ROWS as u64);
            let mut copy = session.copy_out("COPY c TO STDOUT").unwrap();
            let (mut number, mut bytes) = (0, 0);
            while let Some(data) = copy.next().unwrap() {
                assert_eq!(data, row(number).as_bytes());
                number += 1;
                bytes += data.len();
            }
            assert_eq!(copy.rows(), ROWS as u64);
            assert!(copy.next().unwrap().is_none());
            drop(copy);
            assert_eq!(number, ROWS);
            assert!(bytes > 50_000_000);
            assert_eq!(value(&mut session, "SELECT count(*) FROM c"), ROWS.to_string());
        }
    }
}

#[test]
fn data_may_be_split_anywhere() {
    let mut session = server(18).session();
    session.simple("CREATE TEMP TABLE c (a int, b text)").unwrap();
    let all: String = (0..20_000).map(row).collect();
    let mut copy = session.copy_in("COPY c FROM STDIN").unwrap();
    let mut rest = all.as_bytes();
    let mut size = 1;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(size.min(rest.len()));
        copy.send(piece).unwrap();
        rest = after;
        size = size * 3 % 700_001;
    }
    assert_eq!(copy.finish().unwrap(), 20_000);
}

#[test]
fn errors_leave_the_session_usable() {
    for major in MAJORS {
        let mut session = server(major).session();
        assert_eq!(session.copy_in("COPY nix FROM STDIN").err().unwrap().sqlstate(), Some("42P01"));
        session.copy_out("SELECT 1").err().unwrap();
        session = server(major).session();
        session.simple("CREATE TEMP TABLE c (a int)").unwrap();

        // An error after the end of the data.
        let mut copy = session.copy_in("COPY c FROM STDIN").unwrap();
        copy.send(b"1\nx\n").unwrap();
        assert_eq!(copy.finish().unwrap_err().sqlstate(), Some("22P02"));

        // An error while data is sent.
        let mut copy = session.copy_in("COPY c FROM STDIN").unwrap();
        let mut failure = None;
        for _ in 0..2_000_000 {
            if let Err(error) = copy.send(b"1\nx\n1\n") {
                failure = Some(error);
                break;
            }
        }
        assert_eq!(failure.unwrap().sqlstate(), Some("22P02"));
        copy.send(b"1\n").unwrap_err();
        drop(copy);
        assert!(!session.is_broken());

        let mut copy = session.copy_in("COPY c FROM STDIN").unwrap();
        copy.send(b"1\n").unwrap();
        copy.abort("not today").unwrap();
        assert_eq!(value(&mut session, "SELECT count(*) FROM c"), "0");

        let sql = "COPY (SELECT 1 / (2000 - i) FROM generate_series(1, 3000) i) TO STDOUT";
        let mut copy = session.copy_out(sql).unwrap();
        let error = loop {
            match copy.next() {
                Ok(Some(_)) => {}
                Ok(None) => panic!("no error"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.sqlstate(), Some("22012"));
        drop(copy);
        assert_eq!(value(&mut session, "SELECT 1"), "1");

        drop(session.copy_out("COPY (SELECT 1) TO STDOUT").unwrap());
        assert!(session.is_broken());
    }
}
