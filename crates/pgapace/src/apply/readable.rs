//! Makes binary values readable, for the keys in logs and errors.

/// The text form of common types, else the bytes in hexadecimal. `kind` is `pg_type.typtype`.
pub(crate) fn binary(type_oid: u32, kind: char, bytes: &[u8]) -> String {
    known(type_oid, kind, bytes).unwrap_or_else(|| hexadecimal(bytes))
}

fn known(type_oid: u32, kind: char, bytes: &[u8]) -> Option<String> {
    if kind == 'e' {
        return Some(String::from_utf8_lossy(bytes).into_owned());
    }
    Some(match type_oid {
        16 => if array::<1>(bytes)?[0] == 0 { "f" } else { "t" }.to_owned(),
        // "char", name, text, json, bpchar, varchar
        18 | 19 | 25 | 114 | 1042 | 1043 => String::from_utf8_lossy(bytes).into_owned(),
        20 => i64::from_be_bytes(array(bytes)?).to_string(),
        21 => i16::from_be_bytes(array(bytes)?).to_string(),
        23 => i32::from_be_bytes(array(bytes)?).to_string(),
        // oid, xid
        26 | 28 => u32::from_be_bytes(array(bytes)?).to_string(),
        5069 => u64::from_be_bytes(array(bytes)?).to_string(),
        700 => f32::from_be_bytes(array(bytes)?).to_string(),
        701 => f64::from_be_bytes(array(bytes)?).to_string(),
        1082 => date(i64::from(i32::from_be_bytes(array(bytes)?)))?,
        1083 => time(i64::from_be_bytes(array(bytes)?)),
        1114 => timestamp(i64::from_be_bytes(array(bytes)?))?,
        1184 => format!("{}+00", timestamp(i64::from_be_bytes(array(bytes)?))?),
        1700 => numeric(bytes)?,
        2950 => uuid(&array(bytes)?),
        3220 => pgoutput::Lsn(u64::from_be_bytes(array(bytes)?)).to_string(),
        3802 => String::from_utf8_lossy(bytes.get(1..)?).into_owned(),
        _ => return None,
    })
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

const MICROSECONDS_A_DAY: i64 = 86_400_000_000;

/// Days since 2000-01-01; `None` for -infinity and infinity.
fn date(days: i64) -> Option<String> {
    if days == i64::from(i32::MIN) || days == i64::from(i32::MAX) {
        return None;
    }
    // The civil date in the proleptic Gregorian calendar, counted in eras of 400 years.
    let shifted = days + 730_425;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    Some(if year > 0 {
        format!("{year:04}-{month:02}-{day:02}")
    } else {
        format!("{:04}-{month:02}-{day:02} BC", 1 - year)
    })
}

fn time(microseconds: i64) -> String {
    let (seconds, rest) = (microseconds / 1_000_000, microseconds % 1_000_000);
    let whole = format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    if rest == 0 {
        return whole;
    }
    format!("{whole}.{rest:06}").trim_end_matches('0').to_owned()
}

fn timestamp(microseconds: i64) -> Option<String> {
    if microseconds == i64::MIN || microseconds == i64::MAX {
        return None;
    }
    let day = date(microseconds.div_euclid(MICROSECONDS_A_DAY))?;
    Some(format!("{day} {}", time(microseconds.rem_euclid(MICROSECONDS_A_DAY))))
}

/// Digits of base 10000 with a weight, a sign and a display scale (`numeric_send` in `numeric.c`).
fn numeric(bytes: &[u8]) -> Option<String> {
    let word =
        |index: usize| Some(i16::from_be_bytes(array(bytes.get(index * 2..index * 2 + 2)?)?));
    let (count, weight, sign, scale) = (word(0)?, word(1)?, word(2)?, word(3)?);
    let sign = match sign.cast_unsigned() {
        0x0000 => "",
        0x4000 => "-",
        0xc000 => return Some("NaN".to_owned()),
        0xd000 => return Some("Infinity".to_owned()),
        0xf000 => return Some("-Infinity".to_owned()),
        _ => return None,
    };
    let (count, weight) = (i32::from(count), i32::from(weight));
    let digit = |place: i32| {
        let index = weight - place;
        if (0..count).contains(&index) { word(4 + usize::try_from(index).ok()?) } else { Some(0) }
    };
    let mut whole = String::new();
    for place in (0..=weight.max(0)).rev() {
        whole.push_str(&format!("{:04}", digit(place)?));
    }
    let whole = whole.trim_start_matches('0');
    let whole = if whole.is_empty() { "0" } else { whole };
    let scale = usize::try_from(scale).ok()?;
    if scale == 0 {
        return Some(format!("{sign}{whole}"));
    }
    let mut fraction = String::new();
    let mut place = -1;
    while fraction.len() < scale {
        fraction.push_str(&format!("{:04}", digit(place)?));
        place -= 1;
    }
    fraction.truncate(scale);
    Some(format!("{sign}{whole}.{fraction}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_times() {
        assert_eq!(date(0).as_deref(), Some("2000-01-01"));
        assert_eq!(date(59).as_deref(), Some("2000-02-29"));
        assert_eq!(date(-730_119).as_deref(), Some("0001-01-01"));
        assert_eq!(date(-730_120).as_deref(), Some("0001-12-31 BC"));
        assert_eq!(date(9_456).as_deref(), Some("2025-11-21"));
        assert_eq!(timestamp(-1).as_deref(), Some("1999-12-31 23:59:59.999999"));
        assert_eq!(timestamp(1_500_000).as_deref(), Some("2000-01-01 00:00:01.5"));
        assert_eq!(timestamp(i64::MAX), None);
    }

    #[test]
    fn numbers() {
        let words =
            |words: &[i16]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
        assert_eq!(numeric(&words(&[0, 0, 0, 0])).as_deref(), Some("0"));
        assert_eq!(numeric(&words(&[2, 0, 0, 2, 12, 5000])).as_deref(), Some("12.50"));
        assert_eq!(numeric(&words(&[1, 1, 0x4000, 0, 1])).as_deref(), Some("-10000"));
        assert_eq!(numeric(&words(&[1, -1, 0, 4, 12])).as_deref(), Some("0.0012"));
        assert_eq!(numeric(&words(&[2, 0, 0, 2])), None);
        assert_eq!(binary(23, 'b', &(-7_i32).to_be_bytes()), "-7");
        assert_eq!(binary(600, 'b', &[0xab, 1]), "\\xab01");
        let id = *b"\x12\x34\x56\x78\x9a\xbc\xde\xf0\x12\x34\x56\x78\x9a\xbc\xde\xf0";
        assert_eq!(uuid(&id), "12345678-9abc-def0-1234-56789abcdef0");
    }
}
