//! Tests of the stream against a scripted peer on a socket pair.

mod naps;
mod sending;

use std::io::{Read as _, Write as _};

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
