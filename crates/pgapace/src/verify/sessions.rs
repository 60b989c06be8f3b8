//! A session on each server under one pair of snapshots, used side by side.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use pgoutput::Lsn;
use wire::{Rows, Session};

use crate::error::{Failure, Result};
use crate::scoped_thread;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::verify::facts::Explain;
use crate::verify::merge::RowEntry;

/// Rows are passed between threads in batches of about this size.
const BATCH_BYTES: usize = 64 * 1024;

/// Batches of one server that wait to be merged.
const BATCHES: usize = 4;

/// A subtransaction releases the locks of a query when it is rolled back, so that a TRUNCATE waits for
/// one chunk at most.
///
/// A range must be read by its index even if statistics are missing. A bitmap scan reads each block of
/// the table once, and takes a quarter less CPU time than an index scan.
const BEGIN_RANGE: &str = "SAVEPOINT chunk; SET LOCAL enable_seqscan = off; \
    SET LOCAL enable_indexscan = off; SET LOCAL work_mem = '64MB'";
/// The walk along an index needs its order.
const BEGIN_WALK: &str = "SAVEPOINT chunk; SET LOCAL enable_seqscan = off; \
    SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off";
const BEGIN_SCAN: &str = "SAVEPOINT chunk";
const END: &str = "ROLLBACK TO SAVEPOINT chunk; RELEASE SAVEPOINT chunk";

/// How a query finds its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Range,
    Walk,
    Scan,
}

impl Access {
    fn begin(self) -> &'static str {
        match self {
            Self::Range => BEGIN_RANGE,
            Self::Walk => BEGIN_WALK,
            Self::Scan => BEGIN_SCAN,
        }
    }
}

/// A query to one of the servers.
#[derive(Debug, Clone)]
pub(crate) struct Query {
    pub(crate) sql: String,
    /// A query whether it read other rows than the snapshot should show
    /// ([`crate::verify::sql::TableSql::is_rewritten`]).
    pub(crate) check: String,
    pub(crate) access: Access,
}

/// The result of a query, or that the snapshot no longer shows the table as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Read<T> {
    Rows(T),
    Rewritten,
}

impl<T> Read<T> {
    /// Both results, unless one table was rewritten.
    pub(crate) fn and<U>(self, other: Read<U>) -> Read<(T, U)> {
        match (self, other) {
            (Self::Rows(one), Read::Rows(two)) => Read::Rows((one, two)),
            _ => Read::Rewritten,
        }
    }
}

/// A session of each server.
#[derive(Debug)]
pub(crate) struct SessionPair {
    pub(crate) publisher: Session,
    pub(crate) subscriber: Session,
    pub(crate) lsn: Lsn,
    pub(crate) taken: Instant,
}

impl SessionPair {
    /// Whether the snapshots are too old: they hold back VACUUM.
    pub(crate) fn is_older_than(&self, lifetime: Duration) -> bool {
        self.taken.elapsed() >= lifetime
    }

    /// Asks both servers at the same time.
    pub(crate) fn ask(
        &mut self,
        shutdown: &Shutdown,
        publisher: Option<&Query>,
        subscriber: Option<&Query>,
    ) -> Result<Read<(Option<Rows>, Option<Rows>)>> {
        let handles = [self.publisher.cancel_handle(), self.subscriber.cancel_handle()];
        let (theirs, ours) = (&mut self.publisher, &mut self.subscriber);
        interruptible(shutdown, &handles, "verification", || {
            let one = |session: &mut Session, query: Option<&Query>, explain| {
                query.map_or(Ok(Read::Rows(None)), |query| Ok(some(run(session, query, explain)?)))
            };
            let (theirs, ours) = beside(
                || one(theirs, publisher, Failure::publisher),
                || one(ours, subscriber, Failure::subscriber),
            );
            Ok(theirs?.and(ours?))
        })
    }

    /// Streams the rows of both servers through `merge`. The result counts only if no table was
    /// rewritten meanwhile.
    pub(crate) fn stream(
        &mut self,
        shutdown: &Shutdown,
        publisher: &Query,
        subscriber: &Query,
        merge: impl FnOnce(Entries, Entries) -> Result<()>,
    ) -> Result<Read<()>> {
        let handles = [self.publisher.cancel_handle(), self.subscriber.cancel_handle()];
        let (theirs, ours) = (&mut self.publisher, &mut self.subscriber);
        interruptible(shutdown, &handles, "verification", || {
            std::thread::scope(|scope| {
                let (from, publisher_rows) = bounded(BATCHES);
                let (to, subscriber_rows) = bounded(BATCHES);
                let theirs = scoped_thread::spawn(scope, "publisher rows", move || {
                    send(theirs, publisher, Failure::publisher, &from)
                })?;
                let ours = scoped_thread::spawn(scope, "subscriber rows", move || {
                    send(ours, subscriber, Failure::subscriber, &to)
                })?;
                let merged = merge(Entries::new(publisher_rows), Entries::new(subscriber_rows));
                let panicked = |_| Err(Failure::internal("reading rows panicked"));
                let theirs = theirs.join().unwrap_or_else(panicked);
                let ours = ours.join().unwrap_or_else(panicked);
                // A reader that fails ends the merge, and a merge that fails ends the readers: what
                // the readers say comes first.
                match theirs?.and(ours?) {
                    Read::Rows(_) => merged.map(Read::Rows),
                    Read::Rewritten => Ok(Read::Rewritten),
                }
            })
        })
    }

    /// Reads all lines of a COPY from both servers at the same time. They are few.
    pub(crate) fn lines(
        &mut self,
        shutdown: &Shutdown,
        publisher: &str,
        subscriber: &str,
    ) -> Result<(Lines, Lines)> {
        let handles = [self.publisher.cancel_handle(), self.subscriber.cancel_handle()];
        let (theirs, ours) = (&mut self.publisher, &mut self.subscriber);
        interruptible(shutdown, &handles, "verification", || {
            let (theirs, ours) = beside(
                || {
                    copy_lines(theirs, publisher)
                        .map_err(|e| Failure::publisher(&e, "reading rows"))
                },
                || {
                    copy_lines(ours, subscriber)
                        .map_err(|e| Failure::subscriber(&e, "reading rows"))
                },
            );
            Ok((theirs?, ours?))
        })
    }
}

/// Runs both at the same time.
fn beside<A: Send, B>(
    one: impl FnOnce() -> Result<A> + Send,
    other: impl FnOnce() -> Result<B>,
) -> (Result<A>, Result<B>) {
    let (one, other) = scoped_thread::both(one, other);
    let panicked = || Err(Failure::internal("a query of the verification panicked"));
    (one.unwrap_or_else(panicked), other)
}

fn some<T>(read: Read<T>) -> Read<Option<T>> {
    match read {
        Read::Rows(rows) => Read::Rows(Some(rows)),
        Read::Rewritten => Read::Rewritten,
    }
}

/// One query in a subtransaction.
fn run(session: &mut Session, query: &Query, explain: Explain) -> Result<Read<Rows>> {
    let texts = [query.access.begin(), &query.sql, &query.check, END];
    let [_, rows, check, _] = session.simple_each(texts).map_err(|e| explained(&e, explain))?;
    if boolean(&first_row(&check, "the query for rewritten tables")?, 0)? {
        return Ok(Read::Rewritten);
    }
    Ok(Read::Rows(rows.into_iter().next().unwrap_or_default()))
}

/// A value that the publisher cannot convert to the subscriber's type is an error of class 22.
fn explained(error: &wire::Error, explain: Explain) -> Failure {
    let failure = explain(error, "reading rows");
    match error.sqlstate() {
        Some(code) if code.starts_with("22") && failure.hint.is_none() => failure.hint(
            "A value cannot be converted to the type of the subscriber's column. Give that the publisher's \
             type (pgapace check names it), or compare the other columns: pgapace verify --except-column \
             TABLE.COLUMN.",
        ),
        _ => failure,
    }
}

/// Lines of a COPY.
type Lines = Vec<Vec<u8>>;

fn copy_lines(session: &mut Session, sql: &str) -> wire::Result<Lines> {
    session.simple(BEGIN_SCAN)?;
    let mut lines = Vec::new();
    let mut copy = session.copy_out(sql)?;
    while let Some(line) = copy.next()? {
        lines.push(line.to_vec());
    }
    drop(copy);
    session.simple(END)?;
    Ok(lines)
}

type Batch = Vec<RowEntry>;

/// Reads rows in a subtransaction and sends them in batches. Ends early if the receiver is gone.
fn send(
    session: &mut Session,
    query: &Query,
    explain: Explain,
    batches: &Sender<Batch>,
) -> Result<Read<()>> {
    let failed = |e: &wire::Error| explained(e, explain);
    session.simple(query.access.begin()).map_err(|e| failed(&e))?;
    let mut copy = session.copy_out(&query.sql).map_err(|e| failed(&e))?;
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while let Some(line) = copy.next().map_err(|e| failed(&e))? {
        let entry = RowEntry::parse(line)
            .ok_or_else(|| Failure::internal("a row of the comparison cannot be parsed"))?;
        bytes += entry.size();
        batch.push(entry);
        if bytes >= BATCH_BYTES {
            bytes = 0;
            if batches.send(std::mem::take(&mut batch)).is_err() {
                return Ok(Read::Rows(()));
            }
        }
    }
    drop(copy);
    let [check, _] = session.simple_each([&query.check, END]).map_err(|e| failed(&e))?;
    if boolean(&first_row(&check, "the query for rewritten tables")?, 0)? {
        return Ok(Read::Rewritten);
    }
    // The last batch tells that all is well: without it the stream ends with an error.
    drop(batches.send(batch));
    drop(batches.send(Vec::new()));
    Ok(Read::Rows(()))
}

/// The rows of one server, as they arrive.
#[derive(Debug)]
pub(crate) struct Entries {
    batches: Receiver<Batch>,
    current: std::vec::IntoIter<RowEntry>,
    complete: bool,
}

impl Entries {
    fn new(batches: Receiver<Batch>) -> Self {
        Self { batches, current: Vec::new().into_iter(), complete: false }
    }
}

impl Iterator for Entries {
    type Item = Result<RowEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.current.next() {
                return Some(Ok(entry));
            }
            match self.batches.recv() {
                Ok(batch) => {
                    self.complete = batch.is_empty();
                    self.current = batch.into_iter();
                }
                Err(_) if self.complete => return None,
                Err(_) => {
                    self.complete = true;
                    return Some(Err(Failure::internal("the rows of a server ended early")));
                }
            }
        }
    }
}
