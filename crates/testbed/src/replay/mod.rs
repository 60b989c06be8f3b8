//! A publisher whose stream was recorded before, as if its walsender ran on another machine.
//!
//! [`Recording::record`] reads the stream of a slot once. A [`ReplayServer`] in front of the real,
//! idle publisher then answers START_REPLICATION with the recorded messages, as fast as the client
//! takes them: nothing decodes WAL meanwhile. It passes everything else through to the publisher
//! byte for byte, so that a client finds the same catalogues, slots and positions as ever.
//!
//! A stream depends on the options of START_REPLICATION and on the settings of the session, which
//! differ between clients. Together they are a [`Request`]. A request that no recording answers
//! exactly is refused with an error, and kept: see [`ReplayServer::refused`]. So a client shows
//! what to record by trying to start.
//!
//! Like a walsender, the server continues at the position that the client asks for, or at the flush
//! position that it acknowledged for the slot, whichever is later. The slot of the real publisher
//! stays where it is.

mod protocol;
mod recording;
mod server;
mod session;
mod stream;
mod units;

pub use protocol::{Request, parse_lsn};
pub use recording::Recording;
pub use server::ReplayServer;

/// The names of the server's threads begin with this, so that their CPU time can be told apart.
pub const THREADS: &str = "replay";
