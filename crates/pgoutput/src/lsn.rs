//! Log sequence numbers.

use std::fmt;
use std::str::FromStr;

/// A log sequence number: a position in the WAL, in bytes from its beginning (`XLogRecPtr` in
/// `src/include/access/xlogdefs.h`).
///
/// Printed and parsed as PostgreSQL does, `16/B374D848`: the upper and lower half in hexadecimal.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub u64);

impl Lsn {
    /// `InvalidXLogRecPtr`: no position. No record starts at byte 0.
    pub const INVALID: Self = Self(0);

    /// The LSN at `bytes` bytes from the beginning of the WAL.
    #[must_use]
    pub const fn from_u64(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The distance from the beginning of the WAL in bytes.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Whether this is a valid LSN.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.0 != 0
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// Printed as an LSN, not as a decimal number.
impl fmt::Debug for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lsn({self})")
    }
}

/// A text is not an LSN.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an LSN: expected two hexadecimal numbers such as 16/B374D848")]
pub struct ParseLsnError {
    text: String,
}

/// Parses as `pg_lsn_in` does (`src/backend/utils/adt/pg_lsn.c`): one to eight hexadecimal digits
/// of either case on both sides of a slash, and nothing else.
impl FromStr for Lsn {
    type Err = ParseLsnError;

    fn from_str(text: &str) -> Result<Self, ParseLsnError> {
        text.split_once('/')
            .and_then(|(upper, lower)| Some((half(upper)?, half(lower)?)))
            .map(|(upper, lower)| Self(u64::from(upper) << 32 | u64::from(lower)))
            .ok_or_else(|| ParseLsnError { text: text.to_owned() })
    }
}

fn half(digits: &str) -> Option<u32> {
    // `from_str_radix` alone would accept a leading plus sign.
    let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    (plain && digits.len() <= 8).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lsns_are_printed_as_by_postgresql() {
        assert_eq!(Lsn(0x16_B374_D848).to_string(), "16/B374D848");
        assert_eq!(Lsn::INVALID.to_string(), "0/0");
        assert_eq!(Lsn(u64::MAX).to_string(), "FFFFFFFF/FFFFFFFF");
        assert_eq!(format!("{:?}", Lsn(0x16B_3748)), "Lsn(0/16B3748)");
    }

    #[test]
    fn lsns_are_parsed_in_either_case_and_with_leading_zeros() {
        assert_eq!("16/b374d848".parse(), Ok(Lsn(0x16_B374_D848)));
        assert_eq!("0/016B3748".parse(), Ok(Lsn(0x16B_3748)));
        assert_eq!("FFFFFFFF/FFFFFFFF".parse(), Ok(Lsn(u64::MAX)));
    }

    #[test]
    fn other_text_is_rejected() {
        for text in
            ["", "/", "0", "1/", "/1", "0x1/2", "+1/2", "1/2/3", "1/123456789", " 1/2", "g/1"]
        {
            assert_eq!(text.parse::<Lsn>(), Err(ParseLsnError { text: text.to_owned() }));
        }
    }

    #[test]
    fn only_zero_is_invalid() {
        assert!(!Lsn::INVALID.is_valid());
        assert!(Lsn::from_u64(1).is_valid());
        assert_eq!(Lsn::from_u64(7).as_u64(), 7);
        assert_eq!(Lsn::default(), Lsn::INVALID);
    }
}
