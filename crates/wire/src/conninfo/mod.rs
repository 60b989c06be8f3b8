//! Connection strings and all sources from which libpq completes them.
//!
//! A parameter that is not in the string comes from the service file, then from the PG* environment
//! variables, then from the default. A value that is given but empty stops this search and means
//! the default. The password file is read while connecting, because the result depends on the host.
//!
//! PGDATESTYLE, PGTZ and PGGEQO have no effect, because they would change the output of a session.

mod environment;
mod hosts;
mod masked;
mod options;
mod parse_keywords;
mod parse_uri;
mod passfile;
mod service;
#[cfg(test)]
mod tests;

pub(crate) use environment::account;
pub(crate) use hosts::{Host, Place};
pub use masked::without_passwords;
pub(crate) use options::{
    ChannelBinding, SessionAttrs, Settings, SslCertMode, SslMode, TlsVersion,
};
pub(crate) use passfile::{Wanted, lookup as lookup_password};

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use environment::Env;
use options::{PARAMETERS, Support};

/// The reason why a connection string is invalid.
///
/// The messages resemble libpq's, but they name the position and never quote the text. A password
/// without the necessary quotes or percent-encoding is cut into pieces. Any piece can then look
/// like a keyword, a port, a host or a query parameter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConnInfoError {
    message: String,
}

impl ConnInfoError {
    fn new(message: impl Into<String>) -> ConnInfoError {
        ConnInfoError { message: message.into() }
    }

    /// `choices` are the valid values.
    fn invalid_value<'c>(name: &str, choices: impl IntoIterator<Item = &'c str>) -> ConnInfoError {
        let choices: Vec<&str> = choices.into_iter().collect();
        ConnInfoError::new(format!("invalid {name} value (use one of {})", choices.join(", ")))
    }

    fn unknown(name: &str) -> ConnInfoError {
        ConnInfoError::new(format!("invalid connection option \"{name}\""))
    }

    /// `value` is one of the known values, never arbitrary text.
    fn unsupported(name: &str, value: Option<&'static str>) -> ConnInfoError {
        let value = value.map(|value| format!(" value \"{value}\"")).unwrap_or_default();
        let next = options::in_place_of(name);
        ConnInfoError::new(format!("connection option \"{name}\"{value} is not supported: {next}"))
    }
}

/// The position of `part`, a slice of `whole`, in characters, starting at 1.
fn character_number(whole: &str, part: &str) -> usize {
    let offset = part.as_ptr().addr().saturating_sub(whole.as_ptr().addr());
    whole.get(..offset).unwrap_or_default().chars().count() + 1
}

/// Parameters collected from all sources.
#[derive(Clone, Default, PartialEq, Eq)]
struct Given(BTreeMap<&'static str, String>);

impl Given {
    /// The value of a parameter; `None` when it is unset or empty.
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), ConnInfoError> {
        // Obsolete spelling that libpq still accepts.
        if name == "requiressl" {
            let mode = if value.starts_with('1') { "require" } else { "prefer" };
            self.0.insert("sslmode", mode.to_owned());
            return Ok(());
        }
        let parameter = options::find(name).ok_or_else(|| ConnInfoError::unknown(name))?;
        if value.contains('\0') {
            return Err(ConnInfoError::new(format!("NUL character in value of \"{name}\"")));
        }
        self.0.insert(parameter.name, value.to_owned());
        Ok(())
    }

    /// Sets a parameter that is unset. As in libpq, an obsolete spelling is not valid here.
    fn set_default(&mut self, name: &str, value: &str) -> Result<(), ConnInfoError> {
        let parameter = options::find(name).ok_or_else(|| ConnInfoError::unknown(name))?;
        if self.0.contains_key(parameter.name) {
            return Ok(());
        }
        self.set(parameter.name, value)
    }
}

/// A connection string, completed and checked.
///
/// Neither Debug nor Display shows passwords.
#[derive(Clone)]
pub struct ConnInfo {
    given: Given,
    hosts: Vec<Host>,
    settings: Settings,
    /// The home directory, whose `.postgresql/` contains certificates.
    home: Option<PathBuf>,
}

impl ConnInfo {
    /// Whether all parameters are the same, wherever each comes from. The password file is not among the sources: it is read
    /// for each connection.
    #[must_use]
    pub fn has_parameters_of(&self, other: &ConnInfo) -> bool {
        self.given == other.given
    }

    /// Parses a connection string (URI or `keyword = value`) and completes it from the service
    /// file, the environment and the defaults.
    pub fn parse(text: &str) -> Result<ConnInfo, ConnInfoError> {
        ConnInfo::parse_with_os_env(text, &|name| std::env::var_os(name))
    }

    /// A variable that is needed and not UTF-8 is an error: without it, another server may be reached.
    fn parse_with_os_env(
        text: &str,
        env: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<ConnInfo, ConnInfoError> {
        let unreadable = RefCell::new(None);
        let read = |name: &str| match env(name)?.into_string() {
            Ok(value) => Some(value),
            Err(_) => {
                unreadable.replace(Some(name.to_owned()));
                None
            }
        };
        let parsed = ConnInfo::parse_with_env(text, &read, environment::home().as_deref());
        match unreadable.take() {
            Some(name) => {
                Err(ConnInfoError::new(format!("environment variable {name} is not valid UTF-8")))
            }
            None => parsed,
        }
    }

    /// Whether the text itself has a password. False for a text that cannot be parsed.
    pub fn text_has_password(text: &str) -> bool {
        let mut given = Given::default();
        let parsed = match parse_uri::strip_scheme(text) {
            Some(rest) => parse_uri::parse(text, rest, &mut given),
            None => parse_keywords::parse(text, &mut given),
        };
        parsed.is_ok() && given.get("password").is_some()
    }

    /// [`ConnInfo::parse`] with an explicit environment and home directory.
    pub fn parse_with_env(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
        home: Option<&Path>,
    ) -> Result<ConnInfo, ConnInfoError> {
        let mut given = Given::default();
        match parse_uri::strip_scheme(text) {
            Some(rest) => parse_uri::parse(text, rest, &mut given)?,
            None => parse_keywords::parse(text, &mut given)?,
        }
        service::fill(&mut given, env, home)?;
        environment::fill(&mut given, env)?;
        fill_defaults(&mut given, env, home)?;
        ConnInfo::checked(given, home.map(Path::to_owned))
    }

    fn checked(given: Given, home: Option<PathBuf>) -> Result<ConnInfo, ConnInfoError> {
        let settings = options::settings(&given)?;
        let hosts = hosts::hosts(&given)?;
        Ok(ConnInfo { given, hosts, settings, home })
    }

    /// The value of a parameter; `None` when it is unset or empty.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.given.get(key)
    }

    /// Returns a copy with one parameter changed.
    pub fn with(mut self, key: &str, value: &str) -> Result<ConnInfo, ConnInfoError> {
        self.given.set(key, value)?;
        ConnInfo::checked(self.given, self.home)
    }

    /// The database to connect to.
    pub fn dbname(&self) -> &str {
        self.get("dbname").unwrap_or_else(|| self.user())
    }

    /// The user to connect as.
    pub fn user(&self) -> &str {
        self.get("user").unwrap_or_default()
    }

    /// The parameters in keyword form for logs: every secret is shown as `****`.
    pub fn redacted(&self) -> String {
        let mut text = String::new();
        for parameter in PARAMETERS {
            let Some(value) = self.get(parameter.name) else { continue };
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(parameter.name);
            text.push('=');
            match parameter.support {
                Support::Secret | Support::Refused => text.push_str("****"),
                _ => text.push_str(&parse_keywords::quote(value)),
            }
        }
        text
    }

    pub(crate) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The path of a file in `~/.postgresql`.
    pub(crate) fn user_file(&self, name: &str) -> Option<PathBuf> {
        self.home.as_ref().map(|home| home.join(".postgresql").join(name))
    }
}

/// Sets the defaults of user, database and password file.
fn fill_defaults(
    given: &mut Given,
    env: Env<'_>,
    home: Option<&Path>,
) -> Result<(), ConnInfoError> {
    if given.get("user").is_none() {
        let user = environment::os_user(env).ok_or_else(|| {
            ConnInfoError::new(format!(
                "local user with ID {} does not exist",
                rustix::process::geteuid().as_raw()
            ))
        })?;
        given.set("user", &user)?;
    }
    if given.get("dbname").is_none() {
        let user = given.get("user").unwrap_or_default().to_owned();
        given.set("dbname", &user)?;
    }
    if given.get("passfile").is_none()
        && let Some(file) = home.map(|home| home.join(".pgpass"))
        && let Some(file) = file.to_str()
    {
        given.set("passfile", file)?;
    }
    Ok(())
}

impl fmt::Display for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

impl fmt::Debug for ConnInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnInfo({})", self.redacted())
    }
}
