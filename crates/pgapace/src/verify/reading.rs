//! How the publisher reads a text as the subscriber does. Pure but for [`Reading::find`].
//!
//! Where the types of a column differ, a session that applies reads the publisher's text as a value of another type,
//! under `TimeZone` and `DateStyle` of the role, the database or the server. They decide which instant a time without
//! an offset is, and which of two numbers is the month. So the publisher reads the text under the same settings,
//! where its own ones give another value ([`under_settings`]).
//!
//! Its sessions keep UTC otherwise: a time with an offset is sent as that of UTC, and may become a `timestamp` or a
//! text. So the settings hold for one cast only, which takes three to four times as long. A timestamp or a date that
//! becomes a `timestamptz` needs none: a function takes the time zone.
//!
//! Both servers are taken to know the same time zones by the same names.

use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::sqlstate;
use crate::subscriber::oid;
use crate::subscriber::session::{set_config, times_when_writing};
use crate::verify::columns::{SideColumn, output_text};

/// Types of times without an offset, also as arrays, ranges and multiranges.
const WITHOUT_OFFSET: [u32; 14] = [
    oid::DATE,
    oid::DATE_ARRAY,
    oid::TIME,
    1183, // time[]
    oid::TIMESTAMP,
    oid::TIMESTAMP_ARRAY,
    3908, // tsrange
    3909, // tsrange[]
    3912, // daterange
    3913, // daterange[]
    4533, // tsmultirange
    6152, // tsmultirange[]
    4535, // datemultirange
    6155, // datemultirange[]
];

/// Types whose text has an offset, but for [`OF_THE_DAY`].
const WITH_OFFSET: [u32; 6] = [
    oid::TIMESTAMPTZ,
    oid::TIMESTAMPTZ_ARRAY,
    3910, // tstzrange
    3911, // tstzrange[]
    4534, // tstzmultirange
    6153, // tstzmultirange[]
];

/// timetz and timetz[]. A time that has no offset gets that of the day on which it is read.
const OF_THE_DAY: [u32; 2] = [oid::TIMETZ, 1270];

/// Where the publisher's sessions would read a text otherwise than the subscriber's that apply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The subscriber's time zone, if it is not UTC.
    zone: Option<TimeZone>,
    /// `DateStyle` of the subscriber and of the publisher, if their orders of year, month and day differ. Both write
    /// the form ISO.
    styles: Option<[String; 2]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct TimeZone {
    name: String,
    on_publisher: bool,
}

impl Reading {
    /// `publisher` is a session like those that compare.
    pub(crate) fn find(publisher: &mut Session, subscriber: &Session) -> Result<Self> {
        let [style, zone] = times_when_writing(subscriber);
        let theirs = publisher.parameter("DateStyle").unwrap_or("ISO, MDY").to_owned();
        let mut reading = Self::new([style, &theirs], zone);
        if let Some(zone) = &mut reading.zone {
            zone.on_publisher = has_zone(publisher, &zone.name)?;
        }
        Ok(reading)
    }

    fn new(styles: [&str; 2], zone: &str) -> Self {
        let zone = TimeZone { name: zone.to_owned(), on_publisher: true };
        let orders = styles.map(|style| style.rsplit(", ").next().unwrap_or_default());
        Self {
            zone: (!is_utc(&zone.name)).then_some(zone),
            styles: (orders[0] != orders[1]).then(|| orders.map(|order| format!("ISO, {order}"))),
        }
    }

    /// The text of the publisher's column as the subscriber stores it, if the cast of `text` under the settings of the
    /// publisher's session could be another one. Or the reason why the publisher cannot tell it.
    pub(crate) fn of_other(
        &self,
        publisher: &SideColumn,
        subscriber: &SideColumn,
        text: &str,
    ) -> std::result::Result<Option<String>, String> {
        let zone = self.zone.as_ref().filter(|_| has_offset(subscriber) && !has_offset(publisher));
        let styles = self.styles.as_ref().filter(|_| is_time(subscriber) && !is_time(publisher));
        if let Some(zone) = zone {
            let reason = match (zone.on_publisher, OF_THE_DAY.contains(&subscriber.type_oid)) {
                (true, false) => None,
                (true, true) => Some("with the offset of the day"),
                (false, _) => Some("which the publisher does not know"),
            };
            if let Some(reason) = reason {
                return Err(format!(
                    "publisher type {}, subscriber type {}, read in time zone {}, {reason}",
                    publisher.type_sql, subscriber.type_sql, zone.name
                ));
            }
        }
        let is_timestamp = matches!(publisher.type_oid, oid::TIMESTAMP | oid::DATE);
        Ok(match (zone, styles) {
            (None, None) => None,
            // Other names may be those of abbreviations too, which come first here, and mean another offset.
            (Some(zone), None)
                if is_timestamp
                    && subscriber.type_oid == oid::TIMESTAMPTZ
                    && zone.name.contains('/') =>
            {
                Some(output_text(&format!(
                    "pg_catalog.timezone({}, {}::pg_catalog.timestamp)::{}",
                    quote_literal(&zone.name),
                    quote_ident(&publisher.name),
                    subscriber.type_sql
                )))
            }
            _ => Some(under_settings(text, &subscriber.type_sql, zone, styles)),
        })
    }
}

/// The text of a value of this type that is read from another text under the subscriber's settings. The subqueries
/// fix the order: the text is made and written under the publisher's settings, and read in between.
fn under_settings(
    text: &str,
    type_sql: &str,
    zone: Option<&TimeZone>,
    styles: Option<&[String; 2]>,
) -> String {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut set = |name, values: [&str; 2]| {
        ours.push(set_config(&(name, values[0])));
        theirs.push(set_config(&(name, values[1])));
    };
    if let Some(zone) = zone {
        set("TimeZone", [&zone.name, "UTC"]);
    }
    if let Some([ours, theirs]) = styles {
        set("DateStyle", [ours, theirs]);
    }
    let after = |calls: &[String], value: &str| {
        format!("CASE WHEN pg_catalog.num_nulls({}) = 0 THEN {value} END", calls.join(", "))
    };
    format!(
        "(SELECT {} FROM (SELECT {} AS value FROM (SELECT {text} AS sent OFFSET 0) AS made OFFSET 0) AS stored)",
        after(&theirs, &output_text("value")),
        after(&ours, &format!("sent::{type_sql}")),
    )
}

/// Whether a value of the type has an offset of its own, or gets one when it is read.
fn has_offset(column: &SideColumn) -> bool {
    WITH_OFFSET.contains(&column.type_oid) || OF_THE_DAY.contains(&column.type_oid)
}

/// The year comes first in the text of such a type.
fn is_time(column: &SideColumn) -> bool {
    has_offset(column) || WITHOUT_OFFSET.contains(&column.type_oid)
}

fn is_utc(zone: &str) -> bool {
    let name = zone.strip_prefix("Etc/").unwrap_or(zone);
    matches!(name, "UTC" | "UCT" | "GMT" | "Zulu" | "Universal" | "Greenwich")
}

/// Whether a session can have this time zone.
fn has_zone(session: &mut Session, zone: &str) -> Result<bool> {
    let zone = quote_literal(zone);
    match session.simple(&format!("SELECT pg_catalog.set_config('TimeZone', {zone}, true)")) {
        Ok(_) => Ok(true),
        Err(error) if error.sqlstate() == Some(sqlstate::INVALID_PARAMETER_VALUE) => Ok(false),
        Err(error) => Err(Failure::publisher(&error, "looking for a time zone")),
    }
}

#[cfg(test)]
mod tests {
    use super::Reading;
    use crate::subscriber::oid;
    use crate::verify::columns::{self, SideColumn};

    fn column(type_oid: u32) -> SideColumn {
        let column = columns::tests::column(type_oid, &format!("t{type_oid}"), -1);
        SideColumn { category: 'D', ..column }
    }

    fn of_other(reading: &Reading, publisher: u32, subscriber: u32) -> Option<String> {
        reading.of_other(&column(publisher), &column(subscriber), "c::text").unwrap()
    }

    const STYLES: [&str; 2] = ["ISO, MDY"; 2];

    #[test]
    fn times_that_get_an_offset_are_read_in_the_zone() {
        let utc = Reading::new(STYLES, "Etc/UTC");
        assert_eq!(utc, Reading::default());
        assert_eq!(of_other(&utc, oid::TIMESTAMP, oid::TIMESTAMPTZ), None);
        let berlin = Reading::new(STYLES, "Europe/Berlin");
        for time in [oid::TIMESTAMP, oid::DATE] {
            let text = of_other(&berlin, time, oid::TIMESTAMPTZ).unwrap();
            assert!(text.contains("timezone('Europe/Berlin', \"c\"::pg_catalog.timestamp)::t1184"));
        }
        let text = of_other(&berlin, oid::TEXT, oid::TIMESTAMPTZ).unwrap();
        assert_eq!(
            text,
            "(SELECT CASE WHEN pg_catalog.num_nulls(pg_catalog.set_config('TimeZone', 'UTC', false)) = 0 \
             THEN CASE WHEN value IS DISTINCT FROM NULL THEN pg_catalog.format('%s', value) END END \
             FROM (SELECT CASE WHEN pg_catalog.num_nulls(pg_catalog.set_config('TimeZone', 'Europe/Berlin', false)) = 0 \
             THEN sent::t1184 END AS value FROM (SELECT c::text AS sent OFFSET 0) AS made OFFSET 0) AS stored)"
        );
        // CET is an abbreviation too, of the winter.
        let cet = of_other(&Reading::new(STYLES, "CET"), oid::TIMESTAMP, oid::TIMESTAMPTZ);
        assert!(cet.unwrap().contains("set_config"));
        for other in [oid::TIMETZ, oid::TIMESTAMP, oid::DATE, oid::TEXT] {
            assert_eq!(of_other(&berlin, oid::TIMESTAMPTZ, other), None);
        }
    }

    #[test]
    fn the_order_of_day_and_month_matters_to_texts() {
        let reading = Reading::new(["German, DMY", "ISO, MDY"], "UTC");
        assert_eq!(reading, Reading::new(["ISO, DMY", "ISO, MDY"], "UTC"));
        for time in [oid::DATE, oid::TIMESTAMP, oid::TIMESTAMPTZ, oid::TIMETZ] {
            let text = of_other(&reading, oid::TEXT, time).unwrap();
            assert!(text.contains("('DateStyle', 'ISO, DMY', false)) = 0 THEN sent::"), "{text}");
            assert!(!text.contains("TimeZone"));
        }
        for (publisher, subscriber) in [(oid::TIMESTAMP, oid::DATE), (oid::DATE, oid::TEXT)] {
            assert_eq!(of_other(&reading, publisher, subscriber), None);
        }
    }

    #[test]
    fn what_the_publisher_cannot_tell_is_named() {
        let mut reading = Reading::new(STYLES, "Asia/Tokyo");
        let reason = |reading: &Reading, publisher: u32, subscriber: u32| {
            reading.of_other(&column(publisher), &column(subscriber), "c").unwrap_err()
        };
        assert!(reason(&reading, oid::TIME, oid::TIMETZ).contains("Asia/Tokyo, with the offset"));
        reading.zone.as_mut().unwrap().on_publisher = false;
        let unknown = reason(&reading, oid::TEXT, oid::TIMESTAMPTZ);
        assert!(unknown.contains("Asia/Tokyo, which the publisher does not know"), "{unknown}");
    }
}
