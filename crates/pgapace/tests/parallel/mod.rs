//! Parallel apply: the order of dependent changes, deadlocks that PostgreSQL cannot detect, and
//! lost sessions.

mod auto;
mod dependent_scenarios;
mod failing_subscription;
mod faults;
mod few_locks;
mod high_latency;
mod locks;
mod order;
mod origins;
mod prefetch;
mod shared;
mod waits;
