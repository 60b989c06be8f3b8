//! Real PostgreSQL servers, workloads, a fault proxy, replay of recorded streams, and comparison: for
//! tests and the demo.
//!
//! A test has these steps: [`Pair::start`] starts a publisher and a subscriber, a [`workload`]
//! changes the publisher, and [`Program`] runs the binary under test between them. Then
//! [`wait_until`] waits until the subscriber has caught up, and [`compare`] checks whether the
//! tables are equal. A guardian process stops each server and removes its directory, even when the
//! test is killed.
//!
//! SQL runs through the `postgres` crate, an independent client. An error in the program's own wire
//! layer therefore cannot hide itself.

#![forbid(unsafe_code)]

pub mod citus;
pub mod cluster;
pub mod compare;
mod error;
pub mod network;
pub mod own_keys;
mod pair;
pub mod pooler;
pub mod program;
pub mod proxy;
pub mod replay;
pub mod servers;
mod wait;
pub mod workload;

pub use cluster::{Cluster, ClusterBuilder, Stop};

pub use compare::TableName;
pub use error::{Error, Result};
pub use own_keys::OwnKeysProxy;
pub use pair::Pair;
pub use pooler::{PoolMode, Pooler};
pub use postgres;
pub use program::Program;
pub use proxy::Proxy;

pub use servers::ServerBinaries;
pub use wait::wait_until;
