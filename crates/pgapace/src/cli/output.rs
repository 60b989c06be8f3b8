//! Writes to standard output and standard error, except for the log.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;

use crate::error::{Failure, Result};

/// Writes a failure in the form of psql, and returns its exit code.
pub(crate) fn fail(failure: &Failure) -> ExitCode {
    // Standard error may be closed.
    let _ = writeln!(std::io::stderr(), "pgapace: error: {failure}");
    ExitCode::from(failure.class.exit_code())
}

/// Writes a line to standard output. A reader that has ended (`| head`) is no error.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Writes lines to standard output. Returns whether its reader is still there.
pub(crate) fn lines(lines: &[String]) -> bool {
    lines.iter().all(|line| writeln!(std::io::stdout(), "{line}").is_ok())
}

/// Writes a line to standard error.
pub(crate) fn remark(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes text as it is to standard output.
pub(crate) fn text(text: &str) {
    let mut output = std::io::stdout();
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}

/// Writes a value as JSON to standard output.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    line(&to_json(value)?);
    Ok(())
}

/// A value as JSON.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string_pretty(value)
        .map_err(|e| Failure::internal(format!("cannot write JSON: {e}")))
}

/// `1.5 MB` and the like, in powers of 1024 as PostgreSQL's `pg_size_pretty`.
pub(crate) fn size(bytes: i64) -> String {
    const UNITS: [&str; 5] = ["bytes", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value.abs() >= 10240.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.0} {}", UNITS[unit])
}
