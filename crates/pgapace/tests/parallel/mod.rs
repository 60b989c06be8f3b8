//! Several workers: the order of what depends on each other, locks that nobody sees, lost sessions.

mod faults;
mod locks;
mod order;
mod shared;
mod waits;
