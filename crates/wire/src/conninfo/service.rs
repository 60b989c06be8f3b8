//! The connection service file.
//!
//! Source: `parseServiceInfo` and `parseServiceFile` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-pgservice.html>.

use std::path::{Path, PathBuf};

use super::environment::Env;
use super::parse_keywords::is_space;
use super::{ConnInfoError, Given};

/// The directory of Debian's packages. Other packages compile in a directory that pgapace cannot
/// know.
const SYSTEM_DIR: &str = "/etc/postgresql-common";

/// Sets parameters that are still unset from the service that `service=` or PGSERVICE names.
pub(super) fn fill(
    given: &mut Given,
    env: Env<'_>,
    home: Option<&Path>,
) -> Result<(), ConnInfoError> {
    let named = given.get("service").map(str::to_owned).or_else(|| env("PGSERVICE"));
    let Some(service) = named.filter(|service| !service.is_empty()) else { return Ok(()) };
    let user_file = match env("PGSERVICEFILE") {
        Some(file) => Some((PathBuf::from(file), true)),
        None => home.map(|home| (home.join(".pg_service.conf"), false)),
    };
    let system_dir = env("PGSYSCONFDIR").unwrap_or_else(|| SYSTEM_DIR.to_owned());
    let system_file = (Path::new(&system_dir).join("pg_service.conf"), false);
    for (file, required) in user_file.into_iter().chain([system_file]) {
        let text = match std::fs::read(&file) {
            // A comment in another encoding concerns no service.
            Ok(text) => String::from_utf8_lossy(&text).into_owned(),
            Err(_) if !required => continue,
            Err(_) => {
                return Err(ConnInfoError::new(format!(
                    "service file \"{}\" not found",
                    file.display()
                )));
            }
        };
        if apply(&text, &file, &service, given)? {
            given.set_default("service", &service)?;
            return Ok(());
        }
    }
    // The message omits the name, because it may be a piece of an unquoted password.
    Err(ConnInfoError::new("definition of the service not found in any service file"))
}

/// Reads the section `[service]` of a file; returns false when the file does not have it.
fn apply(text: &str, file: &Path, service: &str, given: &mut Given) -> Result<bool, ConnInfoError> {
    let mut found = false;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim_matches(is_space);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(group) = line.strip_prefix('[') {
            if found {
                break;
            }
            found = group.strip_prefix(service).is_some_and(|rest| rest.starts_with(']'));
            continue;
        }
        if !found {
            continue;
        }
        let file = file.display();
        if line.starts_with("ldap") {
            return Err(ConnInfoError::new(format!(
                "LDAP lookup in service file \"{file}\", line {number}, is not supported"
            )));
        }
        let syntax_error = || {
            ConnInfoError::new(format!("syntax error in service file \"{file}\", line {number}"))
        };
        let (name, value) = line.split_once('=').ok_or_else(syntax_error)?;
        if name == "service" || name == "servicefile" {
            return Err(ConnInfoError::new(format!(
                "nested \"{name}\" specifications not supported in service file \"{file}\", line \
                 {number}"
            )));
        }
        given.set_default(name, value).map_err(|_| syntax_error())?;
    }
    Ok(found)
}
