//! Programs that are called.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Runs a command to its end; it must succeed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// Runs a command, and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} failed: {}\n{errors}", output.status);
    }
    Ok(output.stdout)
}

/// The cargo that runs this, without its environment variables about this package: build scripts
/// that look at them would run again.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let about_this = |name: &str| {
        ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(about_this)) {
        cargo.env_remove(name);
    }
    cargo
}

/// Whether a program is in the PATH.
pub(crate) fn exists(name: &str) -> bool {
    find(name).is_some()
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// A subcommand of cargo; it is installed if it is missing.
pub(crate) fn cargo_tool(name: &str, version: &str) -> Result<Command> {
    let program = format!("cargo-{name}");
    if !exists(&program) {
        eprintln!("installing {program} {version}");
        run(cargo().args(["install", &program, "--version", version, "--locked", "--quiet"]))?;
    }
    let mut command = cargo();
    command.arg(name);
    Ok(command)
}

/// A command in a directory.
pub(crate) fn within(
    directory: impl AsRef<std::path::Path>,
    program: impl AsRef<OsStr>,
) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory);
    command
}
