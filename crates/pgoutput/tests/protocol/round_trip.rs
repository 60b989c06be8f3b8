//! Decoding returns what was encoded.

use pgoutput::{
    DecodeErrorKind, Frame, Lsn, PrimaryStatusRequest, StatusUpdate, Timestamp, builder,
    decode_change,
};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

use crate::strategy::{cases, frames, lsns, times};

proptest! {
    #[test]
    fn messages_are_decoded_as_encoded(case in cases()) {
        let payload = builder::encoded(&case.message);
        prop_assert_eq!(payload[0], case.message.tag());
        prop_assert_eq!(case.decoder().decode(&payload), Ok(case.message));
        match decode_change(&payload, case.in_stream) {
            Ok(change) => prop_assert_eq!(change, case.message),
            Err(error) => {
                prop_assert_eq!(error.kind, DecodeErrorKind::NotAChange);
                prop_assert!(case.message.stream_xid().is_none());
            }
        }
    }

    #[test]
    fn frames_are_decoded_as_encoded(frame in frames()) {
        let mut copy_data = Vec::new();
        frame.encode(&mut copy_data);
        prop_assert_eq!(Frame::decode(&copy_data), Ok(frame));
    }

    #[test]
    fn replies_are_decoded_as_encoded(
        write in lsns(), flush in lsns(), apply in lsns(), clock in times(),
        reply_requested in any::<bool>(),
    ) {
        let update = StatusUpdate { write, flush, apply, clock, reply_requested };
        let mut copy_data = Vec::new();
        update.encode(&mut copy_data);
        prop_assert_eq!(StatusUpdate::decode(&copy_data), Ok(update));

        let request = PrimaryStatusRequest { clock };
        copy_data.clear();
        request.encode(&mut copy_data);
        prop_assert_eq!(PrimaryStatusRequest::decode(&copy_data), Ok(request));
    }

    #[test]
    fn lsns_are_parsed_as_printed(lsn in lsns()) {
        prop_assert_eq!(lsn.to_string().parse::<Lsn>(), Ok(lsn));
        prop_assert_eq!(Lsn::from_u64(lsn.as_u64()), lsn);
    }

    #[test]
    fn no_other_text_is_an_lsn(text in "\\PC{0,20}") {
        if let Ok(lsn) = text.parse::<Lsn>() {
            let printed = lsn.to_string();
            prop_assert!(printed.len() <= text.len());
        }
    }

    #[test]
    fn times_within_the_range_are_converted_back(
        micros in i64::MIN..=i64::MAX - Timestamp(0).to_unix_micros(),
    ) {
        let time = Timestamp(micros);
        prop_assert_eq!(Timestamp::from_unix_micros(time.to_unix_micros()), time);
    }
}
