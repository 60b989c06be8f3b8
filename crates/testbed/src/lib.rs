//! Real PostgreSQL servers, workloads, a fault proxy and comparison, for tests and the demo.
//!
//! A test reads like this: [`Pair::start`] brings up a publisher and a subscriber, a
//! [`workload`] changes the publisher, [`Program`] runs the binary under test between them,
//! [`wait_until`] waits for it to catch up, and [`compare`] says whether the tables are equal.
//! Nothing is left behind: a guardian process stops each server and removes its directory even
//! when the test is killed.
//!
//! SQL goes through the `postgres` crate, an independent client, so that a fault of the program's
//! own wire layer cannot hide itself.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod compare;
mod error;
mod pair;
pub mod pooler;
pub mod program;
pub mod proxy;
pub mod servers;
mod wait;
pub mod workload;

pub use cluster::{Cluster, ClusterBuilder, Stop};

pub use compare::TableName;
pub use error::{Error, Result};
pub use pair::Pair;
pub use pooler::{PoolMode, Pooler};
pub use postgres;
pub use program::Program;
pub use proxy::Proxy;

pub use servers::ServerBinaries;
pub use wait::wait_until;
