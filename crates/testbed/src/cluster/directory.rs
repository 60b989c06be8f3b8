//! The directories of a cluster.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::privileges::ServerUser;
use crate::error::{Context, Error, Result};

/// The directories of one cluster.
#[derive(Debug)]
pub(super) struct Directories {
    /// Directory of the socket and the log. The path is short, because the path of a socket has at
    /// most 107 bytes.
    pub(super) home: PathBuf,
    /// Parent of the data directory: `home`, or a directory in shared memory.
    pub(super) data_home: PathBuf,
}

impl Directories {
    /// Creates the directories; `given` is a directory that the caller chose for all files.
    pub(super) fn create(given: Option<&Path>, user: Option<&ServerUser>) -> Result<Self> {
        if let Some(home) = given {
            let home = std::path::absolute(home)
                .context(|| format!("make {} an absolute path", home.display()))?;
            if fs::read_dir(&home).is_ok_and(|mut entries| entries.next().is_some()) {
                return Err(Error::other(format!("{} is not empty", home.display())));
            }
            fs::create_dir_all(&home).context(|| format!("create {}", home.display()))?;
            open_to(user, &home)?;
            return Ok(Self { data_home: home.clone(), home });
        }
        let base = env::var_os("PGAPACE_TEST_TMP").filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = base.unwrap_or_else(|| PathBuf::from("/tmp"));
        let home = fresh_directory(&base, user)?;
        let data_home = match memory_directory() {
            Some(memory) => fresh_directory(memory, user).inspect_err(|_| {
                let _ = fs::remove_dir(&home);
            })?,
            None => home.clone(),
        };
        Ok(Self { home, data_home })
    }

    /// Both directories without duplicates.
    pub(super) fn each(&self) -> Vec<&Path> {
        let mut each = vec![self.home.as_path()];
        if self.data_home != self.home {
            each.push(&self.data_home);
        }
        each
    }

    /// Whether the data directory is in shared memory.
    pub(super) fn in_memory(&self) -> bool {
        self.data_home != self.home
    }

    /// Removes both directories.
    pub(super) fn remove(&self) {
        for directory in self.each() {
            if let Err(error) = fs::remove_dir_all(directory) {
                tracing::warn!(
                    event = "directory_left",
                    directory = %directory.display(),
                    %error,
                    "could not remove a temporary directory"
                );
            }
        }
    }
}

fn fresh_directory(base: &Path, user: Option<&ServerUser>) -> Result<PathBuf> {
    let directory = tempfile::Builder::new()
        .prefix("pgapace-")
        .tempdir_in(base)
        .context(|| format!("create a directory in {}", base.display()))?
        .keep();
    open_to(user, &directory)?;
    Ok(directory)
}

/// Makes the server's user the owner, and lets every user enter the directory to reach the socket.
fn open_to(user: Option<&ServerUser>, directory: &Path) -> Result<()> {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
        .context(|| format!("open {}", directory.display()))?;
    user.map_or(Ok(()), |user| user.own(directory))
}

/// The shared memory directory, if it exists, is writable and has enough free space.
#[cfg(target_os = "linux")]
fn memory_directory() -> Option<&'static Path> {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const ROOM_MIN: u64 = 2 << 30;
    if env::var_os("PGAPACE_TEST_DISK").is_some_and(|v| v == "1") {
        return None;
    }
    let directory = Path::new("/dev/shm");
    let kind = rustix::fs::statfs(directory).ok()?;
    let space = rustix::fs::statvfs(directory).ok()?;
    let writable = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok();
    let is_memory = u64::try_from(kind.f_type).is_ok_and(|magic| magic == TMPFS_MAGIC);
    let room = space.f_bavail * space.f_frsize;
    (is_memory && writable && room > ROOM_MIN).then_some(directory)
}

#[cfg(not(target_os = "linux"))]
fn memory_directory() -> Option<&'static Path> {
    None
}
