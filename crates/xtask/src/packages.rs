//! Tarball, .deb, .rpm and their checksums.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::Places;
use crate::command::{cargo_tool, output, run, within};
use crate::program::Program;

const CARGO_DEB: &str = "3.8.0";
const CARGO_GENERATE_RPM: &str = "0.21.0";

/// Of all files, because a date would make each tarball another one.
const DATE: &str = "--mtime=@0";

/// The staged files below a folder with the name of the version.
pub(crate) fn tarball(places: &Places, program: &Program, stage: &Path) -> Result<PathBuf> {
    let name = format!("pgapace-{}-{}", program.version, program.target);
    let file = places.dist.join(format!("{name}.tar.gz"));
    let mut tar = within(stage, "tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", DATE]);
    tar.arg("--transform=s,zsh/vendor-completions,zsh/site-functions,");
    tar.arg(format!("--transform=s,^usr,{name},")).arg("-czf").arg(&file).arg("usr");
    run(&mut tar)?;
    Ok(file)
}

/// With another version than the program's, to try an upgrade.
pub(crate) fn deb(places: &Places, program: &Program, version: Option<&str>) -> Result<PathBuf> {
    let shown = version.unwrap_or(&program.version);
    let file = deb_file(places, program, shown);
    let mut command = cargo_tool("deb", CARGO_DEB)?;
    command.current_dir(&places.root);
    command.args(["--no-build", "--no-strip", "--package", "pgapace", "--profile", "dist"]);
    command.args(["--target", &program.target, "--deb-version", shown, "--quiet"]);
    run(command.arg("--output").arg(&file))?;
    Ok(file)
}

/// Where a .deb of a version is.
pub(crate) fn deb_file(places: &Places, program: &Program, version: &str) -> PathBuf {
    places.dist.join(format!("pgapace_{version}_{}.deb", program.debian_architecture()))
}

pub(crate) fn rpm(places: &Places, program: &Program) -> Result<PathBuf> {
    let architecture = program.target.split('-').next().unwrap_or_default();
    let file = places.dist.join(format!("pgapace-{}-1.{architecture}.rpm", program.version));
    let mut command = cargo_tool("generate-rpm", CARGO_GENERATE_RPM)?;
    command.current_dir(&places.root);
    command.args(["--package", "crates/pgapace", "--profile", "dist", "--auto-req", "disabled"]);
    command.args(["--target", &program.target]);
    run(command.arg("--output").arg(&file))?;
    Ok(file)
}

/// Writes SHA256SUMS for the files; a folder has none.
pub(crate) fn checksums(places: &Places, made: &[PathBuf]) -> Result<()> {
    let files = made.iter().filter(|file| file.is_file()).filter_map(|file| file.file_name());
    if files.clone().next().is_none() {
        return Ok(());
    }
    let text = output(within(&places.dist, "sha256sum").args(files))?;
    fs::write(places.dist.join("SHA256SUMS"), text).context("write SHA256SUMS")
}
