//! Reads the stream of a temporary slot into a file. Nothing is applied, and no WAL is kept back: what
//! is in the file is acknowledged.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pgoutput::{Lsn, StatusUpdate, Streaming, Timestamp};
use wire::{CopyChunk, EndReason, Haste, Received, ReplicationStream, Session};

use super::file::{Finished, Writer};
use super::progress::RecordedSoFar;
use super::{Head, PublisherFacts, StreamFacts, Tail, streaming_name};
use crate::config::RecordSettings;
use crate::error::{Class, Failure, Result};
use crate::publisher::publication;
use crate::publisher::reader::{Decoding, explain};
use crate::publisher::session::{Publisher, backend_pid, identify};
use crate::publisher::slot;
use crate::publisher::start_replication::{self, StreamOptions};
use crate::publisher::wal_end::{self, WalEnd};
use crate::stopping::interrupt::{abandonable, interruptible};
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::format;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscription::Until;

/// How often the publisher hears up to where messages are in the file.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// How long the recorder waits for messages before it looks at the time.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a transaction that is being sent at the end of the time may take to end.
const LAST_TRANSACTION: Duration = Duration::from_secs(5);

/// This completes "stopped during …".
const CONNECTING: &str = "connecting";

/// When a recording ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    pub(crate) after: Option<Duration>,
    pub(crate) until: Option<Until>,
}

/// The result of a recording.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) start: Lsn,
    pub(crate) tail: Tail,
    /// Size of the file.
    pub(crate) size: u64,
    /// Why it ended early.
    pub(crate) failure: Option<Failure>,
}

/// A session that keeps the snapshot of the recording's start, for pg_dump and COPY.
struct HeldSnapshot {
    _session: Session,
    name: String,
}

/// Records until the end is reached, a signal comes, the stream ends, or the disk is full. In all cases the
/// file is whole.
pub(crate) fn record(
    settings: &RecordSettings,
    path: &Path,
    end: End,
    hold_snapshot: bool,
    shutdown: &Shutdown,
) -> Result<Recorded> {
    let publisher = settings.publisher();
    let reached = publisher.clone();
    let mut source = abandonable(shutdown, CONNECTING, move || reached.connect())??;
    let cancel = [source.cancel_handle()];
    let name = interruptible(shutdown, &cancel, "reading the publications", || {
        publication::check_exist(&mut source, &settings.publications)?;
        Ok(format!("pgapace_record_{}", backend_pid(&mut source)?))
    })?;
    let (created, tables, held) = interruptible(shutdown, &cancel, "creating a slot", || {
        let created = slot::create_to_stream(&mut source, &name, slot::Kind::Temporary)?;
        let tables = publication::tables(&mut source, &settings.publications)?;
        let held = hold_snapshot.then(|| hold(&publisher, &created.snapshot)).transpose()?;
        Ok((created, tables, held))
    })?;
    source.simple("COMMIT").map_err(|e| Failure::publisher(&e, "ending a transaction"))?;
    let until = match end.until {
        Some(Until::Current) => {
            let end = WalEnd::read(&mut source)?;
            Some(wal_end::wait_until_sendable(&mut source, end)?)
        }
        Some(Until::Lsn(lsn)) => Some(lsn),
        None => None,
    };
    let major = source.server_version().major();
    let streaming = settings.streaming(major);
    let options = StreamOptions {
        origin_none: settings.origin_none,
        two_phase: false,
        binary: chooses_binary(settings, &tables, shutdown)?,
        streaming,
    };
    let head = head(&mut source, settings, &created, options, tables)?;
    let start = head.start();
    let mut so_far = RecordedSoFar::new(start);
    let mut writer = Writer::create(path, &head, so_far.tail())?;
    let command =
        start_replication::start_command(major, &name, start, &settings.publications, &options);
    let stream = ReplicationStream::start(source, &command)
        .map_err(|e| start_replication::refused(&publisher, &name, &e))?;
    tracing::info!(
        event = "recording_started",
        lsn = %start,
        snapshot = held.as_ref().map(|held| held.name.as_str()),
        "recording the stream of a temporary slot; a clone must have the state at this LSN"
    );
    let ends = Ends { at: end.after.map(|after| Instant::now() + after), until, shutdown };
    let read = Recorder { stream, writer: &mut writer, so_far: &mut so_far }.read(&ends);
    let Finished { size, tail, failure } = writer.finish()?;
    let failure = read.err().or(failure).or_else(|| ends.not_reached(tail.end));
    Ok(Recorded { start, tail, size, failure })
}

/// Exports the snapshot of the slot once more, from a session that outlives the start of the stream.
fn hold(publisher: &Publisher, snapshot: &str) -> Result<HeldSnapshot> {
    let mut session = publisher.connect_to_look()?;
    let import = format!("SET TRANSACTION SNAPSHOT {}", wire::quote_literal(snapshot));
    let [_, _, exported] = session
        .simple_each([slot::BEGIN_READING, &import, "SELECT pg_catalog.pg_export_snapshot()"])
        .map_err(|e| Failure::publisher(&e, "holding the snapshot"))?;
    let name = crate::subscriber::catalogue::first_row(&exported, "pg_export_snapshot")?;
    let name = crate::subscriber::catalogue::field(&name, 0)?;
    Ok(HeldSnapshot { _session: session, name })
}

/// Whether a subscriber is known that reads all types in binary.
fn chooses_binary(
    settings: &RecordSettings,
    tables: &[publication::PublishedTable],
    shutdown: &Shutdown,
) -> Result<bool> {
    let Some(info) = settings.subscriber.clone() else { return Ok(false) };
    let connect = || Subscriber::new(info, "record").connect(Purpose::Look);
    let mut session = abandonable(shutdown, CONNECTING, connect)??;
    Ok(format::choose(&mut session, tables, settings.binary)?.binary)
}

fn head(
    source: &mut Session,
    settings: &RecordSettings,
    created: &slot::CreatedSlot,
    options: StreamOptions,
    tables: Vec<publication::PublishedTable>,
) -> Result<Head> {
    let identity = identify(source)?;
    let parameter = |name| source.parameter(name).unwrap_or_default().to_owned();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Head {
        pgapace: env!("CARGO_PKG_VERSION").to_owned(),
        recorded_at: now.as_secs(),
        publisher: PublisherFacts {
            system_identifier: identity.system_identifier,
            timeline: identity.timeline,
            version: source.server_version().major(),
            server_encoding: parameter("server_encoding"),
            client_encoding: parameter("client_encoding"),
        },
        publications: settings.publications.clone(),
        start: created.consistent_point.0,
        options: StreamFacts {
            binary: options.binary,
            streaming: streaming_name(options.streaming).to_owned(),
            origin_none: options.origin_none,
        },
        tables,
    })
}

/// The conditions that end a recording.
struct Ends<'a> {
    at: Option<Instant>,
    until: Option<Lsn>,
    shutdown: &'a Shutdown,
}

impl Ends<'_> {
    /// Whether the time is over, and has been for so long.
    fn is_over(&self, since: Duration) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at + since)
    }

    /// The failure of a recording that ends here, if it was to end later.
    fn not_reached(&self, end: u64) -> Option<Failure> {
        let until = self.until.filter(|until| end < until.0)?;
        let message = format!("the recording ends at {}, before {until} of --until", Lsn(end));
        Some(Failure::new(Class::Stopped, message))
    }
}

struct Recorder<'a> {
    stream: ReplicationStream,
    writer: &'a mut Writer,
    so_far: &'a mut RecordedSoFar,
}

impl Recorder<'_> {
    fn read(mut self, ends: &Ends<'_>) -> Result<()> {
        // The file can take messages as fast as the publisher sends; larger chunks save work on both
        // sides.
        self.stream.set_haste(Haste::None);
        let mut told = Instant::now();
        loop {
            let reached = ends.until.is_some_and(|until| self.so_far.tail().end >= until.0);
            let over = ends.shutdown.requested() || ends.is_over(Duration::ZERO);
            let late = ends.shutdown.insisted() || ends.is_over(LAST_TRANSACTION);
            if reached || over && self.so_far.is_whole() || late {
                break;
            }
            if told.elapsed() >= STATUS_INTERVAL {
                told = Instant::now();
                self.answer()?;
            }
            let received = self.stream.receive(PATIENCE);
            match received.map_err(|e| Failure::publisher(&e, "recording"))? {
                Received::Chunk(chunk) => {
                    if self.take(&chunk)? {
                        self.answer()?;
                    }
                }
                Received::Warning(_) | Received::Idle | Received::Woken => {}
                Received::Ended(reason) => return Err(ended(reason)),
            }
        }
        self.answer()?;
        if let Err(error) = self.stream.finish() {
            // The slot ends with the connection, in any case.
            tracing::debug!(%error, "the stream did not end in order");
        }
        Ok(())
    }

    /// Returns whether the publisher wants an answer.
    fn take(&mut self, chunk: &CopyChunk) -> Result<bool> {
        let mut answer = false;
        for (_, message) in chunk.frames() {
            answer |= self.so_far.add(message)?;
        }
        self.writer.append(chunk.bytes(), self.so_far.tail())?;
        Ok(answer)
    }

    /// Tells the publisher up to where messages are in the file, so that it keeps no WAL for the
    /// recording.
    fn answer(&mut self) -> Result<()> {
        let recorded = Lsn(self.so_far.tail().end);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = i64::try_from(now.as_micros()).unwrap_or(i64::MAX);
        let status = StatusUpdate {
            write: recorded,
            flush: recorded,
            apply: recorded,
            clock: Timestamp::from_unix_micros(clock),
            reply_requested: false,
        };
        let mut message = Vec::with_capacity(34);
        status.encode(&mut message);
        self.stream.send(&message).map_err(|e| Failure::publisher(&e, "sending status"))
    }
}

fn ended(reason: EndReason) -> Failure {
    match reason {
        EndReason::Error(error) => {
            explain(Failure::publisher(&wire::Error::Server(error), "recording"), &Decoding::Other)
        }
        EndReason::Done | EndReason::Closed => {
            Failure::new(Class::Publisher, "the publisher ended the stream")
        }
    }
}

impl RecordSettings {
    fn publisher(&self) -> Publisher {
        Publisher::new(self.publisher.clone(), "pgapace_record", "UTF8")
    }

    fn streaming(&self, major: u32) -> Streaming {
        self.streaming.of_publisher(major)
    }
}
