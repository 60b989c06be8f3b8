//! The rate limit of `--max-rate`. Pure: the caller says what time it is, and sleeps.

use std::str::FromStr;
use std::time::Duration;

/// The limit of `--max-rate`, in rows or bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rate {
    RowsPerSecond(u64),
    BytesPerSecond(u64),
}

impl FromStr for Rate {
    type Err = String;

    /// `50000` rows, or `20MB`, each per second. `/s` may follow.
    fn from_str(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, u64); 4] =
            [("kB", 1 << 10), ("MB", 1 << 20), ("GB", 1 << 30), ("B", 1)];
        let wrong =
            || format!("{text:?} is not a rate: write rows per second (50000) or bytes (20MB)");
        let amount = text.trim().trim_end_matches("/s");
        let unit = UNITS.iter().find(|(name, _)| amount.ends_with(name));
        let (number, factor) = match unit {
            Some((name, factor)) => (amount.trim_end_matches(name), Some(*factor)),
            None => (amount, None),
        };
        let number: u64 = number.trim().parse().ok().filter(|n| *n > 0).ok_or_else(wrong)?;
        match factor {
            Some(factor) => number.checked_mul(factor).map(Self::BytesPerSecond).ok_or_else(wrong),
            None => Ok(Self::RowsPerSecond(number)),
        }
    }
}

/// Work that was compared so far, against the limit.
#[derive(Debug)]
pub(crate) struct Pace {
    rate: Option<Rate>,
    /// Work up to now is paid for by time up to this moment since the start.
    paid_until: Duration,
}

impl Pace {
    pub(crate) fn new(rate: Option<Rate>) -> Self {
        Self { rate, paid_until: Duration::ZERO }
    }

    /// Notes work that began and ended then, and returns how long to wait before the next. Time in
    /// which less was done than allowed is not made up for.
    pub(crate) fn wait_after(
        &mut self,
        began: Duration,
        ended: Duration,
        rows: u64,
        bytes: u64,
    ) -> Duration {
        let (amount, limit) = match self.rate {
            None => return Duration::ZERO,
            Some(Rate::RowsPerSecond(limit)) => (rows, limit),
            Some(Rate::BytesPerSecond(limit)) => (bytes, limit),
        };
        let cost = Duration::from_secs_f64(amount as f64 / limit as f64);
        self.paid_until = self.paid_until.max(began) + cost;
        self.paid_until.saturating_sub(ended)
    }
}

/// A share of rows, as `5%`.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let wrong = || format!("{text:?} is not a share between 0% and 100%, such as 5%");
    let number = text.trim().strip_suffix('%').ok_or_else(wrong)?;
    let percent: f64 = number.trim().parse().map_err(|_| wrong())?;
    let valid = percent > 0.0 && percent <= 100.0;
    valid.then_some(percent / 100.0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_shares() {
        assert_eq!("50000".parse(), Ok(Rate::RowsPerSecond(50_000)));
        assert_eq!("20MB".parse(), Ok(Rate::BytesPerSecond(20 << 20)));
        assert_eq!("1 GB/s".parse(), Ok(Rate::BytesPerSecond(1 << 30)));
        for wrong in
            ["", "0", "-1", "fast", "20mb", "MB", "99999999999999999999", "9999999999999GB"]
        {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
        assert_eq!(share("5%"), Ok(0.05));
        assert_eq!(share("100 %"), Ok(1.0));
        for wrong in ["5", "0%", "101%", "x%", "NaN%", "-5%"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn work_is_paid_for_with_time() {
        let seconds = Duration::from_secs_f64;
        let mut pace = Pace::new(Some(Rate::RowsPerSecond(100)));
        assert_eq!(pace.wait_after(seconds(0.0), seconds(0.1), 100, 9), seconds(0.9));
        // Two session pairs share the rate.
        assert_eq!(pace.wait_after(seconds(0.0), seconds(0.2), 100, 9), seconds(1.8));
        // A pause is not made up for.
        assert_eq!(pace.wait_after(seconds(10.0), seconds(10.5), 100, 9), seconds(0.5));
        let mut free = Pace::new(None);
        assert_eq!(free.wait_after(seconds(0.0), seconds(0.0), 1 << 40, 1 << 40), Duration::ZERO);
    }
}
