//! A disk that fills: a file system of a few megabytes for a tablespace. Only root can mount it.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use super::skipped;

pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts it for the user who owns the file `owner_of`; `None` where that is not permitted.
    pub(crate) fn mount(owner_of: &str, megabytes: u32) -> Option<Self> {
        let directory = tempfile::tempdir().ok()?;
        let path = directory.path();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).ok()?;
        let disk = Self(directory);
        let size = format!("size={megabytes}m,mode=0700");
        if !disk.run(&["-t", "tmpfs", "-o", &size, "tmpfs"]) {
            skipped("full disk", "no file system can be mounted here");
            return None;
        }
        let owner = std::fs::metadata(owner_of).ok()?;
        std::os::unix::fs::chown(disk.0.path(), Some(owner.uid()), Some(owner.gid())).ok()?;
        Some(disk)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn run(&self, options: &[&str]) -> bool {
        let status =
            Command::new("mount").args(options).arg(self.0.path()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }

    /// Leaves no space.
    pub(crate) fn fill(&self) {
        let mut file = std::fs::File::create(self.0.path().join("filler")).expect("a file");
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    /// Adds disk space.
    pub(crate) fn grow(&self) {
        assert!(self.run(&["-o", "remount,size=256m"]), "the file system does not grow");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Unmount before the directory is removed.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
