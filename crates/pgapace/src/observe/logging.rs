//! The log, on standard error, as text or JSON. docs/events.md lists its events.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::error::{Class, Failure, Result};

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// One line per event, coloured on a terminal.
    Human,
    /// One JSON object per line.
    Json,
}

/// Starts logging for the whole process.
pub(crate) fn start(format: LogFormat, level: &str) -> Result<()> {
    // The demo's client logs every notice of its servers.
    let filter =
        EnvFilter::try_new(format!("{level},tokio_postgres=warn,postgres=warn")).map_err(|e| {
            Failure::new(Class::Config, format!("--log-level {level:?}: {e}"))
                .hint("Use error, warn, info, debug or trace.")
        })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    match format {
        LogFormat::Human => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}
