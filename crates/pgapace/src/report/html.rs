//! The parts of the file: escaped text, tables, times.

use crate::printable::printable;

/// Text, as it may stand in HTML.
pub(super) fn escaped(text: &str) -> String {
    let text = printable(text);
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

/// A table, or a remark if it has no rows.
pub(super) fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return "<p class=\"dim\">none</p>\n".to_owned();
    }
    let heads: String = heads.iter().map(|head| format!("<th>{}</th>", escaped(head))).collect();
    let rows: String = rows
        .iter()
        .map(|row| {
            let cells: String =
                row.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
            format!("<tr>{cells}</tr>\n")
        })
        .collect();
    format!("<div class=\"wide\"><table><tr>{heads}</tr>\n{rows}</table></div>\n")
}

/// A section with a heading.
pub(super) fn section(title: &str, content: &str) -> String {
    format!("<h2>{}</h2>\n{content}", escaped(title))
}

/// A time in UTC, as `2026-11-24 03:19:05`.
pub(super) fn time(seconds: f64) -> String {
    // Times of this century.
    #[allow(clippy::cast_possible_truncation)]
    let whole = seconds as i64;
    let (days, second) = (whole.div_euclid(86_400), whole.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// The date of a day since 1970 (Hinnant, days_from_civil).
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + i64::from(month <= 2), month, of_year - (153 * shifted + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::{escaped, table, time};

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(time(0.0), "1970-01-01 00:00:00");
        assert_eq!(time(951_782_400.0), "2000-02-29 00:00:00");
        assert_eq!(time(1_795_490_345.0), "2026-11-24 03:19:05");
    }

    #[test]
    fn nothing_of_the_data_is_markup() {
        assert_eq!(escaped("<b>&\"x\""), "&lt;b&gt;&amp;&quot;x&quot;");
        assert_eq!(escaped("\u{1b}[2J\n\u{202e}"), "\\x1B[2J\n\\u202E");
        assert!(table(&["a"], &[vec!["<script>".to_owned()]]).contains("&lt;script&gt;"));
        assert!(table(&["a"], &[]).contains("none"));
    }
}
