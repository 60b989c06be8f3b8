//! A limit of the size of files (`ulimit -f`, `LimitFSIZE` of a systemd unit).

use std::sync::Arc;

use signal_hook::consts::SIGXFSZ;

/// Makes a write beyond the limit fail (`EFBIG`), as one to a full disk does. By default, the system ends the process
/// with a signal, which PostgreSQL ignores for the same reason.
pub(crate) fn let_writes_fail() {
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::default()) {
        tracing::debug!(%error, "cannot ignore SIGXFSZ");
    }
}
