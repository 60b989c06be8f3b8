//! A recorded stream.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::time::Duration;

use super::protocol::{Request, message, read_message};
use super::units::Units;
use crate::Cluster;
use crate::error::{Context, Error, Result};

/// Limit for the time in which the publisher sends nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// The CopyData messages of a stream as the publisher has sent them, with its times.
#[derive(Debug)]
pub struct Recording {
    request: Request,
    bytes: Vec<u8>,
    units: Units,
    end: u64,
}

impl Recording {
    /// Reads a slot, as a client with this request would, until everything before `until` is sent.
    /// Nothing is acknowledged.
    pub fn record(publisher: &Cluster, slot: &str, request: &Request, until: u64) -> Result<Self> {
        let doing = || format!("record slot {slot}");
        let mut stream = TcpStream::connect(("127.0.0.1", publisher.port())).context(doing)?;
        stream.set_read_timeout(Some(PATIENCE)).context(doing)?;
        let mut reader = BufReader::with_capacity(1 << 20, stream.try_clone().context(doing)?);
        stream.write_all(&request.startup_packet()).context(doing)?;
        let mut answer = Vec::new();
        // Authentication, parameters and the key of the session end with ReadyForQuery.
        expect(&mut reader, &mut answer, b'Z', slot)?;
        let mut command = request.command(slot).into_bytes();
        command.push(0);
        stream.write_all(&message(b'Q', &command)).context(doing)?;
        expect(&mut reader, &mut answer, b'W', slot)?;
        let mut bytes = Vec::new();
        let mut units = Units::default();
        loop {
            let kind = read_message(&mut reader, &mut answer).context(doing)?;
            if kind != b'd' {
                return Err(unexpected(kind, &answer, slot));
            }
            let start = bytes.len();
            bytes.extend_from_slice(&answer);
            match units.add(&bytes, start..bytes.len()).context(doing)? {
                Some(end) if end >= until && units.is_whole() => {
                    return Ok(Self { request: request.clone(), bytes, units, end });
                }
                _ => {}
            }
        }
    }

    /// The request that this recording answers.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The length of the stream in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The position up to which the stream sends everything.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// The messages at these bytes.
    pub(super) fn messages(&self, bytes: Range<usize>) -> &[u8] {
        &self.bytes[bytes]
    }

    /// The bytes to send from a position on, in order; each range has whole messages.
    pub(super) fn from(&self, position: u64) -> Vec<Range<usize>> {
        self.units.from(position)
    }

    /// The last position up to which everything is sent once these bytes of the stream are.
    pub(super) fn position_at(&self, offset: usize) -> u64 {
        self.units.position_at(offset)
    }
}

/// Reads messages until one of this type.
fn expect(
    reader: &mut BufReader<TcpStream>,
    answer: &mut Vec<u8>,
    wanted: u8,
    slot: &str,
) -> Result<()> {
    loop {
        let kind = read_message(reader, answer).context(|| format!("record slot {slot}"))?;
        match kind {
            _ if kind == wanted => return Ok(()),
            b'R' | b'S' | b'K' | b'N' => {}
            _ => return Err(unexpected(kind, answer, slot)),
        }
    }
}

fn unexpected(kind: u8, answer: &[u8], slot: &str) -> Error {
    let text = String::from_utf8_lossy(answer.get(5..).unwrap_or_default()).replace('\0', " ");
    Error::other(format!("cannot record slot {slot}: message {}: {text}", char::from(kind)))
}
