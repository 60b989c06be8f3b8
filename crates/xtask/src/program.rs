//! The program that is packaged: static, stripped, without the demo and its dependencies.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::Places;
use crate::command::{cargo, exists, output, run};

pub(crate) const TARGETS: [&str; 2] = ["x86_64-unknown-linux-musl", "aarch64-unknown-linux-musl"];
/// In bytes.
const LARGEST: u64 = 15 << 20;

/// A program that was built.
pub(crate) struct Program {
    pub(crate) file: PathBuf,
    pub(crate) target: String,
    pub(crate) version: String,
}

impl Program {
    /// A program of this machine.
    pub(crate) fn of_file(places: &Places, file: PathBuf) -> Result<Self> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        Ok(Self { file, target, version: version(places)? })
    }

    pub(crate) fn debian_architecture(&self) -> &'static str {
        if self.target.starts_with("aarch64") { "arm64" } else { "amd64" }
    }

    /// Whether this machine can execute it.
    pub(crate) fn is_native(&self) -> bool {
        is_native(&self.target)
    }
}

/// The programs of some targets, or of all for which this machine has a linker: its own first, which
/// writes manual pages and completions.
pub(crate) fn build_all(places: &Places, targets: &[String]) -> Result<Vec<Program>> {
    let is_asked_for = |target: &&str| {
        let listed = targets.iter().any(|asked| asked == target);
        listed || targets.is_empty() && (is_native(target) || has_linker(target))
    };
    let mut targets: Vec<_> = TARGETS.into_iter().filter(is_asked_for).collect();
    targets.sort_by_key(|target| !is_native(target));
    targets.into_iter().map(|target| build(places, target)).collect()
}

/// The program of this machine, which another architecture's packages need too.
pub(crate) fn build_native(places: &Places) -> Result<Program> {
    let target = TARGETS.into_iter().find(|target| is_native(target));
    build(places, target.context("there are no packages for this architecture")?)
}

fn is_native(target: &str) -> bool {
    target.starts_with(std::env::consts::ARCH)
}

fn has_linker(target: &str) -> bool {
    let linker = cross_compiler(target);
    let found = exists(&linker);
    if !found {
        eprintln!(
            "no package for {target}: {linker} is not installed (Debian: apt-get install gcc-{})",
            linker.trim_end_matches("-gcc")
        );
    }
    found
}

/// Of Debian and Fedora.
fn cross_compiler(target: &str) -> String {
    format!("{}-linux-gnu-gcc", target.split('-').next().unwrap_or_default())
}

fn build(places: &Places, target: &str) -> Result<Program> {
    add_target(target)?;
    let mut command = cargo();
    command.current_dir(&places.root);
    command.args(["build", "--locked", "--profile", "dist", "--package", "pgapace"]);
    command.args(["--no-default-features", "--target", target, "--target-dir", "target"]);
    for (name, value) in compilers(target) {
        if std::env::var_os(&name).is_none() {
            command.env(name, value);
        }
    }
    run(&mut command)?;
    let file = places.root.join("target").join(target).join("dist/pgapace");
    let program = Program { file, target: target.to_owned(), version: version(places)? };
    check(&program)?;
    Ok(program)
}

/// The version of the workspace.
fn version(places: &Places) -> Result<String> {
    let text = fs::read_to_string(places.root.join("Cargo.toml"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("version = \""));
    let version = line.and_then(|line| line.strip_suffix('"'));
    Ok(version.context("Cargo.toml has no version")?.to_owned())
}

/// Installs the standard library of the target.
fn add_target(target: &str) -> Result<()> {
    if !exists("rustup") {
        // The toolchain of a distribution has what it has.
        return Ok(());
    }
    let installed = output(Command::new("rustup").args(["target", "list", "--installed"]))?;
    if String::from_utf8_lossy(&installed).lines().any(|line| line == target) {
        return Ok(());
    }
    run(Command::new("rustup").args(["target", "add", target]))
}

/// The variables that name C compiler and linker. The only C code (ring) calls nothing that differs
/// between glibc and musl, but for the checked functions of `_FORTIFY_SOURCE` and the atomics of libgcc.
fn compilers(target: &str) -> Vec<(String, String)> {
    let suffix = target.replace('-', "_");
    let cross = cross_compiler(target);
    let (compiler, flags) = match target {
        _ if is_native(target) && exists("musl-gcc") => ("musl-gcc", "-U_FORTIFY_SOURCE"),
        _ if is_native(target) => ("cc", "-U_FORTIFY_SOURCE"),
        _ if target.starts_with("aarch64") => {
            (cross.as_str(), "-U_FORTIFY_SOURCE -mno-outline-atomics")
        }
        _ => (cross.as_str(), "-U_FORTIFY_SOURCE"),
    };
    let mut variables = vec![
        (format!("CC_{suffix}"), compiler.to_owned()),
        (format!("CFLAGS_{suffix}"), flags.to_owned()),
    ];
    if !is_native(target) {
        let linker = format!("CARGO_TARGET_{}_LINKER", suffix.to_uppercase());
        variables.push((linker, compiler.to_owned()));
    }
    variables
}

/// Checks the promises of the packages.
fn check(program: &Program) -> Result<()> {
    let bytes = fs::read(&program.file)?;
    let size = bytes.len() as u64;
    ensure!(size < LARGEST, "{} has {size} bytes, more than {LARGEST}", program.file.display());
    ensure!(!has_interpreter(&bytes)?, "{} is not static", program.file.display());
    if program.is_native() {
        let said = output(Command::new(&program.file).arg("--version"))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        ensure!(said.contains("commit ") && said.contains("built "), "--version says {said}");
        let help = output(Command::new(&program.file).arg("--help"))?;
        ensure!(!String::from_utf8_lossy(&help).contains("  demo "), "it has the demo");
        println!("{}", said.trim());
    }
    println!("{}: {:.1} MB", program.target, size as f64 / f64::from(1 << 20));
    Ok(())
}

/// Whether an ELF program (64 bit, little-endian) asks for a dynamic linker: PT_INTERP.
fn has_interpreter(elf: &[u8]) -> Result<bool> {
    const INTERPRETER: u64 = 3;
    let number = |at: usize, length: usize| -> Result<u64> {
        let bytes = elf.get(at..at + length).context("the program is cut off")?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        bail!("the program is no 64-bit ELF file");
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for entry in 0..count {
        if number(usize::try_from(table + entry * size)?, 4)? == INTERPRETER {
            return Ok(true);
        }
    }
    Ok(false)
}
