//! Tests of the stream against a scripted peer on a socket pair.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use socket2::{Domain, Socket, Type};

use super::*;

const SOON: Duration = Duration::from_secs(5);

fn pair() -> (Socket, ReplicationStream) {
    let (server, client) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
    let stream = ReplicationStream::new(Stream::on(client), &[], "test".to_owned(), LONGEST_NAP);
    (server, stream.unwrap())
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut message = vec![tag];
    message.extend_from_slice(&u32::try_from(body.len() + 4).unwrap().to_be_bytes());
    message.extend_from_slice(body);
    message
}

fn payloads(chunk: &CopyChunk) -> Vec<Vec<u8>> {
    chunk.frames().map(|(_, payload)| payload.to_vec()).collect()
}

/// Receives to the end of the stream: all payloads, and the reason of the end.
fn receive_all(stream: &mut ReplicationStream) -> (Vec<Vec<u8>>, EndReason) {
    let mut all = Vec::new();
    loop {
        match stream.receive(SOON).unwrap() {
            Received::Chunk(chunk) => all.extend(payloads(&chunk)),
            Received::Ended(reason) => return (all, reason),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn other_messages_are_handled_in_order() {
    let (mut server, mut stream) = pair();
    let error = message(b'E', b"SFATAL\0VFATAL\0C57P01\0Mgood-bye\0\0");
    let script = [
        message(b'd', b"one"),
        message(b'd', b"two"),
        message(b'N', b"VNOTICE\0Mhello\0\0"),
        message(b'd', b"three"),
        message(b'S', b"TimeZone\0UTC\0"),
        error,
        message(b'd', b"after the end"),
    ];
    server.write_all(&script.concat()).unwrap();
    match stream.receive(SOON).unwrap() {
        Received::Chunk(chunk) => {
            assert_eq!(payloads(&chunk), [&b"one"[..], b"two"]);
            assert_eq!(chunk.len(), 16);
        }
        other => panic!("{other:?}"),
    }
    let (rest, reason) = receive_all(&mut stream);
    assert_eq!(rest, [b"three"]);
    assert!(matches!(reason, EndReason::Error(error) if error.message == "good-bye"));
}

#[test]
fn frames_may_come_in_any_pieces() {
    let script: Vec<u8> =
        (0..50_u8).flat_map(|size| message(b'd', &vec![size; usize::from(size)])).collect();
    for piece in [1, 2, 3, 5, 7, 64, 1000] {
        let (mut server, mut stream) = pair();
        let script = script.clone();
        let writer = std::thread::spawn(move || {
            for bytes in script.chunks(piece) {
                server.write_all(bytes).unwrap();
            }
        });
        let (all, reason) = receive_all(&mut stream);
        writer.join().unwrap();
        assert!(matches!(reason, EndReason::Closed));
        assert_eq!(all.len(), 50);
        assert!(all.iter().zip(0..).all(|(body, size)| *body == vec![size; usize::from(size)]));
    }
}

#[test]
fn large_and_small_messages_through_many_buffers() {
    let sizes = [10, 100_000, 262_139, 262_144, 1, 3_000_000, 0, 65_536, 700_000, 5];
    let (mut server, mut stream) = pair();
    let writer = std::thread::spawn(move || {
        for (size, fill) in sizes.into_iter().zip(0..) {
            server.write_all(&message(b'd', &vec![fill; size])).unwrap();
        }
        server.write_all(&message(b'c', b"")).unwrap();
        server.write_all(&message(b'C', b"COPY 0\0")).unwrap();
        // The answer to CopyDone.
        let mut answer = [0; 5];
        server.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"c\0\0\0\x04");
    });
    let (all, reason) = receive_all(&mut stream);
    assert!(matches!(reason, EndReason::Done));
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
    assert!(all.iter().zip(0..).all(|(body, fill)| body.iter().all(|&byte| byte == fill)));
    writer.join().unwrap();
}

#[test]
fn impossible_messages_are_errors() {
    for bytes in [&b"d\0\0\0\x03"[..], b"d\xff\xff\xff\xff", b"d\x7f\xff\xff\xff", b"HTTP/1.1 400"]
    {
        let (mut server, mut stream) = pair();
        server.write_all(bytes).unwrap();
        assert!(matches!(stream.receive(SOON), Err(Error::Protocol(_))), "{bytes:?}");
    }
    let (mut server, mut stream) = pair();
    server.write_all(&message(b'D', b"")).unwrap();
    assert!(matches!(stream.receive(SOON), Err(Error::Protocol(_))));
}

#[test]
fn sending_never_blocks() {
    let (mut server, mut stream) = pair();
    server.set_send_buffer_size(4096).unwrap();
    let update = vec![b'u'; 1000];
    let mut sent = 0;
    let error = loop {
        match stream.send(&update) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(sent > 1000 && matches!(error, Error::Protocol(_)), "{sent} {error}");

    // Later calls of receive and wait write the unsent messages in order.
    let (mut other, mut stream) = pair();
    for number in 0..2000_u32 {
        stream.send(&[&number.to_be_bytes()[..], &[0; 296]].concat()).unwrap();
    }
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; 2000 * 305];
        other.read_exact(&mut all).unwrap();
        for (frame, number) in all.chunks(305).zip(0_u32..) {
            assert_eq!(frame[..9], [&b"d\0\0\x01\x30"[..], &number.to_be_bytes()].concat());
        }
    });
    while stream.has_unsent() {
        let _ = stream.wait_without_reading(Duration::from_millis(10));
    }
    reader.join().unwrap();
    server.flush().unwrap();
}

#[test]
fn a_wake_taken_half_way_is_not_lost_and_does_not_spin() {
    let (_server, mut stream) = pair();
    let waker = stream.waker();
    let waking = std::thread::spawn(move || {
        for _ in 0..20_000 {
            waker.wake();
        }
    });
    while !waking.is_finished() {
        let _ = stream.receive(Duration::from_micros(50)).unwrap();
    }
    waking.join().unwrap();
    // Only the flag and a late write to the descriptor can remain.
    let mut woken = 0;
    while matches!(stream.receive(Duration::from_millis(20)).unwrap(), Received::Woken) {
        woken += 1;
        assert!(woken <= 2);
    }
}

#[test]
fn bytes_of_an_incomplete_message_are_a_sign_of_life() {
    const BRIEFLY: Duration = Duration::from_millis(5);
    let (mut server, mut stream) = pair();
    assert!(matches!(stream.receive(BRIEFLY).unwrap(), Received::Idle));
    assert_eq!(stream.last_data(), None);
    let message = message(b'd', &[7; 300]);
    let mut last = None;
    for piece in message[..300].chunks(100) {
        server.write_all(piece).unwrap();
        assert!(matches!(stream.receive(BRIEFLY).unwrap(), Received::Idle));
        assert!(stream.last_data() > last);
        last = stream.last_data();
    }
    assert!(matches!(stream.receive(BRIEFLY).unwrap(), Received::Idle));
    assert_eq!(stream.last_data(), last);
    server.write_all(&message[300..]).unwrap();
    assert!(matches!(stream.receive(SOON).unwrap(), Received::Chunk(_)));
    assert!(stream.last_data() > last);
}

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

#[test]
fn handles_can_go_to_other_threads() {
    fn send<T: Send>() {}
    fn share<T: Send + Sync>() {}
    send::<ReplicationStream>();
    send::<Session>();
    send::<CopyChunk>();
    share::<Waker>();
    share::<crate::CancelHandle>();
    share::<crate::ConnInfo>();
    share::<Error>();
}

/// Reads messages of this length from the other end.
fn sent(server: &mut Socket, lengths: &[usize]) -> Vec<Vec<u8>> {
    let read = |length: &usize| {
        let mut message = vec![0; length + 5];
        server.read_exact(&mut message).unwrap();
        message
    };
    lengths.iter().map(read).collect()
}

#[test]
fn another_thread_sends_status_messages() {
    let (mut server, mut stream) = pair();
    let sender = stream.status_sender().unwrap();
    sender.send(b"from another").unwrap();
    stream.send(b"own").unwrap();
    let expected = [message(b'd', b"from another"), message(b'd', b"own")];
    assert_eq!(sent(&mut server, &[12, 3]), expected);
    assert!(matches!(stream.receive(Duration::ZERO).unwrap(), Received::Idle), "it is not woken");

    // The end of the stream is the last message.
    server.write_all(&message(b'c', b"")).unwrap();
    assert!(matches!(stream.receive(Duration::ZERO).unwrap(), Received::Idle));
    sender.send(b"too late").unwrap();
    assert_eq!(sent(&mut server, &[0]), [message(b'c', b"")]);
    // It does not keep the connection open.
    server.set_read_timeout(Some(SOON)).unwrap();
    drop(stream);
    assert_eq!(server.read(&mut [0; 9]).unwrap(), 0);
    sender.send(b"far too late").unwrap();
}

/// Both threads send to a server that reads slowly: messages stay whole, and those of one thread in order.
#[test]
fn messages_of_two_threads_are_not_torn() {
    let (mut server, mut stream) = pair();
    let sender = stream.status_sender().unwrap();
    let numbered = |kind: u8, number: u32| [[kind; 300].as_slice(), &number.to_be_bytes()].concat();
    const MANY: u32 = 2000;
    let other = std::thread::spawn(move || {
        (0..MANY).for_each(|number| sender.send(&numbered(b'o', number)).unwrap());
    });
    let reader = std::thread::spawn(move || {
        let mut next = [0, 0];
        for _ in 0..2 * MANY {
            let bytes = &sent(&mut server, &[304])[0][5..];
            let of = usize::from(bytes[0] == b'o');
            let kind = [b's', b'o'][of];
            assert_eq!(bytes, numbered(kind, next[of]), "of {kind}");
            next[of] += 1;
        }
        server
    });
    for number in 0..MANY {
        stream.send(&numbered(b's', number)).unwrap();
    }
    // The stream sends the rest while it waits.
    while !reader.is_finished() {
        assert!(matches!(stream.receive(NAP).unwrap(), Received::Idle | Received::Woken));
    }
    other.join().unwrap();
    let _server = reader.join().unwrap();
}
