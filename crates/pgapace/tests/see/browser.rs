//! A real browser without a screen.

use std::path::Path;
use std::process::Command;

use crate::support::must;

/// A program that is there.
#[derive(Clone, Copy)]
pub(super) struct Browser(&'static str);

impl Browser {
    /// The first one that is there. The shell comes first: its windows may be as narrow as a phone.
    pub(super) fn find() -> Option<Self> {
        let known = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
        let is_there = |name: &&str| Command::new(name).arg("--version").output().is_ok();
        known.into_iter().find(is_there).map(Self)
    }

    /// Opens an address in a window of this size. Returns the document after some seconds, and the console.
    pub(super) fn open(self, url: &str, size: &str, more: &[&str]) -> (String, String) {
        let profile = must(tempfile::tempdir());
        let output = Command::new(self.0)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .args([&format!("--window-size={size}"), "--virtual-time-budget=5000"])
            .args(more)
            .arg(url)
            .output();
        let output = must(output);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        (text(output.stdout), text(output.stderr))
    }

    /// The document of an address.
    pub(super) fn document(self, url: &str, size: &str) -> (String, String) {
        self.open(url, size, &["--dump-dom"])
    }

    /// Photographs an address.
    pub(super) fn photograph(self, url: &str, size: &str, is_dark: bool, file: &Path) {
        let file = format!("--screenshot={}", file.display());
        let mut args = vec![file.as_str(), "--hide-scrollbars"];
        if is_dark {
            args.push("--blink-settings=preferredColorScheme=0");
        }
        self.open(url, size, &args);
    }
}
