//! Files that may hold passwords or tokens. Like libpq, pgapace does not use one that others can read.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use wire::ConnInfo;

use super::wrong;
use crate::error::Result;

/// Text of a file, with the facts about the file that it was read from.
pub(crate) struct SecretFile {
    pub(crate) text: String,
    metadata: Metadata,
    /// The file's role and path.
    shown: String,
    path: String,
}

impl SecretFile {
    /// `what` is the role of the file, for messages.
    pub(crate) fn read(path: &Path, what: &str) -> Result<Self> {
        let shown = format!("{what} {}", path.display());
        let read = || {
            let mut file = File::open(path)?;
            // Of the opened file: another one may take its place meanwhile.
            let metadata = file.metadata()?;
            let mut text = String::new();
            file.read_to_string(&mut text)?;
            Ok((text, metadata))
        };
        let (text, metadata) =
            read().map_err(|e: std::io::Error| wrong(format!("cannot read {shown}: {e}")))?;
        Ok(Self { text, metadata, shown, path: path.display().to_string() })
    }

    /// Refuses the file if it has this connection string, with a password, and others can read it.
    pub(super) fn protects(&self, conninfo: &str) -> Result<()> {
        if ConnInfo::text_has_password(conninfo) { self.keeps("a password") } else { Ok(()) }
    }

    /// Refuses the file, which has this secret, if others can read it.
    pub(crate) fn keeps(&self, secret: &str) -> Result<()> {
        let (mode, owner) = (self.metadata.mode(), self.metadata.uid());
        let own = rustix::process::geteuid().as_raw();
        if !others_may_read(mode, owner, own) {
            return Ok(());
        }
        let (shown, path) = (&self.shown, &self.path);
        Err(wrong(format!("{shown} has {secret}, and group or others may access it"))
            .detail(format!("Its permissions are {:04o}.", mode & 0o7777))
            .hint(format!("chmod 0600 {path}")))
    }
}

/// The rule of libpq's password file, and for files of root that of its private keys: the group of
/// a service may read files that root has written for it (and systemd passes credentials so).
fn others_may_read(mode: u32, owner: u32, own: u32) -> bool {
    let forbidden = if owner == 0 && own != 0 { 0o037 } else { 0o077 };
    mode & forbidden != 0
}

#[cfg(test)]
mod tests {
    use super::others_may_read;

    #[test]
    fn only_the_owner_may_read_and_the_group_what_root_has_written() {
        for (mode, owner, own, others) in [
            (0o600, 1000, 1000, false),
            (0o400, 0, 0, false),
            (0o640, 1000, 1000, true),
            (0o604, 1000, 1000, true),
            (0o640, 0, 0, true),
            (0o640, 0, 1000, false),
            (0o660, 0, 1000, true),
            (0o644, 0, 1000, true),
        ] {
            assert_eq!(others_may_read(mode, owner, own), others, "{mode:o} {owner} {own}");
        }
    }
}
