//! Byte streams to a server: a non-blocking socket with poll(2), with or without TLS.

mod activity;
mod buffered;
pub(crate) mod certificate;
mod channel_binding;
mod notices;
mod socket;
mod tls;
mod user_timeout;

pub(crate) use activity::ActiveSession;
pub use activity::{Activity, AnswerWait};
pub(crate) use buffered::{Buffered, MAX_MESSAGE, Message, from_io, header};
pub(crate) use notices::log_notice;
pub(crate) use socket::{Address, SocketOptions, peer_uid};

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::Socket;

use crate::error::{Error, Result};
use tls::{Tls, tls_error};
use user_timeout::UserTimeout;

/// The protocol name of PostgreSQL in TLS (ALPN).
pub(crate) const ALPN: &[u8] = b"postgresql";

/// A connected, non-blocking byte stream.
pub(crate) struct Stream {
    socket: Arc<Socket>,
    tls: Option<Box<Tls>>,
    /// See [`Stream::set_established`].
    established: bool,
    /// See [`Stream::set_inside_message`].
    inside_message: bool,
    user_timeout: Option<UserTimeout>,
}

/// Which events to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Want {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// Result of poll(2). An error or hang-up of the socket sets every wanted event, so that the
/// following read or write reports it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ready {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The wake-up descriptor is readable.
    pub(crate) woken: bool,
    /// The peer has closed at least its sending side.
    pub(crate) hangup: bool,
}

impl Stream {
    /// Connects, and waits until `deadline` at most.
    pub(crate) fn connect(
        address: &Address,
        options: &SocketOptions,
        deadline: Option<Instant>,
    ) -> io::Result<Stream> {
        let socket = Arc::new(socket::connect(address, options, deadline)?);
        let is_tcp = cfg!(target_os = "linux") && matches!(address, Address::Tcp(_));
        let user_timeout = options.tcp_user_timeout.filter(|_| is_tcp).map(UserTimeout::new);
        Ok(Stream { socket, tls: None, established: false, inside_message: false, user_timeout })
    }

    /// A stream on one end of a socket pair.
    #[cfg(test)]
    pub(crate) fn on(socket: Socket) -> Stream {
        socket.set_nonblocking(true).unwrap();
        let socket = Arc::new(socket);
        Stream { socket, tls: None, established: false, inside_message: false, user_timeout: None }
    }

    /// The server has accepted the session. From now on, dropping the stream sends Terminate, so that the
    /// server does not log a lost connection; and an error of TLS is a lost connection.
    pub(crate) fn set_established(&mut self) {
        self.established = true;
    }

    /// Whether the last bytes written may end inside a message. Then the server would read Terminate as a
    /// part of that message, so none is sent.
    pub(crate) fn set_inside_message(&mut self, inside: bool) {
        self.inside_message = inside;
    }

    /// Starts TLS on the connection. With `direct` negotiation the server must select PostgreSQL by
    /// ALPN; otherwise another protocol could receive the bytes.
    pub(crate) fn start_tls(
        &mut self,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        direct: bool,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let tls = Tls::start(&self.socket, config, name, deadline)?;
        if direct && !tls.speaks_postgresql() {
            return Err(Error::Tls(
                "direct SSL connection was established without ALPN protocol negotiation extension"
                    .to_owned(),
            ));
        }
        self.tls = Some(Box::new(tls));
        Ok(())
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// The version of TLS, as `TLSv1.3`; empty without TLS.
    pub(crate) fn tls_version(&self) -> &'static str {
        self.tls.as_ref().map_or("", |tls| tls.version())
    }

    /// The hash of the server's certificate that binds SCRAM to this channel, if there is one.
    pub(crate) fn tls_server_end_point(&self) -> Option<Vec<u8>> {
        self.tls.as_ref().and_then(|tls| tls.server_end_point())
    }

    pub(crate) fn socket(&self) -> &Arc<Socket> {
        &self.socket
    }

    /// Number of bytes that the socket has received and that were not read.
    pub(crate) fn unread(&self) -> io::Result<usize> {
        Ok(usize::try_from(rustix::io::ioctl_fionread(&*self.socket)?).unwrap_or(usize::MAX))
    }

    /// Reads available data, at most `into.len()` bytes. `Ok(0)` means the end of the stream,
    /// `WouldBlock` that there is no data.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read(&self.socket, into).map_err(|e| self.tls_failure(e)),
            None => retry(|| (&*self.socket).read(into)),
        }
    }

    /// Accepts some of `bytes` for sending; `WouldBlock` when it can accept none.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.note_write();
        match &mut self.tls {
            Some(tls) => tls.write(&self.socket, bytes).map_err(|e| self.tls_failure(e)),
            None => retry(|| (&*self.socket).write(bytes)),
        }
    }

    /// Sends bytes that an earlier [`Stream::write`] accepted but the socket did not; `WouldBlock`
    /// when some of them remain.
    pub(crate) fn push(&mut self) -> io::Result<()> {
        self.note_write();
        match &mut self.tls {
            Some(tls) => tls.push(&self.socket).map_err(|e| self.tls_failure(e)),
            None => Ok(()),
        }
    }

    /// The peer has answered all that was written.
    pub(crate) fn note_answered(&self) {
        if let Some(user_timeout) = &self.user_timeout {
            user_timeout.answered();
        }
    }

    fn note_write(&self) {
        if let Some(user_timeout) = &self.user_timeout {
            user_timeout.wrote();
        }
    }

    /// Of a session, a damaged record or an alert means that the connection is lost, as if the socket had
    /// failed. Before, it may tell that the settings of TLS are wrong: with TLS 1.3 the server judges the
    /// client's certificate after the handshake.
    fn tls_failure(&self, error: io::Error) -> io::Error {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(tls) if self.established => {
                io::Error::new(io::ErrorKind::ConnectionAborted, tls_error(tls).to_string())
            }
            _ => error,
        }
    }

    /// Whether [`Stream::push`] has bytes to send.
    pub(crate) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Whether the TLS layer holds bytes that poll(2) cannot see.
    fn has_unread(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unread())
    }

    /// Waits until a wanted event occurs, `wake` is readable, or `deadline` has passed (`None`).
    pub(crate) fn wait(
        &self,
        want: Want,
        wake: Option<BorrowedFd<'_>>,
        deadline: Option<Instant>,
    ) -> io::Result<Option<Ready>> {
        if want.read && self.has_unread() {
            return Ok(Some(Ready { readable: true, ..Ready::default() }));
        }
        let Some(user_timeout) = &self.user_timeout else {
            return wait(self.socket.as_fd(), want, wake, deadline);
        };
        loop {
            let look = user_timeout.next_look();
            if look.is_some_and(|look| Instant::now() >= look) {
                user_timeout.look(&self.socket);
                continue;
            }
            let looks = look.filter(|look| deadline.is_none_or(|deadline| *look < deadline));
            let ready = wait(self.socket.as_fd(), want, wake, looks.or(deadline))?;
            if ready.is_some() || looks.is_none() {
                return Ok(ready);
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.established {
            if !self.inside_message {
                // Sends Terminate, as far as the socket accepts it at once.
                let _ = self.write(b"X\0\0\0\x04");
            }
            if let Some(tls) = &mut self.tls {
                tls.close(&self.socket);
            }
        }
    }
}

/// The time `timeout` from now; `None`, meaning never, when the clock cannot represent it.
pub(crate) fn after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

/// Repeats a system call that a signal interrupted.
pub(crate) fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// [`Stream::wait`] for a bare socket.
pub(crate) fn wait(
    socket: BorrowedFd<'_>,
    want: Want,
    wake: Option<BorrowedFd<'_>>,
    deadline: Option<Instant>,
) -> io::Result<Option<Ready>> {
    let mut flags = PollFlags::RDHUP;
    flags.set(PollFlags::IN, want.read);
    flags.set(PollFlags::OUT, want.write);
    // RDHUP reports a closed peer even to a caller that does not read. Once set it makes poll(2)
    // return immediately, so every caller must either read, and find the end, or treat the event as
    // the end.
    let mut fds = [
        PollFd::from_borrowed_fd(socket, flags),
        PollFd::from_borrowed_fd(wake.unwrap_or(socket), PollFlags::IN),
    ];
    let used = if wake.is_some() { 2 } else { 1 };
    loop {
        let timeout = match deadline {
            None => None,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                Some(Timespec::try_from(left).map_err(io::Error::other)?)
            }
        };
        match poll(&mut fds[..used], timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(0) => {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(None);
                }
            }
            Ok(_) => {
                let found = fds[0].revents();
                let failed = found.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
                return Ok(Some(Ready {
                    readable: want.read
                        && (failed || found.intersects(PollFlags::IN | PollFlags::RDHUP)),
                    writable: want.write && (failed || found.contains(PollFlags::OUT)),
                    woken: used == 2 && !fds[1].revents().is_empty(),
                    hangup: failed || found.contains(PollFlags::RDHUP),
                }));
            }
        }
    }
}
