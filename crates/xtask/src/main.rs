//! `cargo xtask dist` makes the packages, and tries them in a fresh Debian root.
#![forbid(unsafe_code)]

mod command;
mod container;
mod packages;
mod program;
mod stage;
mod try_packages;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser};

use program::Program;

/// Packages of pgapace
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
enum Task {
    /// Build static programs, and make tarballs, .deb, .rpm and folders of containers in target/packages
    Dist(DistArgs),
}

#[derive(Debug, Args)]
struct DistArgs {
    /// Target of a build; repeat it. Without it, all for which this machine has a linker
    #[arg(long, value_parser = program::TARGETS)]
    target: Vec<String>,

    /// Package this program of this machine instead of building one, to try the packaging itself
    #[arg(long, value_name = "FILE", conflicts_with = "target")]
    program: Option<PathBuf>,

    /// Formats to leave out; repeat it
    #[arg(long, value_enum, value_name = "FORMAT")]
    without: Vec<Format>,

    /// Install, use, upgrade and remove the .deb in a fresh Debian root, and run the first hour there
    ///
    /// It needs root, mmdebstrap and a mirror of Debian; it says what is missing.
    #[arg(long = "try")]
    try_packages: bool,

    /// Package to upgrade from, with --try; without it, the same one under a lower version
    #[arg(long, value_name = "DEB", requires = "try_packages")]
    before: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Tarball,
    Deb,
    Rpm,
    Container,
}

/// Where things are.
struct Places {
    /// The repository.
    root: PathBuf,
    /// The directory of the packages that are made.
    dist: PathBuf,
}

impl Places {
    fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().context("find the repository")?;
        Ok(Self { dist: root.join("target/packages"), root })
    }
}

fn main() -> Result<()> {
    let Task::Dist(args) = Task::parse();
    ensure!(!args.try_packages || !args.without.contains(&Format::Deb), "--try needs the .deb");
    let places = Places::find()?;
    let programs = match &args.program {
        Some(file) => vec![Program::of_file(&places, file.clone())?],
        None => program::build_all(&places, &args.target)?,
    };
    let mut made = Vec::new();
    for program in &programs {
        made.extend(package(&places, program, &args.without)?);
    }
    packages::checksums(&places, &made)?;
    for file in &made {
        println!("{}", file.display());
    }
    if args.try_packages {
        let native = programs.iter().find(|program| program.is_native());
        let native = native.context("--try needs a program of this machine")?;
        try_packages::run(&places, native, args.before.as_deref())?;
    }
    Ok(())
}

fn package(places: &Places, program: &Program, without: &[Format]) -> Result<Vec<PathBuf>> {
    let stage = stage::fill(places, program)?;
    let mut made = Vec::new();
    for format in [Format::Tarball, Format::Deb, Format::Rpm, Format::Container] {
        if !without.contains(&format) {
            made.push(match format {
                Format::Tarball => packages::tarball(places, program, &stage)?,
                Format::Deb => packages::deb(places, program, None)?,
                Format::Rpm => packages::rpm(places, program)?,
                Format::Container => container::folder(places, program)?,
            });
        }
    }
    Ok(made)
}
