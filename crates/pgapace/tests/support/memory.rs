//! Memory of the program.

use std::fs;

use testbed::program::Process;
use testbed::{Error, Result};

/// The peak memory of a process in megabytes, without the pages of the program file: how many of those
/// are in memory depends on the build.
pub(crate) fn peak(run: &Process) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", run.pid()))?;
    let kilobytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kb = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
        kb.ok_or_else(|| Error::other(format!("no {name}")))
    };
    Ok(kilobytes("VmHWM:")?.saturating_sub(kilobytes("RssFile:")?) / 1024)
}
