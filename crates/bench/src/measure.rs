//! CPU time and memory of processes, read from /proc while they run.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

/// Jiffies per second in /proc, constant in Linux's interface.
const JIFFIES: f64 = 100.0;

/// Names of leader threads, as far as the kernel stores them. They are the names of the scenarios'
/// subscriptions.
const LEADERS: [&str; 2] = ["pgapace", "bench_subscribe"];

/// The role of a process in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Sends changes: a walsender on the publisher.
    Walsender,
    /// Applies changes: an apply worker of the native subscription, or a backend of pgapace.
    Apply,
    /// The pgapace process itself.
    Program,
}

/// CPU seconds and memory of one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Usage {
    /// CPU seconds of the publisher's walsenders.
    pub(crate) walsender_cpu: f64,
    /// CPU seconds of the replay server, which takes the place of the walsenders in regime
    /// `elsewhere`.
    #[serde(default)]
    pub(crate) replayer_cpu: f64,
    /// CPU seconds of the native workers, or of pgapace's backends on the subscriber.
    pub(crate) apply_cpu: f64,
    /// CPU seconds of the pgapace process.
    pub(crate) program_cpu: f64,
    /// Part of `program_cpu` in the leader: decoding, assembling, dependencies, commit order.
    #[serde(default)]
    pub(crate) leader_cpu: f64,
    /// Part of `program_cpu` in the thread that reads the publisher's stream.
    #[serde(default)]
    pub(crate) receiver_cpu: f64,
    /// Part of `program_cpu` in the apply workers: net changes, encoding, sending.
    #[serde(default)]
    pub(crate) workers_cpu: f64,
    /// Peak memory of the pgapace process (VmHWM), in bytes.
    pub(crate) peak_memory: u64,
}

/// Samples processes until they end; the last sample counts.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    processes: BTreeMap<u32, (Role, f64)>,
    /// Threads of pgapace by thread ID, with their names.
    threads: BTreeMap<u32, (String, f64)>,
    /// Threads of the replay server in this process. Those of earlier runs are not counted.
    replayer: Option<BTreeMap<u32, f64>>,
    earlier: BTreeMap<u32, f64>,
    peak_memory: u64,
}

impl Meter {
    /// Adds a process. Adding it again has no effect.
    pub(crate) fn watch(&mut self, role: Role, pid: u32) {
        self.processes.entry(pid).or_insert((role, 0.0));
    }

    /// Adds the replay server's threads, as far as they have worked after this call.
    pub(crate) fn watch_replayer(&mut self) {
        self.earlier = replayer_threads().collect();
        self.replayer = Some(BTreeMap::new());
    }

    /// Samples every process that still runs.
    pub(crate) fn sample(&mut self) {
        if let Some(replayer) = &mut self.replayer {
            for (thread, now) in replayer_threads() {
                let before = self.earlier.get(&thread).copied().unwrap_or(0.0);
                let seconds = replayer.entry(thread).or_insert(0.0);
                *seconds = seconds.max(now - before);
            }
        }
        for (pid, (role, seconds)) in &mut self.processes {
            if let Some(now) = cpu_seconds(*pid) {
                *seconds = seconds.max(now);
            }
            if *role == Role::Program {
                self.peak_memory = self.peak_memory.max(peak_memory(*pid).unwrap_or(0));
                for (thread, name, now) in threads(*pid) {
                    let (_, seconds) = self.threads.entry(thread).or_insert((name, 0.0));
                    *seconds = seconds.max(now);
                }
            }
        }
    }

    /// The sums of all samples.
    pub(crate) fn usage(&self) -> Usage {
        let sum = |wanted| {
            let of_role = self.processes.values().filter(|(role, _)| *role == wanted);
            of_role.fold(0.0, |sum, (_, seconds)| sum + seconds)
        };
        let of_threads = |is: &dyn Fn(&str) -> bool| {
            let threads = self.threads.values().filter(|(name, _)| is(name));
            threads.fold(0.0, |sum, (_, seconds)| sum + seconds)
        };
        Usage {
            walsender_cpu: sum(Role::Walsender),
            replayer_cpu: self.replayer.iter().flat_map(BTreeMap::values).sum(),
            apply_cpu: sum(Role::Apply),
            program_cpu: sum(Role::Program),
            leader_cpu: of_threads(&|name| LEADERS.contains(&name)),
            receiver_cpu: of_threads(&|name| name == "receiver"),
            workers_cpu: of_threads(&|name| {
                name.starts_with("apply ") || name.starts_with("stream ")
            }),
            peak_memory: self.peak_memory,
        }
    }
}

fn cpu_seconds(pid: u32) -> Option<f64> {
    parse_cpu_seconds(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The threads of a process: ID, name, CPU seconds.
fn threads(pid: u32) -> Vec<(u32, String, f64)> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of = |task: fs::DirEntry| {
        let number = task.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(task.path().join("stat")).ok()?;
        let name = &stat[stat.find('(')? + 1..stat.rfind(')')?];
        Some((number, name.to_owned(), parse_cpu_seconds(&stat)?))
    };
    tasks.flatten().filter_map(of).collect()
}

/// The threads of the replay server in this process: ID and CPU seconds. They need so little that
/// the kernel's nanoseconds are read instead of its clock ticks.
fn replayer_threads() -> impl Iterator<Item = (u32, f64)> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| {
        let read = |name| fs::read_to_string(task.path().join(name)).ok();
        if !read("comm")?.starts_with(testbed::replay::THREADS) {
            return None;
        }
        let nanoseconds: f64 = read("schedstat")?.split_whitespace().next()?.parse().ok()?;
        Some((task.file_name().to_str()?.parse().ok()?, nanoseconds / 1e9))
    })
}

/// CPU time in user and kernel mode: fields 14 and 15, counted after the name in parentheses.
fn parse_cpu_seconds(stat: &str) -> Option<f64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace().skip(11);
    let mut jiffies = || fields.next()?.parse::<f64>().ok();
    Some((jiffies()? + jiffies()?) / JIFFIES)
}

fn peak_memory(pid: u32) -> Option<u64> {
    parse_peak_memory(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_peak_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use super::*;

    #[test]
    fn stat_of_a_name_with_spaces() {
        let stat = "42 (postgres: a) b) S 1 42 42 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 1 0";
        assert_eq!(parse_cpu_seconds(stat), Some(1.75));
        assert_eq!(parse_cpu_seconds("42 (x) S 1"), None);
    }

    #[test]
    fn peak_of_status() {
        assert_eq!(parse_peak_memory("Name:\tx\nVmHWM:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(parse_peak_memory("Name:\tx\n"), None);
    }

    #[test]
    fn follows_this_process() {
        let mut meter = Meter::default();
        meter.watch(Role::Program, std::process::id());
        meter.sample();
        assert!(meter.usage().peak_memory > 0);
        assert!(!meter.threads.is_empty());
        assert_eq!(meter.usage().walsender_cpu, 0.0);
    }

    #[test]
    fn follows_threads_of_the_replay_server() {
        let mut meter = Meter::default();
        meter.watch_replayer();
        std::thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            let spin = move || while stopped.try_recv() == Err(TryRecvError::Empty) {};
            let name = format!("{} test", testbed::replay::THREADS);
            std::thread::Builder::new().name(name).spawn_scoped(scope, spin).unwrap();
            while meter.usage().replayer_cpu == 0.0 {
                meter.sample();
            }
            drop(stop);
        });
        assert_eq!(meter.usage().walsender_cpu, 0.0);
    }
}
