//! Protection of a session from attackers between client and server.

/// Capabilities of an attacker between client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// Nothing: the session uses a Unix socket, and does not leave the machine.
    Socket,
    /// Nothing, without TLS: the session uses a loopback address.
    Loopback,
    /// Read and change everything.
    Nothing,
    /// No more than [`Verified`] leaves.
    Tls {
        /// As PostgreSQL names it in `pg_stat_ssl`, such as `TLSv1.3`.
        version: &'static str,
        /// The properties of the server that TLS has verified.
        verified: Verified,
    },
}

/// The properties of the server that TLS has verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verified {
    /// Nothing: another server in its place would not be noticed.
    Nothing,
    /// The certificate is signed by a trusted root. Any other server with such a certificate would
    /// not be noticed.
    Chain,
    /// The certificate is also for the host of the connection string.
    Name,
}
