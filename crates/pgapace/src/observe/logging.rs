//! The log, on standard error, as text or JSON. docs/events.md lists its events. Those of a thread that works for a
//! subscription name it ([`log_lines`](super::log_lines)). Nothing waits for its reader ([`log_output`](super::log_output)).

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::error::{Class, Failure, Result};
use crate::observe::events::EventLayer;
use crate::observe::log_lines::{JsonLines, TextFields};
use crate::observe::log_output::Line;

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Text, coloured on a terminal. An error with a hint takes several lines.
    Human,
    /// One JSON object per line and event, also for the error that ends pgapace.
    Json,
}

/// Without another one, and for a blank one.
pub(crate) const DEFAULT_LEVEL: &str = "info";

/// Replaces the filter of the process.
static FILTER: OnceLock<Handle<EnvFilter, Registry>> = OnceLock::new();

/// The form of the log of the process.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// The form of log lines, once it is known.
pub(crate) fn format() -> LogFormat {
    FORMAT.get().copied().unwrap_or(LogFormat::Human)
}

/// Writes what `log` logs as JSON to standard error, whatever the level of the log is.
pub(crate) fn at_any_level(log: impl FnOnce()) {
    let subscriber = tracing_subscriber::registry().with(json_lines());
    tracing::subscriber::with_default(subscriber, log);
}

fn json_lines<S>() -> impl Layer<S>
where
    S: tracing::Subscriber + for<'s> LookupSpan<'s>,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(|| Line).json();
    layer.event_format(JsonLines::default())
}

/// Lets through log lines of another level from now on.
pub(crate) fn set_level(level: &str) -> Result<()> {
    let filter = filter(level)?;
    match FILTER.get() {
        Some(handle) => handle
            .reload(filter)
            .map_err(|e| Failure::internal(format!("cannot change the level of the log: {e}"))),
        None => Ok(()),
    }
}

fn filter(level: &str) -> Result<EnvFilter> {
    let wrong = |reason: &str| {
        Failure::new(Class::Config, format!("--log-level {level:?}: {reason}"))
            .hint("Use error, warn, info, debug, trace or off, or a filter such as pgapace=debug.")
    };
    let mut directives = Vec::new();
    for directive in level.split(',').map(str::trim).filter(|directive| !directive.is_empty()) {
        // The filter would take an unknown word for a target, of which it lets through everything, and nothing
        // of the others.
        directives.push(match directive {
            "warning" => "warn",
            "log" | "notice" => "info",
            _ if directive.contains('=') || directive.parse::<LevelFilter>().is_ok() => directive,
            _ => return Err(wrong(&format!("{directive:?} is not a level"))),
        });
    }
    if directives.is_empty() {
        directives.push(DEFAULT_LEVEL);
    }
    // The demo's client logs every notice of its servers.
    directives.extend(["tokio_postgres=warn", "postgres=warn"]);
    EnvFilter::try_new(directives.join(",")).map_err(|e| wrong(&e.to_string()))
}

/// Starts logging for the whole process.
pub(crate) fn start(format: LogFormat, level: &str) -> Result<()> {
    // It is started once.
    let _ = FORMAT.set(format);
    let (filter, handle) = reload::Layer::new(filter(level)?);
    let _ = FILTER.set(handle);
    let text = tracing_subscriber::fmt::layer().with_writer(|| Line).with_target(false);
    let text = text.fmt_fields(TextFields);
    let layer = match format {
        LogFormat::Human => text.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => json_lines().boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .with(EventLayer.with_filter(LevelFilter::INFO))
        .init();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{DEFAULT_LEVEL, filter};

    #[test]
    fn a_word_is_a_level_and_no_target() {
        let read = |level: &str| filter(level).map(|filter| filter.to_string());
        for (level, same) in [
            ("warning", "warn"),
            ("notice", DEFAULT_LEVEL),
            ("log", DEFAULT_LEVEL),
            ("", DEFAULT_LEVEL),
            (" ", DEFAULT_LEVEL),
            (" debug ", "debug"),
            ("INFO", "info"),
            ("warn, pgapace=debug", "pgapace=debug,warn"),
        ] {
            assert_eq!(read(level).expect(level), read(same).expect(same), "{level:?}");
        }
        assert_ne!(read("warn").expect("a level"), read("info").expect("a level"));
        for level in ["verbose", "pgapace", "warn,verbose", "pgapace=verbose"] {
            let failure = read(level).expect_err(level);
            assert_eq!(failure.class.exit_code(), 3, "{level}");
            assert!(failure.message.contains(level), "{}", failure.message);
        }
    }
}
