//! Output of a program that nobody reads: a pipe that is full from the start.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::OFlags;
use testbed::Result;

/// A named pipe without a reader.
pub(crate) struct UnreadPipe {
    path: PathBuf,
    end: File,
}

impl UnreadPipe {
    pub(crate) fn full(path: &Path) -> Result<Self> {
        let made = Command::new("mkfifo").arg(path).status()?;
        assert!(made.success(), "{made}");
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).expect("a flag");
        let mut end = File::options().read(true).write(true).custom_flags(flags).open(path)?;
        // The last bytes are taken one by one.
        for size in [4096, 1] {
            loop {
                match end.write(&[b'\n'; 4096][..size]) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(Self { path: path.to_owned(), end })
    }

    /// The file to which a program writes.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads what is there.
    pub(crate) fn read(&mut self) -> Result<String> {
        let mut read = Vec::new();
        match self.end.read_to_end(&mut read) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(String::from_utf8_lossy(&read).into_owned()),
        }
    }
}
