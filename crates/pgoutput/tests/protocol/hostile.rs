//! Input that is not a message is rejected at the right byte and without a panic.

use pgoutput::{DecodeErrorKind, Frame, builder};
use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::{Index, select};

use crate::exercise::exercise;
use crate::strategy::{cases, frames};

/// A connection with one packet, in the format of `exercise`.
fn connection(mode: u8, packets: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![mode];
    for packet in packets {
        bytes.extend(u16::try_from(packet.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(packet);
    }
    bytes
}

fn is_truncated(kind: DecodeErrorKind) -> bool {
    matches!(kind, DecodeErrorKind::Truncated { .. } | DecodeErrorKind::MissingNul)
}

/// Bytes that start like a message but are not one.
fn messagelike() -> impl Strategy<Value = Vec<u8>> {
    let tags = select(b"BCORYIUDTMSEcAbPKrpwks".as_slice());
    // Small numbers produce lengths and counts near the real ones.
    let bytes =
        vec(proptest::prop_oneof![0..4_u8, select(b"NKOntubdfi".as_slice()), any::<u8>()], 0..64);
    (tags, bytes).prop_map(|(tag, mut bytes)| {
        bytes.insert(0, tag);
        bytes
    })
}

proptest! {
    #[test]
    fn a_truncated_message_is_rejected_at_any_byte(case in cases()) {
        let payload = builder::encoded(&case.message);
        for length in 0..payload.len() {
            let error = case.decoder().decode(&payload[..length]).unwrap_err();
            prop_assert!(is_truncated(error.kind), "{length}: {error}");
            prop_assert!(error.offset <= length);
            prop_assert_eq!(error.message, payload[..length].first().copied());
        }
    }

    #[test]
    fn a_message_with_trailing_bytes_is_rejected(case in cases(), more in vec(any::<u8>(), 1..9)) {
        let mut payload = builder::encoded(&case.message);
        let offset = payload.len();
        payload.extend_from_slice(&more);
        let error = case.decoder().decode(&payload).unwrap_err();
        prop_assert_eq!(error.kind, DecodeErrorKind::TrailingBytes(more.len()));
        prop_assert_eq!(error.offset, offset);
    }

    #[test]
    fn a_truncated_frame_is_rejected(frame in frames()) {
        let mut copy_data = Vec::new();
        frame.encode(&mut copy_data);
        let header = if let Frame::XLogData { .. } = frame { 25 } else { copy_data.len() };
        for length in 0..header {
            let error = Frame::decode(&copy_data[..length]).unwrap_err();
            prop_assert!(is_truncated(error.kind), "{length}: {error}");
        }
    }

    #[test]
    fn one_wrong_byte_is_rejected_or_gives_another_message(
        case in cases(), at in any::<Index>(), byte in any::<u8>(),
    ) {
        let mut payload = builder::encoded(&case.message);
        let at = at.index(payload.len());
        payload[at] = byte;
        for mode in 0..3 {
            exercise(&connection(mode, &[&payload]));
            exercise(&connection(mode, &[b"S\0\0\0\x01\x01", &payload, b"E"]));
        }
    }

    #[test]
    fn bytes_that_look_like_messages_never_panic(
        mode in 0..3_u8, payloads in vec(messagelike(), 1..5),
    ) {
        let packets: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        exercise(&connection(mode, &packets));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..300)) {
        exercise(&bytes);
    }
}
