//! Several workers: the order of what depends on each other, locks that nobody sees, lost sessions.

mod apart;
mod far_away;
mod faults;
mod locks;
mod order;
mod prefetch;
mod shared;
mod waits;
