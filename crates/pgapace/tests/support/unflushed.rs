//! WAL of an open transaction that ends in the middle of a record, and that nothing flushes.

use std::process::Command;

use testbed::postgres::Client;
use testbed::{Cluster, Result, wait_until};

use super::PATIENCE;
use super::database::texts;

/// Until it is dropped, the flushed WAL of a server ends in the middle of a record, and no process flushes the rest but
/// for a commit.
pub(crate) struct UnflushedWal {
    /// A backend with an open transaction.
    _writer: Client,
    _wal_writer: Suspended,
}

impl UnflushedWal {
    /// Makes some, with a transaction in a database of its own: nobody waits for writers of other databases.
    pub(crate) fn make(cluster: &Cluster) -> Result<Self> {
        const OTHER: &str = "unflushed";
        let exists = format!("SELECT count(*) FROM pg_database WHERE datname = '{OTHER}'");
        if cluster.query_one_text("postgres", &exists)? == "0" {
            cluster.create_database(OTHER)?;
            let table = "CREATE TABLE w (v text); ALTER TABLE w ALTER v SET STORAGE EXTERNAL";
            cluster.sql(OTHER, table)?;
        }
        let mut writer = cluster.connect(OTHER)?;
        writer.batch_execute("BEGIN")?;
        let cut = "SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() \
            AND (pg_current_wal_flush_lsn() - '0/0') % current_setting('wal_block_size')::int = 0";
        let mut made = None;
        wait_until(PATIENCE, "unflushed WAL", || {
            // The WAL writer flushes whole pages. It is suspended while it sleeps, and so holds no lock.
            writer.batch_execute("INSERT INTO w VALUES (repeat('x', 20000))")?;
            wait_until(PATIENCE, "the WAL writer", || Ok(texts(&mut writer, cut) == ["t"]))?;
            let sleeps = "SELECT pid FROM pg_stat_activity \
                          WHERE backend_type = 'walwriter' AND wait_event = 'WalWriterMain'";
            if let Some(wal_writer) = texts(&mut writer, sleeps).pop() {
                signal(&wal_writer, "-STOP")?;
                let suspended = Suspended(wal_writer);
                if texts(&mut writer, cut) == ["t"] {
                    made = Some(suspended);
                }
            }
            Ok(made.is_some())
        })?;
        let wal_writer = made.expect("it was suspended");
        Ok(Self { _writer: writer, _wal_writer: wal_writer })
    }
}

/// A process that is suspended until this is dropped.
struct Suspended(String);

impl Drop for Suspended {
    fn drop(&mut self) {
        let _ = signal(&self.0, "-CONT");
    }
}

/// Sends a signal to a process of a server.
pub(crate) fn signal(process: &str, signal: &str) -> Result<()> {
    let status = Command::new("kill").args([signal, process]).status()?;
    assert!(status.success(), "{status}");
    Ok(())
}
