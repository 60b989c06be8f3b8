//! Loss of the connection: killed and stopped servers.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use testbed::Stop;
use wire::{Error, Param};

use super::{MAJORS, connect, info, is_encrypted, server, start, wait_until_it_sleeps};

#[test]
fn killing_the_server_during_a_statement_is_a_connection_loss() {
    for major in MAJORS {
        for tcp in [false, true] {
            let mut server = start(major);
            let info = if tcp { server.tcp("postgres", "sslmode=require") } else { server.local() };
            let mut session = connect(&info).unwrap();
            let pid = session.backend_pid();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| session.simple("SELECT pg_sleep(60)").unwrap_err());
                wait_until_it_sleeps(&server.local(), pid);
                server.cluster.kill9().unwrap();
                let error = waiting.join().unwrap();
                assert!(error.is_connection_loss(), "{error:?}");
            });
            assert!(session.is_broken());
            assert!(matches!(session.simple("SELECT 1"), Err(Error::Closed)));
            let error = connect(&info).unwrap_err();
            assert!(error.is_connection_loss(), "{error:?}");
            server.cluster.start().unwrap();
            connect(&info).unwrap();
        }
    }
}

#[test]
fn a_server_shutdown_is_reported_with_its_sqlstate() {
    for major in MAJORS {
        let mut server = start(major);
        let mut idle = server.session();
        let mut busy = server.session();
        let pid = busy.backend_pid();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| busy.simple("SELECT pg_sleep(60)").unwrap_err());
            wait_until_it_sleeps(&server.local(), pid);
            server.cluster.stop(Stop::Fast).unwrap();
            let error = waiting.join().unwrap();
            assert_eq!(error.sqlstate(), Some("57P01"));
            assert!(error.is_connection_loss());
        });
        // The FATAL message is in the receive buffer; the failing write must find it.
        let error = idle.simple("SELECT 1").unwrap_err();
        assert!(error.is_connection_loss());
        assert_eq!(error.sqlstate(), Some("57P01"), "{error:?}");
        assert!(idle.is_broken());
    }
}

#[test]
fn killing_the_server_during_a_pipeline_is_a_connection_loss() {
    let mut server = start(18);
    let mut session = connect(&server.tcp("postgres", "sslmode=disable")).unwrap();
    let pid = session.backend_pid();
    session.queue_parse("s", "SELECT pg_sleep(0.001), $1::text", &[]);
    let value = vec![b'v'; 1000];
    for _ in 0..50_000 {
        session.queue_bind("s", [Param::Text(&value)].into_iter()).unwrap();
        session.queue_execute();
    }
    session.queue_sync();
    let other = server.local();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            wait_until_it_sleeps(&other, pid);
            let sql = format!("SELECT pg_terminate_backend({pid})");
            connect(&other).unwrap().simple(&sql).unwrap();
        });
        let error = session.flush().unwrap_err();
        assert!(error.is_connection_loss(), "{error:?}");
        assert!(session.is_broken());
    });
    server.cluster.stop(Stop::Fast).unwrap();
}

/// Forwards one connection to the server. Returns its address, and the server's end of the way to the client.
fn forward_one(port: u16) -> (u16, std::sync::mpsc::Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().port();
    let (sender, to_client) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
        sender.send(client.try_clone().unwrap()).unwrap();
        let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
        std::io::copy(&mut client, &mut server)
    });
    (address, to_client)
}

/// How a server, or what stands before it, ends a connection that asks for TLS.
#[derive(Debug, Clone, Copy)]
enum End {
    Closed,
    Reset,
    DuringHandshake,
    /// An answer of a proxy whose servers are down.
    Nonsense,
}

/// Ends the first connection, and forwards the next one to the server.
fn end_first(port: u16, end: End) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut request = [0; 8];
        match end {
            // Closing with unread data resets the connection.
            End::Reset => assert!(client.peek(&mut request).unwrap() > 0),
            _ => client.read_exact(&mut request).unwrap(),
        }
        match end {
            End::Closed | End::Reset => {}
            End::DuringHandshake => client.write_all(b"S").unwrap(),
            End::Nonsense => client.write_all(b"HTTP/1.0 503 Service Unavailable").unwrap(),
        }
        drop(client);
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
        std::io::copy(&mut client, &mut server)
    });
    address
}

#[test]
fn a_lost_connection_does_not_lead_to_one_without_encryption() {
    for end in [End::Closed, End::Reset, End::DuringHandshake, End::Nonsense] {
        let port = end_first(server(18).cluster.port(), end);
        let text = format!("host=127.0.0.1 port={port} user=postgres dbname=postgres");
        let info = info(&format!("{text} sslmode=prefer"));
        let error = connect(&info).expect_err("the connection was lost");
        assert_eq!(error.is_connection_loss(), !matches!(end, End::Nonsense), "{end:?}: {error}");
        assert!(is_encrypted(&mut connect(&info).unwrap()), "{end:?}");
    }
}

/// A record that was damaged on the way, and an alert, which is damaged too if it is not encrypted.
#[test]
fn an_error_of_tls_in_a_session_is_a_connection_loss() {
    let damaged: [&[u8]; 2] =
        [b"\x17\x03\x03\x00\x20damaged damaged damaged damaged!", b"\x15\x03\x03\x00\x02\x02\x14"];
    for record in damaged {
        let (port, to_client) = forward_one(server(18).cluster.port());
        let text = format!("host=127.0.0.1 port={port} user=u_tls dbname=postgres sslmode=require");
        let mut session = connect(&info(&text)).unwrap();
        let pid = session.backend_pid();
        let error = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| session.simple("SELECT pg_sleep(60)").unwrap_err());
            wait_until_it_sleeps(&server(18).local(), pid);
            to_client.recv().unwrap().write_all(record).unwrap();
            waiting.join().unwrap()
        });
        assert!(error.is_connection_loss(), "{error:?}");
        assert!(error.to_string().contains("SSL error"), "{error}");
        assert!(session.is_broken());
    }
}
