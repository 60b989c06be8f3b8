//! Checks the PostgreSQL client programs that a run starts to create the tables (`--copy-schema`).

use std::process::Command;

use crate::check::report::Reporter;

const TOPIC: &str = "schema_copy";
const TOOLS: [&str; 3] = ["pg_dump", "pg_restore", "psql"];

/// Checks that they can be started, and that pg_dump is not older than the publisher, which it would refuse.
pub(super) fn check(publisher_major: u32, reporter: &mut Reporter<'_>) {
    let mut found = Vec::new();
    for tool in TOOLS {
        let said = match Command::new(tool).arg("--version").output() {
            Ok(output) if output.status.success() => {
                String::from_utf8_lossy(&output.stdout).trim().to_owned()
            }
            Ok(output) => {
                return refuse(tool, &format!("it ends with {}", output.status), reporter);
            }
            Err(error) => return refuse(tool, &error.to_string(), reporter),
        };
        if tool == "pg_dump" && major(&said).is_some_and(|major| major < publisher_major) {
            let message = format!(
                "{said} cannot read the schema of a publisher of version {publisher_major}: put pg_dump \
                 {publisher_major} or a newer one into the PATH, with its pg_restore and psql"
            );
            reporter.block(TOPIC, message);
            return;
        }
        found.push(said);
    }
    reporter.ok(TOPIC, format!("tables are created with {}", found.join(", ")));
}

fn refuse(tool: &str, reason: &str, reporter: &mut Reporter<'_>) {
    let message = format!(
        "cannot run {tool}: {reason}. --copy-schema needs {} in the PATH",
        TOOLS.join(", ")
    );
    reporter.block(TOPIC, message);
}

/// The major version in what a program says, as `pg_dump (PostgreSQL) 18.1 (Debian 18.1-1)`.
fn major(said: &str) -> Option<u32> {
    let version = said.split_once(") ")?.1;
    let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::major;

    #[test]
    fn versions_of_packages() {
        assert_eq!(major("pg_dump (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Some(15));
        assert_eq!(major("pg_dump (PostgreSQL) 19beta1"), Some(19));
        assert_eq!(major("pg_dump (EnterpriseDB) 17.0"), Some(17));
        assert_eq!(major("something else"), None);
    }
}
