//! Resolution of host names to addresses.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{SocketAddr, ToSocketAddrs};

use crate::conninfo::{Host, Place};
use crate::error::{Error, Result};
use crate::stream::Address;

/// The addresses of a host, at least one. The operating system does the lookup, with its own
/// timeouts.
pub(super) fn addresses(host: &Host) -> Result<Vec<Address>> {
    match host.place {
        Place::Socket => Ok(vec![Address::Unix(host.socket_path())]),
        Place::Address(address) => Ok(vec![Address::Tcp(SocketAddr::new(address, host.port))]),
        Place::Name => {
            let addresses: Vec<Address> =
                (host.name.as_str(), host.port).to_socket_addrs()?.map(Address::Tcp).collect();
            if addresses.is_empty() {
                return Err(Error::Io(std::io::ErrorKind::AddrNotAvailable.into()));
            }
            Ok(addresses)
        }
    }
}

/// Fisher-Yates shuffle. Its random numbers come from the seeds of std's hash maps: good enough to
/// spread load, not for secrets.
pub(super) fn shuffle<T>(items: &mut [T]) {
    for last in (1..items.len()).rev() {
        let random = RandomState::new().hash_one(last);
        let bound = last as u64 + 1;
        items.swap(last, usize::try_from(random % bound).unwrap_or(0));
    }
}
