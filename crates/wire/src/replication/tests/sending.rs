//! Messages to the server, also from other threads.

use std::io::{Read as _, Write as _};

use socket2::Socket;

use super::{SOON, message, pair};
use crate::replication::*;

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
