//! Times in the flags of verbs, with the units of settings; a number without one counts seconds.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::config::setting::{MOST, Unit};

/// The longest time of PostgreSQL's settings. A clock cannot count to all longer ones.
pub(crate) const LONGEST: u64 = MOST;

/// Reads a time between these numbers of seconds.
pub(crate) fn time(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync {
    move |text| {
        let time = Duration::from_millis(Unit::Seconds.amount(text)?);
        let (least, most) = (*range.start(), *range.end());
        match (Duration::from_secs(least)..=Duration::from_secs(most)).contains(&time) {
            true => Ok(time),
            false => Err(format!("must be between {least}s and {most}s")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{LONGEST, time};

    #[test]
    fn a_time_has_a_unit_or_counts_seconds() {
        let read = time(0..=LONGEST);
        for (text, milliseconds) in
            [("20", 20_000), ("20s", 20_000), ("500ms", 500), ("2min", 120_000), ("0", 0)]
        {
            assert_eq!(read(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "s", "-1", "1.5", "20 parsecs", "20S", "99999999999999999999", "36500d"] {
            assert!(read(text).is_err(), "{text}");
        }
        assert_eq!(time(1..=30)("500ms"), Err("must be between 1s and 30s".to_owned()));
    }
}
