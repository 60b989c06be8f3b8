//! Scenarios: how each kind of workload is set up and measured.

pub(crate) mod backlog;
mod lag;
pub(crate) mod large;
pub(crate) mod latency;
pub(crate) mod live;
mod resume;
mod standby;
pub(crate) mod synchronous;
pub(crate) mod tablesync;
pub(crate) mod twophase;
mod verify;

use anyhow::Result;

use crate::bench::Bench;
use crate::outcome::Outcome;
use crate::regime::Regime;
use crate::workload::{Kind, Workload};

/// Measures one workload; some have several outcomes, or none in this regime.
pub(crate) fn measure(bench: &Bench, workload: &Workload) -> Result<Vec<Outcome>> {
    if bench.regime == Regime::Elsewhere && !matches!(workload.kind, Kind::Backlog(_)) {
        println!("{}: regime elsewhere replays only backlogs", workload.name);
        return Ok(Vec::new());
    }
    match workload.kind {
        Kind::Backlog(make) => backlog::measure(bench, workload, &make(bench.scale)),
        Kind::TableSync(tables) => Ok(vec![tablesync::measure(bench, workload, tables)?]),
        Kind::Synchronous(clients) => synchronous::measure(bench, workload, clients),
        Kind::Large(memory) => large::measure(bench, workload, memory),
        Kind::Latency => latency::measure(bench, workload),
        Kind::TwoPhase => Ok(vec![twophase::measure(bench, workload)?]),
        Kind::Resume => Ok(vec![resume::measure(bench, workload)?]),
        Kind::Verify(tables) => Ok(vec![verify::measure(bench, workload, tables)?]),
    }
}
