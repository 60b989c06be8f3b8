//! The cache of fetched servers: one directory per major version, shared by processes.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::ServerBinaries;
use crate::error::{Context, Result};

const MAJORS: std::ops::RangeInclusive<u16> = 14..=20;

/// The cached installation of `major`, if there is a complete one.
pub(super) fn find(major: u16) -> Option<ServerBinaries> {
    let directory = root().join(major.to_string()).join("bin");
    if !directory.is_dir() {
        return None;
    }
    match ServerBinaries::in_directory(&directory) {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::warn!(directory = %directory.display(), %error, "a cached server is unusable");
            None
        }
    }
}

/// Every cached installation.
pub(super) fn all() -> Vec<ServerBinaries> {
    MAJORS.filter_map(find).collect()
}

/// Fills the place of `major` with what `unpack` puts into the directory that it is given (and
/// that does not exist yet). Only one process does it; the others wait and find it done.
#[cfg_attr(not(feature = "fetch"), allow(dead_code))]
pub(super) fn fill(major: u16, unpack: impl FnOnce(&Path) -> Result<()>) -> Result<ServerBinaries> {
    let root = root();
    fs::create_dir_all(&root).context(|| format!("create the cache {}", root.display()))?;
    let lock_path = root.join(format!("{major}.lock"));
    let lock = File::create(&lock_path).context(|| format!("create {}", lock_path.display()))?;
    lock.lock().context(|| format!("lock {}", lock_path.display()))?;
    if let Some(found) = find(major) {
        return Ok(found);
    }
    let place = root.join(major.to_string());
    let staging = root.join(format!(".{major}.{}", std::process::id()));
    let filled = unpack(&staging).and_then(|()| {
        make_readable(&staging)?;
        if place.exists() {
            fs::remove_dir_all(&place).context(|| format!("remove {}", place.display()))?;
        }
        fs::rename(&staging, &place).context(|| format!("rename to {}", place.display()))
    });
    if filled.is_err() {
        let _ = fs::remove_dir_all(&staging);
    }
    filled?;
    ServerBinaries::in_directory(&place.join("bin"))
}

/// Where the cache is. Root's own cache directory is closed to the user that runs the servers,
/// so root has its cache under /var/cache.
fn root() -> PathBuf {
    let variable = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(directory) = variable("PGAPACE_CACHE") {
        return directory;
    }
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/var/cache/pgapace/postgresql");
    }
    variable("XDG_CACHE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(|| {
            env::temp_dir().join(format!("pgapace-{}", rustix::process::geteuid().as_raw()))
        })
        .join("pgapace/postgresql")
}

/// Lets every user read the tree, whatever the umask was.
fn make_readable(path: &Path) -> Result<()> {
    let cannot = || format!("make {} readable", path.display());
    let metadata = fs::symlink_metadata(path).context(cannot)?;
    if metadata.is_symlink() {
        return Ok(());
    }
    let mode = metadata.permissions().mode();
    let wanted = if metadata.is_dir() || mode & 0o100 != 0 { 0o755 } else { 0o644 };
    fs::set_permissions(path, fs::Permissions::from_mode(wanted)).context(cannot)?;
    if metadata.is_dir() {
        for entry in fs::read_dir(path).context(cannot)? {
            make_readable(&entry.context(cannot)?.path())?;
        }
    }
    Ok(())
}
