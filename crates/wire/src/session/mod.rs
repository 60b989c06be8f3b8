//! A session: whole SQL statements, a pipeline for applying changes, and COPY.

mod copy;
mod copy_data;
mod description;
mod pipeline;
mod reply;
mod rows;

pub use copy::{CopyIn, CopyOut};
pub use copy_data::CopyData;
pub use description::{DescribedColumn, RowDescription};
pub use pipeline::{Param, Queued};
pub use reply::{DataRow, Reply, TransactionStatus, affected_rows};
pub use rows::{Column, Row, RowIter, Rows};

pub(crate) use reply::unexpected;

use std::fmt;
use std::time::{Duration, Instant};

use crate::connect::CancelHandle;
use crate::error::{Error, Result, ServerError};
use crate::memory;
use crate::protection::Protection;
use crate::stream::{Activity, Buffered};
use crate::version::ServerVersion;

/// Exchanges from which the round trip is known well enough; see [`Session::measure_round_trip`].
const ENOUGH_EXCHANGES: usize = 8;

/// A session on a server. Its calls block, and one thread at a time can use it.
///
/// At any moment the session serves one of three purposes: whole statements ([`Session::simple`],
/// [`Session::query`], [`Session::execute`]), a COPY, or a pipeline (`queue_*`, [`Session::flush`],
/// [`Session::next_reply`]). Before it leaves the pipeline, the caller must take every reply up to
/// the last Ready.
///
/// Dropping a session sends Terminate.
pub struct Session {
    pub(crate) channel: Buffered,
    version: ServerVersion,
    /// What the server reported before the first statement.
    parameters_at_start: Vec<(String, String)>,
    cancel: CancelHandle,
    backend_pid: i32,
    host: String,
    protection: Protection,
    read_timeout: Option<Duration>,
    /// Shortest answer time so far; see [`Self::round_trip`].
    round_trip: Duration,
    /// Number of exchanges that were measured.
    exchanges: usize,
    status: TransactionStatus,
    /// Number of ReadyForQuery messages that the queued messages will still produce.
    ready_expected: usize,
    /// The error of a message that could not be queued.
    queue_failure: Option<Error>,
    /// Names and texts of the statements that [`Self::query_prepared_each`] has prepared.
    prepared: Vec<(&'static str, String)>,
}

/// A statement that a session prepares when it executes it first, and keeps.
#[derive(Debug, Clone, Copy)]
pub struct PreparedStatement<'s> {
    /// Its name on the server.
    pub name: &'static str,
    /// Its text. With another one, the statement is prepared again.
    pub sql: &'s str,
}

impl Session {
    /// Creates a session whose startup is complete.
    pub(crate) fn started(
        channel: Buffered,
        cancel: CancelHandle,
        host: String,
        protection: Protection,
    ) -> Result<Self> {
        let version = channel
            .parameter("server_version")
            .and_then(ServerVersion::parse)
            .ok_or_else(|| Error::protocol("the server does not report its version"))?;
        let backend_pid = cancel.pid();
        Ok(Session {
            parameters_at_start: channel.parameters().to_vec(),
            channel,
            version,
            cancel,
            backend_pid,
            host,
            protection,
            read_timeout: None,
            round_trip: Duration::MAX,
            exchanges: 0,
            status: TransactionStatus::Idle,
            ready_expected: 0,
            queue_failure: None,
            prepared: Vec::new(),
        })
    }

    /// The server's version.
    pub fn server_version(&self) -> ServerVersion {
        self.version
    }

    /// A parameter that the server reports, such as `TimeZone` or `in_hot_standby`.
    ///
    /// Source: <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-ASYNC>.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.channel.parameter(name)
    }

    /// The same as the server reported it before the first statement: with the defaults of the role, the database and the
    /// server, and what an event trigger on `login` has made of them.
    pub fn parameter_at_start(&self, name: &str) -> Option<&str> {
        let mut parameters = self.parameters_at_start.iter();
        parameters.find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The process ID of the session's backend: that of the cancel key, unless
    /// [`Session::set_backend_pid`] was called.
    pub fn backend_pid(&self) -> i32 {
        self.backend_pid
    }

    /// Sets the process ID of the session's backend, where a proxy sends its clients cancel keys of
    /// its own. Cancel requests keep the key that was received.
    pub fn set_backend_pid(&mut self, pid: i32) {
        self.backend_pid = pid;
        self.channel.set_backend_pid(pid);
    }

    /// A handle with which any thread can cancel the running statement.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// The server's host and port, for messages.
    pub fn host(&self) -> String {
        self.host.clone()
    }

    /// The protection of the session from attackers between client and server.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// The transaction status from the last ReadyForQuery.
    pub fn transaction_status(&self) -> TransactionStatus {
        self.status
    }

    /// Number of ReadyForQuery replies that are still to come: the Syncs and simple queries whose
    /// replies have not been taken completely.
    pub fn pending_ready(&self) -> usize {
        self.ready_expected
    }

    /// Limits every wait for the server; `None` (the default) waits indefinitely. After
    /// [`Error::Timeout`] a pipeline can continue to wait, but the functions for whole statements
    /// make the session unusable.
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_timeout = timeout;
    }

    /// Counts waits for the server there from now on.
    pub fn set_activity(&mut self, activity: &Activity) {
        self.channel.set_activity(activity, self.backend_pid);
    }

    /// How many commits of this session have ended their wait for synchronous standbys because it was canceled.
    pub fn unreplicated_commits(&self) -> u64 {
        self.channel.unreplicated_commits()
    }

    /// True after an error that makes the connection unusable: the session can only be dropped.
    pub fn is_broken(&self) -> bool {
        self.channel.is_broken()
    }

    /// Runs SQL text, possibly several statements, with the simple query protocol. Returns one
    /// result for each statement.
    pub fn simple(&mut self, sql: &str) -> Result<Vec<Rows>> {
        self.begin_exchange()?;
        self.queue_simple(sql);
        self.exchange()
    }

    /// Runs several texts in one round trip, each as [`Session::simple`] does. A text runs even if
    /// an earlier one failed; the first error is returned.
    pub fn simple_each<const N: usize>(&mut self, texts: [&str; N]) -> Result<[Vec<Rows>; N]> {
        let mut results =
            self.simple_all(&texts)?.into_iter().collect::<Result<Vec<_>>>()?.into_iter();
        Ok(std::array::from_fn(|_| results.next().unwrap_or_default()))
    }

    /// The same for any number of texts, with the result of each. They must fit into the buffers of the connection, because
    /// nothing is read before all are sent.
    ///
    /// # Errors
    /// When the texts cannot be sent.
    pub fn simple_all<T: AsRef<str>>(&mut self, texts: &[T]) -> Result<Vec<Result<Vec<Rows>>>> {
        self.begin_exchange()?;
        texts.iter().for_each(|sql| self.queue_simple(sql.as_ref()));
        let started = Instant::now();
        self.send_exchange()?;
        let answer = |_| if self.is_broken() { Err(Error::Closed) } else { self.collect() };
        let answers = texts.iter().map(answer).collect();
        self.note_round_trip(started);
        Ok(answers)
    }

    /// Runs one statement with text parameters `$1` and so on. The server infers their types.
    pub fn query(&mut self, sql: &str, params: &[Option<&str>]) -> Result<Rows> {
        self.begin_exchange()?;
        self.queue_query(sql, params);
        self.queue_sync();
        Ok(self.exchange()?.pop().unwrap_or_default())
    }

    /// The same, for values that are only shown: bytes that are not UTF-8 are replaced. An SQL_ASCII database has
    /// such values, and `pg_stat_activity` those of databases with another encoding.
    pub fn query_for_display(&mut self, sql: &str, params: &[Option<&str>]) -> Result<Rows> {
        self.begin_exchange()?;
        self.queue_query(sql, params);
        self.queue_sync();
        let started = Instant::now();
        self.send_exchange()?;
        let rows = self.collect_into(Rows::for_display());
        self.note_round_trip(started);
        Ok(rows?.pop().unwrap_or_default())
    }

    fn queue_query(&mut self, sql: &str, params: &[Option<&str>]) {
        self.queue_parse("", sql, &[]);
        self.queue_bound("", params);
    }

    fn queue_bound(&mut self, statement: &str, params: &[Option<&str>]) {
        let params = params.iter().map(|param| match param {
            None => Param::Null,
            Some(text) => Param::Text(text.as_bytes()),
        });
        if let Err(error) = self.queue_bind(statement, params) {
            self.queue_failure.get_or_insert(error);
        }
        self.queue_describe_portal();
        self.queue_execute();
    }

    /// Runs several statements in one round trip, each as [`Session::query`] does, but all in one
    /// transaction unless one is open. After an error the server does not run the rest.
    pub fn query_each<const N: usize>(
        &mut self,
        statements: [(&str, &[Option<&str>]); N],
    ) -> Result<[Rows; N]> {
        self.begin_exchange()?;
        for (sql, params) in statements {
            self.queue_query(sql, params);
        }
        self.queue_sync();
        exactly(self.exchange()?)
    }

    /// The same for statements that are executed again and again: parsing and planning a short one takes
    /// longer than its execution, so the session keeps them.
    pub fn query_prepared_each<const N: usize>(
        &mut self,
        statements: [(PreparedStatement<'_>, &[Option<&str>]); N],
    ) -> Result<[Rows; N]> {
        self.begin_exchange()?;
        for (PreparedStatement { name, sql }, params) in statements {
            if !self.prepared.iter().any(|(known, text)| *known == name && text == sql) {
                // After an error it may be there. Closing a statement that does not exist is not an error.
                self.queue_close_statement(name);
                self.queue_parse(name, sql, &[]);
                self.prepared.retain(|(known, _)| *known != name);
                self.prepared.push((name, sql.to_owned()));
            }
            self.queue_bound(name, params);
        }
        self.queue_sync();
        let results = self.exchange();
        if results.is_err() {
            // The server may have skipped any of them.
            let is_one = |known: &str| statements.iter().any(|(one, _)| one.name == known);
            self.prepared.retain(|(known, _)| !is_one(known));
        }
        exactly(results?)
    }

    /// Runs one statement with text parameters and returns the number of affected rows.
    pub fn execute(&mut self, sql: &str, params: &[Option<&str>]) -> Result<u64> {
        Ok(self.query(sql, params)?.affected())
    }

    /// Runs all queued messages in one round trip: sends a Sync, and returns one result for each
    /// Execute. After an error of one statement the server does not run the others, and the error is
    /// returned; the session stays usable.
    pub fn run_queued(&mut self) -> Result<Vec<Rows>> {
        if self.is_broken() {
            return Err(Error::Closed);
        }
        if self.ready_expected > 0 {
            return Err(Error::protocol("a pipeline is already active"));
        }
        self.queue_sync();
        self.exchange()
    }

    /// Ends the session and waits, for `patience` at most, until the server has closed the
    /// connection. Then its backend has exited, because the server closes the socket only when the
    /// process ends.
    pub fn close(mut self, patience: Duration) {
        if memory::reserve(&mut self.channel.out, 5).is_err() {
            return;
        }
        self.channel.out.extend_from_slice(b"X\0\0\0\x04");
        if self.channel.flush(Some(patience)).is_ok() {
            while self.channel.next(Some(patience)).is_ok() {}
        }
    }

    /// Checks that no other exchange is active before a whole statement runs.
    fn begin_exchange(&mut self) -> Result<()> {
        if self.is_broken() {
            return Err(Error::Closed);
        }
        if self.ready_expected > 0 || self.queued() > 0 {
            return Err(Error::protocol("a statement cannot run while a pipeline is active"));
        }
        Ok(())
    }

    /// The shortest answer time of a whole exchange so far, an upper bound of the network round
    /// trip. [`Duration::MAX`] before the first exchange.
    pub fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Measures the round trip until one takes less than `enough`, or until the session has made 8
    /// exchanges since it began. Repetition is necessary because a slow answer may also mean that the
    /// server or this process had no CPU time. Returns zero for a Unix socket.
    pub fn measure_round_trip(&mut self, enough: Duration) -> Result<Duration> {
        if self.protection == Protection::Socket {
            return Ok(Duration::ZERO);
        }
        while self.round_trip >= enough && self.exchanges < ENOUGH_EXCHANGES {
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
        self.exchanges += 1;
    }

    /// Sends the messages of a whole statement, or none of them if one cannot be sent.
    fn send_exchange(&mut self) -> Result<()> {
        if let Some(failure) = self.queue_failure.take() {
            self.channel.forget_queued();
            self.ready_expected = 0;
            return Err(failure);
        }
        self.flush().map_err(|error| self.give_up(error))
    }

    /// Collects results up to ReadyForQuery.
    fn collect(&mut self) -> Result<Vec<Rows>> {
        self.collect_into(Rows::default())
    }

    /// The same; `current` takes the first result.
    fn collect_into(&mut self, mut current: Rows) -> Result<Vec<Rows>> {
        let mut results = Vec::new();
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
                // Read the rest of the answer, so that the session stays usable.
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
    }

    /// An interrupted exchange cannot be resumed.
    fn give_up(&self, error: Error) -> Error {
        self.channel.fail(error)
    }
}

fn exactly<const N: usize>(results: Vec<Rows>) -> Result<[Rows; N]> {
    results.try_into().map_err(|results: Vec<Rows>| {
        Error::Protocol(format!("{} results of {N} statements", results.len()))
    })
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
