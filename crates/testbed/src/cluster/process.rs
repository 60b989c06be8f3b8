//! Inspection and termination of processes that are not children of this process.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::error::{Context, Error, Result};

/// Converts a process ID for rustix.
pub(crate) fn pid_of(id: u32) -> Result<Pid> {
    i32::try_from(id)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| Error::other(format!("{id} is no process id")))
}

/// Sends a signal.
pub(crate) fn signal(id: u32, signal: Signal) -> Result<()> {
    kill_process(pid_of(id)?, signal).context(|| format!("send {signal:?} to process {id}"))
}

/// Whether a process runs; a zombie does not count.
pub(crate) fn runs(id: u32) -> bool {
    if Path::new("/proc/self/stat").exists() {
        return stat(id).is_some_and(|(state, _)| state != 'Z' && state != 'X');
    }
    pid_of(id).is_ok_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

/// The children of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    if let Ok(entries) = fs::read_dir("/proc")
        && Path::new("/proc/self/stat").exists()
    {
        return entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
            .filter(|id| stat(*id).is_some_and(|(_, its_parent)| its_parent == parent))
            .collect();
    }
    let listing = Command::new("ps").args(["-A", "-o", "pid=,ppid="]).output();
    let text = listing.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    text.unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().filter_map(|word| word.parse::<u32>().ok());
            let (id, its_parent) = (words.next()?, words.next()?);
            (its_parent == parent).then_some(id)
        })
        .collect()
}

/// State letter and parent from /proc. The process name in parentheses may contain any character.
fn stat(id: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
