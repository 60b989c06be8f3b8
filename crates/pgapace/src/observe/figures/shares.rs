//! Shares of the time of threads, by reason of waiting. They add up to 100 %.

use std::time::Duration;

use crate::subscriber::state::statistics::WaitTimes;

/// The reason of the time in which a thread does not wait.
pub(crate) const BUSY: &str = "busy";

/// Shares of `elapsed` in percent, by reason; the rest is [`BUSY`]. They are rounded to a tenth, and add up
/// to 100 exactly. Reasons without time are left out.
pub(crate) fn shares(waits: &WaitTimes, elapsed: Duration) -> Vec<(&'static str, f64)> {
    let waited: Vec<_> = waits.named().into_iter().filter(|(_, time)| !time.is_zero()).collect();
    let sum: Duration = waited.iter().map(|(_, time)| *time).sum();
    // Waits and elapsed time are read one after the other.
    let elapsed = elapsed.max(sum);
    if elapsed.is_zero() {
        return Vec::new();
    }
    let mut parts = waited;
    parts.push((BUSY, elapsed - sum));
    let exact = parts.iter().map(|(_, time)| time.as_secs_f64() / elapsed.as_secs_f64() * 1000.0);
    let exact: Vec<f64> = exact.collect();
    let mut tenths: Vec<u32> = exact.iter().map(|share| whole(*share)).collect();
    // The tenths that rounding down has left over go to the largest remainders.
    let left = 1000_u32.saturating_sub(tenths.iter().sum());
    let mut order: Vec<usize> = (0..exact.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    for index in order.into_iter().take(left as usize) {
        tenths[index] += 1;
    }
    let shares = parts.into_iter().zip(tenths);
    shares
        .filter(|(_, tenths)| *tenths > 0)
        .map(|((reason, _), tenths)| (reason, f64::from(tenths) / 10.0))
        .collect()
}

fn whole(value: f64) -> u32 {
    // Between 0 and 1000.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let whole = value.floor() as u32;
    whole
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::shares;
    use crate::subscriber::state::statistics::WaitTimes;

    #[test]
    fn shares_add_up() {
        let seconds = Duration::from_secs;
        assert!(shares(&WaitTimes::default(), Duration::ZERO).is_empty());
        assert_eq!(shares(&WaitTimes::default(), seconds(3)), [("busy", 100.0)]);
        let waits = WaitTimes { dependency: seconds(1), idle: seconds(1), ..WaitTimes::default() };
        let thirds = shares(&waits, seconds(3));
        let sum: f64 = thirds.iter().map(|(_, share)| share).sum();
        assert!((sum - 100.0).abs() < 1e-9, "{thirds:?}");
        assert!(thirds.iter().all(|(_, share)| (33.3..=33.4).contains(share)), "{thirds:?}");
        // A clock that was read later.
        assert_eq!(
            shares(&WaitTimes { idle: seconds(3), ..WaitTimes::default() }, seconds(2)),
            [("idle", 100.0)]
        );
    }
}
