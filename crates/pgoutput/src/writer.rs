//! The counterpart of the reader, for tests and simulations. All numbers are big-endian.

use crate::reader::PG_CATALOG;
use crate::{Lsn, RawName, Timestamp, Xid};

pub(crate) fn u8(out: &mut Vec<u8>, value: u8) {
    out.push(value);
}

pub(crate) fn u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_be_bytes());
}

pub(crate) fn u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_be_bytes());
}

pub(crate) fn i32(out: &mut Vec<u8>, value: i32) {
    out.extend_from_slice(&value.to_be_bytes());
}

pub(crate) fn u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_be_bytes());
}

pub(crate) fn lsn(out: &mut Vec<u8>, lsn: Lsn) {
    u64(out, lsn.0);
}

pub(crate) fn timestamp(out: &mut Vec<u8>, timestamp: Timestamp) {
    out.extend_from_slice(&timestamp.0.to_be_bytes());
}

pub(crate) fn xid(out: &mut Vec<u8>, xid: Xid) {
    u32(out, xid.0);
}

/// Writes the xid in front of a streamed change.
pub(crate) fn stream_xid(out: &mut Vec<u8>, stream_xid: Option<Xid>) {
    if let Some(stream_xid) = stream_xid {
        xid(out, stream_xid);
    }
}

/// Writes a length. PostgreSQL itself limits it to less than 1 GiB.
pub(crate) fn length(out: &mut Vec<u8>, length: usize) {
    i32(out, i32::try_from(length).expect("contents of 2 GiB and more cannot be sent"));
}

pub(crate) fn name(out: &mut Vec<u8>, name: &str) {
    raw_name(out, name.into());
}

pub(crate) fn raw_name(out: &mut Vec<u8>, name: RawName<'_>) {
    debug_assert!(!name.0.contains(&0), "a zero byte would end the name early: {name}");
    out.extend_from_slice(name.0);
    out.push(0);
}

pub(crate) fn schema(out: &mut Vec<u8>, schema: &str) {
    name(out, if schema == PG_CATALOG { "" } else { schema });
}
