//! The spool: transactions whose end is not yet known, as far as they do not fit into memory.
//!
//! Spool files are temporary. Nothing in them is acknowledged, so if they are lost, the publisher
//! sends it again. The files have no names. The kernel removes them when the process ends, however
//! it ends, and no other process can find them.

mod file;

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use engine::assemble::{SpoolCommand, SpoolId};
use rustc_hash::FxHashMap;
use rustix::io::Errno;

use crate::cli::output::size as pretty;
use crate::error::{Class, Failure, Result};
use crate::spool::file::{ReadError, SpoolFile};
use crate::subscriber::state::statistics::Spooled;

/// The default directory. /tmp is often in memory.
pub(crate) fn default_directory() -> PathBuf {
    const LARGE: &str = "/var/tmp";
    if std::env::var_os("TMPDIR").is_none() && Path::new(LARGE).is_dir() {
        return PathBuf::from(LARGE);
    }
    std::env::temp_dir()
}

/// The spool of one run of a subscription.
#[derive(Debug)]
pub(crate) struct Spool {
    directory: PathBuf,
    /// Maximum size of all files together, in bytes.
    limit: Option<u64>,
    used: u64,
    files: FxHashMap<SpoolId, SpoolFile>,
}

impl Spool {
    /// Starts empty in this directory; files are created when they are needed.
    pub(crate) fn new(directory: &Path, limit: Option<u64>) -> Self {
        raise_file_limit();
        Self { directory: directory.to_owned(), limit, used: 0, files: FxHashMap::default() }
    }

    /// Checks that files can be created in the directory.
    pub(crate) fn check(&self) -> Result<()> {
        tempfile::tempfile_in(&self.directory).map(drop).map_err(|e| self.failure(&e, "use"))
    }

    /// Whether more than half of the limit is used.
    pub(crate) fn is_half_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.used > limit / 2)
    }

    /// The size of the spool.
    pub(crate) fn used(&self) -> Spooled {
        Spooled { files: self.files.len() as u64, bytes: self.used }
    }

    /// Executes a command of the assembler.
    pub(crate) fn carry_out(&mut self, command: SpoolCommand) -> Result<()> {
        match command {
            SpoolCommand::Append { id, block } => self.append(id, &block),
            SpoolCommand::Truncate { id, length } => self.truncate(id, length),
            SpoolCommand::Discard { id } => {
                self.discard(id);
                Ok(())
            }
        }
    }

    fn append(&mut self, id: SpoolId, block: &[u8]) -> Result<()> {
        let size = SpoolFile::size_of_block(block);
        if let Some(limit) = self.limit
            && self.used + size > limit
        {
            return Err(Failure::new(
                Class::Spool,
                format!(
                    "the spool needs more than --spool-limit ({}); it has {} open {}",
                    pretty(i64::try_from(limit).unwrap_or(i64::MAX)),
                    self.files.len(),
                    if self.files.len() == 1 { "transaction" } else { "transactions" }
                ),
            )
            .hint(
                "Nothing is lost: spooled transactions are not acknowledged, and are sent again. \
                 Raise --spool-limit, or end the large or prepared transactions on the publisher. \
                 --streaming off leaves large transactions on the publisher's disk until they commit.",
            ));
        }
        if !self.files.contains_key(&id) {
            let file = tempfile::tempfile_in(&self.directory)
                .map_err(|e| self.failure(&e, "create a file in"))?;
            tracing::debug!(files = self.files.len() + 1, bytes = self.used, "spooling");
            self.files.insert(id, SpoolFile::new(file, id));
        }
        let Some(file) = self.files.get_mut(&id) else { return Ok(()) };
        if let Err(error) = file.append(block) {
            return Err(self.failure(&error, "write to"));
        }
        self.used += size;
        Ok(())
    }

    fn truncate(&mut self, id: SpoolId, length: u64) -> Result<()> {
        let file = self.files.get_mut(&id).ok_or_else(|| unknown(id))?;
        let before = file.size();
        if let Err(error) = file.truncate(length) {
            return Err(self.unreadable(error));
        }
        self.used = self.used - before + file.size();
        Ok(())
    }

    /// Reads the next block of a transaction, starting with the first.
    pub(crate) fn read(&mut self, id: SpoolId) -> Result<Bytes> {
        let file = self.files.get_mut(&id).ok_or_else(|| unknown(id))?;
        file.read().map(Bytes::from).map_err(|error| self.unreadable(error))
    }

    /// Reads the block of a transaction that contains a position, from that position on. Does not
    /// affect [`Self::read`].
    pub(crate) fn read_from(&self, id: SpoolId, place: u64) -> Result<Bytes> {
        let file = self.files.get(&id).ok_or_else(|| unknown(id))?;
        file.read_from(place).map(Bytes::from).map_err(|error| self.unreadable(error))
    }

    /// Removes a transaction, if the spool contains it.
    pub(crate) fn discard(&mut self, id: SpoolId) {
        if let Some(file) = self.files.remove(&id) {
            self.used -= file.size();
        }
    }

    fn unreadable(&self, error: ReadError) -> Failure {
        match error {
            ReadError::Io(error) => self.failure(&error, "read"),
            ReadError::Damaged { offset } => Failure::new(
                Class::Spool,
                format!(
                    "the spool in {} is damaged: a file returned other bytes than were written, at \
                     offset {offset}",
                    self.directory.display()
                ),
            )
            .hint(
                "Nothing of the transaction is committed, and it is sent again. The disk or the \
                 memory may be faulty: choose another --spool-directory.",
            ),
        }
    }

    fn failure(&self, error: &io::Error, doing: &str) -> Failure {
        let directory = self.directory.display();
        let message = format!("cannot {doing} the spool in {directory}: {error}");
        // Each transaction in the spool has a file.
        if Errno::from_io_error(error).is_some_and(|it| matches!(it, Errno::MFILE | Errno::NFILE)) {
            let failure = Failure::new(Class::Spool, message).hint(Failure::LIMITS_HINT);
            return failure.transient(true);
        }
        if error.kind() == io::ErrorKind::OutOfMemory {
            let failure = Failure::new(Class::Spool, message).hint(Failure::MEMORY_HINT);
            return failure.transient(true);
        }
        let hint = match error.kind() {
            io::ErrorKind::FileTooLarge => {
                "Nothing is lost: spooled transactions are not acknowledged, and are sent again. \
                 The process has reached its limit of the size of a file: raise LimitFSIZE in the systemd unit; \
                 else see ulimit -f. \
                 --streaming off leaves large transactions on the publisher's disk until they commit."
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "Nothing is lost: spooled transactions are not acknowledged, and are sent again. \
                 Make room, or choose another --spool-directory. \
                 --streaming off leaves large transactions on the publisher's disk until they commit."
            }
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                "Set --spool-directory to a directory in which this user may create files."
            }
            _ => "Choose another --spool-directory. Spooled transactions are sent again.",
        };
        Failure::new(Class::Spool, message).hint(hint)
    }
}

fn unknown(id: SpoolId) -> Failure {
    Failure::internal(format!("the spool has no transaction {}", id.0))
}

/// Raises the soft limit of open files, because each transaction in the spool has an open file.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(%error, "cannot raise the limit of open files");
        }
    }
}

#[cfg(test)]
mod tests;
