//! The lines of the log, as text and as JSON: an event that names no subscription gets the one of its thread.
//!
//! Many events come from code that does not know the subscription, and a process may run several.

use std::error::Error;
use std::fmt::{self, Debug};

use tracing_subscriber::field::{MakeVisitor, RecordFields, VisitFmt, VisitOutput};
use tracing_subscriber::fmt::format::{
    DefaultFields, DefaultVisitor, Format, Json, Writer, format,
};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::observe::events::Concern;

const FIELD: &str = "subscription";

/// The fields of a text line. The subscription follows the name of the event, because the last field may take
/// several lines.
pub(super) struct TextFields;

impl<'w> FormatFields<'w> for TextFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let concern = missing(|visitor| fields.record(visitor));
        let name = concern.name();
        let added = name.map(|name| match writer.has_ansi_escapes() {
            true => format!(" \u{1b}[3m{FIELD}\u{1b}[0m\u{1b}[2m=\u{1b}[0m{name:?}"),
            false => format!(" {FIELD}={name:?}"),
        });
        let mut line =
            Named { fields: DefaultFields::new().make_visitor(writer), added, result: Ok(()) };
        fields.record(&mut line);
        line.add();
        line.result.and(line.fields.finish())
    }
}

/// Adds the subscription behind the name of the event.
struct Named<'w> {
    fields: DefaultVisitor<'w>,
    added: Option<String>,
    result: fmt::Result,
}

impl Named<'_> {
    fn add(&mut self) {
        if let Some(added) = self.added.take() {
            self.result = self.fields.writer().write_str(&added);
        }
    }

    fn behind(&mut self, field: &tracing::field::Field) {
        if field.name() == "event" {
            self.add();
        }
    }
}

impl tracing::field::Visit for Named<'_> {
    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        self.fields.record_str(field, value);
        self.behind(field);
    }

    fn record_error(&mut self, field: &tracing::field::Field, value: &(dyn Error + 'static)) {
        self.fields.record_error(field, value);
    }

    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        self.fields.record_debug(field, value);
    }
}

/// JSON objects, one per line.
pub(super) struct JsonLines(Format<Json>);

impl Default for JsonLines {
    fn default() -> Self {
        Self(format().json().flatten_event(true).with_target(false))
    }
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: tracing::Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        let concern = missing(|visitor| event.record(visitor));
        let Some(name) = concern.name() else {
            return self.0.format_event(context, writer, event);
        };
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        // The object has a time and a level at least.
        match line.trim_end().strip_suffix('}') {
            Some(object) => {
                writeln!(writer, "{object},\"{FIELD}\":{}}}", serde_json::Value::from(name))
            }
            None => writer.write_str(&line),
        }
    }
}

/// The subscription that the fields lack, if there is one.
fn missing(record: impl FnOnce(&mut dyn tracing::field::Visit)) -> Concern {
    let mut names = NamesSubscription(false);
    record(&mut names);
    if names.0 { Concern::none() } else { Concern::of_this_thread() }
}

/// Whether a field is the subscription.
struct NamesSubscription(bool);

impl tracing::field::Visit for NamesSubscription {
    fn record_debug(&mut self, field: &tracing::field::Field, _: &dyn Debug) {
        self.0 |= field.name() == FIELD;
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::Registry;
    use tracing_subscriber::fmt::{Layer, layer};
    use tracing_subscriber::layer::SubscriberExt;

    use super::{Concern, JsonLines, TextFields};

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of a thread of subscription `a`.
    fn lines(json: bool, log: impl FnOnce() + Send + 'static) -> Vec<String> {
        let written = Written::default();
        let to = written.clone();
        let work = move || {
            Concern::of("a").enter();
            let plain: Layer<Registry> = layer();
            let plain = plain.with_target(false).with_ansi(false).without_time();
            let writer = move || to.clone();
            if json {
                let lines = plain.json().event_format(JsonLines::default()).with_writer(writer);
                let subscriber = tracing_subscriber::registry().with(lines);
                tracing::subscriber::with_default(subscriber, log);
            } else {
                let lines = plain.fmt_fields(TextFields).with_writer(writer);
                let subscriber = tracing_subscriber::registry().with(lines);
                tracing::subscriber::with_default(subscriber, log);
            }
        };
        std::thread::spawn(work).join().unwrap();
        let written = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        written.lines().map(str::to_owned).collect()
    }

    fn log() {
        // Not events of the program.
        tracing::event!(
            tracing::Level::INFO,
            event = "x",
            table = "t",
            error = "two\nlines",
            "said"
        );
        tracing::event!(tracing::Level::INFO, event = "x", lsn = 1, subscription = "b", "said");
        tracing::event!(tracing::Level::INFO, "said");
    }

    #[test]
    fn an_event_without_a_subscription_gets_that_of_its_thread() {
        let text = lines(false, log);
        assert_eq!(
            text[0],
            " INFO said event=\"x\" subscription=\"a\" table=\"t\" error=\"two\\nlines\""
        );
        assert_eq!(text[1], " INFO said event=\"x\" lsn=1 subscription=\"b\"");
        assert_eq!(text[2], " INFO said subscription=\"a\"");
        let json = lines(true, log);
        let named: Vec<serde_json::Value> =
            json.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<_> = named.iter().map(|line| line["subscription"].clone()).collect();
        assert_eq!(names, ["a", "b", "a"]);
        assert!(json.iter().all(|line| line.matches("subscription").count() == 1), "{json:?}");
        assert_eq!(named[0]["error"], "two\nlines");
    }
}
