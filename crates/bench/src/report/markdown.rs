//! `docs/benchmarks.md`, `docs/benchmarks-rounds.md` and plots, generated from all stored results. The first
//! page is for readers who know neither the workloads nor the regimes; the second one has all the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::json;
use super::svg::{Labels, Series, plot};
use super::terminal::{figure, ratio};
use crate::outcome::{Outcome, Run, Runner};
use crate::workload::{self, Workload};

const METHOD: &str = "\
Every result compares programs within one run on one machine, so only the ratios apply elsewhere.
Workloads with the same settings share a pair of servers, which is cleaned between them. The tables
are filled on both sides, a replication slot is created, and the backlog is written once. The rounds
then replay it from copies of that slot on a subscriber that is reset to a copy of the files. Every
other round reverses the order of the programs. Each run is preceded by CHECKPOINT on both sides and
VACUUM of the changed tables. After every round the tables are compared by checksum.

- **raw** is the upper limit: the same slot, read and discarded by pgapace's receiver with text or
  binary values, or by `pg_recvlogical` with binary values. The fastest of them counts; the table of
  all rounds names it. For table syncs it is COPY of all tables without a destination, for `sync` and
  `large` the publisher without a subscriber. For `large-…-visible` it is pgapace's receiver, which
  reads while the insert runs.
- **native** is CREATE SUBSCRIPTION with the server's fastest options (binary, and streaming =
  parallel where it exists), timed from ENABLE. `rollback` and `large` test large transactions and
  also run it with streaming = on. The faster of the two counts; the notes show both.
- **pgapace** is `pgapace run`, timed from the start of the process. It runs in its own session, like
  a service, because Linux first divides CPU time between sessions, and every process of a server has
  its own.
- Both are timed until the last transaction is visible on the subscriber; table syncs until all
  tables are copied. For pgapace that is its exit, without ANALYZE, which the native subscription
  leaves to autovacuum.
- **× native** and **of raw** are ratios in which more is better, in every unit.
- `~` marks a run that was stopped at its limit. Its result is projected from the share of the
  backlog that had been applied, measured in the publisher's WAL. The run is not repeated in later
  rounds.
- `sync` runs the native subscription with synchronous_commit on and off in its first round, and
  with the faster setting in the others.
- `latency` is the time from sending COMMIT on the publisher until a query on the subscriber sees the
  row. The query is repeated without a pause. One transaction runs at a time, with a pause of 10 ms
  between them.
- `large` has a value of logical_decoding_work_mem in its name. At a scale below 0.5 only the
  smallest and the largest of the eleven values are measured. `-visible` measures the same runs from
  sending COMMIT until a query on the subscriber sees the last row. The query runs every two
  milliseconds.
- `twophase` is a load of 80 connections, followed by the time to catch up. Its notes show the growth
  of the lag in milliseconds per second of the load, as the slope of the least-squares line through
  all samples. `twophase-drain` is a backlog of the same transactions.
- `first-touch` is the time from the start until the change of the last table is visible. `resume` is
  the time from the first change after the restart of a crashed publisher until it is visible; an open
  transaction keeps the slot from being saved before the crash. `old-snapshot-…-last-tenth` is the
  rate of the last tenth of the backlog over the rate of the first. `verify` compares with one
  `COPY … TO STDOUT` of the table on each server, both at the same time.
- Regime `elsewhere` records the stream of the backlog once for each subscriber, with the options that
  it asks for. In the rounds a replay server sends the recording, and passes everything else through
  to the publisher, which is idle: subscriber and program have the processors to themselves, as if the
  publisher ran on another machine. The CPU time of the replay server is that of the walsender.
- CPU seconds are those of the publisher's walsenders, of the processes that apply (native apply
  workers, or backends of pgapace), and of the pgapace process. The last are also shown for its
  leader (decoding, dependencies, commit order), its receiver (reading the stream) and its apply
  workers (net changes, encoding). Memory is the peak of the pgapace process.
- **client µs** is the CPU time of the pgapace process, without its backends, per changed row.
";

/// Writes the report and the plots.
pub(crate) fn write(results: &Path, docs: &Path) -> Result<()> {
    let outcomes = json::read_all(results)?;
    ensure!(!outcomes.is_empty(), "no results in {}: measure first", results.display());
    fs::create_dir_all(docs).with_context(|| format!("cannot create {}", docs.display()))?;
    let mut plots = BTreeMap::new();
    let rounds = rounds_page(&outcomes, &mut plots);
    let text = page(&outcomes, &plots);
    let save = |name: &str, text: &str| {
        let path = docs.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    for (name, svg) in &plots {
        save(name, svg)?;
    }
    save("benchmarks-rounds.md", &rounds)?;
    save("benchmarks.md", &text)
}

/// Outcomes grouped by server version and regime, in the order of the workloads.
fn groups(outcomes: &[Outcome]) -> BTreeMap<(u16, u8, &str), Vec<&Outcome>> {
    let mut groups = BTreeMap::<_, Vec<_>>::new();
    for outcome in outcomes {
        let key = (outcome.server, regime_rank(&outcome.regime), outcome.regime.as_str());
        groups.entry(key).or_default().push(outcome);
    }
    for group in groups.values_mut() {
        // Variants of a workload are in the order of measurement.
        group.sort_by_key(|outcome| (workload_rank(&outcome.workload), outcome.measured_at));
    }
    groups
}

fn regime_rank(regime: &str) -> u8 {
    let order = ["cpu", "disk", "slow-commit", "cold", "rtt", "elsewhere"];
    let place = order.iter().position(|name| regime.starts_with(name)).unwrap_or(order.len());
    u8::try_from(place).unwrap_or(u8::MAX)
}

fn workload_rank(name: &str) -> usize {
    workload_of(name).map_or(usize::MAX, |(rank, _)| rank)
}

/// The workload that a result belongs to, with its place: the longest name with which that of the result
/// begins.
fn workload_of(name: &str) -> Option<(usize, &'static Workload)> {
    let all = workload::ALL.iter().enumerate();
    all.filter(|(_, workload)| name.starts_with(workload.name))
        .max_by_key(|(_, workload)| workload.name.len())
}

const REGIMES: &str = "\
| regime | what it stands for |
|---|---|
| cpu | data and WAL in memory: the processors are the limit |
| disk | data directories on a disk |
| slow-commit:5ms | each flush of the subscriber takes 5 ms more, as on network storage |
| cold | nearly every read of the subscriber comes from the disk |
| rtt:5ms | each answer of the subscriber takes 5 ms, as in another region |
| elsewhere | the publisher has a machine of its own |
";

fn distinct(outcomes: &[Outcome], of: impl Fn(&Outcome) -> &str) -> String {
    let all: BTreeSet<_> = outcomes.iter().map(of).collect();
    all.into_iter().collect::<Vec<_>>().join(", ")
}

/// Whether a newcomer wants to know: not every variant of a workload.
fn is_shown(workload: &str) -> bool {
    let one_of_many = workload.starts_with("large-")
        && !workload.ends_with("-64kB")
        && !workload.ends_with("-64MB");
    !one_of_many && !workload.ends_with("-visible") && !workload.ends_with("-p95")
}

/// The description of a result; empty if its workload is not known.
fn about(name: &str) -> String {
    match workload_of(name) {
        Some((_, workload)) if name.ends_with("-last-tenth") => {
            format!("rate of the last tenth of {} over that of the first", workload.name)
        }
        Some((_, workload)) => workload.about.replace('|', "\\|"),
        None => String::new(),
    }
}

fn page(outcomes: &[Outcome], plots: &BTreeMap<String, String>) -> String {
    let mut text = String::from("# Benchmarks\n\n");
    text.push_str("Written by `cargo run --release -p bench -- --report`; do not edit.\n\n");
    let _ = writeln!(
        text,
        "One machine for publisher, subscriber and pgapace: {}. PostgreSQL {}.\n",
        distinct(outcomes, |o| &o.machine),
        distinct(outcomes, |o| &o.server_version)
    );
    text.push_str(
        "**Times as fast** is what pgapace gains over the native subscription with its fastest options. Below \
         1, pgapace is\nslower. After every round the tables are compared. `~`: a program was stopped, and its \
         result is projected.\n\n",
    );
    let all = groups(outcomes);
    let shown: BTreeMap<_, Vec<_>> = all
        .iter()
        .map(|(key, group)| {
            (*key, group.iter().copied().filter(|o| is_shown(&o.workload)).collect::<Vec<_>>())
        })
        .collect();
    newcomers_table(&mut text, &shown);
    let _ = writeln!(text, "## By regime\n\n{REGIMES}");
    overview(&mut text, &shown);
    slower(&mut text, &shown);
    text.push_str("## Curves\n\n");
    for name in plots.keys() {
        let _ = writeln!(text, "![{}]({name})\n", name.trim_end_matches(".svg"));
    }
    let _ = writeln!(text, "## How it is measured\n\n{METHOD}");
    text.push_str(
        "[Every round](benchmarks-rounds.md) has the upper limit, CPU, memory and settings. [Where the time \
         goes](performance.md)\nsays what bounds the figures.\n",
    );
    text
}

/// Figures of the newest server in regime cpu, with words.
fn newcomers_table(text: &mut String, groups: &BTreeMap<(u16, u8, &str), Vec<&Outcome>>) {
    let newest = groups.keys().map(|(server, ..)| *server).max();
    let Some(((server, _, regime), group)) = groups.iter().find(|((s, ..), _)| Some(*s) == newest)
    else {
        return;
    };
    let _ = writeln!(
        text,
        "## In one table\n\nPostgreSQL {server}, regime {regime}.\n\n\
         | workload | what it does | unit | native | pgapace | times as fast |\n\
         |---|---|---|--:|--:|--:|"
    );
    for outcome in group {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} |",
            outcome.workload,
            about(&outcome.workload),
            outcome.unit,
            result(outcome, outcome.native, Runner::Native),
            result(outcome, outcome.pgapace, Runner::Pgapace),
            faster(outcome)
        );
    }
    text.push('\n');
}

/// All figures of all rounds.
fn rounds_page(outcomes: &[Outcome], plots: &mut BTreeMap<String, String>) -> String {
    let groups = groups(outcomes);
    let mut text = String::from("# Benchmarks: every round\n\n");
    text.push_str("Written by `cargo run --release -p bench -- --report`; do not edit. ");
    text.push_str("[Benchmarks](benchmarks.md) explains the terms.\n\n");
    let _ = writeln!(text, "- Machine: {}", distinct(outcomes, |o| &o.machine));
    let _ = writeln!(text, "- PostgreSQL: {}", distinct(outcomes, |o| &o.server_version));
    let _ = writeln!(text, "- Program: {}\n", distinct(outcomes, |o| &o.program_version));
    overview(&mut text, &groups);
    for ((server, _, regime), group) in &groups {
        let _ = writeln!(text, "## PostgreSQL {server}, regime {regime}\n");
        summary(&mut text, group);
        for outcome in group {
            if let Some((name, svg)) = curves(outcome) {
                plots.insert(name, svg);
            }
        }
        details(&mut text, group);
    }
    text
}

/// All ratios to the native subscription: one line per workload, one column per group.
fn overview(text: &mut String, groups: &BTreeMap<(u16, u8, &str), Vec<&Outcome>>) {
    let _ = writeln!(text, "## How many times faster than the native subscription\n");
    let heads: Vec<_> =
        groups.keys().map(|(server, _, regime)| format!("{server} {regime}")).collect();
    let _ = writeln!(text, "| workload | {} |", heads.join(" | "));
    let _ = writeln!(text, "|---|{}", "--:|".repeat(heads.len()));
    let workloads: BTreeSet<_> = groups
        .values()
        .flatten()
        .map(|outcome| (workload_rank(&outcome.workload), outcome.workload.as_str()))
        .collect();
    for (_, workload) in workloads {
        let cells: Vec<_> = groups
            .values()
            .map(|group| {
                let outcome = group.iter().find(|outcome| outcome.workload == workload);
                outcome.map_or("-".into(), |outcome| faster(outcome))
            })
            .collect();
        let _ = writeln!(text, "| {workload} | {} |", cells.join(" | "));
    }
    text.push('\n');
}

/// The ratio to the native subscription, marked if it is projected or the tables differ.
fn faster(outcome: &Outcome) -> String {
    if outcome.parity == Some(false) {
        return "**differ**".into();
    }
    let projected = [Runner::Native, Runner::Pgapace].iter().any(|r| outcome.is_projected(*r));
    let mark = if projected { "~" } else { "" };
    outcome.ratio_native.map_or("-".into(), |value| format!("{mark}{}", ratio(Some(value))))
}

/// Lists the workloads in which pgapace is slower.
fn slower(text: &mut String, groups: &BTreeMap<(u16, u8, &str), Vec<&Outcome>>) {
    let _ = writeln!(text, "## Where pgapace is slower than the native subscription\n");
    let mut any = false;
    for ((server, _, regime), group) in groups {
        let slower: Vec<_> = group
            .iter()
            .filter(|outcome| outcome.ratio_native.is_some_and(|ratio| ratio < 1.0))
            .map(|outcome| format!("{} ({})", outcome.workload, ratio(outcome.ratio_native)))
            .collect();
        if !slower.is_empty() {
            any = true;
            let _ = writeln!(text, "- {server}, {regime}: {}", slower.join(", "));
        }
    }
    if !any {
        let _ = writeln!(text, "In none of the measured workloads.");
    }
    text.push('\n');
}

/// A result of a runner, with a mark if it is a projection.
fn result(outcome: &Outcome, value: Option<f64>, runner: Runner) -> String {
    let mark = if outcome.is_projected(runner) { "~" } else { "" };
    value.map_or("-".into(), |value| format!("{mark}{}", figure(value)))
}

fn summary(text: &mut String, group: &[&Outcome]) {
    let _ = writeln!(
        text,
        "| workload | unit | raw | native | pgapace | × native | of raw | client µs | tables |\n\
         |---|---|--:|--:|--:|--:|--:|--:|---|"
    );
    for outcome in group {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            outcome.workload,
            outcome.unit,
            result(outcome, outcome.raw, Runner::Receiver),
            result(outcome, outcome.native, Runner::Native),
            result(outcome, outcome.pgapace, Runner::Pgapace),
            ratio(outcome.ratio_native),
            ratio(outcome.ratio_raw),
            ratio(outcome.client_us_per_change),
            match outcome.parity {
                Some(true) => "equal",
                Some(false) => "**differ**",
                None => "-",
            }
        );
    }
    text.push('\n');
    for outcome in group {
        for note in &outcome.notes {
            let _ = writeln!(text, "- {}: {note}", outcome.workload);
        }
    }
    text.push('\n');
}

fn details(text: &mut String, group: &[&Outcome]) {
    let _ = writeln!(text, "<details><summary>Every round, CPU, memory, settings</summary>\n");
    let _ = writeln!(
        text,
        "| workload | scale | who | rounds | unit | CPU s: walsender | applier | pgapace | \
         leader | receiver | workers | memory MB |\n\
         |---|--:|---|---|---|--:|--:|--:|--:|--:|--:|--:|"
    );
    for outcome in group {
        let runners: BTreeSet<_> = outcome.rounds.iter().map(|run| run.runner).collect();
        for runner in runners {
            let mut runs: Vec<_> =
                outcome.rounds.iter().filter(|run| run.runner == runner).collect();
            runs.sort_by_key(|run| run.round);
            let _ = writeln!(text, "{}", detail(outcome, runner, &runs));
        }
    }
    text.push('\n');
    spent(text, group);
    let workers: BTreeSet<_> = group
        .iter()
        .map(|outcome| match outcome.workers {
            0 => format!("auto {}", outcome.pgapace_args),
            number => format!("{number} {}", outcome.pgapace_args),
        })
        .collect();
    let workers: Vec<_> = workers.iter().map(|workers| workers.trim()).collect();
    let _ =
        writeln!(text, "- pgapace's workers, and arguments beyond those: {}", workers.join("; "));
    let settings: BTreeSet<_> = group.iter().map(|outcome| outcome.settings.as_str()).collect();
    for setting in settings.iter().filter(|setting| !setting.is_empty()) {
        let who: Vec<_> = group
            .iter()
            .filter(|outcome| outcome.settings == **setting)
            .map(|outcome| outcome.workload.as_str())
            .collect();
        let _ = writeln!(text, "- {}: `{setting}`", who.join(", "));
    }
    let _ = writeln!(text, "\n</details>\n");
}

/// The duration of the workloads, including all overhead.
fn spent(text: &mut String, group: &[&Outcome]) {
    let total: f64 = group.iter().map(|outcome| outcome.seconds).sum();
    if total > 0.0 {
        let timed = group.iter().filter(|outcome| outcome.seconds > 0.0);
        let list: Vec<_> =
            timed.map(|outcome| format!("{} {:.0}", outcome.workload, outcome.seconds)).collect();
        let _ = writeln!(text, "- Seconds of the pass: {total:.0} ({})", list.join(", "));
    }
}

/// One line: the results of every round, and mean CPU time and memory.
fn detail(outcome: &Outcome, runner: Runner, runs: &[&Run]) -> String {
    let figures: Vec<_> = runs
        .iter()
        .map(|run| {
            let mark = if run.projected_from.is_some() { "~" } else { "" };
            format!("{mark}{}", figure(run.value))
        })
        .collect();
    let mean = |of: &dyn Fn(&Run) -> f64| {
        let sum: f64 = runs.iter().map(|run| of(run)).sum();
        let mean = sum / runs.len() as f64;
        if mean > 0.0 { format!("{mean:.1}") } else { "-".into() }
    };
    format!(
        "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        outcome.workload,
        outcome.scale,
        if outcome.limit == Some(runner) {
            format!("{} (limit)", runner.name())
        } else {
            runner.name().into()
        },
        figures.join(", "),
        outcome.unit,
        mean(&|run| run.usage.walsender_cpu + run.usage.replayer_cpu),
        mean(&|run| run.usage.apply_cpu),
        mean(&|run| run.usage.program_cpu),
        mean(&|run| run.usage.leader_cpu),
        mean(&|run| run.usage.receiver_cpu),
        mean(&|run| run.usage.workers_cpu),
        mean(&|run| run.usage.peak_memory as f64 / f64::from(1 << 20)),
    )
}

/// The plot of an outcome whose runs have curves: the first round of each runner.
fn curves(outcome: &Outcome) -> Option<(String, String)> {
    let series: Vec<_> = [Runner::Native, Runner::Pgapace]
        .into_iter()
        .filter_map(|runner| {
            let run =
                outcome.rounds.iter().find(|run| run.runner == runner && !run.curve.is_empty())?;
            Some(Series { name: runner.name(), points: &run.curve })
        })
        .collect();
    if series.is_empty() {
        return None;
    }
    let y = match outcome.workload.as_str() {
        "twophase" => "bytes of WAL behind",
        _ => "share of the backlog applied",
    };
    let title = format!(
        "{}, PostgreSQL {}, regime {}",
        outcome.workload, outcome.server_version, outcome.regime
    );
    let name = format!(
        "benchmarks-{}-{}-{}.svg",
        outcome.workload,
        outcome.server,
        outcome.regime.replace(':', "-")
    );
    Some((name, plot(Labels { title: &title, x: "seconds", y }, &series)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(regime: &str, workload: &str, ratio: Option<f64>) -> Outcome {
        let json = serde_json::json!({
            "workload": workload, "regime": regime, "server": 18, "metric": "m", "unit": "s",
            "raw": null, "native": 1.0, "pgapace": 1.0, "ratio_native": ratio, "ratio_raw": null,
            "parity": true, "rounds": [], "scale": 1.0, "workers": 1, "server_version": "18.6",
            "program_version": "p", "machine": "m", "settings": "", "measured_at": 0,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn the_overview_has_a_column_for_each_regime() {
        let mut differs = outcome("cpu", "wide", Some(9.0));
        differs.parity = Some(false);
        let outcomes = [
            outcome("rtt:5ms", "tpcb", Some(3.0)),
            outcome("cpu", "tpcb", Some(0.5)),
            outcome("cpu", "hot", None),
            differs,
        ];
        let text = page(&outcomes, &BTreeMap::new());
        for line in [
            "| workload | 18 cpu | 18 rtt:5ms |",
            "|---|--:|--:|",
            "| tpcb | 0.50 | 3.00 |",
            "| hot | - | - |",
            "| wide | **differ** | - |",
            "- 18, cpu: tpcb (0.50)",
            "| tpcb | pgbench's default transactions: three updates and an insert each | s | 1.000 | 1.000 | 0.50 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}");
        }
    }

    #[test]
    fn order_of_workloads_and_regimes() {
        assert!(workload_rank("tpcb") < workload_rank("hot"));
        assert_eq!(workload_rank("sync-remote-apply"), workload_rank("sync"));
        assert_eq!(workload_rank("sync-few-on"), workload_rank("sync-few"));
        assert_eq!(workload_rank("unknown"), usize::MAX);
        let of_simple = "old-snapshot-simple-last-tenth";
        assert_eq!(workload_rank(of_simple), workload_rank("old-snapshot-simple"));
        assert!(about(of_simple).contains("last tenth of old-snapshot-simple"));
        assert!(regime_rank("cpu") < regime_rank("rtt:5ms"));
    }
}
