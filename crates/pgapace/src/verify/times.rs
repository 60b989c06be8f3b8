//! How the subscriber reads times that lack an offset, or whose day and month may change places. Pure but for
//! [`TimeReading::read`].
//!
//! Sessions that apply keep `TimeZone` and `DateStyle` of the role, the database or the server. The publisher
//! casts its values in a session with UTC and with an order of its own. So where the types differ, the cast has
//! to name the zone, or the column cannot be compared.

use wire::{Session, quote_ident, quote_literal};

use crate::error::{Failure, Result};
use crate::subscriber::oid;
use crate::verify::columns::SideColumn;

/// Types of times without an offset, alone, in arrays, ranges and multiranges.
const WITHOUT_OFFSET: [u32; 14] =
    [1082, 1182, 1083, 1183, 1114, 1115, 3908, 3909, 3912, 3913, 4533, 6152, 4535, 6155];
/// Types whose text has an offset.
const WITH_OFFSET: [u32; 8] = [1184, 1185, 1266, 1270, 3910, 3911, 4534, 6153];

/// How sessions that apply read times.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TimeReading {
    /// The zone of times without an offset; `None` if it is UTC.
    zone: Option<String>,
    /// Their order of day and month, and that of the publisher's sessions, if they differ.
    orders: Option<[String; 2]>,
}

impl TimeReading {
    /// `reset_val` is what a session has that sets nothing itself.
    pub(crate) fn read(publisher: &mut Session, subscriber: &mut Session) -> Result<Self> {
        let sql = |value: &str| {
            format!(
                "SELECT name, {value} FROM pg_catalog.pg_settings WHERE name IN ('DateStyle', 'TimeZone') ORDER BY 1"
            )
        };
        let theirs = publisher
            .simple(&sql("setting"))
            .map_err(|e| Failure::publisher(&e, "reading the settings for times"))?;
        let ours = subscriber
            .simple(&sql("reset_val"))
            .map_err(|e| Failure::subscriber(&e, "reading the settings for times"))?;
        let value = |results: &[wire::Rows], name: &str| {
            let mut rows = results.iter().flatten();
            let row = rows.find(|row| row.get(0) == Some(name));
            row.and_then(|row| row.get(1).map(str::to_owned)).unwrap_or_default()
        };
        let order = |style: String| style.rsplit(", ").next().unwrap_or_default().to_owned();
        let orders = [value(&ours, "DateStyle"), value(&theirs, "DateStyle")].map(order);
        Ok(Self::new(value(&ours, "TimeZone"), orders))
    }

    fn new(zone: String, orders: [String; 2]) -> Self {
        let bare = zone.to_ascii_uppercase();
        let bare = bare.strip_prefix("ETC/").unwrap_or(&bare);
        let is_utc = matches!(bare, "UTC" | "GMT" | "UCT" | "ZULU" | "UNIVERSAL" | "GREENWICH");
        Self { zone: (!is_utc).then_some(zone), orders: (orders[0] != orders[1]).then_some(orders) }
    }

    /// The publisher's value as a value of the subscriber's type, where the cast of its text would be another one.
    /// Or the reason why there is none.
    pub(crate) fn value(
        &self,
        publisher: &SideColumn,
        subscriber: &SideColumn,
    ) -> std::result::Result<Option<String>, String> {
        let is_time = |column: &SideColumn| {
            WITHOUT_OFFSET.contains(&column.type_oid) || WITH_OFFSET.contains(&column.type_oid)
        };
        let has_offset = |column: &SideColumn| WITH_OFFSET.contains(&column.type_oid);
        if !is_time(subscriber) {
            return Ok(None);
        }
        let types = format!(
            "publisher type {}, subscriber type {}",
            publisher.type_sql, subscriber.type_sql
        );
        // Times are sent with the year first.
        if let (Some([ours, theirs]), false) = (&self.orders, is_time(publisher)) {
            return Err(format!(
                "{types}, which the subscriber reads with DateStyle {ours}, and the publisher with {theirs}"
            ));
        }
        let Some(zone) =
            self.zone.as_ref().filter(|_| has_offset(subscriber) && !has_offset(publisher))
        else {
            return Ok(None);
        };
        let is_timestamp = matches!(publisher.type_oid, oid::TIMESTAMP | oid::DATE)
            && subscriber.type_oid == oid::TIMESTAMPTZ;
        // Other names may be abbreviations too, which mean another offset than the zone.
        if is_timestamp && zone.contains('/') {
            return Ok(Some(format!(
                "pg_catalog.timezone({}, {}::pg_catalog.timestamp)::{}",
                quote_literal(zone),
                quote_ident(&publisher.name),
                subscriber.type_sql
            )));
        }
        Err(format!(
            "{types}, which the subscriber reads with TimeZone {zone}, and the publisher with UTC"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::TimeReading;
    use crate::subscriber::oid;
    use crate::verify::columns::{RecordForm, SideColumn};

    fn column(type_oid: u32) -> SideColumn {
        SideColumn {
            name: "c".to_owned(),
            type_oid,
            type_name: "t".to_owned(),
            type_sql: "t".to_owned(),
            bare_name: "t".to_owned(),
            kind: 'b',
            category: 'D',
            modifier: -1,
            is_array: false,
            send: None,
            not_null: false,
            generated: false,
            byte_order: true,
            readable: true,
            record: RecordForm::None,
            quotes_by_locale: false,
            correlation: None,
        }
    }

    fn reading(zone: &str, order: &str) -> TimeReading {
        TimeReading::new(zone.to_owned(), [order.to_owned(), "MDY".to_owned()])
    }

    #[test]
    fn the_zone_matters_to_times_that_get_an_offset() {
        let value = |times: &TimeReading, publisher: u32, subscriber: u32| {
            times.value(&column(publisher), &column(subscriber))
        };
        let (utc, berlin) = (reading("Etc/UTC", "MDY"), reading("Europe/Berlin", "MDY"));
        let named = "pg_catalog.timezone('Europe/Berlin', \"c\"::pg_catalog.timestamp)::t";
        for time in [oid::TIMESTAMP, oid::DATE] {
            assert_eq!(value(&utc, time, oid::TIMESTAMPTZ), Ok(None));
            assert_eq!(value(&berlin, time, oid::TIMESTAMPTZ), Ok(Some(named.to_owned())));
            assert!(value(&reading("CET", "MDY"), time, oid::TIMESTAMPTZ).is_err());
        }
        for (time, other) in [(oid::TIME, oid::TIMETZ), (oid::TEXT, oid::TIMESTAMPTZ)] {
            assert_eq!(value(&utc, time, other), Ok(None));
            assert!(value(&berlin, time, other).unwrap_err().contains("TimeZone Europe/Berlin"));
        }
        for (time, other) in [(oid::TIMESTAMPTZ, oid::TIMETZ), (oid::TIMESTAMPTZ, oid::TIMESTAMP)] {
            assert_eq!(value(&berlin, time, other), Ok(None));
        }
    }

    #[test]
    fn the_order_of_day_and_month_matters_to_text() {
        let times = reading("UTC", "DMY");
        let value = |publisher, subscriber| times.value(&column(publisher), &column(subscriber));
        assert!(value(oid::TEXT, oid::DATE).unwrap_err().contains("DateStyle DMY"));
        assert_eq!(value(oid::TIMESTAMP, oid::DATE), Ok(None));
        assert_eq!(value(oid::DATE, oid::TEXT), Ok(None));
    }
}
