//! TLS on a non-blocking socket: rustls handles the records, this module moves the bytes.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ClientConnection, ProtocolVersion};
use socket2::Socket;

use super::{Want, channel_binding, from_io, wait};
use crate::error::{Error, Result};

/// By default rustls reads 4 KiB at a time; this buffer replaces many reads by one.
const RECORDS_SIZE: usize = 64 * 1024;
/// Limit in bytes of unsent ciphertext, above which writes are refused.
const UNSENT_LIMIT: usize = 256 * 1024;

/// The TLS layer of a stream.
pub(super) struct Tls {
    connection: ClientConnection,
    /// Received records; `start..end` has not been given to rustls yet.
    records: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether plaintext may be available that poll(2) cannot see.
    unread: bool,
}

impl Tls {
    /// Performs the TLS handshake.
    pub(super) fn start(
        socket: &Socket,
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
        deadline: Option<Instant>,
    ) -> Result<Tls> {
        let mut connection =
            ClientConnection::new(config, name).map_err(|error| tls_error(&error))?;
        connection.set_buffer_limit(Some(UNSENT_LIMIT));
        let records = vec![0; RECORDS_SIZE].into_boxed_slice();
        let mut tls = Tls { connection, records, start: 0, end: 0, unread: false };
        while tls.connection.is_handshaking() || tls.connection.wants_write() {
            let progress = match tls.push(socket) {
                Ok(()) if !tls.connection.is_handshaking() => break,
                Ok(()) => tls.advance(socket),
                Err(error) => Err(error),
            };
            match progress {
                Ok(true) => {}
                Ok(false) => return Err(Error::Closed),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let write = tls.connection.wants_write();
                    if wait(socket.as_fd(), Want { read: !write, write }, None, deadline)?.is_none()
                    {
                        return Err(Error::Timeout);
                    }
                }
                Err(error) => return Err(from_io(error)),
            }
        }
        Ok(tls)
    }

    pub(super) fn read(&mut self, socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        loop {
            match self.connection.reader().read(&mut into[filled..]) {
                // The peer has sent close_notify.
                Ok(0) => return Ok(filled),
                Ok(count) => {
                    filled += count;
                    if filled == into.len() {
                        self.unread = true;
                        return Ok(filled);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match self.advance(socket) {
                        Ok(true) => {}
                        Ok(false) => return Ok(filled),
                        // The next read reports the error again.
                        Err(_) if filled > 0 => {
                            self.unread = false;
                            return Ok(filled);
                        }
                        Err(error) => {
                            self.unread = false;
                            return Err(error);
                        }
                    }
                }
                // The peer closed the connection without close_notify, as a killed server does.
                // Truncation cannot go unnoticed, because every message carries its length.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(filled),
                Err(error) => return Err(error),
            }
        }
    }

    /// Passes more records to rustls; false at the end of the stream.
    fn advance(&mut self, socket: &Socket) -> io::Result<bool> {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            self.end = super::retry(|| Read::read(&mut &*socket, &mut self.records))?;
            if self.end == 0 {
                // Tell rustls, so that its reader reports the end from now on.
                let _ = self.connection.read_tls(&mut io::empty());
                return Ok(false);
            }
        }
        let mut records = &self.records[self.start..self.end];
        self.start += self.connection.read_tls(&mut records)?;
        if let Err(error) = self.connection.process_new_packets() {
            // Send the alert with the reason, as far as the socket accepts it.
            let _ = self.push(socket);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(true)
    }

    pub(super) fn write(&mut self, socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
        self.push(socket)?;
        let count = self.connection.writer().write(bytes)?;
        match self.push(socket) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }

    /// Writes ciphertext until none is left or the socket accepts no more (`WouldBlock`).
    pub(super) fn push(&mut self, socket: &Socket) -> io::Result<()> {
        while self.connection.wants_write() {
            super::retry(|| self.connection.write_tls(&mut &*socket))?;
        }
        Ok(())
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    pub(super) fn has_unread(&self) -> bool {
        self.unread || self.start < self.end
    }

    /// Sends close_notify.
    pub(super) fn close(&mut self, socket: &Socket) {
        self.connection.send_close_notify();
        let _ = self.push(socket);
    }

    /// See [`channel_binding`].
    pub(super) fn server_end_point(&self) -> Option<Vec<u8>> {
        let certificate = self.connection.peer_certificates()?.first()?;
        channel_binding::tls_server_end_point(certificate)
    }

    /// The name that OpenSSL, and with it PostgreSQL, gives the negotiated version.
    pub(super) fn version(&self) -> &'static str {
        match self.connection.protocol_version() {
            Some(ProtocolVersion::TLSv1_2) => "TLSv1.2",
            Some(ProtocolVersion::TLSv1_3) => "TLSv1.3",
            _ => "TLS",
        }
    }

    /// Whether the server selected PostgreSQL by ALPN.
    pub(super) fn speaks_postgresql(&self) -> bool {
        self.connection.alpn_protocol() == Some(super::ALPN)
    }
}

/// Converts an error of rustls.
pub(super) fn tls_error(error: &rustls::Error) -> Error {
    Error::Tls(format!("SSL error: {}", described(error)))
}

/// The error, without the names of rustls's types.
fn described(error: &rustls::Error) -> String {
    let rustls::Error::InvalidCertificate(reason) = error else { return error.to_string() };
    let reason = match reason {
        CertificateError::UnknownIssuer => {
            "no trusted certificate (sslrootcert) has signed it".to_owned()
        }
        CertificateError::NotValidForName => "it is not for the name of the host".to_owned(),
        CertificateError::NotValidForNameContext { expected, presented } => {
            let names: Vec<_> = presented.iter().map(|name| bare(name)).collect();
            let names = if names.is_empty() { "no name".to_owned() } else { names.join(", ") };
            format!("it is for {names}, not for host \"{}\"", expected.to_str())
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired".to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet".to_owned()
        }
        CertificateError::BadSignature => "its signature is wrong".to_owned(),
        CertificateError::BadEncoding => "it cannot be parsed".to_owned(),
        // A self-signed certificate counts as an authority's. webpki's type cannot be named here.
        CertificateError::Other(reason) if reason.to_string() == "CaUsedAsEndEntity" => {
            "no trusted certificate (sslrootcert) has signed it, and it is not one of them"
                .to_owned()
        }
        CertificateError::Other(reason) => reason.to_string(),
        reason => reason.to_string(),
    };
    format!("the server's certificate is refused: {reason}")
}

/// `example.com` of `DnsName("example.com")`.
fn bare(name: &str) -> &str {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.map_or(name, |inner| inner.trim_matches('"'))
}
