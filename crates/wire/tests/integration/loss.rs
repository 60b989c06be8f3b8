//! Loss of the connection: killed and stopped servers.

use testbed::Stop;
use wire::{Error, Param};

use super::{MAJORS, connect, start, wait_until_it_sleeps};

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
