//! What faults do: crashes, restarts, cuts, take-overs, lost slots; always on real servers.

mod crashes;
mod errors;
mod failover;
mod history;
mod large;
mod network;
mod privileges;
mod secrets;
pub(crate) mod site;
mod slots;
mod status;
mod stops;
mod takeover;
mod waiting;
