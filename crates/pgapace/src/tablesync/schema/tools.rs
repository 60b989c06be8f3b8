//! Running pg_dump, psql and pg_restore: their connection strings, their end, their files and what they leave behind.

use std::fs::DirBuilder;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use wire::{Activity, ConnInfo, Session};

use crate::error::{Class, Failure, Result};
use crate::login_role::as_login_role;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::state::SubscriptionId;

const POLL: Duration = Duration::from_millis(20);
/// How long a session of an earlier process may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);
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

/// A tool with the connection string of a server. `options` go before its own.
pub(super) fn tool(
    name: &str,
    info: &ConnInfo,
    application_name: &str,
    options: Option<&str>,
) -> Command {
    let given = |key: &str| info.get(key).map(str::to_owned);
    // The last one counts.
    let value = |key: &str| match (key, given(key), options) {
        ("options", Some(given), Some(ours)) => Some(format!("{given} {ours}")),
        ("options", None, Some(ours)) => Some(ours.to_owned()),
        (_, given, _) => given,
    };
    let parts: Vec<_> = KEYS
        .iter()
        .filter_map(|key| value(key).map(|value| (key, value)))
        .map(|(key, value)| format!("{key}='{}'", value.replace('\\', "\\\\").replace('\'', "\\'")))
        .collect();
    let mut command = Command::new(name);
    command
        .arg(format!("--dbname={}", parts.join(" ")))
        .arg("--no-password")
        .env("PGAPPNAME", application_name);
    quiet(&mut command);
    match info.get("password") {
        Some(password) => command.env("PGPASSWORD", password),
        None => command.env_remove("PGPASSWORD"),
    };
    command
}

/// Only the errors of the tool are read.
pub(super) fn quiet(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
}

/// Runs a tool to its end, or until the shutdown. `activity` shows that pgapace waits for it. Returns whether it
/// succeeded, and its error output.
pub(super) fn run(
    command: &mut Command,
    name: &str,
    shutdown: &Shutdown,
    activity: &Activity,
) -> Result<(bool, String)> {
    let mut child = command.spawn().map_err(|error| {
        Failure::new(Class::Config, format!("cannot run {name}: {error}"))
            .hint("--copy-schema needs pg_dump, psql and pg_restore in the PATH.")
    })?;
    let mut errors = child.stderr.take();
    let read = move || {
        let mut said = Vec::new();
        if let Some(errors) = &mut errors {
            // Output that cannot be read is not shown.
            let _ = errors.read_to_end(&mut said);
        }
        String::from_utf8_lossy(&said).trim().to_owned()
    };
    let reader = match std::thread::Builder::new().name(name.to_owned()).spawn(read) {
        Ok(reader) => reader,
        Err(error) => {
            // It could not be heard.
            let ended = child.kill().and_then(|()| child.wait());
            tracing::debug!(?ended, name, "the tool was ended");
            return Err(Failure::refused_by_system("start a thread", &error));
        }
    };
    let ended = wait(&mut child, name, shutdown, activity);
    let said = reader.join().unwrap_or_default();
    Ok((ended?, said))
}

fn wait(child: &mut Child, name: &str, shutdown: &Shutdown, activity: &Activity) -> Result<bool> {
    let failed = |error| Failure::internal(format!("waiting for {name}: {error}"));
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(status.success());
        }
        if shutdown.requested() {
            child.kill().map_err(failed)?;
            child.wait().map_err(failed)?;
            return Err(Failure::new(Class::Stopped, "stopped while copying the schema"));
        }
        activity.note();
        std::thread::sleep(POLL);
    }
}

/// The subscription is named by its number: of a long name, the server would cut the end.
pub(super) fn application_name(id: SubscriptionId) -> String {
    format!("pgapace schema {}", id.0)
}

/// Terminates sessions of tools that an earlier process has started, and waits until they have ended.
pub(crate) fn end_leftovers(control: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.pg_terminate_backend({}, {}) \
         FROM pg_catalog.pg_stat_activity a \
         WHERE a.datname = pg_catalog.current_database() AND a.usename = session_user \
           AND a.application_name = {}",
        as_login_role("a.pid"),
        END_PATIENCE.as_millis(),
        wire::quote_literal(&application_name(id)),
    );
    control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "terminating sessions of an earlier schema copy"))?;
    Ok(())
}

/// A private directory, removed when dropped.
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn create() -> Result<Self> {
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

    /// The path of a file in it.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
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
    use wire::ConnInfo;

    use super::tool;

    #[test]
    fn the_tools_check_the_server_as_pgapace_does() {
        let text = "host=/tmp dbname=d channel_binding=require requirepeer=postgres \
                    sslnegotiation=direct sslmode=verify-full require_auth=scram-sha-256 sslcertmode=disable";
        let given = |text: &str| {
            let info = ConnInfo::parse_with_env(text, &|_| None, None).unwrap();
            let command = tool("psql", &info, "", Some("-c a=x\\ y"));
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
        assert!(argument.contains("options='-c a=x\\\\ y'"), "{argument}");
        let argument = given("host=/tmp dbname=d options='-c b=z'");
        assert!(argument.contains("options='-c b=z -c a=x\\\\ y'"), "{argument}");
        assert!(!argument.contains("ssl") && !argument.contains("require"), "{argument}");
    }
}
