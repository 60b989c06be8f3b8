//! The guardian: a process that cleans up after a killed test.
//!
//! A killed test runs no destructor. Each cluster therefore has a small shell that reads from a
//! pipe whose only writer is the test process. When that process ends for any reason, the shell
//! reads the end of the pipe. It then stops the server and removes its directories. The shell has
//! its own process group, so that an interrupt from the keyboard does not end it too early.

use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin};

use crate::error::Result;
use crate::program::watching_shell;

/// Arguments: the data directory, then the directories to remove.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
data=$1; shift
server=
while read -r word value; do
    case $word in
        server) server=$value ;;
        stopped) server=none ;;
        done) exit 0 ;;
    esac
done
# Told nothing yet, but a server may have been started in this very moment.
[ -n "$server" ] || { read -r server < "$data/postmaster.pid"; } 2>/dev/null
runs() {
    kill -0 "$server" 2>/dev/null || return 1
    ! grep -q '^State:[[:space:]]*Z' "/proc/$server/status" 2>/dev/null
}
segment=
{ segment=$(sed -n '7s/.* //p' "$data/postmaster.pid"); } 2>/dev/null
case $server in
    ''|none|*[!0-9]*) ;;
    *)
        kill -QUIT "$server" 2>/dev/null
        i=0
        while runs && [ $i -lt 60 ]; do sleep 0.1; i=$((i + 1)); done
        runs && kill -KILL "$server" 2>/dev/null
        ;;
esac
[ -e "$data/postmaster.pid" ] && [ -n "$segment" ] && ipcrm -m "$segment" 2>/dev/null
# An initdb in progress may still be writing: try again for a while.
[ $# -gt 0 ] || exit 0
i=0
while [ $i -lt 50 ]; do
    rm -rf -- "$@" 2>/dev/null
    gone=yes
    for directory; do [ -e "$directory" ] && gone=no; done
    [ $gone = yes ] && sleep 0.2
    for directory; do [ -e "$directory" ] && gone=no; done
    [ $gone = yes ] && exit 0
    sleep 0.1
    i=$((i + 1))
done
"#;

/// The writing end of the pipe.
#[derive(Debug)]
pub(super) struct Guardian {
    process: Child,
    pipe: Option<ChildStdin>,
}

impl Guardian {
    /// Starts a guardian for the server in this data directory; `remove` lists its directories.
    pub(super) fn start(data: &Path, remove: &[&Path]) -> Result<Self> {
        let args = [&[data], remove].concat();
        let mut process = watching_shell(SCRIPT, "pgapace-guardian", &args)?;
        let pipe = process.stdin.take();
        Ok(Self { process, pipe })
    }

    /// Reports the process ID of the server.
    pub(super) fn server_started(&mut self, pid: u32) {
        self.tell(&format!("server {pid}\n"));
    }

    /// Reports that no server is running.
    pub(super) fn server_stopped(&mut self) {
        self.tell("stopped\n");
    }

    fn tell(&mut self, line: &str) {
        if let Some(pipe) = &mut self.pipe
            && let Err(error) = pipe.write_all(line.as_bytes())
        {
            tracing::warn!(event = "guardian_gone", %error, "guardian of a test server is gone");
        }
    }
}

impl Drop for Guardian {
    /// Tells the guardian that the cluster has cleaned up itself.
    fn drop(&mut self) {
        self.tell("done\n");
        self.pipe = None;
        let _ = self.process.wait();
    }
}
