//! Memory of the program.

use std::fs;

use testbed::program::Process;
use testbed::{Error, Result};

/// The peak memory of a process in megabytes, without the pages of the program file: how many of those
/// are in memory depends on the build.
pub(crate) fn peak(run: &Process) -> Result<u64> {
    Ok(kilobytes(run, "VmHWM:")?.saturating_sub(kilobytes(run, "RssFile:")?) / 1024)
}

/// The size of its address space in megabytes.
pub(crate) fn address_space(run: &Process) -> Result<u64> {
    Ok(kilobytes(run, "VmSize:")? / 1024)
}

fn kilobytes(run: &Process, name: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", run.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kb = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kb.ok_or_else(|| Error::other(format!("no {name}")))
}
