//! What faults do: crashes, restarts, cuts, take-overs, lost slots; always on real servers.

mod crashes;
mod failover;
mod large;
mod privileges;
mod secrets;
mod site;
mod slots;
mod status;
