//! The context of one invocation: servers, program, regime, sizes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use testbed::servers::ServerBinaries;

use crate::clock::{Clock, Phase};
use crate::environment::Environment;
use crate::outcome::{Outcome, Run, Runner};
use crate::regime::{Regime, Setting};
use crate::workload::{Scale, Workload};

/// The context of one invocation.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) binaries: ServerBinaries,
    pub(crate) regime: Regime,
    pub(crate) rounds: usize,
    pub(crate) scale: Scale,
    pub(crate) limit: Duration,
    /// Compares tables only: no raw drain, and workload-specific settings are not used.
    pub(crate) quick: bool,
    /// Whether the upper limit is measured too.
    pub(crate) raw: bool,
    pub(crate) program: PathBuf,
    pub(crate) program_version: String,
    pub(crate) workers: u32,
    /// Additional arguments for pgapace.
    pub(crate) arguments: Vec<String>,
    /// Servers that no workload uses now. The next workload takes them if it needs the same
    /// settings.
    pub(crate) idle: RefCell<Option<Environment>>,
    pub(crate) clock: Clock,
}

impl Bench {
    /// Returns servers without user databases. Takes the previous workload's servers if their
    /// settings match. A quick run starts only one pair.
    pub(crate) fn servers(
        &self,
        publisher: &[Setting],
        subscriber: &[Setting],
    ) -> Result<Environment> {
        self.clock.time(Phase::Servers, || {
            let (publisher, subscriber) =
                if self.quick { (&[][..], &[][..]) } else { (publisher, subscriber) };
            let idle = self.idle.take().filter(|idle| idle.was_asked_for(publisher, subscriber));
            // Drop servers with other settings before new ones start.
            idle.map_or_else(
                || Environment::start(&self.binaries, self.regime, publisher, subscriber),
                Ok,
            )
        })
    }

    /// Cleans the servers for the next workload. If a workload fails, its servers are stopped.
    pub(crate) fn give_back(
        &self,
        servers: Environment,
        database: &str,
        subscribers: &[&str],
    ) -> Result<()> {
        self.clock.time(Phase::Clean, || servers.clean(database, subscribers))?;
        self.idle.replace(Some(servers));
        Ok(())
    }

    /// Runs every runner in every round. Every other round reverses the order, so that drift
    /// affects all runners equally. A runner that reached its limit would reach it again, and is
    /// not repeated. After a difference between tables, measuring stops.
    pub(crate) fn alternate(
        &self,
        outcome: &mut Outcome,
        mut runners: Vec<Runner>,
        mut measure: impl FnMut(&mut Outcome, Runner) -> Result<Run>,
    ) -> Result<()> {
        for round in 1..=self.rounds {
            if round > 1 {
                runners.reverse();
            }
            for runner in runners.clone() {
                let run = measure(outcome, runner)
                    .with_context(|| format!("round {round} of {} failed", runner.name()))?;
                if run.projected_from.is_some() {
                    runners.retain(|other| *other != runner);
                }
                outcome.rounds.push(Run { round, ..run });
                if outcome.parity == Some(false) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Creates an outcome without figures.
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
            changes: None,
            client_us_per_change: None,
            limit: None,
            seconds: 0.0,
            phases: BTreeMap::new(),
            notes: Vec::new(),
            scale: self.scale.0,
            workers: self.workers,
            pgapace_args: self.arguments.join(" "),
            server_version: self.binaries.version(),
            program_version: self.program_version.clone(),
            machine: machine(),
            settings: String::new(),
            measured_at: now.as_secs(),
        }
    }
}

/// The arguments that set pgapace's number of workers, if this version supports more than one. Zero
/// stands for auto.
pub(crate) fn worker_arguments(program: &Path, workers: u32) -> Result<Vec<String>> {
    let help = Command::new(program)
        .args(["run", "--help"])
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if String::from_utf8_lossy(&help.stdout).contains("--workers") {
        let workers = if workers == 0 { "auto".to_owned() } else { workers.to_string() };
        return Ok(vec![format!("--workers={workers}")]);
    }
    ensure!(workers == 1, "--workers {workers}: {} supports only one worker", program.display());
    Ok(Vec::new())
}

/// Finds the pgapace to measure: the given one, or the one next to this binary. Returns it with its
/// version.
pub(crate) fn find_program(given: Option<&Path>) -> Result<(PathBuf, String)> {
    let own = std::env::current_exe().context("cannot find the bench binary")?;
    let sibling = own.parent().unwrap_or(Path::new(".")).join("pgapace");
    let program = given.map_or(sibling, Path::to_path_buf);
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

/// The commit of the source tree, marked if there are uncommitted changes.
fn commit() -> Option<String> {
    let output = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

/// The default directory of results: `target/bench`.
pub(crate) fn results_directory() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the bench binary")?;
    let build = own.ancestors().nth(2).unwrap_or(Path::new("."));
    Ok(build.join("bench"))
}

/// A description of the machine: CPU and memory.
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
