//! The last events of the process in memory, and warnings and errors on their way to `pgapace.event`.
//!
//! A layer of the log takes every event of level info and above, whatever `--log-level` says. These are rare:
//! nothing logs at that level per transaction.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt::{Debug, Write as _};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::observe::board::wall;

/// How many are kept in memory, and how many wait to be written at most.
const MOST: usize = 1000;

/// Fields that quote rows.
const OF_ROWS: [&str; 2] = ["key", "detail"];

thread_local! {
    static OF_THREAD: RefCell<Concern> = const { RefCell::new(Concern::none()) };
}

static EVENTS: LazyLock<Mutex<Kept>> = LazyLock::new(Mutex::default);

/// An event of the log.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct LogEvent {
    /// Seconds since 1970.
    pub(crate) at: f64,
    /// `INFO`, `WARN` or `ERROR`.
    pub(crate) level: &'static str,
    /// As docs/events.md lists it.
    pub(crate) event: String,
    /// Null if it concerns the process.
    pub(crate) subscription: Option<String>,
    pub(crate) message: String,
    /// The other fields, as in the log.
    pub(crate) fields: String,
    /// The same without what may quote rows, for `pgapace.event`, which members of pg_monitor read.
    #[serde(skip)]
    pub(crate) stored_fields: String,
}

/// The subscription for which a thread works: its events are about that one, unless they name another.
#[derive(Debug, Clone)]
pub(crate) struct Concern(Option<Arc<str>>);

impl Concern {
    pub(crate) fn of(subscription: &str) -> Self {
        Self(Some(subscription.into()))
    }

    /// No subscription.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// The subscription of the calling thread. A thread that it starts works for the same one.
    pub(crate) fn of_this_thread() -> Self {
        OF_THREAD.with_borrow(Clone::clone)
    }

    /// The work of a thread that the calling one starts, for the same subscription.
    pub(crate) fn keep<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
        let concern = Self::of_this_thread();
        move || {
            concern.enter();
            work()
        }
    }

    /// The subscription's name.
    pub(crate) fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// From now on, the calling thread works for this subscription.
    pub(crate) fn enter(self) {
        OF_THREAD.set(self);
    }
}

#[derive(Debug, Default)]
struct Kept {
    last: VecDeque<LogEvent>,
    /// Warnings and errors that are not written yet.
    pending: VecDeque<LogEvent>,
    /// The subscription of a process that runs only one.
    sole: Option<String>,
}

impl Kept {
    fn push(&mut self, mut event: LogEvent) {
        if event.subscription.is_none() {
            event.subscription.clone_from(&self.sole);
        }
        if event.level != "INFO" {
            if self.pending.len() >= MOST {
                self.pending.pop_front();
            }
            self.pending.push_back(event.clone());
        }
        if self.last.len() >= MOST {
            self.last.pop_front();
        }
        self.last.push_back(event);
    }

    fn take_pending(&mut self, subscription: &str) -> Vec<LogEvent> {
        let (mine, others) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|event| event.subscription.as_deref().is_none_or(|of| of == subscription));
        self.pending = others;
        mine.into()
    }
}

fn kept() -> MutexGuard<'static, Kept> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process runs only this subscription, so all events are about it.
pub(crate) fn set_sole(subscription: &str) {
    kept().sole = Some(subscription.to_owned());
}

/// The last events, the oldest first.
pub(crate) fn last() -> Vec<LogEvent> {
    kept().last.iter().cloned().collect()
}

/// Takes the warnings and errors of a subscription, or of the whole process, since the last call.
pub(crate) fn take_pending(subscription: &str) -> Vec<LogEvent> {
    kept().take_pending(subscription)
}

/// Gives events back that were taken and could not be written.
pub(crate) fn give_back(events: Vec<LogEvent>) {
    let mut kept = kept();
    for event in events.into_iter().rev() {
        if kept.pending.len() < MOST {
            kept.pending.push_front(event);
        }
    }
}

/// Adds events to those of a subscription that wait to be written. The oldest ones are dropped if there are too
/// many.
pub(crate) fn add(waiting: &mut Vec<LogEvent>, newer: Vec<LogEvent>) {
    waiting.extend(newer);
    waiting.drain(..waiting.len().saturating_sub(MOST));
}

/// Keeps logged events until they are taken.
pub(crate) struct EventLayer;

impl<S: tracing::Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let Some(name) = fields.event else { return };
        let level = match *event.metadata().level() {
            tracing::Level::ERROR => "ERROR",
            tracing::Level::WARN => "WARN",
            _ => "INFO",
        };
        kept().push(LogEvent {
            at: wall(),
            level,
            event: name,
            subscription: fields
                .subscription
                .or_else(|| Concern::of_this_thread().name().map(str::to_owned)),
            message: fields.message,
            fields: fields.others.trim_end().to_owned(),
            stored_fields: fields.stored.trim_end().to_owned(),
        });
    }
}

#[derive(Default)]
struct Fields {
    event: Option<String>,
    subscription: Option<String>,
    message: String,
    others: String,
    stored: String,
}

impl Fields {
    /// `stored`: the value without what may quote rows.
    fn set(&mut self, name: &str, value: String, stored: &str) {
        match name {
            "event" => self.event = Some(value),
            "subscription" => self.subscription = Some(value),
            "message" => self.message = value,
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(self.others, "{name}={value} ");
                if !OF_ROWS.contains(&name) {
                    let _ = write!(self.stored, "{name}={stored} ");
                }
            }
        }
    }
}

impl tracing::field::Visit for Fields {
    fn record_str(&mut self, field: &tracing::field::Field, value: &str) {
        self.set(field.name(), value.to_owned(), value);
    }

    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        // A failure has such a form.
        let stored = if field.name() == "error" { format!("{value:#?}") } else { text.clone() };
        self.set(field.name(), text, &stored);
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::{Concern, EventLayer, Kept, LogEvent, MOST};
    use crate::error::{Class, Failure};

    fn event(number: usize, level: &'static str, subscription: Option<&str>) -> LogEvent {
        LogEvent {
            at: number as f64,
            level,
            event: "e".to_owned(),
            subscription: subscription.map(str::to_owned),
            message: String::new(),
            fields: String::new(),
            stored_fields: String::new(),
        }
    }

    #[test]
    fn what_quotes_rows_is_in_memory_only() {
        let mut failure = Failure::new(Class::Apply, "a row violates a check").hint("mend it");
        failure.detail = Some("Failing row contains (1, secret).".to_owned());
        let subscriber = tracing_subscriber::registry().with(EventLayer);
        tracing::subscriber::with_default(subscriber, || {
            // Not an event of the program.
            tracing::event!(
                tracing::Level::WARN,
                event = "what_quotes_rows",
                table = "public.t",
                key = "(name)=(secret)",
                error = %failure,
                "for this test"
            );
        });
        let all = super::last();
        let event = all.iter().find(|event| event.event == "what_quotes_rows").expect("the event");
        assert_eq!(event.fields.matches("secret").count(), 2, "{event:?}");
        let stored = "table=public.t error=a row violates a check\nHINT:  mend it";
        assert_eq!(event.stored_fields, stored);
    }

    #[test]
    fn an_event_is_about_the_subscription_of_its_thread() {
        let log = |concern: Option<Concern>, name: &'static str| {
            std::thread::spawn(move || {
                if let Some(concern) = concern {
                    concern.enter();
                }
                let subscriber = tracing_subscriber::registry().with(EventLayer);
                tracing::subscriber::with_default(subscriber, || {
                    // Not an event of the program.
                    tracing::event!(tracing::Level::WARN, event = name, "for this test");
                });
            })
            .join()
            .expect("it does not panic");
            let all = super::last();
            let event = all.iter().find(|event| event.event == name).expect("the event");
            event.subscription.clone()
        };
        assert_eq!(log(Some(Concern::of("a")), "of_a_thread"), Some("a".to_owned()));
        assert_eq!(log(None, "of_the_process"), None);
    }

    #[test]
    fn the_last_thousand_are_kept() {
        let mut kept = Kept::default();
        for number in 0..MOST + 10 {
            kept.push(event(number, "INFO", None));
        }
        assert_eq!(kept.last.len(), MOST);
        assert_eq!(kept.last.front().map(|event| event.at), Some(10.0));
        assert!(kept.take_pending("s").is_empty(), "information is not written");
    }

    #[test]
    fn the_last_thousand_wait_to_be_written() {
        let mut waiting = Vec::new();
        for number in 0..MOST + 10 {
            super::add(&mut waiting, vec![event(number, "WARN", None)]);
        }
        assert_eq!((waiting.len(), waiting[0].at), (MOST, 10.0));
    }

    #[test]
    fn each_subscription_takes_its_own_warnings_once() {
        let mut kept = Kept::default();
        kept.push(event(1, "WARN", Some("a")));
        kept.push(event(2, "ERROR", Some("b")));
        kept.push(event(3, "WARN", None));
        let at = |events: Vec<LogEvent>| events.iter().map(|event| event.at).collect::<Vec<_>>();
        assert_eq!(at(kept.take_pending("a")), [1.0, 3.0]);
        assert!(kept.take_pending("a").is_empty());
        assert_eq!(at(kept.take_pending("b")), [2.0]);
        kept.sole = Some("c".to_owned());
        kept.push(event(4, "WARN", None));
        assert!(kept.take_pending("a").is_empty());
        assert_eq!(at(kept.take_pending("c")), [4.0]);
    }
}
