//! Properties that must hold for any bytes. The fuzz target `fuzz/fuzz_targets/decode.rs` includes
//! this file.

use pgoutput::{
    Column, DecodeErrorKind, Decoder, Frame, Message, OldTuple, PrimaryStatusRequest, StatusUpdate,
    Streaming, Tuple, decode_change,
};

/// Decodes one replication connection. The first byte selects the `streaming` option. Packets
/// follow, each after its two-byte length. A packet that is not a frame of log data is decoded as a
/// message itself, so that short inputs reach much of the code.
pub(crate) fn exercise(connection: &[u8]) {
    let Some((mode, mut rest)) = connection.split_first() else { return };
    let mut decoder = Decoder::new(match mode % 3 {
        0 => Streaming::Off,
        1 => Streaming::On,
        _ => Streaming::Parallel,
    });
    while let Some((length, tail)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_be_bytes(*length)).min(tail.len());
        let (packet, tail) = tail.split_at(length);
        rest = tail;
        exercise_replies(packet);
        match exercise_frame(packet) {
            Some(Frame::XLogData { payload, .. }) => exercise_message(&mut decoder, payload),
            _ => exercise_message(&mut decoder, packet),
        }
    }
}

fn exercise_replies(packet: &[u8]) {
    let mut out = Vec::new();
    if let Ok(update) = StatusUpdate::decode(packet) {
        update.encode(&mut out);
        assert_eq!(out, packet);
    } else if let Ok(request) = PrimaryStatusRequest::decode(packet) {
        request.encode(&mut out);
        assert_eq!(out, packet);
    }
}

fn exercise_frame(packet: &[u8]) -> Option<Frame<'_>> {
    match Frame::decode(packet) {
        Ok(frame) => {
            let mut out = Vec::new();
            frame.encode(&mut out);
            assert_eq!(out, packet);
            Some(frame)
        }
        Err(error) => {
            assert!(error.offset <= packet.len() && !error.to_string().is_empty());
            None
        }
    }
}

fn exercise_message(decoder: &mut Decoder, payload: &[u8]) {
    let mut before = decoder.clone();
    let in_stream = decoder.in_stream();
    let message = match decoder.decode(payload) {
        Ok(message) => message,
        Err(error) => {
            assert!(error.offset <= payload.len() && !error.to_string().is_empty());
            assert_eq!(decoder.in_stream(), in_stream);
            return;
        }
    };
    walk(&message);
    match decode_change(payload, in_stream) {
        Ok(change) => assert_eq!(change, message),
        Err(error) => assert_eq!(error.kind, DecodeErrorKind::NotAChange),
    }
    let mut out = Vec::new();
    message.encode(&mut out);
    assert_eq!(before.decode(&out), Ok(message));
    // The schema pg_catalog has two encodings; everything else has one.
    let schema = match &message {
        Message::Relation(relation) => relation.schema,
        Message::Type(type_info) => type_info.schema,
        _ => "",
    };
    assert!(out == payload || schema == "pg_catalog");
}

/// Iterates over everything in a decoded message.
fn walk(message: &Message<'_>) {
    match message {
        Message::Relation(relation) => {
            assert!(!relation.schema.is_empty());
            assert_eq!(relation.columns.iter().count(), relation.columns.len());
        }
        Message::Truncate(truncate) => {
            assert_eq!(truncate.relations.iter().count(), truncate.relations.len());
        }
        Message::Insert(insert) => walk_tuple(&insert.new),
        Message::Update(update) => {
            update.old.iter().map(OldTuple::tuple).for_each(walk_tuple);
            walk_tuple(&update.new);
        }
        Message::Delete(delete) => walk_tuple(delete.old.tuple()),
        _ => {}
    }
    assert!(!format!("{message:?}").is_empty());
}

fn walk_tuple(tuple: &Tuple<'_>) {
    let mut columns = tuple.columns();
    let mut bytes = 0;
    for left in (0..tuple.len()).rev() {
        bytes += match columns.next().expect("as many columns as the row says") {
            Column::Null | Column::Unchanged => 1,
            Column::Text(value) | Column::Binary(value) => 5 + value.len(),
        };
        assert_eq!(columns.len(), left);
    }
    assert_eq!(columns.next(), None);
    assert!(bytes >= tuple.len());
}
