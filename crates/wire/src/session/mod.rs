//! One session: SQL for control work, a pipeline for the hot path, COPY.

mod copy;
mod copy_data;
mod pipeline;
mod reply;
mod rows;

pub use copy::{CopyIn, CopyOut};
pub use copy_data::CopyData;
pub use pipeline::{Param, Queued};
pub use reply::{DataRow, Reply, TransactionStatus, affected_rows};
pub use rows::{Column, Row, RowIter, Rows};

pub(crate) use reply::unexpected;

use std::fmt;
use std::time::{Duration, Instant};

use crate::connect::CancelHandle;
use crate::error::{Error, Result, ServerError};
use crate::stream::Buffered;
use crate::version::ServerVersion;

/// See [`Session::measure_round_trip`].
const LOOKS: usize = 8;

/// A session with a server. Blocking; one thread at a time.
///
/// A session is used in one of three ways at a time: whole statements ([`Session::simple`],
/// [`Session::query`], [`Session::execute`]), a COPY, or a pipeline (`queue_*`,
/// [`Session::flush`], [`Session::next_reply`]). Before leaving the pipeline every reply up to
/// the last Ready must have been taken.
///
/// Dropping a session says Terminate.
pub struct Session {
    pub(crate) channel: Buffered,
    version: ServerVersion,
    cancel: CancelHandle,
    host: String,
    /// Over a Unix socket.
    local: bool,
    read_timeout: Option<Duration>,
    /// See [`Self::round_trip`].
    round_trip: Duration,
    status: TransactionStatus,
    /// ReadyForQuery messages that are still to come for what was queued.
    ready_expected: usize,
    /// Why a message could not be queued.
    queue_failure: Option<Error>,
}

impl Session {
    /// A session whose startup is complete.
    pub(crate) fn started(
        channel: Buffered,
        cancel: CancelHandle,
        host: String,
        local: bool,
    ) -> Result<Self> {
        let version = channel
            .parameter("server_version")
            .and_then(ServerVersion::parse)
            .ok_or_else(|| Error::protocol("the server does not report its version"))?;
        Ok(Session {
            channel,
            version,
            cancel,
            host,
            local,
            read_timeout: None,
            round_trip: Duration::MAX,
            status: TransactionStatus::Idle,
            ready_expected: 0,
            queue_failure: None,
        })
    }

    /// The server's version.
    pub fn server_version(&self) -> ServerVersion {
        self.version
    }

    /// A parameter the server reports, such as `TimeZone` or `in_hot_standby`.
    ///
    /// Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-ASYNC>.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.channel.parameter(name)
    }

    /// The process id of the session's backend.
    pub fn backend_pid(&self) -> i32 {
        self.cancel.pid()
    }

    /// A handle by which any thread can cancel what this session runs.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// What this session is connected to, for messages.
    pub fn host(&self) -> String {
        self.host.clone()
    }

    /// The transaction status of the last ReadyForQuery.
    pub fn transaction_status(&self) -> TransactionStatus {
        self.status
    }

    /// ReadyForQuery replies that are still to come for what was queued so far: the number of
    /// Syncs and simple queries whose end has not been taken.
    pub fn pending_ready(&self) -> usize {
        self.ready_expected
    }

    /// Bounds every wait for the server; `None` (the default) waits for ever. When it expires
    /// the answer is [`Error::Timeout`]; a pipeline can go on waiting after that, while the
    /// whole-statement functions give the session up.
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// True after an error that leaves the connection unusable: the session can only be dropped.
    pub fn is_broken(&self) -> bool {
        self.channel.is_broken()
    }

    /// Runs SQL text, possibly several statements, by the simple query protocol. One result for
    /// each statement.
    pub fn simple(&mut self, sql: &str) -> Result<Vec<Rows>> {
        self.begin_exchange()?;
        self.queue_simple(sql);
        self.exchange()
    }

    /// Runs several such texts, each as if [`Session::simple`] ran it, in one round trip. What follows
    /// one that fails is run all the same; the first error is returned.
    pub fn simple_each<const N: usize>(&mut self, texts: [&str; N]) -> Result<[Vec<Rows>; N]> {
        self.begin_exchange()?;
        texts.iter().for_each(|sql| self.queue_simple(sql));
        let started = Instant::now();
        self.send_exchange()?;
        let mut failed = None;
        let results = std::array::from_fn(|_| {
            if self.is_broken() {
                return Vec::new();
            }
            self.collect().unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Vec::new()
            })
        });
        self.note_round_trip(started);
        failed.map_or(Ok(results), Err)
    }

    /// Runs one statement with text parameters, `$1` and so on; their types are the server's
    /// choice.
    pub fn query(&mut self, sql: &str, params: &[Option<&str>]) -> Result<Rows> {
        self.begin_exchange()?;
        self.queue_parse("", sql, &[]);
        let params = params.iter().map(|param| match param {
            None => Param::Null,
            Some(text) => Param::Text(text.as_bytes()),
        });
        if let Err(error) = self.queue_bind("", params) {
            self.queue_failure.get_or_insert(error);
        }
        self.queue_describe_portal();
        self.queue_execute();
        self.queue_sync();
        Ok(self.exchange()?.pop().unwrap_or_default())
    }

    /// Runs one statement with text parameters; the number of rows it affected.
    pub fn execute(&mut self, sql: &str, params: &[Option<&str>]) -> Result<u64> {
        Ok(self.query(sql, params)?.affected())
    }

    /// Ends the session and waits until the server has closed the connection, for `patience` at
    /// most: then its backend is gone (the server leaves the socket to the end of the process).
    pub fn close(mut self, patience: Duration) {
        self.channel.out.extend_from_slice(b"X\0\0\0\x04");
        if self.channel.flush(Some(patience)).is_ok() {
            while self.channel.next(Some(patience)).is_ok() {}
        }
    }

    /// Checks that nothing else is going on before a whole statement is run.
    fn begin_exchange(&mut self) -> Result<()> {
        if self.is_broken() {
            return Err(Error::Closed);
        }
        if self.ready_expected > 0 || self.queued() > 0 {
            return Err(Error::protocol("a statement was to run while a pipeline is under way"));
        }
        Ok(())
    }

    /// The quickest answer to a whole exchange so far: a round trip to the server takes no longer.
    /// [`Duration::MAX`] before the first.
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Looks at what a round trip takes until one takes less than `enough`, or several times: a
    /// server, or this process, that waits for a processor is not far away. Nothing over a Unix
    /// socket.
    pub fn measure_round_trip(&mut self, enough: Duration) -> Result<Duration> {
        if self.local {
            return Ok(Duration::ZERO);
        }
        for _ in 0..LOOKS {
            if self.round_trip < enough {
                break;
            }
            self.begin_exchange()?;
            self.finish_queued()?;
        }
        Ok(self.round_trip)
    }

    fn exchange(&mut self) -> Result<Vec<Rows>> {
        let started = Instant::now();
        self.send_exchange()?;
        let results = self.collect();
        self.note_round_trip(started);
        results
    }

    fn note_round_trip(&mut self, started: Instant) {
        self.round_trip = self.round_trip.min(started.elapsed());
    }

    /// Sends the messages of a whole statement, or, if one of them cannot be sent, none.
    fn send_exchange(&mut self) -> Result<()> {
        if let Some(failure) = self.queue_failure.take() {
            self.channel.forget_queued();
            self.ready_expected = 0;
            return Err(failure);
        }
        self.flush().map_err(|error| self.give_up(error))
    }

    /// Takes results until ReadyForQuery.
    fn collect(&mut self) -> Result<Vec<Rows>> {
        let mut results = Vec::new();
        let mut current = Rows::default();
        let mut first_error = None;
        loop {
            let message =
                self.channel.next(self.read_timeout).map_err(|error| self.give_up(error))?;
            if message.tag == b'Z' {
                self.note_ready(&message)?;
                return match first_error {
                    None => Ok(results),
                    Some(error) => Err(error),
                };
            }
            let body = self.channel.bytes(message.body.clone());
            let result = match message.tag {
                b'T' => current.describe(body),
                b'D' => reply::DataRow::parse(body).and_then(|row| current.push(row)),
                b'C' => reply::command_tag(body).map(|tag| {
                    current.complete(tag);
                    results.push(std::mem::take(&mut current));
                }),
                b'1' | b'2' | b'3' | b'n' | b't' | b'I' => Ok(()),
                b'E' => Err(Error::Server(Box::new(ServerError::parse(body)))),
                tag => Err(reply::unexpected(tag, "in a query result")),
            };
            match result {
                Ok(()) => {}
                Err(error @ Error::Protocol(_)) => return Err(self.channel.fail(error)),
                Err(Error::Server(error)) if error.is_fatal() => {
                    return Err(self.channel.fail(Error::Server(error)));
                }
                // What is left of the answer is read, so that the session stays usable.
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
    }

    /// An exchange that stops half way cannot be taken up again.
    fn give_up(&self, error: Error) -> Error {
        self.channel.fail(error)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("host", &self.host)
            .field("backend_pid", &self.backend_pid())
            .field("server_version", &self.version)
            .field("broken", &self.is_broken())
            .finish_non_exhaustive()
    }
}
