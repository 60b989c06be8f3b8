//! Defaults from the process environment and the operating system.

use std::fs;
use std::path::{Path, PathBuf};

use super::options::PARAMETERS;
use super::{ConnInfoError, Given};

/// The environment as a function, so that tests do not change the real one.
pub(super) type Env<'e> = &'e dyn Fn(&str) -> Option<String>;

/// Sets parameters that are still unset from their PG* variables.
pub(super) fn fill(given: &mut Given, env: Env<'_>) -> Result<(), ConnInfoError> {
    for parameter in PARAMETERS {
        if given.0.contains_key(parameter.name) {
            continue;
        }
        if let Some(value) = parameter.env.and_then(env) {
            given.set_default(parameter.name, &value)?;
        }
    }
    // Deprecated, but libpq still honours it.
    if env("PGREQUIRESSL").is_some_and(|value| value.starts_with('1')) {
        given.set_default("sslmode", "require")?;
    }
    Ok(())
}

/// The home directory of the process.
pub(super) fn home() -> Option<PathBuf> {
    match std::env::var_os("HOME") {
        Some(home) if !home.is_empty() => Some(home.into()),
        _ => account(rustix::process::geteuid().as_raw()).map(|account| account.home),
    }
}

/// The name of the operating system user, which is libpq's default user name.
pub(super) fn os_user(env: Env<'_>) -> Option<String> {
    match account(rustix::process::geteuid().as_raw()) {
        Some(account) => Some(account.name),
        // Not a local account (LDAP, for example): use the name that the login program set.
        None => env("LOGNAME").or_else(|| env("USER")).filter(|name| !name.is_empty()),
    }
}

/// An entry of /etc/passwd.
pub(crate) struct Account {
    pub(crate) name: String,
    pub(crate) home: PathBuf,
}

/// The local account with this user id.
pub(crate) fn account(uid: u32) -> Option<Account> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, id, home) = (fields.next()?, fields.nth(1)?, fields.nth(2)?);
        (id.parse() == Ok(uid))
            .then(|| Account { name: name.to_owned(), home: Path::new(home).to_owned() })
    })
}
