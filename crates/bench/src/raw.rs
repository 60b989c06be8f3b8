//! The raw drain: reads a slot as fast as the publisher sends and discards the data.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pgoutput::{Frame, Lsn};
use testbed::Cluster;
use testbed::postgres::Client;
use testbed::servers::{ServerBinaries, find_local};
use wire::{ConnInfo, CopyChunk, Haste, Received, ReplicationStream, Session, Startup};

use crate::measure::{Meter, Role};

/// If the publisher sends nothing for this time, it has no more changes.
const STALLED: Duration = Duration::from_secs(40);
/// Interval of checks whether the other reader has ended.
const POLL: Duration = Duration::from_millis(2);

/// A slot and how to read it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) publisher: &'a Cluster,
    pub(crate) database: &'a str,
    pub(crate) slot: &'a str,
    pub(crate) publication: &'a str,
    /// Whether values are in binary form instead of text.
    pub(crate) binary: bool,
    /// Whether transactions are sent at PREPARE instead of COMMIT PREPARED.
    pub(crate) two_phase: bool,
    /// Whether transactions are sent while they run.
    pub(crate) streaming: bool,
    pub(crate) end: End,
}

/// Where to stop reading.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    At(Lsn),
    /// At the first commit, whose position is unknown.
    Commit,
}

impl Source<'_> {
    /// The oldest protocol version with the requested features.
    fn protocol(&self) -> u8 {
        match (self.two_phase, self.streaming) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 1,
        }
    }
}

/// The result of one reader.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Drained {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    /// CPU seconds of the walsender.
    pub(crate) walsender_cpu: f64,
    /// When everything was read, if that was recorded.
    pub(crate) ended: Option<Instant>,
}

impl Drained {
    pub(crate) fn messages_per_second(&self) -> f64 {
        self.messages as f64 / self.seconds
    }
}

/// The tools of this server version, or else of any installed version: the protocol is the same.
pub(crate) fn tool_with_recvlogical(binaries: &ServerBinaries) -> Option<ServerBinaries> {
    std::iter::once(binaries.clone())
        .chain((14..=19).rev().filter_map(find_local))
        .find(|candidate| candidate.has("pg_recvlogical"))
}

/// Reads with `pg_recvlogical`, which does not count messages.
pub(crate) fn by_recvlogical(source: &Source<'_>, tool: &ServerBinaries) -> Result<Drained> {
    let End::At(end) = source.end else { bail!("pg_recvlogical stops at a position") };
    let mut meter = Meter::default();
    let mut control = source.publisher.connect(source.database)?;
    let started = Instant::now();
    let publications = format!("publication_names={}", source.publication);
    let mut child = tool
        .command("pg_recvlogical")
        .args(["-d", &source.publisher.conninfo_tcp(source.database)])
        .args(["--slot", source.slot, "--start", "-o", &publications])
        .args(["-o", &format!("proto_version={}", source.protocol())])
        .args(source.two_phase.then_some("--option=two_phase=on"))
        .args(source.streaming.then_some("--option=streaming=on"))
        .args(source.binary.then_some("--option=binary=true"))
        .args(["--endpos", &end.to_string(), "-f", "/dev/null", "--no-loop"])
        .stdin(Stdio::null())
        .spawn()
        .context("cannot run pg_recvlogical")?;
    let mut watched = false;
    let status = loop {
        if let Some(status) = child.try_wait().context("cannot wait for pg_recvlogical")? {
            break status;
        }
        if !watched {
            watched = watch_walsender(&mut meter, &mut control, source.slot)?;
        }
        meter.sample();
        std::thread::sleep(POLL);
    };
    let seconds = started.elapsed().as_secs_f64();
    ensure!(status.success(), "pg_recvlogical ended with {status}");
    let walsender_cpu = meter.usage().walsender_cpu;
    Ok(Drained { seconds, walsender_cpu, ..Drained::default() })
}

/// Watches the walsender of a slot, if it has started.
fn watch_walsender(meter: &mut Meter, publisher: &mut Client, slot: &str) -> Result<bool> {
    let sql = "SELECT active_pid FROM pg_replication_slots \
               WHERE slot_name::text = $1 AND active_pid IS NOT NULL";
    let row = publisher.query_opt(sql, &[&slot])?;
    let pid = row.and_then(|row| u32::try_from(row.get::<_, i32>(0)).ok());
    if let Some(pid) = pid {
        meter.watch(Role::Walsender, pid);
    }
    Ok(pid.is_some())
}

/// Starts the stream of a slot.
fn start(source: &Source<'_>) -> Result<ReplicationStream> {
    let startup = Startup { replication: true, ..Startup::default() };
    let conninfo = ConnInfo::parse(&source.publisher.conninfo_tcp(source.database))?;
    let session = Session::connect(&conninfo, &startup)?;
    let command = format!(
        "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '{}', publication_names '{}'{}{}{})",
        source.slot,
        source.protocol(),
        source.publication,
        if source.binary { ", binary 'true'" } else { "" },
        if source.two_phase { ", two_phase 'on'" } else { "" },
        if source.streaming { ", streaming 'on'" } else { "" },
    );
    Ok(ReplicationStream::start(session, &command)?)
}

/// Makes a slot send transactions at PREPARE: the first start with that option does.
pub(crate) fn turn_on_two_phase(source: &Source<'_>) -> Result<()> {
    drop(start(source)?);
    Ok(())
}

/// Reads with pgapace's receiver and passes every chunk to `sink`.
pub(crate) fn by_receiver(source: &Source<'_>, mut sink: impl FnMut(CopyChunk)) -> Result<Drained> {
    let started = Instant::now();
    let mut stream = start(source)?;
    // Read as pgapace reads a backlog.
    stream.set_haste(Haste::None);
    let mut drained = Drained::default();
    'stream: loop {
        match stream.receive(STALLED)? {
            Received::Chunk(chunk) => {
                let mut complete = false;
                for (_, payload) in chunk.frames() {
                    match Frame::decode(payload)? {
                        Frame::XLogData { payload, .. } => {
                            drained.messages += 1;
                            drained.bytes += payload.len() as u64;
                            let commits = matches!(payload.first(), Some(b'C' | b'c'));
                            complete |= commits && matches!(source.end, End::Commit);
                        }
                        Frame::Keepalive { wal_end, .. } => {
                            complete |= matches!(source.end, End::At(end) if wal_end >= end);
                        }
                        Frame::PrimaryStatus { .. } => {}
                    }
                }
                sink(chunk);
                if complete {
                    break 'stream;
                }
            }
            Received::Woken | Received::Warning(_) => {}
            Received::Idle => bail!("the publisher sent nothing for {STALLED:?}"),
            Received::Ended(reason) => bail!("the stream ended: {reason:?}"),
        }
    }
    drained.ended = Some(Instant::now());
    drained.seconds = started.elapsed().as_secs_f64();
    // The walsender is idle now, so its CPU time is final.
    let mut meter = Meter::default();
    watch_walsender(&mut meter, &mut source.publisher.connect(source.database)?, source.slot)?;
    meter.sample();
    drained.walsender_cpu = meter.usage().walsender_cpu;
    stream.finish()?;
    Ok(drained)
}
