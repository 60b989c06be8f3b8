//! Channel binding of SCRAM to the server's TLS certificate.
//!
//! Source: RFC 5929, section 4; `be_tls_get_certificate_hash`,
//! `src/backend/libpq/be-secure-openssl.c`.

use ring::digest;

use super::certificate::{self, SignatureHash};

/// The `tls-server-end-point` data: a hash of the certificate with the hash function of its own
/// signature, where SHA-256 replaces MD5 and SHA-1. `None` when the signature has no such function
/// (Ed25519), because the binding is then undefined.
pub(super) fn tls_server_end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    let algorithm = match certificate::signature_hash(certificate)? {
        SignatureHash::Md5 | SignatureHash::Sha1 | SignatureHash::Sha256 => &digest::SHA256,
        SignatureHash::Sha384 => &digest::SHA384,
        SignatureHash::Sha512 => &digest::SHA512,
    };
    Some(digest::digest(algorithm, certificate).as_ref().to_vec())
}
