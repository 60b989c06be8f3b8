//! Cancel requests from other threads.
//!
//! Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-CANCELING-REQUESTS>
//! and `PQcancelBlocking`, `src/interfaces/libpq/fe-cancel.c`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;

use super::{encryption, open};
use crate::conninfo::{ConnInfo, Host};
use crate::error::{Error, Result};
use crate::stream::{Address, Want, after, from_io};

/// Longest time for a cancel request, unless `connect_timeout` is shorter.
const PATIENCE: Duration = Duration::from_secs(10);

/// Cancels the statement that a session is running. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct CancelHandle(Arc<Backend>);

struct Backend {
    info: ConnInfo,
    host: Host,
    /// The exact address of the session, because another address of the same host may be another
    /// server.
    address: Address,
    /// Cancel requests are encrypted if the session is.
    encrypted: bool,
    pid: i32,
    secret: i32,
}

impl CancelHandle {
    pub(super) fn new(
        info: &ConnInfo,
        host: &Host,
        address: &Address,
        encrypted: bool,
        pid: i32,
        secret: i32,
    ) -> CancelHandle {
        CancelHandle(Arc::new(Backend {
            info: info.clone(),
            host: host.clone(),
            address: address.clone(),
            encrypted,
            pid,
            secret,
        }))
    }

    /// The process ID of the session's backend.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.0.pid
    }

    /// Asks the server, on a separate connection, to cancel the statement that the session is
    /// running, and waits until the server has accepted the request. Only the session itself can
    /// tell whether a statement was cancelled.
    pub fn cancel(&self) -> Result<()> {
        self.cancel_if(&|| true)
    }

    /// The same. If the request is not `wanted` any more when the connection is there, which may take a while, it is not
    /// sent: the session may execute another statement then.
    pub fn cancel_if(&self, wanted: &dyn Fn() -> bool) -> Result<()> {
        let backend = &*self.0;
        let settings = backend.info.settings();
        let deadline =
            after(settings.connect_timeout.map_or(PATIENCE, |limit| limit.min(PATIENCE)));
        let mut stream = open(settings, &backend.address, false, deadline)?;
        if backend.encrypted
            && encryption::start_tls(&mut stream, &backend.info, &backend.host, deadline)?.is_none()
        {
            return Err(Error::Tls("the server no longer offers SSL".to_owned()));
        }
        if !wanted() {
            return Ok(());
        }
        let mut request = BytesMut::new();
        frontend::cancel_request(backend.pid, backend.secret, &mut request);
        let mut written = 0;
        let mut answer = [0; 64];
        // The server answers by closing the connection after it has sent the signal.
        loop {
            let result = if written < request.len() {
                stream.write(&request[written..]).map(|count| written += count)
            } else if stream.has_unsent() {
                stream.push()
            } else {
                match stream.read(&mut answer) {
                    Ok(0) => return Ok(()),
                    Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Ok(()),
                    result => result.map(|_| ()),
                }
            };
            match result {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let writing = written < request.len() || stream.has_unsent();
                    let want = Want { read: !writing, write: writing };
                    if stream.wait(want, None, deadline)?.is_none() {
                        return Err(Error::Timeout);
                    }
                }
                Err(error) => return Err(from_io(error)),
            }
        }
    }
}

impl fmt::Debug for CancelHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelHandle").field("pid", &self.0.pid).finish_non_exhaustive()
    }
}
