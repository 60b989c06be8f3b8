//! PostgreSQL server installations.
//!
//! [`find_or_fetch`] searches the environment, PATH and the usual directories of packages, then the
//! cache. As a last resort it downloads a build into the cache.

mod cache;
#[cfg(feature = "fetch")]
mod fetch;
mod local;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cluster::privileges::ServerUser;
use crate::error::{Context, Error, Result};

/// One installation of PostgreSQL: the directory of its programs and its version.
#[derive(Clone, Debug)]
pub struct ServerBinaries {
    directory: PathBuf,
    library_directory: Option<PathBuf>,
    major: u16,
    version: String,
}

impl ServerBinaries {
    /// Checks whether a `bin` directory contains a server that the server's user can run, and its
    /// version.
    pub fn in_directory(directory: &Path) -> Result<Self> {
        let library_directory = library_beside(directory);
        let mut probe = Self {
            directory: directory.to_path_buf(),
            library_directory,
            major: 0,
            version: String::new(),
        };
        for program in ["postgres", "initdb"] {
            if !probe.has(program) {
                return Err(Error::other(format!("{} has no {program}", directory.display())));
            }
        }
        // Runs as the server's user, because a directory that only root can enter is unusable.
        let mut command = probe.command("postgres");
        let user = ServerUser::needed()?;
        if let Some(user) = &user {
            user.apply(&mut command);
        }
        let output = command.arg("--version").current_dir("/").output().context(|| {
            let who = user.map_or(String::new(), |user| format!(" as user {}", user.name()));
            format!("run {} --version{who}", probe.bin("postgres").display())
        })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (version, major) = parse_version(&text).ok_or_else(|| {
            Error::other(format!(
                "{} --version said {text:?} {}",
                probe.bin("postgres").display(),
                String::from_utf8_lossy(&output.stderr).trim()
            ))
        })?;
        probe.version = version;
        probe.major = major;
        Ok(probe)
    }

    /// The major version, such as 18.
    pub fn major(&self) -> u16 {
        self.major
    }

    /// The full version, such as `18.6` or `19rc1`.
    pub fn version(&self) -> String {
        self.version.clone()
    }

    /// The directory of the programs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of a program, which may not exist; see [`has`](Self::has).
    pub fn bin(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Whether this installation has a program (`psql`, `pgbench`, `pg_dump`, ...).
    pub fn has(&self, name: &str) -> bool {
        self.bin(name).is_file()
    }

    /// Environment variables that the programs need to find their own libraries.
    pub fn environment(&self) -> Vec<(String, PathBuf)> {
        self.library_directory.iter().map(|lib| ("LD_LIBRARY_PATH".into(), lib.clone())).collect()
    }

    /// A command for one of the programs, without the caller's `PG*` variables.
    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.bin(name));
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("PG") {
                command.env_remove(variable);
            }
        }
        command.envs(self.environment()).env("LC_ALL", "C").env("TZ", "UTC");
        command
    }
}

/// Finds the server programs of a major version on this machine, or downloads them into the cache.
pub fn find_or_fetch(major: u16) -> Result<ServerBinaries> {
    if let Some(found) = local::find(major)? {
        return Ok(found);
    }
    if let Some(found) = cache::find(major) {
        return Ok(found);
    }
    fetch_into_cache(major)
}

/// The installed or cached server programs of a major version.
pub fn find_local(major: u16) -> Option<ServerBinaries> {
    match local::find(major) {
        Ok(Some(found)) => Some(found),
        Ok(None) => cache::find(major),
        Err(error) => {
            tracing::warn!(
                event = "server_directory_ignored",
                %error,
                "PostgreSQL directory named by the environment cannot be used"
            );
            cache::find(major)
        }
    }
}

/// The newest installed or cached server programs.
pub fn newest_local() -> Option<ServerBinaries> {
    let mut all = local::all();
    all.extend(cache::all());
    // Of several installations of the newest version, the first in the search order.
    all.into_iter().rev().max_by_key(ServerBinaries::major)
}

#[cfg(feature = "fetch")]
fn fetch_into_cache(major: u16) -> Result<ServerBinaries> {
    if major > fetch::NEWEST_MAJOR {
        return Err(not_found(major, "and no build of it is published for fetching"));
    }
    cache::fill(major, |directory| fetch::fetch(major, directory))
        .map_err(|error| not_found(major, &format!("and fetching failed: {error}")))
}

#[cfg(not(feature = "fetch"))]
fn fetch_into_cache(major: u16) -> Result<ServerBinaries> {
    Err(not_found(major, "and this build cannot fetch (feature `fetch` is off)"))
}

fn not_found(major: u16, why: &str) -> Error {
    Error::NoServer {
        major,
        reason: format!(
            "none on PATH or in the usual directories, {why}. Install the package \
             postgresql-{major}, or set PGAPACE_PG{major}_BIN to the directory of its programs"
        ),
    }
}

/// The library directory of a relocatable build; distribution packages need none.
fn library_beside(bin: &Path) -> Option<PathBuf> {
    let library = bin.parent()?.join("lib");
    let own = ["libpq.so.5", "libpq.5.dylib"].iter().any(|name| library.join(name).exists());
    (own && !library.starts_with("/usr/lib")).then_some(library)
}

/// Parses `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)` as `("15.18", 15)`.
fn parse_version(text: &str) -> Option<(String, u16)> {
    let version = text.split_once("(PostgreSQL) ")?.1.split_whitespace().next()?;
    let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    Some((version.to_string(), version[..digits].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of_every_kind_of_build() {
        let parse = |text| parse_version(text).unwrap();
        let debian = "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n";
        assert_eq!(parse(debian), ("15.18".into(), 15));
        assert_eq!(parse("postgres (PostgreSQL) 18.6\n"), ("18.6".into(), 18));
        assert_eq!(parse("postgres (PostgreSQL) 19rc1\n"), ("19rc1".into(), 19));
        assert_eq!(parse_version("postgres: not found"), None);
    }
}
