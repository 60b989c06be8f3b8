//! Installed servers of this machine.

use std::env;
use std::path::{Path, PathBuf};

use super::ServerBinaries;
use crate::error::{Error, Result};

/// Major versions that [`all`] looks for.
const MAJORS: std::ops::RangeInclusive<u16> = 14..=20;

/// The first installation of `major` in the search order. If the environment names an unusable
/// directory, the result is an error instead of another installation.
pub(super) fn find(major: u16) -> Result<Option<ServerBinaries>> {
    if let Some(directory) = named_by_environment(major) {
        let found = ServerBinaries::in_directory(&directory).map_err(|error| Error::NoServer {
            major,
            reason: format!("the environment names {}: {error}", directory.display()),
        })?;
        if found.major() != major {
            let reason = format!(
                "the environment names {}, which is {}",
                directory.display(),
                found.major()
            );
            return Err(Error::NoServer { major, reason });
        }
        return Ok(Some(found));
    }
    Ok(usual_directories(major)
        .iter()
        .filter_map(|directory| usable(directory))
        .find(|found| found.major() == major))
}

/// Every installation, in the search order.
pub(super) fn all() -> Vec<ServerBinaries> {
    MAJORS.filter_map(|major| find(major).ok().flatten()).collect()
}

fn named_by_environment(major: u16) -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if let Some(directory) = variable(&format!("PGAPACE_PG{major}_BIN")) {
        return Some(PathBuf::from(directory));
    }
    let directory = Path::new(&variable("PGAPACE_PG_DIR")?).join(major.to_string()).join("bin");
    directory.is_dir().then_some(directory)
}

fn usual_directories(major: u16) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for entry in env::split_paths(&env::var_os("PATH").unwrap_or_default()) {
        // A link on PATH leads to the directory that contains initdb and the other programs.
        if let Ok(program) = entry.join("postgres").canonicalize()
            && let Some(directory) = program.parent()
        {
            directories.push(directory.to_path_buf());
        }
    }
    directories.extend(
        [
            format!("/usr/lib/postgresql/{major}/bin"),
            format!("/usr/pgsql-{major}/bin"),
            "/usr/local/pgsql/bin".to_string(),
            format!("/opt/homebrew/opt/postgresql@{major}/bin"),
            format!("/usr/local/opt/postgresql@{major}/bin"),
            format!("/home/linuxbrew/.linuxbrew/opt/postgresql@{major}/bin"),
        ]
        .map(PathBuf::from),
    );
    directories
}

fn usable(directory: &Path) -> Option<ServerBinaries> {
    if !directory.join("postgres").is_file() {
        return None;
    }
    match ServerBinaries::in_directory(directory) {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::debug!(directory = %directory.display(), %error, "passed over a server");
            None
        }
    }
}
