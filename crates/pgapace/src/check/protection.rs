//! Whether others can read or change what a session carries on its way.

use wire::{Protection, Session, Verified};

use crate::check::report::Reporter;

const TOPIC: &str = "tls";

pub(super) fn check(session: &Session, reporter: &mut Reporter<'_>) {
    let (version, verified) = match session.protection() {
        Protection::Socket => {
            return reporter.ok(TOPIC, "the connection uses a Unix socket, without TLS");
        }
        Protection::Loopback => {
            return reporter.ok(TOPIC, "the connection uses a loopback address, without TLS");
        }
        Protection::Nothing => {
            reporter.warn(
                TOPIC,
                "the connection is not encrypted. To encrypt it and to verify the server, set \
                 sslmode=verify-full and sslrootcert in the connection string",
            );
            return;
        }
        Protection::Tls { version, verified } => (version, verified),
    };
    match verified {
        Verified::Name => reporter.ok(
            TOPIC,
            format!("the connection is encrypted ({version}), and the server is verified"),
        ),
        Verified::Chain => {
            reporter.note(
                TOPIC,
                format!(
                    "the connection is encrypted ({version}), and the certificate of the server is \
                     verified, but not its host name. To verify both, set sslmode=verify-full"
                ),
            );
        }
        Verified::Nothing => {
            reporter.note(
                TOPIC,
                format!(
                    "the connection is encrypted ({version}), but the server is not verified: \
                     another one could take its place. Set sslmode=verify-full and sslrootcert"
                ),
            );
        }
    }
}
