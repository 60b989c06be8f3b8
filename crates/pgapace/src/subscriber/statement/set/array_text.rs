//! Arrays of a row as text, which can be elements of an array parameter.
//!
//! An array cannot be an element of an array, so an array in binary format could be only a parameter of its own, and
//! its row a statement of its own. The text form of the array is an element like other texts (`array_out` in
//! PostgreSQL's `arrayfuncs.c`); elements whose text form depends on settings have none here.

use std::io::Write as _;

use crate::subscriber::oid;
use crate::subscriber::value_text::{date, numeric, timestamp};

/// The type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Bool,
    Int2,
    Int4,
    Int8,
    Oid,
    Float4,
    Float8,
    Numeric,
    Uuid,
    Bytea,
    Date,
    Timestamp,
    TimestampTz,
    /// Text in the binary format too.
    Text,
    /// Text behind a version number.
    Jsonb,
}

/// The dimensions of an array (`MAXDIM` in PostgreSQL's `array.h`).
const MAX_DIMENSIONS: usize = 6;

impl Element {
    /// The elements of an array type; `None` if their text form is not known here.
    pub(super) fn of(array_type: u32) -> Option<Self> {
        Some(match array_type {
            oid::BOOL_ARRAY => Self::Bool,
            oid::INT2_ARRAY => Self::Int2,
            oid::INT4_ARRAY => Self::Int4,
            oid::INT8_ARRAY => Self::Int8,
            oid::OID_ARRAY => Self::Oid,
            oid::FLOAT4_ARRAY => Self::Float4,
            oid::FLOAT8_ARRAY => Self::Float8,
            oid::NUMERIC_ARRAY => Self::Numeric,
            oid::UUID_ARRAY => Self::Uuid,
            oid::BYTEA_ARRAY => Self::Bytea,
            oid::DATE_ARRAY => Self::Date,
            oid::TIMESTAMP_ARRAY => Self::Timestamp,
            oid::TIMESTAMPTZ_ARRAY => Self::TimestampTz,
            oid::TEXT_ARRAY
            | oid::VARCHAR_ARRAY
            | oid::BPCHAR_ARRAY
            | oid::NAME_ARRAY
            | oid::JSON_ARRAY => Self::Text,
            oid::JSONB_ARRAY => Self::Jsonb,
            _ => return None,
        })
    }

    /// Appends the text form of a value that is not NULL; `None` if its bytes are not of this type.
    fn write(self, bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
        match self {
            Self::Bool => out.push(if *bytes.first()? == 0 { b'f' } else { b't' }),
            Self::Int2 => print(out, i16::from_be_bytes(bytes.try_into().ok()?)),
            Self::Int4 => print(out, i32::from_be_bytes(bytes.try_into().ok()?)),
            Self::Int8 => print(out, i64::from_be_bytes(bytes.try_into().ok()?)),
            Self::Oid => print(out, u32::from_be_bytes(bytes.try_into().ok()?)),
            Self::Float4 => float(out, f32::from_be_bytes(bytes.try_into().ok()?)),
            Self::Float8 => float(out, f64::from_be_bytes(bytes.try_into().ok()?)),
            Self::Numeric => numeric(bytes, out)?,
            Self::Uuid => hex(bytes, out),
            Self::Bytea => {
                out.extend_from_slice(br"\\x");
                hex(bytes, out);
            }
            Self::Date => date(out, i32::from_be_bytes(bytes.try_into().ok()?)),
            Self::Timestamp => timestamp(out, i64::from_be_bytes(bytes.try_into().ok()?), ""),
            Self::TimestampTz => timestamp(out, i64::from_be_bytes(bytes.try_into().ok()?), "+00"),
            Self::Text => escaped(bytes, out),
            Self::Jsonb => {
                let (version, text) = bytes.split_first()?;
                if *version != 1 {
                    return None;
                }
                escaped(text, out);
            }
        }
        Some(())
    }
}

/// Replaces `out` by the text form of a binary array; `None` if it is not an array of such elements, or if the text has
/// more bytes than `room`.
pub(super) fn array(element: Element, bytes: &[u8], room: usize, out: &mut Vec<u8>) -> Option<()> {
    out.clear();
    if bytes.len() > room {
        return None;
    }
    let mut input = Input(bytes);
    let dimensions = usize::try_from(input.int()?).ok()?;
    // Flags and the type of the elements.
    input.take(8)?;
    if dimensions == 0 {
        out.extend_from_slice(b"{}");
        return Some(());
    }
    if dimensions > MAX_DIMENSIONS {
        return None;
    }
    let mut lengths = [0_usize; MAX_DIMENSIONS];
    let mut bounds = [1_i32; MAX_DIMENSIONS];
    for (length, bound) in lengths.iter_mut().zip(&mut bounds).take(dimensions) {
        *length = usize::try_from(input.int()?).ok()?;
        *bound = input.int()?;
    }
    let lengths = &lengths[..dimensions];
    if bounds.iter().any(|bound| *bound != 1) {
        for (length, bound) in lengths.iter().zip(bounds) {
            let last = i64::from(bound) + i64::try_from(*length).ok()? - 1;
            write!(out, "[{bound}:{last}]").ok()?;
        }
        out.push(b'=');
    }
    write_dimension(element, lengths, &mut input, room, out)?;
    input.0.is_empty().then_some(())
}

fn write_dimension(
    element: Element,
    lengths: &[usize],
    input: &mut Input<'_>,
    room: usize,
    out: &mut Vec<u8>,
) -> Option<()> {
    let Some((length, inner)) = lengths.split_first() else {
        let Ok(length) = usize::try_from(input.int()?) else {
            out.extend_from_slice(b"NULL");
            return Some(());
        };
        out.push(b'"');
        element.write(input.take(length)?, out)?;
        out.push(b'"');
        // A single element is at most 16 MB larger than its bytes.
        return (out.len() <= room).then_some(());
    };
    out.push(b'{');
    for number in 0..*length {
        if number > 0 {
            out.push(b',');
        }
        write_dimension(element, inner, input, room, out)?;
    }
    out.push(b'}');
    Some(())
}

/// The bytes that are not read yet.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn int(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }
}

fn print(out: &mut Vec<u8>, value: impl std::fmt::Display) {
    // A Vec takes everything.
    let _ = write!(out, "{value}");
}

/// The shortest digits that give the same number again. The names of infinity and NaN are PostgreSQL's too.
fn float(out: &mut Vec<u8>, value: impl std::fmt::LowerExp) {
    let _ = write!(out, "{value:e}");
}

fn hex(bytes: &[u8], out: &mut Vec<u8>) {
    for byte in bytes {
        let _ = write!(out, "{byte:02x}");
    }
}

fn escaped(text: &[u8], out: &mut Vec<u8>) {
    for byte in text {
        if matches!(byte, b'"' | b'\\') {
            out.push(b'\\');
        }
        out.push(*byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary(dimensions: &[(i32, i32)], elements: &[Option<&[u8]>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut int = |value: i32| bytes.extend_from_slice(&value.to_be_bytes());
        int(i32::try_from(dimensions.len()).unwrap());
        int(0);
        int(25);
        for (length, bound) in dimensions {
            int(*length);
            int(*bound);
        }
        for element in elements {
            let length = element.map_or(-1, |bytes| i32::try_from(bytes.len()).unwrap());
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(element.unwrap_or_default());
        }
        bytes
    }

    fn text(element: Element, bytes: &[u8]) -> Option<String> {
        let mut out = b"old".to_vec();
        array(element, bytes, 1 << 10, &mut out)?;
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn arrays_as_the_server_writes_them() {
        let empty = binary(&[], &[]);
        assert_eq!(text(Element::Text, &empty).as_deref(), Some("{}"));
        let texts: [Option<&[u8]>; 4] = [Some(b"a,b"), None, Some(b"NULL"), Some(br#"\""#)];
        let one = binary(&[(4, 1)], &texts);
        let expected = r#"{"a,b",NULL,"NULL","\\\""}"#;
        assert_eq!(text(Element::Text, &one).as_deref(), Some(expected));
        let two = binary(&[(2, 0), (2, 1)], &texts);
        let expected = r#"[0:1][1:2]={{"a,b",NULL},{"NULL","\\\""}}"#;
        assert_eq!(text(Element::Text, &two).as_deref(), Some(expected));
    }

    #[test]
    fn what_is_no_such_array_has_no_text() {
        let numbers = binary(&[(1, 1)], &[Some(&[0, 0, 7])]);
        assert_eq!(text(Element::Int4, &numbers), None);
        let mut longer = binary(&[(1, 1)], &[Some(&[0, 7])]);
        assert_eq!(text(Element::Int2, &longer).as_deref(), Some(r#"{"7"}"#));
        longer.push(0);
        assert_eq!(text(Element::Int2, &longer), None);
        assert_eq!(text(Element::Int2, &longer[..10]), None);
        let dimensions = [(1, 1); MAX_DIMENSIONS + 1];
        assert_eq!(text(Element::Text, &binary(&dimensions, &[Some(b"a")])), None);
        let quotes = [b'"'; 600];
        assert_eq!(text(Element::Text, &binary(&[(1, 1)], &[Some(&quotes)])), None, "too large");
        let jsonb = binary(&[(1, 1)], &[Some(b"\x02{}")]);
        assert_eq!(text(Element::Jsonb, &jsonb), None);
    }
}
