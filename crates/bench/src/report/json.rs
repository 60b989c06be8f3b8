//! Results as JSON: one object per workload, in the user's file and in the results directory.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::outcome::Outcome;

/// Writes all outcomes as one array.
pub(crate) fn write(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    let text = serde_json::to_string_pretty(outcomes)?;
    fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

/// Stores each outcome in its own file; a later outcome of the same kind replaces it.
pub(crate) fn keep(directory: &Path, outcomes: &[Outcome]) -> Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    for outcome in outcomes {
        let regime = outcome.regime.replace(':', "-");
        let name = format!("{}-{regime}-{}.json", outcome.server, outcome.workload);
        write(&directory.join(name), std::slice::from_ref(outcome))?;
    }
    Ok(())
}

/// Reads all outcomes in a directory.
pub(crate) fn read_all(directory: &Path) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {}", directory.display()))?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let kept: Vec<Outcome> = serde_json::from_str(&text)
            .with_context(|| format!("{} contains no results of this bench", path.display()))?;
        outcomes.extend(kept);
    }
    Ok(outcomes)
}
