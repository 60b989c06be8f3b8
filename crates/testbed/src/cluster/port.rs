//! Allocation of ports for the servers.

use std::collections::HashSet;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::error::{Error, Result};

/// A range below the ephemeral ports, so that no outgoing connection takes the port of a stopped
/// server.
const RANGE: std::ops::Range<u16> = 20_000..32_000;

static TAKEN: LazyLock<Mutex<HashSet<u16>>> = LazyLock::new(Mutex::default);

/// A port that no other cluster of this process uses. Dropping it frees the port.
#[derive(Debug)]
pub(crate) struct Port(u16);

impl Port {
    /// Allocates a port on which nothing listens now.
    pub(crate) fn take() -> Result<Self> {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..1000 {
            let port = fastrand::u16(RANGE);
            if !taken.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
                taken.insert(port);
                return Ok(Self(port));
            }
        }
        Err(Error::other(format!("no free port in {RANGE:?}")))
    }

    pub(crate) fn number(&self) -> u16 {
        self.0
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        TAKEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}
