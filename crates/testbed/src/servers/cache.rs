//! The cache of downloaded servers: one directory for each major version, shared by processes.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::ServerBinaries;
use crate::error::{Context, Result};

const MAJORS: std::ops::RangeInclusive<u16> = 14..=20;

/// The cached installation of `major`, if any of the caches has a complete one.
pub(super) fn find(major: u16) -> Option<ServerBinaries> {
    roots().iter().find_map(|root| find_in(root, major))
}

fn find_in(root: &Path, major: u16) -> Option<ServerBinaries> {
    let directory = root.join(major.to_string()).join("bin");
    if !directory.is_dir() || !is_trusted(root) {
        return None;
    }
    match ServerBinaries::in_directory(&directory) {
        Ok(found) => Some(found),
        Err(error) => {
            tracing::warn!(
                event = "cached_server_ignored",
                directory = %directory.display(),
                %error,
                "cached server cannot be used"
            );
            None
        }
    }
}

/// Whether only this user or root can write to a cache. Programs from other caches are not run.
fn is_trusted(root: &Path) -> bool {
    let owner = fs::metadata(root).map(|metadata| metadata.uid());
    owner.is_ok_and(|owner| owner == 0 || owner == rustix::process::geteuid().as_raw())
}

/// Every cached installation.
pub(super) fn all() -> Vec<ServerBinaries> {
    MAJORS.filter_map(find).collect()
}

/// Installs `major`: `unpack` fills the directory that it receives, which does not exist yet. Only
/// one process installs; the others wait for it.
#[cfg_attr(not(feature = "fetch"), allow(dead_code))]
pub(super) fn fill(major: u16, unpack: impl FnOnce(&Path) -> Result<()>) -> Result<ServerBinaries> {
    let root = writable_root()?;
    let lock_path = root.join(format!("{major}.lock"));
    let lock = File::create(&lock_path).context(|| format!("create {}", lock_path.display()))?;
    lock.lock().context(|| format!("lock {}", lock_path.display()))?;
    if let Some(found) = find_in(&root, major) {
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

/// The cache of root, which every user can read. The server's user cannot enter root's own cache
/// directory.
const SYSTEM_ROOT: &str = "/var/cache/pgapace/postgresql";

/// The cache directories in order of preference.
fn roots() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(directory) = variable("PGAPACE_CACHE") {
        return vec![directory];
    }
    let user = rustix::process::geteuid();
    let mut roots = Vec::new();
    if !user.is_root() {
        let own = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        roots.extend(own.map(|cache| cache.join("pgapace/postgresql")));
    }
    roots.push(PathBuf::from(SYSTEM_ROOT));
    roots.push(env::temp_dir().join(format!("pgapace-cache-{}", user.as_raw())));
    roots
}

/// The first cache directory that is writable.
#[cfg_attr(not(feature = "fetch"), allow(dead_code))]
fn writable_root() -> Result<PathBuf> {
    let mut failure = None;
    for root in roots() {
        let writable = fs::create_dir_all(&root)
            .and_then(|()| Ok(rustix::fs::access(&root, rustix::fs::Access::WRITE_OK)?));
        match writable {
            Ok(()) => return Ok(root),
            Err(error) => {
                failure.get_or_insert((root, error));
            }
        }
    }
    let (root, error) = failure.unwrap_or_else(|| (PathBuf::new(), std::io::Error::other("none")));
    Err(error).context(|| format!("write to the cache {}", root.display()))
}

/// Makes the tree readable for every user, independent of the umask.
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
