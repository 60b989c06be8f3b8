//! The shell command that creates tables of the publisher on the subscriber, for hints.

/// A shell command that creates these tables on the subscriber.
pub(crate) fn dump_command(tables: &[String], publisher: &str, subscriber: &str) -> String {
    let patterns: Vec<_> =
        tables.iter().map(|sql| format!("--table={}", shell_quoted(sql))).collect();
    format!(
        "pg_dump --schema-only --no-owner --no-publications --no-subscriptions {} {publisher} | \
         psql {subscriber}",
        patterns.join(" ")
    )
}

/// One word of a shell command.
pub(crate) fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
