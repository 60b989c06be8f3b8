//! This process, as other processes see it in schema `pgapace` of a subscriber.

use std::fmt::Write as _;

use ring::rand::{SecureRandom, SystemRandom};

use crate::error::{Failure, Result};

/// Host and process id are for people; several containers may have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    /// Another one in each process.
    pub(crate) id: String,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

impl Process {
    pub(crate) fn this() -> Result<Self> {
        let mut bytes = [0; 16];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| Failure::internal("the system has no random numbers"))?;
        let mut id = String::new();
        for byte in bytes {
            // Writing to a string does not fail.
            let _ = write!(id, "{byte:02x}");
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Self { id, host, pid: std::process::id() })
    }
}
