//! Canonical forms of key values: values that are equal on the subscriber have equal bytes.
//!
//! Equal bytes are not the same as equal values: numeric 1.0 and 1.00, float -0 and 0, and char(n)
//! padding are equal by their operators. The type of the subscriber's column determines the form of
//! each key column. A type of another equality has [`KeyForm::Bytes`] where values that are taken for
//! different ones are noticed, and no form elsewhere.

use pgoutput::Column;

/// The rule that brings values of a key column into a canonical form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeyForm {
    /// Values are equal if and only if their bytes are: integers of one type, oid, boolean, uuid,
    /// date, timestamps, bytea, enums, text under a deterministic collation and others. Or values are
    /// equal if their bytes are, and equal ones with other bytes are noticed.
    Bytes,
    /// int2, int4 and int8, compared by value: their binary formats differ in length.
    Integer,
    /// char(n), without trailing blanks.
    Blanks,
    /// numeric, in text or binary, without its scale.
    Numeric,
    /// float4, in text or binary. -0 equals 0, and NaN equals NaN.
    Float4,
    /// float8, with the same rules.
    Float8,
}

impl KeyForm {
    /// Appends the canonical form of a value. Returns false, and appends nothing, if the value has
    /// no form: it is NULL, was not sent, is not spelled as the output function of its type
    /// spells it, or is too large for the memory that the system allows.
    ///
    /// A value has the same form in text and binary, except under [`Self::Bytes`], where the form
    /// ends with the format. There the two formats never compare equal. That is correct, because
    /// one connection sends a column in one format only.
    #[inline]
    pub fn append(self, value: Column<'_>, out: &mut Vec<u8>) -> bool {
        match (self, value) {
            (_, Column::Null | Column::Unchanged) => false,
            (Self::Bytes, Column::Text(bytes)) => append_bytes(bytes, b"t", out),
            (Self::Bytes, Column::Binary(bytes)) => append_bytes(bytes, b"b", out),
            (Self::Integer, value) => integer(value).is_some_and(|value| {
                out.extend_from_slice(&value.to_be_bytes());
                true
            }),
            (Self::Blanks, Column::Text(bytes) | Column::Binary(bytes)) => {
                let end = bytes.iter().rposition(|&byte| byte != b' ').map_or(0, |last| last + 1);
                append_bytes(&bytes[..end], b"", out)
            }
            (Self::Numeric, value) => {
                let start = out.len();
                let valid = append_numeric(value, out).is_some();
                if !valid {
                    out.truncate(start);
                }
                valid
            }
            (Self::Float4, value) => float4(value).is_some_and(|value| {
                out.extend_from_slice(&value.to_bits().to_be_bytes());
                true
            }),
            (Self::Float8, value) => float8(value).is_some_and(|value| {
                out.extend_from_slice(&value.to_bits().to_be_bytes());
                true
            }),
        }
    }
}

/// Returns false, with nothing appended, if the system refuses the memory.
#[inline]
fn append_bytes(bytes: &[u8], format: &[u8], out: &mut Vec<u8>) -> bool {
    let has_room = out.try_reserve(bytes.len() + format.len()).is_ok();
    if has_room {
        out.extend_from_slice(bytes);
        out.extend_from_slice(format);
    }
    has_room
}

/// Parses an integer in text or binary.
#[inline]
fn integer(value: Column<'_>) -> Option<i64> {
    match value {
        Column::Text(text) => {
            let (negative, digits) = match text.split_first()? {
                (b'-', rest) => (true, rest),
                _ => (false, text),
            };
            if digits.is_empty() || digits[0] == b'0' && text.len() > 1 {
                return None;
            }
            digits.iter().try_fold(0_i64, |number, &digit| {
                let digit = digit.is_ascii_digit().then(|| i64::from(digit - b'0'))?;
                let shifted = number.checked_mul(10)?;
                if negative { shifted.checked_sub(digit) } else { shifted.checked_add(digit) }
            })
        }
        Column::Binary(bytes) => match *bytes {
            [a, b] => Some(i16::from_be_bytes([a, b]).into()),
            [a, b, c, d] => Some(i32::from_be_bytes([a, b, c, d]).into()),
            _ => Some(i64::from_be_bytes(bytes.try_into().ok()?)),
        },
        Column::Null | Column::Unchanged => None,
    }
}

/// First byte of the form of a numeric. The form of a finite nonzero value continues with the
/// weight and the base-10000 digits, without zeros at either end.
mod numeric {
    pub(super) const MINUS_INFINITY: u8 = 0;
    pub(super) const NEGATIVE: u8 = 1;
    pub(super) const ZERO: u8 = 2;
    pub(super) const POSITIVE: u8 = 3;
    pub(super) const INFINITY: u8 = 4;
    pub(super) const NAN: u8 = 5;
}

/// Appends the form of a numeric. On `None` it may leave appended bytes.
fn append_numeric(value: Column<'_>, out: &mut Vec<u8>) -> Option<()> {
    match value {
        Column::Text(text) => append_numeric_text(text, out),
        Column::Binary(bytes) => append_numeric_binary(bytes, out),
        Column::Null | Column::Unchanged => None,
    }
}

/// Parses the output of `numeric_out`: `-12.3400`, `0.5`, `NaN`, `Infinity`; no exponent, no plus
/// sign.
fn append_numeric_text(text: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let special = match text {
        b"NaN" => Some(numeric::NAN),
        b"Infinity" => Some(numeric::INFINITY),
        b"-Infinity" => Some(numeric::MINUS_INFINITY),
        _ => None,
    };
    if let Some(special) = special {
        out.push(special);
        return Some(());
    }
    let (negative, text) = match text.split_first()? {
        (b'-', rest) => (true, rest),
        _ => (false, text),
    };
    let (integer, fraction) = match text.iter().position(|&byte| byte == b'.') {
        Some(point) => (&text[..point], Some(&text[point + 1..])),
        None => (text, None),
    };
    let leading_zero = integer.len() > 1 && integer[0] == b'0';
    if integer.is_empty() || leading_zero || fraction.is_some_and(<[u8]>::is_empty) {
        return None;
    }
    let weight = i32::try_from(integer.len().div_ceil(4)).ok()? - 1;
    let mut digits = Digits::new(negative, weight, out);
    let (first, rest) = integer.split_at((integer.len() - 1) % 4 + 1);
    digits.push(base_10000(first)?);
    for group in rest.chunks(4) {
        digits.push(base_10000(group)?);
    }
    for group in fraction.unwrap_or_default().chunks(4) {
        let missing = u32::try_from(4 - group.len()).ok()?;
        digits.push(base_10000(group)? * 10_u16.pow(missing));
    }
    digits.finish()
}

/// Parses up to four decimal digits.
fn base_10000(digits: &[u8]) -> Option<u16> {
    digits.iter().try_fold(0, |number, &digit| {
        digit.is_ascii_digit().then(|| number * 10 + u16::from(digit - b'0'))
    })
}

/// Parses the output of `numeric_send`: number of digits, weight, sign and display scale, two bytes
/// each, then the digits.
fn append_numeric_binary(bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (header, digits) = bytes.split_first_chunk::<8>()?;
    let [count, weight, sign, _scale] =
        [0, 2, 4, 6].map(|at| u16::from_be_bytes([header[at], header[at + 1]]));
    if digits.len() != usize::from(count) * 2 {
        return None;
    }
    let special = match sign {
        0x0000 | 0x4000 => None,
        0xC000 => Some(numeric::NAN),
        0xD000 => Some(numeric::INFINITY),
        0xF000 => Some(numeric::MINUS_INFINITY),
        _ => return None,
    };
    if let Some(special) = special {
        out.push(special);
        return (count == 0).then_some(());
    }
    let mut form = Digits::new(sign == 0x4000, i32::from(weight.cast_signed()), out);
    for digit in digits.chunks_exact(2) {
        let digit = u16::from_be_bytes([digit[0], digit[1]]);
        if digit > 9999 {
            return None;
        }
        form.push(digit);
    }
    form.finish()
}

/// Writes the form of a finite numeric digit by digit.
struct Digits<'o> {
    out: &'o mut Vec<u8>,
    start: usize,
    negative: bool,
    /// Power of 10000 of the first significant digit; of the next digit while all were zero.
    weight: i32,
}

impl<'o> Digits<'o> {
    fn new(negative: bool, weight: i32, out: &'o mut Vec<u8>) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0; 5]);
        Self { out, start, negative, weight }
    }

    fn push(&mut self, digit: u16) {
        if digit == 0 && self.out.len() == self.start + 5 {
            self.weight -= 1;
        } else {
            self.out.extend_from_slice(&digit.to_be_bytes());
        }
    }

    fn finish(self) -> Option<()> {
        let head = self.start + 5;
        while self.out.len() > head && self.out.ends_with(&[0, 0]) {
            self.out.truncate(self.out.len() - 2);
        }
        if self.out.len() == head {
            self.out.truncate(self.start);
            self.out.push(numeric::ZERO);
            return Some(());
        }
        self.out[self.start] = if self.negative { numeric::NEGATIVE } else { numeric::POSITIVE };
        self.out[self.start + 1..head].copy_from_slice(&self.weight.to_be_bytes());
        Some(())
    }
}

fn float4(value: Column<'_>) -> Option<f32> {
    let value = match value {
        Column::Text(text) => parse_float(text, f32::is_finite)?,
        Column::Binary(bytes) => f32::from_be_bytes(bytes.try_into().ok()?),
        Column::Null | Column::Unchanged => return None,
    };
    // Adding 0 turns -0 into 0.
    Some(if value.is_nan() { f32::NAN } else { value + 0.0 })
}

fn float8(value: Column<'_>) -> Option<f64> {
    let value = match value {
        Column::Text(text) => parse_float(text, f64::is_finite)?,
        Column::Binary(bytes) => f64::from_be_bytes(bytes.try_into().ok()?),
        Column::Null | Column::Unchanged => return None,
    };
    Some(if value.is_nan() { f64::NAN } else { value + 0.0 })
}

/// Parses the output of `float4out` or `float8out`. Rejects a number out of range, as PostgreSQL
/// does.
fn parse_float<F: std::str::FromStr + Copy>(text: &[u8], is_finite: fn(F) -> bool) -> Option<F> {
    let text = str::from_utf8(text).ok()?;
    if matches!(text, "NaN" | "Infinity" | "-Infinity") {
        return text.parse().ok();
    }
    let numeric = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e'));
    text.parse().ok().filter(|&value| numeric && is_finite(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(form: KeyForm, value: Column<'_>) -> Option<Vec<u8>> {
        let mut out = b"before".to_vec();
        if !form.append(value, &mut out) {
            assert_eq!(out, b"before", "nothing is appended without a form");
            return None;
        }
        Some(out.split_off(b"before".len()))
    }

    fn text(kind: KeyForm, value: &str) -> Option<Vec<u8>> {
        form(kind, Column::Text(value.as_bytes()))
    }

    /// A numeric as `numeric_send` encodes it.
    fn sent(weight: i16, sign: u16, scale: u16, digits: &[u16]) -> Vec<u8> {
        let count = u16::try_from(digits.len()).unwrap();
        let head = [count, weight.cast_unsigned(), sign, scale];
        head.iter().chain(digits).flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn null_and_unsent_values_have_no_form() {
        for kind in [
            KeyForm::Bytes,
            KeyForm::Integer,
            KeyForm::Blanks,
            KeyForm::Numeric,
            KeyForm::Float4,
            KeyForm::Float8,
        ] {
            assert_eq!(form(kind, Column::Null), None);
            assert_eq!(form(kind, Column::Unchanged), None);
        }
    }

    #[test]
    fn text_and_binary_bytes_are_never_equal() {
        assert_eq!(text(KeyForm::Bytes, "1"), text(KeyForm::Bytes, "1"));
        assert_ne!(text(KeyForm::Bytes, "1"), text(KeyForm::Bytes, "01"));
        assert_ne!(text(KeyForm::Bytes, "1"), form(KeyForm::Bytes, Column::Binary(b"1")));
    }

    #[test]
    fn integers_are_equal_by_value() {
        let binary = |bytes: &[u8]| form(KeyForm::Integer, Column::Binary(bytes));
        for (spelling, value) in [("0", 0), ("7", 7), ("-1", -1), ("-32768", -32768_i16)] {
            let expected = Some(i64::from(value).to_be_bytes().to_vec());
            assert_eq!(text(KeyForm::Integer, spelling), expected);
            assert_eq!(binary(&value.to_be_bytes()), expected);
            assert_eq!(binary(&i32::from(value).to_be_bytes()), expected);
            assert_eq!(binary(&i64::from(value).to_be_bytes()), expected);
        }
        for value in [i64::MIN, i64::MAX] {
            assert!(text(KeyForm::Integer, &value.to_string()).is_some());
        }
        for spelling in ["", "-", "+1", "01", "-0", "1.0", " 1", "1e3", "9223372036854775808"] {
            assert_eq!(text(KeyForm::Integer, spelling), None, "{spelling:?}");
        }
        assert_eq!(binary(b"abc"), None);
    }

    #[test]
    fn char_ignores_trailing_blanks() {
        assert_eq!(text(KeyForm::Blanks, "ab  "), text(KeyForm::Blanks, "ab"));
        assert_eq!(text(KeyForm::Blanks, "ab"), form(KeyForm::Blanks, Column::Binary(b"ab ")));
        assert_eq!(text(KeyForm::Blanks, "  "), text(KeyForm::Blanks, ""));
        assert_ne!(text(KeyForm::Blanks, " ab"), text(KeyForm::Blanks, "ab"));
        assert_ne!(text(KeyForm::Blanks, "ab\t"), text(KeyForm::Blanks, "ab"));
    }

    #[test]
    fn numeric_ignores_the_scale() {
        let classes: [&[&str]; 12] = [
            &["1", "1.0", "1.0000", "1.00000000"],
            &["0", "0.0", "-0.00"],
            &["10000", "10000.0"],
            &["-12.34", "-12.3400"],
            &["12.34"],
            &["0.00001", "0.000010"],
            &["0.1", "0.1000"],
            &["123456789.987654321"],
            &["100000000"],
            &["NaN"],
            &["Infinity"],
            &["-Infinity"],
        ];
        for (index, class) in classes.iter().enumerate() {
            for spelling in *class {
                let expected = text(KeyForm::Numeric, class[0]);
                assert!(expected.is_some(), "{spelling}");
                assert_eq!(text(KeyForm::Numeric, spelling), expected, "{spelling}");
                for other in &classes[..index] {
                    assert_ne!(text(KeyForm::Numeric, other[0]), expected, "{spelling}");
                }
            }
        }
    }

    #[test]
    fn a_numeric_is_the_same_in_text_and_binary() {
        let cases = [
            ("1.50", sent(0, 0, 2, &[1, 5000])),
            ("-12.3400", sent(0, 0x4000, 4, &[12, 3400])),
            ("0.00", sent(0, 0, 2, &[])),
            ("0.00001", sent(-2, 0, 5, &[1000])),
            ("120000", sent(1, 0, 0, &[12])),
            ("120000", sent(2, 0, 0, &[0, 12, 0])),
            ("123456789", sent(2, 0, 0, &[1, 2345, 6789])),
            ("NaN", sent(0, 0xC000, 0, &[])),
            ("Infinity", sent(0, 0xD000, 0, &[])),
            ("-Infinity", sent(0, 0xF000, 0, &[])),
        ];
        for (spelling, bytes) in cases {
            let binary = form(KeyForm::Numeric, Column::Binary(&bytes));
            assert!(binary.is_some(), "{spelling}");
            assert_eq!(text(KeyForm::Numeric, spelling), binary, "{spelling}");
        }
    }

    #[test]
    fn a_numeric_that_is_not_spelled_as_postgresql_does_has_no_form() {
        for spelling in [
            "", "-", "1e5", " 1", "1 ", "+1", "1.", ".5", "007", "-00", "1.2.3", "nan", "inf",
            "--1", "0x10", "1_000",
        ] {
            assert_eq!(text(KeyForm::Numeric, spelling), None, "{spelling:?}");
        }
        for bytes in [
            b"\0\0\0\x01".to_vec(),
            sent(0, 0x8000, 0, &[1]),
            sent(0, 0, 0, &[10000]),
            sent(0, 0xC000, 0, &[1]),
            [sent(0, 0, 0, &[1]), vec![0]].concat(),
        ] {
            assert_eq!(form(KeyForm::Numeric, Column::Binary(&bytes)), None, "{bytes:?}");
        }
    }

    #[test]
    fn floats_are_equal_by_value_in_either_format() {
        for kind in [KeyForm::Float4, KeyForm::Float8] {
            for (one, other) in
                [("0", "-0"), ("1", "1.0"), ("1e+20", "100000000000000000000"), ("NaN", "NaN")]
            {
                assert!(text(kind, one).is_some());
                assert_eq!(text(kind, one), text(kind, other), "{one} {other}");
            }
            assert_ne!(text(kind, "Infinity"), text(kind, "-Infinity"));
            assert_ne!(text(kind, "0.1"), text(kind, "0.2"));
            for spelling in ["", "inf", "nan", "+Infinity", "1e999", " 1", "1f"] {
                assert_eq!(text(kind, spelling), None, "{spelling:?}");
            }
            assert_eq!(form(kind, Column::Binary(b"\0\0\0")), None);
        }
        for (spelling, value) in [("0.1", 0.1_f32), ("0", -0.0), ("NaN", -f32::NAN)] {
            let bytes = value.to_be_bytes();
            let binary = form(KeyForm::Float4, Column::Binary(&bytes));
            assert_eq!(text(KeyForm::Float4, spelling), binary);
        }
        for (spelling, value) in [("0.1", 0.1_f64), ("0", -0.0), ("NaN", -f64::NAN)] {
            let bytes = value.to_be_bytes();
            let binary = form(KeyForm::Float8, Column::Binary(&bytes));
            assert_eq!(text(KeyForm::Float8, spelling), binary);
        }
    }
}
