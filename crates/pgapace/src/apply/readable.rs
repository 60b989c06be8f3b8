//! Makes binary values readable, for the keys in logs and errors.

use crate::subscriber::oid;
use crate::subscriber::value_text::{date, network, numeric, time, timestamp};

/// The text of a value. NUL, and bytes that are not UTF-8, become `\\xNN`: the encoding of the subscriber
/// may lack what else would stand for them.
pub(crate) fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(&chunk.valid().replace('\0', "\\x00"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// The text of a value of a common type, else the bytes in hexadecimal. `kind` is `pg_type.typtype`.
pub(crate) fn binary(type_oid: u32, kind: char, bytes: &[u8]) -> String {
    known(type_oid, kind, bytes).unwrap_or_else(|| hexadecimal(bytes))
}

fn known(type_oid: u32, kind: char, bytes: &[u8]) -> Option<String> {
    if kind == 'e' {
        return Some(text(bytes));
    }
    Some(match type_oid {
        oid::BOOL => if array::<1>(bytes)?[0] == 0 { "f" } else { "t" }.to_owned(),
        oid::CHAR | oid::NAME | oid::TEXT | oid::JSON | oid::BPCHAR | oid::VARCHAR => text(bytes),
        oid::INT8 => i64::from_be_bytes(array(bytes)?).to_string(),
        oid::INT2 => i16::from_be_bytes(array(bytes)?).to_string(),
        oid::INT4 => i32::from_be_bytes(array(bytes)?).to_string(),
        oid::OID | oid::XID => u32::from_be_bytes(array(bytes)?).to_string(),
        oid::XID8 => u64::from_be_bytes(array(bytes)?).to_string(),
        oid::FLOAT4 => f32::from_be_bytes(array(bytes)?).to_string(),
        oid::FLOAT8 => f64::from_be_bytes(array(bytes)?).to_string(),
        oid::UUID => uuid(&array(bytes)?),
        oid::PG_LSN => pgoutput::Lsn(u64::from_be_bytes(array(bytes)?)).to_string(),
        oid::JSONB => text(bytes.get(1..)?),
        oid::INT4RANGE => range(oid::INT4, bytes)?,
        oid::INT8RANGE => range(oid::INT8, bytes)?,
        oid::NUMRANGE => range(oid::NUMERIC, bytes)?,
        oid::DATERANGE => range(oid::DATE, bytes)?,
        oid::TSRANGE => range(oid::TIMESTAMP, bytes)?,
        oid::TSTZRANGE => range(oid::TIMESTAMPTZ, bytes)?,
        _ => return written(type_oid, bytes),
    })
}

fn written(type_oid: u32, bytes: &[u8]) -> Option<String> {
    let mut out = Vec::new();
    match type_oid {
        oid::NUMERIC => numeric(bytes, &mut out)?,
        oid::DATE => date(&mut out, i32::from_be_bytes(array(bytes)?)),
        oid::TIME => time(&mut out, i64::from_be_bytes(array(bytes)?)),
        oid::TIMESTAMP => timestamp(&mut out, i64::from_be_bytes(array(bytes)?), ""),
        oid::TIMESTAMPTZ => timestamp(&mut out, i64::from_be_bytes(array(bytes)?), "+00"),
        oid::INET | oid::CIDR => network(bytes, &mut out)?,
        _ => return None,
    }
    String::from_utf8(out).ok()
}

/// A range with bounds of this type (`range_send` in PostgreSQL's `rangetypes.c`, flags in `rangetypes.h`).
fn range(bound: u32, bytes: &[u8]) -> Option<String> {
    const EMPTY: u8 = 0x01;
    const LOWER_INCLUSIVE: u8 = 0x02;
    const UPPER_INCLUSIVE: u8 = 0x04;
    const LOWER_INFINITE: u8 = 0x08;
    const UPPER_INFINITE: u8 = 0x10;
    let (flags, mut bounds) = bytes.split_first()?;
    let has = |flag: u8| flags & flag != 0;
    if has(EMPTY) {
        return Some("empty".to_owned());
    }
    let mut next = |infinite| {
        if has(infinite) {
            return Some(String::new());
        }
        let (length, rest) = bounds.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (value, rest) = rest.split_at_checked(length)?;
        bounds = rest;
        let text = known(bound, 'b', value)?;
        Some(if text.contains(' ') { format!("\"{text}\"") } else { text })
    };
    let (lower, upper) = (next(LOWER_INFINITE)?, next(UPPER_INFINITE)?);
    let open = if has(LOWER_INCLUSIVE) { '[' } else { '(' };
    let close = if has(UPPER_INCLUSIVE) { ']' } else { ')' };
    Some(format!("{open}{lower},{upper}{close}"))
}

fn array<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
    bytes.try_into().ok()
}

fn hexadecimal(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().take(64).map(|byte| format!("{byte:02x}")).collect();
    format!("\\x{digits}")
}

fn uuid(bytes: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_common_types() {
        assert_eq!(binary(23, 'b', &(-7_i32).to_be_bytes()), "-7");
        assert_eq!(binary(18, 'b', b"\0"), "\\x00");
        assert_eq!(binary(25, 'b', b"\xc3\xa9\xe4b"), "é\\xe4b");
        assert_eq!(binary(600, 'b', &[0xab, 1]), "\\xab01");
        assert_eq!(binary(1082, 'b', &366_i32.to_be_bytes()), "2001-01-01");
        assert_eq!(binary(1184, 'b', &1_500_000_i64.to_be_bytes()), "2000-01-01 00:00:01.5+00");
        assert_eq!(binary(1700, 'b', &[0, 2, 0, 0, 0x40, 0, 0, 2, 0, 1, 0x13, 0x88]), "-1.50");
        assert_eq!(binary(1700, 'b', &[0, 2]), "\\x0002");
        assert_eq!(binary(3904, 'r', b"\x02\0\0\0\x04\0\0\0\x01\0\0\0\x04\0\0\0\x05"), "[1,5)");
        assert_eq!(binary(3904, 'r', b"\x14\0\0\0\x04\0\0\0\x01"), "(1,]");
        let times = b"\x0a\0\0\0\x08\0\0\0\0\0\x0f\x42\x40";
        assert_eq!(binary(3908, 'r', times), "[,\"2000-01-01 00:00:01\")");
        assert_eq!(binary(3912, 'r', b"\x01"), "empty");
        assert_eq!(binary(3904, 'r', b"\x02\0\0\0\x04\0"), "\\x020000000400");
        let id = *b"\x12\x34\x56\x78\x9a\xbc\xde\xf0\x12\x34\x56\x78\x9a\xbc\xde\xf0";
        assert_eq!(uuid(&id), "12345678-9abc-def0-1234-56789abcdef0");
    }
}
