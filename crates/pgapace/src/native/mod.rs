//! Native subscriptions of the subscriber: adopting one that runs, and handing it back.
//!
//! A native subscription keeps its position in its replication origin, which each of its commits
//! advances. The slot's confirmed position lags behind it: native commits asynchronously, and confirms
//! only durable transactions. So the slot alone does not tell where to start: transactions between the
//! two positions would be applied a second time.
//!
//! ```text
//! native runs ──disable──► disabled ──take slot──► adopted ──release──► native runs
//!      ▲                      │
//!      └───────enable─────────┘
//! ```
//!
//! Each arrow is one transaction of the subscriber: it has the `ALTER SUBSCRIPTION` and the rows of
//! schema `pgapace` that record it. So after a crash at any point the subscription is in one of these
//! states, and `pgapace.adoption` tells in which. While it is adopted, the native subscription is
//! disabled and has no slot name: it cannot be enabled by mistake, and DROP SUBSCRIPTION leaves the slot.
//!
//! `ALTER SUBSCRIPTION` locks the subscription until the end of its transaction. Positions are read
//! under this lock, after no worker and no walsender of the subscription is left. They are never taken
//! from an earlier attempt.

pub(crate) mod abort;
pub(crate) mod adopt;
pub(crate) mod guard;
pub(crate) mod interrupted;
pub(crate) mod options;
pub(crate) mod plan;
mod proof;
pub(crate) mod release;
pub(crate) mod requirements;
pub(crate) mod subscription;
