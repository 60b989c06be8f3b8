//! A fresh Debian root, in which the package is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use testbed::{Pair, Program};

use crate::book;
use crate::support::{must, skipped};

/// The folder that `cargo xtask dist --try` fills: root.tar, before.deb, now.deb, and what users download.
const FOLDER: &str = "PGAPACE_PACKAGES";

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Arguments: the root, folders of this machine to show in it, `--`, and the command. The mounts end with
/// the command, because they are made in its own mount namespace.
const ENTER: &str = r#"set -e
root=$1; shift
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --bind "$1" "$root$1"; shift; done
shift
exec chroot "$root" "$@""#;

pub(crate) struct Root {
    directory: TempDir,
    /// The folders of the servers' sockets, which have the same path inside.
    shared: Vec<PathBuf>,
}

impl Root {
    /// A new one; none, with a message, if there is nothing to try.
    pub(super) fn unpack(test: &str) -> Option<Self> {
        let folder = packages(test)?;
        let directory = must(TempDir::new());
        let mut tar = Command::new("tar");
        tar.arg("--numeric-owner").arg("-xf").arg(folder.join("root.tar"));
        assert!(must(tar.arg("-C").arg(directory.path()).status()).success());
        let root = Self { directory, shared: Vec::new() };
        for entry in must(fs::read_dir(&folder)) {
            let file = must(entry).path();
            if file.extension().is_none_or(|extension| extension != "tar") {
                let name = file.file_name().expect("a name");
                must(fs::copy(&file, root.path("/root").join(name)));
            }
        }
        Some(root)
    }

    /// The servers that the pages of the book expect; the root shows the sockets of the servers.
    pub(super) fn servers(&mut self) -> Pair {
        let pair = book::servers();
        for server in [&pair.publisher, &pair.subscriber] {
            self.shared.push(server.socket_dir().to_owned());
        }
        pair
    }

    /// A path of the root, seen from this machine.
    pub(super) fn path(&self, inside: &str) -> PathBuf {
        self.directory.path().join(inside.trim_start_matches('/'))
    }

    /// The arguments of `unshare` for a command of a user, or of root, in a directory of the root.
    fn arguments(&self, user: Option<&str>, directory: &str, command: &[&str]) -> Vec<String> {
        let root = self.directory.path().display().to_string();
        let mut all = ["--mount", "sh", "-c", ENTER, "sh", &root].map(str::to_owned).to_vec();
        all.extend(self.shared.iter().map(|folder| folder.display().to_string()));
        all.extend(["--", "env", "-C", directory, PATH].map(str::to_owned));
        if let Some(user) = user {
            all.push("setpriv".to_owned());
            all.extend([format!("--reuid={user}"), format!("--regid={user}")]);
            all.push("--init-groups".to_owned());
        }
        all.extend(command.iter().map(|word| (*word).to_owned()));
        all
    }

    /// A command without the variables of this process.
    pub(crate) fn command(&self, user: Option<&str>, directory: &str, command: &[&str]) -> Command {
        let mut unshare = Command::new("unshare");
        unshare.env_clear().env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        unshare.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        unshare.args(self.arguments(user, directory, command));
        unshare
    }

    /// The same for a process that goes on.
    pub(super) fn program(&self, user: &str, command: &[&str]) -> Program {
        Program::new("unshare").args(self.arguments(Some(user), "/", command))
    }

    /// Exit code and output of a line of shell.
    pub(super) fn try_run(&self, user: Option<&str>, line: &str) -> (i32, String) {
        let line = format!("exec 2>&1; {line}");
        let output = must(self.command(user, "/root", &["sh", "-ec", &line]).output());
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap_or(-1), format!("{text}{errors}"))
    }

    /// The output of a line of shell of root, which must succeed.
    #[track_caller]
    pub(super) fn run(&self, line: &str) -> String {
        let (code, output) = self.try_run(None, line);
        assert_eq!(code, 0, "{line}\n{output}");
        output
    }
}

fn packages(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from);
    if folder.is_none() {
        skipped(test, "cargo xtask dist --try makes the packages and runs it");
    }
    folder.filter(|folder| Path::new(folder).is_dir())
}
