//! Faults on real servers: crashes, restarts, lost connections, takeovers and lost slots.

mod acknowledgements;
mod attention;
mod canceled_waits;
mod crashes;
mod durability;
mod errors;
mod failover;
mod history;
mod large;
mod network;
pub(crate) mod privileges;
mod refused;
mod resuming;
mod round_trips;
mod same_history;
mod secrets;
mod setup_errors;
mod silent;
mod slots;
mod standby_publisher;
mod starting;
mod status;
mod stops;
mod supervised;
mod takeover;
mod time_limits;
mod waiting;
