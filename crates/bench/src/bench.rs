//! What one invocation measures with: servers, program, regime, sizes.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use testbed::servers::ServerBinaries;

use crate::environment::Environment;
use crate::outcome::Outcome;
use crate::regime::{Regime, ServerSettings};
use crate::workload::{Scale, Workload};

/// One invocation.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) binaries: ServerBinaries,
    pub(crate) regime: Regime,
    pub(crate) rounds: usize,
    pub(crate) scale: Scale,
    pub(crate) limit: Duration,
    /// Parity only: no raw drain, one pair of servers for all workloads.
    pub(crate) quick: bool,
    pub(crate) program: PathBuf,
    pub(crate) program_version: String,
    /// The pair of servers of a quick run.
    pub(crate) shared: Option<Environment>,
}

/// The servers of one workload.
#[derive(Debug)]
pub(crate) enum Servers<'a> {
    Own(Box<Environment>),
    Shared(&'a Environment),
}

impl std::ops::Deref for Servers<'_> {
    type Target = Environment;

    fn deref(&self) -> &Environment {
        match self {
            Self::Own(environment) => environment,
            Self::Shared(environment) => environment,
        }
    }
}

impl Servers<'_> {
    /// The servers, if nobody else uses them.
    pub(crate) fn own(&mut self) -> Option<&mut Environment> {
        match self {
            Self::Own(environment) => Some(environment),
            Self::Shared(_) => None,
        }
    }
}

impl Bench {
    /// Fresh servers, or those that all workloads of a quick run share. The latter have none of
    /// the workload's settings.
    pub(crate) fn servers(
        &self,
        publisher: &ServerSettings,
        target: &ServerSettings,
    ) -> Result<Servers<'_>> {
        if let Some(shared) = &self.shared {
            return Ok(Servers::Shared(shared));
        }
        let own = Environment::start(&self.binaries, self.regime, publisher, target)?;
        Ok(Servers::Own(Box::new(own)))
    }

    /// An outcome without figures.
    pub(crate) fn outcome(&self, workload: &Workload, metric: &str, unit: &str) -> Outcome {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Outcome {
            workload: workload.name.into(),
            regime: self.regime.to_string(),
            server: self.binaries.major(),
            metric: metric.into(),
            unit: unit.into(),
            raw: None,
            native: None,
            pgapace: None,
            ratio_native: None,
            ratio_raw: None,
            parity: None,
            rounds: Vec::new(),
            notes: Vec::new(),
            scale: self.scale.0,
            workers: 1,
            server_version: self.binaries.version(),
            program_version: self.program_version.clone(),
            machine: machine(),
            settings: String::new(),
            measured_at: now.as_secs(),
        }
    }
}

/// The pgapace binary beside this one, and what it calls itself.
pub(crate) fn find_program() -> Result<(PathBuf, String)> {
    let own = std::env::current_exe().context("cannot find the bench binary")?;
    let program = own.parent().unwrap_or(Path::new(".")).join("pgapace");
    let profile = if cfg!(debug_assertions) { "" } else { " --release" };
    ensure!(
        program.is_file(),
        "{} does not exist; build it: cargo build{profile} -p pgapace",
        program.display()
    );
    let output = Command::new(&program)
        .arg("--version")
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let mut version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if let Some(commit) = commit() {
        let _ = write!(version, ", commit {commit}");
    }
    if cfg!(debug_assertions) {
        version.push_str(", debug build");
    }
    Ok((program, version))
}

/// The commit of the source tree, marked when there are changes on top.
fn commit() -> Option<String> {
    let output = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

/// Where results are kept unless told otherwise: beside the build, `target/bench`.
pub(crate) fn results_directory() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the bench binary")?;
    let target = own.ancestors().nth(2).unwrap_or(Path::new("."));
    Ok(target.join("bench"))
}

/// Processors and memory.
fn machine() -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".into());
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.strip_suffix(" kB")?.trim().parse::<u64>().ok())
        .map_or(String::new(), |kilobytes| format!(", {} GB memory", kilobytes >> 20));
    format!("{processors} × {model}{memory}")
}
