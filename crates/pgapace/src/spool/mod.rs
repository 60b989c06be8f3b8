//! The spool: transactions whose end is not known yet, as far as they do not fit into memory.
//!
//! It is scratch. Nothing in it is acknowledged, so whatever becomes of it, the publisher sends it
//! again. Its files have no names: the system removes them with the process, however that ends, and
//! nobody else can find or mistake them.

mod file;

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use engine::assemble::{SpoolCommand, SpoolId};
use rustc_hash::FxHashMap;

use crate::error::{Class, Failure, Result};
use crate::spool::file::{ReadError, SpoolFile};
use crate::subscriber::state::statistics::Spooled;

/// Where the spool is if the user does not say: /tmp is memory on many systems.
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
    /// Bytes that all files may have together.
    limit: Option<u64>,
    used: u64,
    files: FxHashMap<SpoolId, SpoolFile>,
}

impl Spool {
    /// A spool in this directory, empty; nothing is created before it is needed.
    pub(crate) fn new(directory: &Path, limit: Option<u64>) -> Self {
        raise_file_limit();
        Self { directory: directory.to_owned(), limit, used: 0, files: FxHashMap::default() }
    }

    /// Whether files can be made in the directory.
    pub(crate) fn check(&self) -> Result<()> {
        tempfile::tempfile_in(&self.directory).map(drop).map_err(|e| self.failure(&e, "use"))
    }

    /// Whether more than half of what it may have is used.
    pub(crate) fn is_half_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.used > limit / 2)
    }

    /// What is in it.
    pub(crate) fn used(&self) -> Spooled {
        Spooled { files: self.files.len() as u64, bytes: self.used }
    }

    /// Does what the assembler says.
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
                format!("the spool needs more than --spool-limit, {limit} bytes"),
            )
            .hint(
                "Nothing is lost: what is spooled was not acknowledged, and is sent again. Raise \
                 --spool-limit, or end the large or prepared transactions on the publisher.",
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

    /// The next block of a transaction, from its beginning on.
    pub(crate) fn read(&mut self, id: SpoolId) -> Result<Bytes> {
        let file = self.files.get_mut(&id).ok_or_else(|| unknown(id))?;
        file.read().map(Bytes::from).map_err(|error| self.unreadable(error))
    }

    /// The block of a transaction that holds a place, from there on; it stays unread.
    pub(crate) fn read_from(&self, id: SpoolId, place: u64) -> Result<Bytes> {
        let file = self.files.get(&id).ok_or_else(|| unknown(id))?;
        file.read_from(place).map(Bytes::from).map_err(|error| self.unreadable(error))
    }

    /// Forgets a transaction, if it is here.
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
                    "the spool in {} returned other bytes than were written, at offset {offset}",
                    self.directory.display()
                ),
            )
            .hint(
                "Nothing of the transaction is committed, and it is sent again. The disk or its \
                 memory is damaged: choose another --spool-directory.",
            ),
        }
    }

    fn failure(&self, error: &io::Error, doing: &str) -> Failure {
        let directory = self.directory.display();
        let hint = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "Nothing is lost: what is spooled was not acknowledged, and is sent again. Make \
                 room, or choose another --spool-directory."
            }
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
                "Give --spool-directory a directory in which this user may create files."
            }
            _ => "Choose another --spool-directory. What is spooled is sent again.",
        };
        Failure::new(Class::Spool, format!("cannot {doing} the spool in {directory}: {error}"))
            .hint(hint)
    }
}

fn unknown(id: SpoolId) -> Failure {
    Failure::internal(format!("the spool has no transaction {}", id.0))
}

/// Every transaction in the spool has a file open; the usual limit is far below what is allowed.
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
