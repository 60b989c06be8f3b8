//! The raw drain: a slot read as fast as the publisher sends, into nothing.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pgoutput::{Frame, Lsn};
use testbed::Cluster;
use testbed::postgres::Client;
use testbed::servers::{ServerBinaries, find_local};
use wire::{ConnInfo, CopyChunk, Haste, Received, ReplicationStream, Session, Startup};

use crate::measure::{Meter, Role};

/// A publisher that sends nothing for so long has nothing more to send.
const STALLED: Duration = Duration::from_secs(40);
/// How often the other reader's end is looked for.
const POLL: Duration = Duration::from_millis(2);

/// A slot and how to read it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) publisher: &'a Cluster,
    pub(crate) database: &'a str,
    pub(crate) slot: &'a str,
    pub(crate) publication: &'a str,
    /// Values in binary form rather than as text.
    pub(crate) binary: bool,
    /// Transactions when they are prepared, not when they are committed after that.
    pub(crate) two_phase: bool,
    /// Transactions while they run.
    pub(crate) streaming: bool,
    pub(crate) end: End,
}

/// Where to stop.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    At(Lsn),
    /// With the first commit, of which it is not known where it will be.
    Commit,
}

impl Source<'_> {
    /// The oldest version of the protocol that has what is asked for.
    fn protocol(&self) -> u8 {
        match (self.two_phase, self.streaming) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 1,
        }
    }
}

/// What one reader read.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Drained {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) seconds: f64,
    /// CPU seconds of the walsender.
    pub(crate) walsender_cpu: f64,
    /// When all was read, if that was noted.
    pub(crate) ended: Option<Instant>,
}

impl Drained {
    pub(crate) fn messages_per_second(&self) -> f64 {
        self.messages as f64 / self.seconds
    }
}

/// The server's own tools, or those of any server that is installed: the protocol is the same.
pub(crate) fn tool_with_recvlogical(binaries: &ServerBinaries) -> Option<ServerBinaries> {
    std::iter::once(binaries.clone())
        .chain((14..=19).rev().filter_map(find_local))
        .find(|candidate| candidate.has("pg_recvlogical"))
}

/// Reads with `pg_recvlogical`. It counts nothing.
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

/// Watches the walsender of a slot, if there is one by now.
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

/// Reads with our receiver and hands every chunk to `sink`.
pub(crate) fn by_receiver(source: &Source<'_>, mut sink: impl FnMut(CopyChunk)) -> Result<Drained> {
    let startup = Startup { replication: true, ..Startup::default() };
    let conninfo = ConnInfo::parse(&source.publisher.conninfo_tcp(source.database))?;
    let started = Instant::now();
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
    let mut stream = ReplicationStream::start(session, &command)?;
    // A backlog is read as the program reads it.
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
    // The walsender waits for more, and does nothing meanwhile.
    let mut meter = Meter::default();
    watch_walsender(&mut meter, &mut source.publisher.connect(source.database)?, source.slot)?;
    meter.sample();
    drained.walsender_cpu = meter.usage().walsender_cpu;
    stream.finish()?;
    Ok(drained)
}
