//! Several hosts, `target_session_attrs` and timeouts.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::{MAJORS, connect, info, refused, server, start, value};

/// A port on which nothing listens.
fn dead_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn the_next_host_is_tried() {
    for major in MAJORS {
        let port = server(major).cluster.port();
        let dead = dead_port();
        let text = format!(
            "postgresql://postgres@127.0.0.1:{dead},%2Fno%2Fsuch%2Fdir:1,127.0.0.1:{port}/postgres"
        );
        let session = connect(&info(&text)).unwrap();
        assert_eq!(session.host(), format!("at \"127.0.0.1\", port {port}"));
        let text = refused(&info(&format!(
            "host=127.0.0.1,no-such-host.invalid,/no/such/dir port={dead} user=u dbname=d"
        )));
        assert_eq!(text.lines().count(), 3, "{text}");
        for part in
            ["Connection refused", "could not translate host name", "/no/such/dir/.s.PGSQL."]
        {
            assert!(text.contains(part), "{text}");
        }
        for _ in 0..5 {
            connect(&info(&format!(
                "host=127.0.0.1,127.0.0.1 port={dead},{port} user=postgres load_balance_hosts=random"
            )))
            .unwrap();
        }
    }
}

#[test]
fn a_refused_login_ends_the_search() {
    let server = server(18);
    let port = server.cluster.port();
    let text =
        format!("host=127.0.0.1,127.0.0.1 port={port},{port} user=nobody_such dbname=postgres");
    let error = connect(&info(&text)).unwrap_err();
    assert_eq!(error.sqlstate(), Some("28000"));
    assert_eq!(error.to_string().matches("failed:").count(), 1, "{error}");
    let text = format!("host=127.0.0.1 port={port} user=postgres dbname=no_such");
    assert_eq!(connect(&info(&text)).unwrap_err().sqlstate(), Some("3D000"));
}

#[test]
fn target_session_attrs() {
    for major in MAJORS {
        let mut reading = start(major);
        reading.cluster.set("default_transaction_read_only", "on").unwrap();
        let ports = format!("{},{}", reading.cluster.port(), server(major).cluster.port());
        let with = |attrs: &str| {
            info(&format!(
                "host=127.0.0.1,127.0.0.1 port={ports} user=postgres target_session_attrs={attrs}"
            ))
        };
        let read_only = |attrs: &str| {
            value(&mut connect(&with(attrs)).unwrap(), "SHOW default_transaction_read_only")
        };
        assert_eq!(read_only("any"), "on");
        assert_eq!(read_only("read-only"), "on");
        assert_eq!(read_only("read-write"), "off");
        assert_eq!(read_only("primary"), "on");
        assert_eq!(read_only("prefer-standby"), "on");
        let text = refused(&with("standby"));
        assert_eq!(text.matches("server is not in hot standby mode").count(), 2, "{text}");
    }
}

#[test]
fn connect_timeout_bounds_a_silent_server() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let start = Instant::now();
    let text = format!("host=127.0.0.1 port={port} user=u connect_timeout=1");
    let error = connect(&info(&text)).unwrap_err();
    assert!(error.to_string().contains("timeout expired"), "{error}");
    assert!(error.is_connection_loss());
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// A server that cannot start a process answers both requests so, in the form of protocol 2.
#[test]
fn a_server_without_a_free_process_is_tried_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let full = std::thread::spawn(move || {
        for _ in 0..3 {
            let (mut socket, _) = listener.accept().unwrap();
            // Unread data would reset the connection.
            let read = std::io::Read::read(&mut socket, &mut [0; 1000]).unwrap();
            assert!(read > 0);
            let text = b"Ecould not fork new process for connection: Cannot allocate memory\n\0";
            std::io::Write::write_all(&mut socket, text).unwrap();
        }
    });
    for (sslmode, said) in
        [("disable", "08004"), ("require", "during SSL exchange"), ("disable", "not fork new")]
    {
        let text = format!("host=127.0.0.1 port={port} user=u sslmode={sslmode}");
        let error = connect(&info(&text)).unwrap_err();
        assert!(error.is_connection_loss() && !error.is_away(), "{error:?}");
        assert!(error.to_string().contains(said), "{error}");
    }
    full.join().unwrap();
}

#[test]
fn not_a_postgresql_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let (mut socket, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut socket, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        }
    });
    for sslmode in ["require", "disable"] {
        let text = refused(&info(&format!("host=127.0.0.1 port={port} user=u sslmode={sslmode}")));
        assert!(text.contains("invalid response") || text.contains("protocol error"), "{text}");
    }
    server.join().unwrap();
}
