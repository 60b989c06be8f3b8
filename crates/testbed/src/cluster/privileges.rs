//! The server's operating system user: PostgreSQL refuses to run as root.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Once;

use crate::error::{Context, Error, Result};

/// The user that runs the server programs when the test runs as root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerUser {
    name: String,
    uid: u32,
    gid: u32,
}

impl ServerUser {
    /// The user to switch to, or none when the test does not run as root.
    pub(crate) fn needed() -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let accounts =
            fs::read_to_string("/etc/passwd").context(|| "read /etc/passwd".to_string())?;
        let user = ["postgres", "nobody"]
            .iter()
            .find_map(|name| Self::in_accounts(&accounts, name))
            .ok_or_else(|| {
                Error::other(
                    "PostgreSQL refuses to run as root, and there is neither a user `postgres` \
                     nor a user `nobody` to run it as",
                )
            })?;
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::debug!(user = user.name, "PostgreSQL refuses root: servers run as this user");
        });
        Ok(Some(user))
    }

    /// The user's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Makes the command run as this user. It has no supplementary groups, because the standard
    /// library clears them when root sets a user.
    pub(crate) fn apply(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    /// Makes this user the owner of a file or directory.
    pub(crate) fn own(&self, path: &Path) -> Result<()> {
        chown(path, Some(self.uid), Some(self.gid))
            .context(|| format!("give {} to user {}", path.display(), self.name))
    }

    fn in_accounts(accounts: &str, name: &str) -> Option<Self> {
        let fields: Vec<&str> =
            accounts.lines().map(|l| l.split(':').collect::<Vec<_>>()).find(|f| f[0] == name)?;
        let (uid, gid) = (fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        (uid != 0).then(|| Self { name: name.to_string(), uid, gid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_an_account() {
        let accounts = "root:x:0:0::/root:/bin/sh\npostgres:x:101:104:a:/var/lib:/bin/bash\n";
        let user = ServerUser::in_accounts(accounts, "postgres").unwrap();
        assert_eq!((user.uid, user.gid), (101, 104));
        assert_eq!(ServerUser::in_accounts(accounts, "nobody"), None);
        assert_eq!(ServerUser::in_accounts(accounts, "root"), None);
    }
}
