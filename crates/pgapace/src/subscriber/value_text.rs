//! Values in PostgreSQL's binary format as text, as its output functions write them with `DateStyle` ISO.
//!
//! Everything is written to a Vec, which takes all of it.

use std::io::Write as _;
use std::net::IpAddr;

/// Days from 1970-01-01 to 2000-01-01, where PostgreSQL's dates begin.
const EPOCH_DAYS: i64 = 10_957;
const MICROSECONDS_OF_DAY: i64 = 86_400_000_000;
/// A numeric with this sign is negative; with one of the others it is no number.
const NUMERIC_NEGATIVE: u16 = 0x4000;
const NUMERIC_NAN: u16 = 0xC000;
const NUMERIC_INFINITY: u16 = 0xD000;
const NUMERIC_MINUS_INFINITY: u16 = 0xF000;

/// `numeric_send` in PostgreSQL's `numeric.c`: digits of base 10000, the weight of the first, the sign, and the number
/// of decimal places.
pub(crate) fn numeric(bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let mut input = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    let digits = input.next()?;
    let weight = i32::from(input.next()?.cast_signed());
    let sign = input.next()?;
    let places = i32::from(input.next()?);
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
    let mut digits = (0..digits).map(|_| input.next()).collect::<Option<Vec<_>>>()?.into_iter();
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

pub(crate) fn date(out: &mut Vec<u8>, days: i32) {
    match days {
        i32::MIN => out.extend_from_slice(b"-infinity"),
        i32::MAX => out.extend_from_slice(b"infinity"),
        _ => {
            let before_christ = day(out, days.into());
            out.extend_from_slice(before_christ.as_bytes());
        }
    }
}

pub(crate) fn timestamp(out: &mut Vec<u8>, microseconds: i64, zone: &str) {
    match microseconds {
        i64::MIN => out.extend_from_slice(b"-infinity"),
        i64::MAX => out.extend_from_slice(b"infinity"),
        _ => {
            let before_christ = day(out, microseconds.div_euclid(MICROSECONDS_OF_DAY));
            out.push(b' ');
            time(out, microseconds.rem_euclid(MICROSECONDS_OF_DAY));
            let _ = write!(out, "{zone}{before_christ}");
        }
    }
}

/// A time of the day, since midnight.
pub(crate) fn time(out: &mut Vec<u8>, microseconds: i64) {
    let (seconds, fraction) = (microseconds / 1_000_000, microseconds % 1_000_000);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = write!(out, "{hours:02}:{minutes:02}:{seconds:02}");
    if fraction != 0 {
        let _ = write!(out, ".{fraction:06}");
        while out.last() == Some(&b'0') {
            out.pop();
        }
    }
}

/// An address of type inet or cidr (`network_send` in PostgreSQL's `network.c`): family, bits of the netmask, whether it is
/// a cidr, and the length of the address.
pub(crate) fn network(bytes: &[u8], out: &mut Vec<u8>) -> Option<()> {
    let ([_, bits, is_cidr, _], address) = bytes.split_first_chunk::<4>()?;
    let address = match address.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(address).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(address).ok()?),
    };
    let _ = write!(out, "{address}");
    if *is_cidr != 0 || usize::from(*bits) < if address.is_ipv4() { 32 } else { 128 } {
        let _ = write!(out, "/{bits}");
    }
    Some(())
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

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn times_have_no_zeros_behind() {
        let at = |microseconds| written(|out| timestamp(out, microseconds, "+00"));
        assert_eq!(at(0), "2000-01-01 00:00:00+00");
        assert_eq!(at(-1), "1999-12-31 23:59:59.999999+00");
        assert_eq!(at(i64::MAX), "infinity");
        assert_eq!(written(|out| time(out, MICROSECONDS_OF_DAY)), "24:00:00");
        assert_eq!(written(|out| time(out, 3_600_020_500)), "01:00:00.0205");
    }

    #[test]
    fn addresses() {
        let text = |bytes: &[u8]| {
            let mut out = Vec::new();
            network(bytes, &mut out)?;
            String::from_utf8(out).ok()
        };
        assert_eq!(text(&[2, 32, 0, 4, 10, 0, 0, 1]).as_deref(), Some("10.0.0.1"));
        assert_eq!(text(&[2, 8, 0, 4, 10, 0, 0, 1]).as_deref(), Some("10.0.0.1/8"));
        assert_eq!(text(&[2, 32, 1, 4, 10, 0, 0, 1]).as_deref(), Some("10.0.0.1/32"));
        let six = [&[3, 128, 0, 16][..], &[0; 15], &[1]].concat();
        assert_eq!(text(&six).as_deref(), Some("::1"));
        assert_eq!(text(&six[..9]), None);
    }
}
