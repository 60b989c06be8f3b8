//! Writes to standard output and standard error, except for the log.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::error::{Class, Failure, Result};
use crate::observe::log_output;
use crate::observe::logging::{self, LogFormat};
use crate::observe::outlet::{Outlet, patience_at_end};
use crate::printable::{is_safe, printable};

/// Writes a failure in the form of psql, or of the log if that is JSON, and returns its exit code.
pub(crate) fn fail(failure: &Failure) -> ExitCode {
    let exit_code = failure.class.exit_code();
    let text = failure.to_string();
    match logging::format() {
        LogFormat::Human => {
            log_output::line(&format!("pgapace: error: {}", printable(&text)));
        }
        LogFormat::Json => logging::at_any_level(|| {
            tracing::error!(
                event = "failed",
                exit_code,
                sqlstate = failure.sqlstate,
                error = text,
                detail = failure.detail,
                hint = failure.hint,
                "pgapace ends with an error"
            );
        }),
    }
    ExitCode::from(exit_code)
}

/// Ends the program after an error of the command line, or writes the help or version that it asks for.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() {
        error.exit();
    }
    noted(error.print());
    match finish() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => fail(&failure),
    }
}

/// Waits until the log, the last error and offered lines are written.
pub(crate) fn end() {
    OFFERED.finish(patience_at_end(&io::stdout()));
    log_output::finish();
}

/// The first error of standard output, for the exit code.
static NOT_WRITTEN: OnceLock<io::Error> = OnceLock::new();

/// Whether the verb changes something, and its output only reports that. If standard output cannot be written, the lines
/// go to standard error, and the exit code is that of the work: a user must not take finished work for a failure.
static TELLS_OF_WORK: AtomicBool = AtomicBool::new(false);

/// See [`TELLS_OF_WORK`].
pub(crate) fn tells_of_work() {
    TELLS_OF_WORK.store(true, Ordering::Relaxed);
}

/// Returns whether something was written. A reader that has ended (`| head`) is no error; a full disk is.
fn noted(written: io::Result<()>) -> bool {
    match written {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => false,
        Err(error) => {
            if TELLS_OF_WORK.load(Ordering::Relaxed) && NOT_WRITTEN.get().is_none() {
                tracing::warn!(
                    event = "output_not_written",
                    %error,
                    "cannot write to standard output; what belongs there follows here"
                );
            }
            NOT_WRITTEN.get_or_init(|| error);
            false
        }
    }
}

/// Writes lines, which are printable.
fn write(lines: &str) -> bool {
    if noted(io::stdout().write_all(lines.as_bytes())) {
        return true;
    }
    if TELLS_OF_WORK.load(Ordering::Relaxed) && NOT_WRITTEN.get().is_some() {
        log_output::line(lines.trim_end_matches('\n'));
    }
    false
}

/// Lines for which nothing waits.
static OFFERED: Outlet = Outlet::new(
    |line| {
        write(&String::from_utf8_lossy(line));
    },
    |_| {},
);

/// Fails if standard output has not taken everything that was written to it, unless it only tells of work that is done. A
/// reader that takes nothing is no error.
pub(crate) fn finish() -> Result<()> {
    if OFFERED.finish(patience_at_end(&io::stdout())) {
        noted(io::stdout().flush());
    }
    match NOT_WRITTEN.get() {
        None => Ok(()),
        Some(_) if TELLS_OF_WORK.load(Ordering::Relaxed) => Ok(()),
        Some(error) => {
            Err(Failure::new(Class::Internal, format!("cannot write to standard output: {error}")))
        }
    }
}

/// Writes a line to standard output.
pub(crate) fn line(text: &str) {
    write(&format!("{}\n", printable(text)));
}

/// Writes a line to standard output without waiting for a reader that has stopped. Further lines of the verb must be
/// written so, too.
pub(crate) fn offer(text: &str) {
    OFFERED.send(format!("{}\n", printable(text)).as_bytes());
}

/// Writes lines to standard output. Returns whether they were written.
pub(crate) fn lines(lines: &[String]) -> bool {
    lines.iter().all(|line| write(&format!("{}\n", printable(line))))
}

/// Writes a line to standard error.
pub(crate) fn remark(text: &str) {
    log_output::line(&printable(text));
}

/// Writes text as it is to standard output.
pub(crate) fn text(text: &str) {
    let mut output = io::stdout();
    noted(output.write_all(text.as_bytes()).and_then(|()| output.flush()));
}

/// Writes a value as JSON to standard output.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    line(&to_json(value)?);
    Ok(())
}

/// A value as JSON without control characters but new lines.
pub(crate) fn to_json(value: &impl Serialize) -> Result<String> {
    let json = serde_json::to_string_pretty(value)
        .map_err(|e| Failure::internal(format!("cannot write JSON: {e}")))?;
    // Those beyond ASCII, and DEL, are in strings as they are.
    if json.chars().all(is_safe) {
        return Ok(json);
    }
    let escaped = |c| if is_safe(c) { String::from(c) } else { format!("\\u{:04x}", u32::from(c)) };
    Ok(json.chars().map(escaped).collect())
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

/// The first of these names.
pub(crate) fn some(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut shown = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        shown.push_str(&format!(", and {} more", names.len() - SHOWN));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::to_json;

    #[test]
    fn json_has_no_control_characters() {
        let text = "a\u{7f}\u{89}\t\u{1b}é\u{202e}";
        let json = to_json(&[text]).unwrap();
        assert_eq!(json, "[\n  \"a\\u007f\\u0089\\t\\u001bé\\u202e\"\n]");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
    }
}
