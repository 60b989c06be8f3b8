//! A real terminal: `pgapace top` in tmux.

use std::process::{Command, Output};

use crate::support::{Case, must};

/// A server of tmux with one session, in which `top` runs.
pub(super) struct Terminal {
    server: String,
}

impl Terminal {
    /// Whether there is tmux.
    pub(super) fn is_there() -> bool {
        Command::new("tmux").arg("-V").output().is_ok()
    }

    /// Starts `top` in a terminal of this size.
    #[track_caller]
    pub(super) fn top(case: &Case, (width, height): (u16, u16)) -> Self {
        let server = format!("pgapace-{}-{}-{height}", std::process::id(), case.tool.name);
        let terminal = Self { server };
        let command = format!(
            "{} top --interval 1 --subscriber '{}' --name {}",
            env!("CARGO_BIN_EXE_pgapace"),
            case.tool.subscriber,
            case.tool.name
        );
        let (width, height) = (width.to_string(), height.to_string());
        let started = terminal.tmux(&["new-session", "-d", "-x", &width, "-y", &height, &command]);
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
        terminal
    }

    fn tmux(&self, args: &[&str]) -> Output {
        must(Command::new("tmux").args(["-L", &self.server, "-f", "/dev/null"]).args(args).output())
    }

    /// The text of the screen.
    pub(super) fn screen(&self) -> String {
        String::from_utf8_lossy(&self.tmux(&["capture-pane", "-p"]).stdout).into_owned()
    }

    /// The same with escape sequences for colours.
    pub(super) fn coloured(&self) -> String {
        String::from_utf8_lossy(&self.tmux(&["capture-pane", "-e", "-p"]).stdout).into_owned()
    }

    /// Presses a key.
    pub(super) fn press(&self, key: &str) {
        self.tmux(&["send-keys", key]);
    }

    /// Whether `top` has ended.
    pub(super) fn has_ended(&self) -> bool {
        !self.tmux(&["has-session"]).status.success()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux").args(["-L", &self.server, "kill-server"]).output();
    }
}
