//! A physical standby of the publisher, for comparison. It is stopped between its runs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::{Cluster, Stop, wait_until};

use crate::environment::Environment;

/// Name of the standby in `synchronous_standby_names`, and of its slot.
pub(crate) const STANDBY: &str = "bench_standby";
/// Files that are not copied from the publisher: directories, settings, slots.
const KEPT: [&str; 4] = ["postgresql.conf", "postgresql.auto.conf", "pg_hba.conf", "pg_replslot"];
const PATIENCE: Duration = Duration::from_secs(120);

/// Creates a standby from the files of the publisher, which is stopped meanwhile. It does not use
/// pg_basebackup, because some server builds do not include that program.
pub(crate) fn create(environment: &mut Environment) -> Result<Cluster> {
    let slot = format!("SELECT pg_create_physical_replication_slot('{STANDBY}', true)");
    environment.publisher.sql("postgres", &slot)?;
    let mut standby = environment.standby_builder().start()?;
    standby.stop(Stop::Fast)?;
    environment.publisher.stop(Stop::Fast)?;
    let copied = replace_files(environment.publisher.data_dir(), standby.data_dir());
    environment.publisher.start()?;
    copied?;
    // Create the signal file as a copy, so that it has the same owner.
    copy(&standby.data_dir().join("PG_VERSION"), &standby.data_dir().join("standby.signal"))?;
    let conninfo =
        format!("{} application_name={STANDBY}", environment.publisher_for_native("postgres"));
    let settings = standby.data_dir().join("postgresql.conf");
    let text = fs::read_to_string(&settings)
        .with_context(|| format!("cannot read {}", settings.display()))?;
    let conninfo = conninfo.replace('\'', "''");
    let text =
        format!("{text}\nprimary_conninfo = '{conninfo}'\nprimary_slot_name = '{STANDBY}'\n");
    fs::write(&settings, text).with_context(|| format!("cannot write {}", settings.display()))?;
    Ok(standby)
}

/// Starts the standby and waits until it has replayed all of the publisher's WAL.
pub(crate) fn start(environment: &Environment, standby: &mut Cluster) -> Result<()> {
    standby.start()?;
    let sql = format!(
        "SELECT count(*) FROM pg_stat_replication WHERE application_name = '{STANDBY}' \
         AND state = 'streaming' AND replay_lsn >= pg_current_wal_lsn()"
    );
    let caught_up = || Ok(environment.publisher.query_one_text("postgres", &sql)? == "1");
    Ok(wait_until(PATIENCE, "the standby to catch up", caught_up)?)
}

fn replace_files(from: &Path, to: &Path) -> Result<()> {
    let entries = |directory: &Path| -> Result<Vec<fs::DirEntry>> {
        let all = fs::read_dir(directory)
            .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
            .with_context(|| format!("cannot read {}", directory.display()))?;
        let others = all.into_iter().filter(|entry| !KEPT.iter().any(|k| entry.file_name() == *k));
        Ok(others.collect())
    };
    for entry in entries(to)? {
        let path = entry.path();
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }
            .with_context(|| format!("cannot remove {}", path.display()))?;
    }
    for entry in entries(from)? {
        copy(&entry.path(), to)?;
    }
    Ok(())
}

/// Copies with owner and mode, because the servers may run as another user.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let status =
        Command::new("cp").arg("-a").arg(from).arg(to).status().context("cannot run cp")?;
    ensure!(status.success(), "cannot copy {}: cp ended with {status}", from.display());
    Ok(())
}
