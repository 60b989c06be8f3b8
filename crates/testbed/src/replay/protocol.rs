//! The part of the frontend/backend protocol that the replay server understands.

use std::collections::BTreeMap;
use std::io::{self, Read};

/// Code of protocol version 3.0 in a startup packet; minor versions follow it.
const VERSION_3: u32 = 3 << 16;
const CANCEL: u32 = 80_877_102;
const TLS: u32 = 80_877_103;
const GSSAPI: u32 = 80_877_104;
/// No message of a test is longer.
const LENGTH_MAX: usize = 1 << 30;

/// The parameters that a stream depends on: those of the session, except for its name, and the
/// options of START_REPLICATION.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Parameters of the startup packet.
    pub session: BTreeMap<String, String>,
    /// Options of START_REPLICATION.
    pub options: BTreeMap<String, String>,
}

impl Request {
    /// The START_REPLICATION command of this request.
    pub(super) fn command(&self, slot: &str) -> String {
        let quoted = |value: &str| value.replace('\'', "''");
        let options: Vec<_> = self
            .options
            .iter()
            .map(|(name, value)| format!("{name} '{}'", quoted(value)))
            .collect();
        format!(
            "START_REPLICATION SLOT {} LOGICAL 0/0 ({})",
            crate::compare::quote(slot),
            options.join(", ")
        )
    }

    /// The startup packet of this request.
    pub(super) fn startup_packet(&self) -> Vec<u8> {
        let mut body = VERSION_3.to_be_bytes().to_vec();
        for text in self.session.iter().flat_map(|(name, value)| [name, value]) {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        body.push(0);
        let mut packet = length_of(&body).to_be_bytes().to_vec();
        packet.extend_from_slice(&body);
        packet
    }
}

/// The first packet of a connection.
pub(super) enum Startup {
    /// Asks for encryption, which is declined.
    Encryption,
    /// Cancels a query of another session.
    Cancel(Vec<u8>),
    /// Starts a session: the packet and its parameters.
    Session(Vec<u8>, BTreeMap<String, String>),
}

/// Reads a packet that has no type.
pub(super) fn read_startup(from: &mut impl Read) -> io::Result<Startup> {
    let mut packet = vec![0; 4];
    from.read_exact(&mut packet)?;
    let length = u32::from_be_bytes([packet[0], packet[1], packet[2], packet[3]]) as usize;
    if !(8..=LENGTH_MAX).contains(&length) {
        return Err(invalid("the length of a startup packet"));
    }
    packet.resize(length, 0);
    from.read_exact(&mut packet[4..])?;
    match be_u32(&packet, 4)? {
        TLS | GSSAPI => Ok(Startup::Encryption),
        CANCEL => Ok(Startup::Cancel(packet)),
        version if version >> 16 == VERSION_3 >> 16 => {
            let texts: Vec<_> = packet[8..].split(|byte| *byte == 0).collect();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let pairs = texts.chunks_exact(2).take_while(|pair| !pair[0].is_empty());
            let session = pairs.map(|pair| (text(pair[0]), text(pair[1]))).collect();
            Ok(Startup::Session(packet, session))
        }
        _ => Err(invalid("the version in a startup packet")),
    }
}

/// Reads a message with a type into `message`, complete with its head, and returns the type.
pub(super) fn read_message(from: &mut impl Read, message: &mut Vec<u8>) -> io::Result<u8> {
    message.resize(5, 0);
    from.read_exact(message)?;
    let length = be_u32(message, 1)? as usize;
    if !(4..=LENGTH_MAX).contains(&length) {
        return Err(invalid("the length of a message"));
    }
    message.resize(1 + length, 0);
    from.read_exact(&mut message[5..])?;
    Ok(message[0])
}

/// Builds a message.
pub(super) fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend_from_slice(&length_of(body).to_be_bytes());
    message.extend_from_slice(body);
    message
}

/// The length of a body with its own length field.
fn length_of(body: &[u8]) -> u32 {
    u32::try_from(body.len() + 4).unwrap_or(u32::MAX)
}

/// An error, after which the session waits for its next query.
pub(super) fn error_response(sqlstate: &str, text: &str) -> Vec<u8> {
    let mut body = Vec::new();
    for (field, value) in [(b'S', "ERROR"), (b'V', "ERROR"), (b'C', sqlstate), (b'M', text)] {
        body.push(field);
        body.extend_from_slice(value.as_bytes());
        body.push(0);
    }
    body.push(0);
    let mut messages = message(b'E', &body);
    messages.extend(message(b'Z', b"I"));
    messages
}

/// START_REPLICATION of a logical slot.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StartReplication {
    pub(super) slot: String,
    pub(super) from: u64,
    pub(super) options: BTreeMap<String, String>,
}

/// Whether a query is START_REPLICATION of any kind.
pub(super) fn starts_replication(query: &str) -> bool {
    let word = query.split_whitespace().next().unwrap_or_default();
    word.eq_ignore_ascii_case("START_REPLICATION")
}

impl StartReplication {
    /// Parses the command; none if it is another one, or of a physical slot.
    pub(super) fn parse(query: &str) -> Option<Self> {
        let mut words = Words(query);
        words.expect("START_REPLICATION")?;
        words.expect("SLOT")?;
        let slot = words.next()?;
        words.expect("LOGICAL")?;
        let from = parse_lsn(&words.next()?)?;
        let mut options = BTreeMap::new();
        let mut separator = words.next();
        while let Some("(" | ",") = separator.as_deref() {
            let name = words.next()?;
            options.insert(name, words.next()?);
            separator = words.next();
        }
        matches!(separator.as_deref(), None | Some(")")).then_some(Self { slot, from, options })
    }
}

/// The words of a replication command: identifiers and literals without their quotes, punctuation.
struct Words<'a>(&'a str);

impl Words<'_> {
    fn expect(&mut self, word: &str) -> Option<()> {
        self.next()?.eq_ignore_ascii_case(word).then_some(())
    }

    fn next(&mut self) -> Option<String> {
        let text = self.0.trim_start_matches(|c: char| c.is_whitespace() || c == ';' || c == '\0');
        let first = text.chars().next()?;
        let rest = &text[first.len_utf8()..];
        match first {
            '(' | ')' | ',' => {
                self.0 = rest;
                Some(first.to_string())
            }
            '\'' | '"' => {
                let mut word = String::new();
                let mut characters = rest.char_indices().peekable();
                while let Some((at, character)) = characters.next() {
                    if character != first {
                        word.push(character);
                    } else if characters.peek().is_some_and(|(_, next)| *next == first) {
                        word.push(first);
                        characters.next();
                    } else {
                        self.0 = &rest[at + 1..];
                        return Some(word);
                    }
                }
                None
            }
            _ => {
                let is_end = |c: char| c.is_whitespace() || "(),;'\"\0".contains(c);
                let end = text.find(is_end).unwrap_or(text.len());
                self.0 = &text[end..];
                Some(text[..end].to_owned())
            }
        }
    }
}

/// Parses an LSN in PostgreSQL's text form.
pub fn parse_lsn(text: &str) -> Option<u64> {
    let (high, low) = text.split_once('/')?;
    let number = |digits: &str| u32::from_str_radix(digits, 16).ok().map(u64::from);
    Some(number(high)? << 32 | number(low)?)
}

pub(super) fn be_u32(bytes: &[u8], at: usize) -> io::Result<u32> {
    let field = bytes.get(at..at + 4).and_then(|field| field.try_into().ok());
    field.map(u32::from_be_bytes).ok_or_else(|| invalid("a message that is too short"))
}

pub(super) fn be_u64(bytes: &[u8], at: usize) -> io::Result<u64> {
    let field = bytes.get(at..at + 8).and_then(|field| field.try_into().ok());
    field.map(u64::from_be_bytes).ok_or_else(|| invalid("a message that is too short"))
}

pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} is invalid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_the_native_worker_and_of_others() {
        let native = "START_REPLICATION SLOT \"na\"\"tive\" LOGICAL A/10 (proto_version '4', \
                      publication_names '\"it''s\"', binary 'true')";
        let parsed = StartReplication::parse(native).unwrap();
        assert_eq!((parsed.slot.as_str(), parsed.from), ("na\"tive", 0xa_0000_0010));
        assert_eq!(parsed.options["publication_names"], "\"it's\"");
        assert_eq!(parsed.options.len(), 3);
        let request = Request { session: BTreeMap::new(), options: parsed.options };
        let again = StartReplication::parse(&request.command("s")).unwrap();
        assert_eq!((again.from, again.options), (0, request.options));
        let bare = StartReplication::parse("start_replication slot s logical 0/0;\0").unwrap();
        assert!(bare.options.is_empty());
        for other in ["SELECT 1", "START_REPLICATION 0/0", "START_REPLICATION SLOT s LOGICAL 1 ("] {
            assert_eq!(StartReplication::parse(other), None, "{other}");
        }
        assert!(starts_replication("START_REPLICATION 0/0") && !starts_replication("SELECT 1"));
    }

    #[test]
    fn a_startup_packet_round_trips() {
        let session = BTreeMap::from([("user".to_owned(), "postgres".to_owned())]);
        let request = Request { session: session.clone(), options: BTreeMap::new() };
        let packet = request.startup_packet();
        match read_startup(&mut packet.as_slice()).unwrap() {
            Startup::Session(bytes, parameters) => {
                assert_eq!((bytes, parameters), (packet, session));
            }
            _ => panic!("not a session"),
        }
        assert!(read_startup(&mut [0, 0, 0, 2, 0, 0].as_slice()).is_err());
    }
}
