//! Timestamps.

/// A timestamp: microseconds since 2000-01-01 00:00:00 UTC, negative before (`TimestampTz` in
/// `src/include/datatype/timestamp.h`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub i64);

/// Microseconds from 1970-01-01 to 2000-01-01: 10957 days.
const UNIX_TO_POSTGRES_MICROS: i64 = 10_957 * 86_400 * 1_000_000;

impl Timestamp {
    /// Converts from microseconds since 1970-01-01 00:00:00 UTC. Saturates at the ends of the range
    /// of some 292,000 years.
    #[must_use]
    pub const fn from_unix_micros(micros: i64) -> Self {
        Self(micros.saturating_sub(UNIX_TO_POSTGRES_MICROS))
    }

    /// Converts to microseconds since 1970-01-01 00:00:00 UTC. Saturates at the ends of the range.
    #[must_use]
    pub const fn to_unix_micros(self) -> i64 {
        self.0.saturating_add(UNIX_TO_POSTGRES_MICROS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_is_the_first_of_january_2000() {
        assert_eq!(Timestamp(0).to_unix_micros(), 946_684_800_000_000);
        assert_eq!(Timestamp::from_unix_micros(946_684_800_000_001), Timestamp(1));
        assert_eq!(Timestamp::from_unix_micros(0), Timestamp(-946_684_800_000_000));
    }

    #[test]
    fn conversions_saturate_at_the_ends_of_the_range() {
        assert_eq!(Timestamp(i64::MAX).to_unix_micros(), i64::MAX);
        assert_eq!(Timestamp::from_unix_micros(i64::MIN), Timestamp(i64::MIN));
    }
}
