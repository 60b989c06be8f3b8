//! When the stream naps, so that one read takes many messages.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};

use socket2::{Domain, Socket, Type};

use super::{SOON, message, pair, receive_all};
use crate::replication::*;

/// A message on an idle connection is not delayed by a nap; while data flows, naps combine
/// messages.
#[test]
fn naps_only_while_data_flows() {
    let (mut server, mut stream) = pair();
    for _ in 0..20 {
        std::thread::sleep(2 * FLOW_NAPS * NAP);
        server.write_all(&message(b'd', b"lone")).unwrap();
        let start = Instant::now();
        assert!(matches!(stream.receive(SOON).unwrap(), Received::Chunk(_)));
        if start.elapsed() < NAP {
            return;
        }
    }
    panic!("every single message was delayed by a nap");
}

/// The sender of a Unix socket soon has no room for more.
#[test]
fn naps_stay_short_on_a_unix_socket() {
    let (_server, stream) = pair();
    let mut stream = ReplicationStream { longest_nap: LONGEST_NAP_ON_UNIX_SOCKET, ..stream };
    let company = [Haste::ConcurrentCommitters, Haste::ScarceProcessors];
    for haste in company.into_iter().chain([Haste::Prompt, Haste::None]) {
        stream.set_haste(haste);
        for _ in 0..20 {
            stream.adapt(BUFFER_SIZE);
            assert!(stream.nap <= LONGEST_NAP_ON_UNIX_SOCKET, "{haste:?}");
        }
    }
}

/// Only [`Haste::None`] makes naps longer, and only while much data arrives.
#[test]
fn naps_grow_in_a_backlog() {
    let (_server, mut stream) = pair();
    stream.adapt(BUFFER_SIZE);
    assert_eq!(stream.nap, NAP);
    stream.set_haste(Haste::None);
    for _ in 0..20 {
        stream.adapt(BUFFER_SIZE);
    }
    assert_eq!(stream.nap, LONGEST_NAP);
    stream.adapt(0);
    assert_eq!(stream.nap, LONGEST_NAP / 2);
    assert!(stream.should_nap(0, Some(Instant::now())));
    // Data that arrived long ago is not a flow.
    assert!(!stream.should_nap(100, Some(Instant::now() - FLOW_NAPS * LONGEST_NAP)));
    assert_eq!(stream.nap, NAP);
    stream.adapt(0);
    assert_eq!(stream.nap, NAP);
    stream.adapt(BUFFER_SIZE);
    assert_eq!(stream.nap, 2 * NAP);
    stream.set_haste(Haste::ConcurrentCommitters);
    stream.adapt(0);
    assert_eq!(stream.nap, COMMITTERS_NAP);
    stream.set_haste(Haste::ScarceProcessors);
    stream.adapt(0);
    assert_eq!(stream.nap, SCARCE_NAP);
    stream.set_haste(Haste::Prompt);
    stream.adapt(BUFFER_SIZE);
    assert_eq!(stream.nap, NAP);
}

/// A stream over TCP that reads a backlog at a pace, and its peer.
fn paced_pair() -> (TcpStream, ReplicationStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    client.set_recv_buffer_size(24 * 1024).unwrap();
    client.connect(&listener.local_addr().unwrap().into()).unwrap();
    let stream = ReplicationStream::new(Stream::on(client), &[], "test".to_owned(), LONGEST_NAP);
    let mut stream = ReplicationStream { pace: Some(Pace::new(Instant::now())), ..stream.unwrap() };
    stream.set_haste(Haste::None);
    (listener.accept().unwrap().0, stream)
}

#[test]
fn a_backlog_is_read_to_its_end() {
    let (mut server, mut stream) = paced_pair();
    server.set_nodelay(true).unwrap();
    // Small messages, some that fit no window or buffer, and silence in between.
    let size = |n: usize| match n {
        _ if n.is_multiple_of(10_000) => 400_000,
        _ if n.is_multiple_of(1000) => 50_000,
        _ => n % 200,
    };
    let body = move |n: usize| vec![n.to_le_bytes()[0]; size(n)];
    let writer = std::thread::spawn(move || {
        for n in 0..50_000_usize {
            server.write_all(&message(b'd', &body(n))).unwrap();
            if n.is_multiple_of(7000) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    let (all, reason) = receive_all(&mut stream);
    writer.join().unwrap();
    assert!(matches!(reason, EndReason::Closed));
    assert_eq!(all.len(), 50_000);
    assert!(all.iter().enumerate().all(|(n, received)| *received == body(n)));
}

/// A read that leaves data because the buffer is full does not end a cycle.
#[test]
fn a_full_buffer_is_no_empty_sender() {
    let (mut server, mut stream) = paced_pair();
    let room = 8 * 1024;
    server.write_all(&vec![0; room + 100]).unwrap();
    while stream.stream.unread().unwrap() < room + 100 {
        std::thread::yield_now();
    }
    stream.filled = stream.buffer.len() - room;
    assert_eq!(stream.read_paced(Some(BUFFER_SIZE)).unwrap(), room);
    assert_eq!(stream.stream.unread().unwrap(), 100);
    let step = stream.pace.as_mut().unwrap().step(Instant::now());
    assert!(matches!(step, Step::Read(_)), "{step:?}");
}

/// A backlog must not delay the status, for which the caller is woken.
#[test]
fn wake_ups_come_through_in_a_backlog() {
    let (mut server, mut stream) = paced_pair();
    let writer = std::thread::spawn(move || {
        // Until the stream is dropped.
        while server.write_all(&message(b'd', &[0; 100])).is_ok() {}
    });
    let mut chunks = 0;
    for _ in 0..200 {
        let waker = stream.waker();
        let other = std::thread::spawn(move || waker.wake());
        loop {
            match stream.receive(SOON).unwrap() {
                Received::Woken => break,
                Received::Chunk(_) => chunks += 1,
                other => panic!("{other:?}"),
            }
        }
        other.join().unwrap();
    }
    while chunks < 200 {
        assert!(matches!(stream.receive(SOON).unwrap(), Received::Chunk(_)));
        chunks += 1;
    }
    drop(stream);
    writer.join().unwrap();
}

/// The backlog may end before the caller changes the haste.
#[test]
fn lone_messages_are_not_held_back_for_long() {
    let (mut server, mut stream) = pair();
    stream.set_haste(Haste::None);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        for _ in 0..3 {
            server.write_all(&message(b'd', &[0; 100])).unwrap();
            assert!(matches!(stream.receive(SOON).unwrap(), Received::Chunk(_)));
            assert!(stream.nap <= 2 * NAP);
        }
    }
}
