//! Copying the publisher's schema to the subscriber with `pg_dump`, `psql` and `pg_restore` from
//! the PATH. Tables, and the objects that they need, are created before the table copy; indexes,
//! constraints and triggers after it.
//!
//! The progress is recorded. The first section is one transaction together with its record. The
//! second section cannot be one transaction; if it was interrupted, it is repeated, and existing
//! objects are ignored.

use std::fs::DirBuilder;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use wire::{Activity, ConnInfo, Session};

use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::{self, SchemaCopy, SubscriptionId};

const POLL: Duration = Duration::from_millis(20);
/// Parameters that the tools get if the connection string has them. The tools must trust no server that
/// pgapace would not trust; one that is too old to know a parameter fails, and names it. The password goes
/// into the environment.
const KEYS: &[&str] = &[
    "host",
    "hostaddr",
    "port",
    "user",
    "dbname",
    "connect_timeout",
    "options",
    "passfile",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslcrl",
    "sslcertmode",
    "sslnegotiation",
    "channel_binding",
    "require_auth",
    "requirepeer",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "gssencmode",
    "krbsrvname",
    "target_session_attrs",
];
/// SQLSTATEs for existing objects: duplicate_table, duplicate_object, and a second primary key.
const EXISTS_ALREADY: [&str; 3] =
    [sqlstate::DUPLICATE_TABLE, sqlstate::DUPLICATE_OBJECT, sqlstate::INVALID_TABLE_DEFINITION];

/// The two servers of a schema copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchemaCopier<'a> {
    pub(crate) publisher: &'a ConnInfo,
    pub(crate) subscriber: &'a ConnInfo,
    pub(crate) id: SubscriptionId,
    /// Number of indexes that are built at the same time.
    pub(crate) jobs: usize,
    pub(crate) shutdown: &'a Shutdown,
    /// Shows that pgapace waits for a tool.
    pub(crate) activity: &'a Activity,
}

impl SchemaCopier<'_> {
    /// Creates the tables, in one transaction with the record.
    pub(crate) fn before(&self) -> Result<()> {
        let directory = Directory::create()?;
        let file = directory.0.join("pre-data.sql");
        tracing::info!(event = "schema_copy_started", section = "pre-data", "copying the schema");
        self.dump("pre-data", "plain", &file)?;
        let record = format!(
            "UPDATE pgapace.subscription SET schema_copy = '{}' WHERE id = {}",
            SchemaCopy::After.name(),
            self.id.0
        );
        let mut psql = tool("psql", self.subscriber);
        psql.args(["--no-psqlrc", "--quiet", "--single-transaction", "-v", "ON_ERROR_STOP=1"])
            .arg("-f")
            .arg(&file)
            .args(["-c", &record]);
        let (succeeded, said) = self.run(psql, "psql")?;
        if succeeded {
            return Ok(());
        }
        Err(Failure::new(
            Class::Subscriber,
            "the publisher's schema cannot be created on the subscriber",
        )
        .detail(said)
        .hint("Nothing was created. Create the tables yourself, and omit --copy-schema."))
    }

    /// Creates indexes, constraints and triggers.
    pub(crate) fn after(&self, control: &mut Session, begun: bool) -> Result<()> {
        let directory = Directory::create()?;
        let failed = |said: String| {
            Failure::new(
                Class::Subscriber,
                "an index or constraint cannot be created on the subscriber",
            )
            .detail(said)
            .hint(
                "The tables are copied. Fix the cause, and start pgapace again: it creates the \
                 rest.",
            )
        };
        tracing::info!(event = "schema_copy_started", section = "post-data", "copying the schema");
        if begun {
            let file = directory.0.join("post-data.sql");
            self.dump("post-data", "plain", &file)?;
            let mut psql = tool("psql", self.subscriber);
            psql.args(["--no-psqlrc", "--quiet", "-v", "VERBOSITY=sqlstate", "-f"]).arg(&file);
            let (succeeded, said) = self.run(psql, "psql")?;
            if !succeeded {
                return Err(failed(said));
            }
            let unexpected = unexpected(&said, &file);
            if !unexpected.is_empty() {
                return Err(failed(unexpected.join("; ")));
            }
        } else {
            state::set_schema_copy(control, self.id, Some(SchemaCopy::Begun))?;
            let file = directory.0.join("post-data.dump");
            self.dump("post-data", "custom", &file)?;
            let mut restore = tool("pg_restore", self.subscriber);
            restore
                .args(["--no-owner", "--no-privileges", "--exit-on-error"])
                .arg(format!("--jobs={}", self.jobs))
                .arg(&file);
            let (succeeded, said) = self.run(restore, "pg_restore")?;
            if !succeeded {
                return Err(failed(said));
            }
        }
        state::set_schema_copy(control, self.id, None)
    }

    fn dump(&self, section: &str, format: &str, file: &Path) -> Result<()> {
        let mut dump = tool("pg_dump", self.publisher);
        dump.args(["--no-owner", "--no-privileges", "--no-publications", "--no-subscriptions"])
            .args(["--exclude-schema=pgapace"])
            .arg(format!("--section={section}"))
            .arg(format!("--format={format}"))
            .arg("--file")
            .arg(file);
        let (succeeded, said) = self.run(dump, "pg_dump")?;
        if succeeded {
            return Ok(());
        }
        Err(Failure::new(Class::Publisher, "the publisher's schema cannot be read")
            .detail(said)
            .hint("pg_dump must have the publisher's major version, or a newer one."))
    }

    /// Runs a tool to its end. Returns whether it succeeded, and its error output.
    fn run(&self, mut command: Command, name: &str) -> Result<(bool, String)> {
        let mut child = command.spawn().map_err(|error| {
            Failure::new(Class::Config, format!("cannot run {name}: {error}"))
                .hint("--copy-schema needs pg_dump, psql and pg_restore in the PATH.")
        })?;
        let mut errors = child.stderr.take();
        let reader = std::thread::spawn(move || {
            let mut said = Vec::new();
            if let Some(errors) = &mut errors {
                // Output that cannot be read is not shown.
                let _ = errors.read_to_end(&mut said);
            }
            String::from_utf8_lossy(&said).trim().to_owned()
        });
        let ended = self.wait(&mut child, name);
        let said = reader.join().unwrap_or_default();
        Ok((ended?, said))
    }

    fn wait(&self, child: &mut Child, name: &str) -> Result<bool> {
        let failed = |error| Failure::internal(format!("waiting for {name}: {error}"));
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(status.success());
            }
            if self.shutdown.requested() {
                child.kill().map_err(failed)?;
                child.wait().map_err(failed)?;
                return Err(Failure::new(Class::Stopped, "stopped while copying the schema"));
            }
            self.activity.note();
            std::thread::sleep(POLL);
        }
    }
}

/// The lines of psql about a script that report something else than an object that exists already.
///
/// With VERBOSITY=sqlstate, a line is `psql:FILE:LINE: ERROR:  42P07`. The word before the SQLSTATE is in
/// the server's language, so only the SQLSTATE counts. A line about the script without SQLSTATE is
/// psql's own error. After an error of the server psql continues, and exits with 0.
fn unexpected<'t>(said: &'t str, file: &Path) -> Vec<&'t str> {
    let about = format!("psql:{}:", file.display());
    let is_expected = |line: &str| {
        let code = line.rsplit_once(":  ").map_or("", |(_, code)| code);
        let is_notice = code.len() == 5 && matches!(code.get(..2), Some("00" | "01" | "02"));
        is_notice || EXISTS_ALREADY.contains(&code)
    };
    said.lines().filter(|line| line.starts_with(&about) && !is_expected(line)).collect()
}

fn tool(name: &str, info: &ConnInfo) -> Command {
    let parts: Vec<_> = KEYS
        .iter()
        .filter_map(|key| info.get(key).map(|value| (key, value)))
        .map(|(key, value)| format!("{key}='{}'", value.replace('\\', "\\\\").replace('\'', "\\'")))
        .collect();
    let mut command = Command::new(name);
    command
        .arg(format!("--dbname={}", parts.join(" ")))
        .arg("--no-password")
        .env("PGAPPNAME", "pgapace schema")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    match info.get("password") {
        Some(password) => command.env("PGPASSWORD", password),
        None => command.env_remove("PGPASSWORD"),
    };
    command
}

/// A private directory, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn create() -> Result<Self> {
        let nanos = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        let path =
            std::env::temp_dir().join(format!("pgapace-schema-{}-{nanos}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            Failure::internal(format!("cannot create directory {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(
                event = "directory_left",
                directory = %self.0.display(),
                %error,
                "could not remove a temporary directory"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use wire::ConnInfo;

    use super::{tool, unexpected};

    #[test]
    fn errors_of_a_script_are_judged_by_their_sqlstate() {
        let said = "WARNING: password file \"/p\" has group or world access\n\
                    psql:/tmp/s.sql:2: ERROR:  42P07\n\
                    psql:/tmp/s.sql:3: ERREUR:  42710\n\
                    psql:/tmp/s.sql:4: FEHLER:  23505\n\
                    psql:/tmp/s.sql:5: ERROR:  42P16\n\
                    psql:/tmp/s.sql:6: HINWEIS:  00000\n\
                    psql:/tmp/s.sql:7: WARNUNG:  01000\n\
                    psql:/tmp/s.sql:8: error: invalid command \\restrict";
        assert_eq!(
            unexpected(said, Path::new("/tmp/s.sql")),
            [
                "psql:/tmp/s.sql:4: FEHLER:  23505",
                "psql:/tmp/s.sql:8: error: invalid command \\restrict",
            ]
        );
    }

    #[test]
    fn the_tools_check_the_server_as_pgapace_does() {
        let text = "host=/tmp dbname=d channel_binding=require requirepeer=postgres \
                    sslnegotiation=direct sslmode=verify-full require_auth=scram-sha-256 sslcertmode=disable";
        let given = |text: &str| {
            let info = ConnInfo::parse_with_env(text, &|_| None, None).unwrap();
            let command = tool("psql", &info);
            command.get_args().next().unwrap().to_string_lossy().into_owned()
        };
        let argument = given(text);
        for parameter in [
            "channel_binding='require'",
            "requirepeer='postgres'",
            "sslnegotiation='direct'",
            "require_auth='scram-sha-256'",
            "sslcertmode='disable'",
        ] {
            assert!(argument.contains(parameter), "{parameter}: {argument}");
        }
        let argument = given("host=/tmp dbname=d");
        assert!(!argument.contains("ssl") && !argument.contains("require"), "{argument}");
    }
}
