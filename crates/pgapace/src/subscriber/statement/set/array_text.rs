//! Arrays of a row as text, which can be elements of an array parameter.
//!
//! An array cannot be an element of an array, so an array in binary format could be only a parameter of its own, and
//! its row a statement of its own. The text form of the array is an element like other texts (`array_out` in
//! PostgreSQL's `arrayfuncs.c`); elements whose text form depends on settings have none here.

use std::io::Write as _;

use crate::subscriber::oid;

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

/// Days from 1970-01-01 to 2000-01-01, where PostgreSQL's dates begin.
const EPOCH_DAYS: i64 = 10_957;
const MICROSECONDS_OF_DAY: i64 = 86_400_000_000;
/// A numeric with this sign is negative; with one of the others it is no number.
const NUMERIC_NEGATIVE: u16 = 0x4000;
const NUMERIC_NAN: u16 = 0xC000;
const NUMERIC_INFINITY: u16 = 0xD000;
const NUMERIC_MINUS_INFINITY: u16 = 0xF000;
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

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
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

/// `numeric_send` in PostgreSQL's `numeric.c`: digits of base 10000, the weight of the first, the sign, and the number
/// of decimal places.
fn numeric(bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut input = Input(bytes);
    let digits = input.short()?;
    let weight = i32::from(input.short()?.cast_signed());
    let sign = input.short()?;
    let places = i32::from(input.short()?);
    match sign {
        0 => {}
        NUMERIC_NEGATIVE => out.push(b'-'),
        NUMERIC_NAN => out.extend_from_slice(b"NaN"),
        NUMERIC_INFINITY => out.extend_from_slice(b"Infinity"),
        NUMERIC_MINUS_INFINITY => out.extend_from_slice(b"-Infinity"),
        _ => return None,
    }
    if !matches!(sign, 0 | NUMERIC_NEGATIVE) {
        return Some(());
    }
    let mut digits = (0..digits).map(|_| input.short()).collect::<Option<Vec<_>>>()?.into_iter();
    if weight < 0 {
        out.push(b'0');
    }
    for position in 0..=weight {
        let digit = digits.next().unwrap_or(0);
        let _ = if position == 0 { write!(out, "{digit}") } else { write!(out, "{digit:04}") };
    }
    if places > 0 {
        out.push(b'.');
        let point = out.len();
        // Groups of zeros between the point and the first digit.
        for _ in weight..-1 {
            out.extend_from_slice(b"0000");
        }
        let end = point + usize::try_from(places).ok()?;
        while out.len() < end {
            let _ = write!(out, "{:04}", digits.next().unwrap_or(0));
        }
        out.truncate(end);
    }
    Some(())
}

fn date(out: &mut Vec<u8>, days: i32) {
    match days {
        i32::MIN => out.extend_from_slice(b"-infinity"),
        i32::MAX => out.extend_from_slice(b"infinity"),
        _ => {
            let before_christ = day(out, days.into());
            out.extend_from_slice(before_christ.as_bytes());
        }
    }
}

fn timestamp(out: &mut Vec<u8>, microseconds: i64, zone: &str) {
    match microseconds {
        i64::MIN => out.extend_from_slice(b"-infinity"),
        i64::MAX => out.extend_from_slice(b"infinity"),
        _ => {
            let before_christ = day(out, microseconds.div_euclid(MICROSECONDS_OF_DAY));
            let time = microseconds.rem_euclid(MICROSECONDS_OF_DAY);
            let (seconds, fraction) = (time / 1_000_000, time % 1_000_000);
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            let seconds = seconds % 60;
            let _ = write!(
                out,
                " {hours:02}:{minutes:02}:{seconds:02}.{fraction:06}{zone}{before_christ}"
            );
        }
    }
}

/// Appends year, month and day of a day since 2000-01-01; returns what stands behind a year before 1 AD.
///
/// Years are counted from March, so that the day of a leap year is the last: then a month begins after a number of
/// days that is linear in the number of the month.
fn day(out: &mut Vec<u8>, days: i64) -> &'static str {
    const DAYS_OF_ERA: i64 = 146_097;
    // From 0000-03-01.
    let days = days + EPOCH_DAYS + 719_468;
    let (era, day_of_era) = (days.div_euclid(DAYS_OF_ERA), days.rem_euclid(DAYS_OF_ERA));
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (shown, before_christ) = if year > 0 { (year, "") } else { (1 - year, " BC") };
    let _ = write!(out, "{shown:04}-{month:02}-{day:02}");
    before_christ
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

    #[test]
    fn days_of_the_calendar() {
        for (days, expected) in [
            (0, "2000-01-01"),
            (-1, "1999-12-31"),
            (59, "2000-02-29"),
            (-730_119, "0001-01-01"),
            (-730_120, "0001-12-31 BC"),
            (2_145_031_948, "5874897-12-31"),
            (i32::MAX, "infinity"),
            (i32::MIN, "-infinity"),
        ] {
            let mut out = Vec::new();
            date(&mut out, days);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }
}
