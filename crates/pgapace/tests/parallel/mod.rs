//! Parallel apply: the order of dependent changes, deadlocks that PostgreSQL cannot detect, and
//! lost sessions.

mod apart;
mod far_away;
mod faults;
mod locks;
mod order;
mod prefetch;
mod shared;
mod waits;
