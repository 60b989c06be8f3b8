//! The log, on standard error, as text or JSON. docs/events.md lists its events.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::error::{Class, Failure, Result};
use crate::observe::events::EventLayer;

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// One line per event, coloured on a terminal.
    Human,
    /// One JSON object per line.
    Json,
}

/// Without another one.
pub(crate) const DEFAULT_LEVEL: &str = "info";

/// Replaces the filter of the process.
static FILTER: OnceLock<Handle<EnvFilter, Registry>> = OnceLock::new();

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
    // The demo's client logs every notice of its servers.
    EnvFilter::try_new(format!("{level},tokio_postgres=warn,postgres=warn")).map_err(|e| {
        Failure::new(Class::Config, format!("--log-level {level:?}: {e}"))
            .hint("Use error, warn, info, debug or trace.")
    })
}

/// Starts logging for the whole process.
pub(crate) fn start(format: LogFormat, level: &str) -> Result<()> {
    let (filter, handle) = reload::Layer::new(filter(level)?);
    // It is started once.
    let _ = FILTER.set(handle);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let layer = match format {
        LogFormat::Human => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .with(EventLayer.with_filter(LevelFilter::INFO))
        .init();
    Ok(())
}
