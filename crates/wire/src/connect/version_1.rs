//! Certificates of X.509 version 1, which webpki does not parse.
//!
//! `openssl x509 -req` before version 3.2 makes them, also with the commands of PostgreSQL's documentation, and
//! libpq accepts them. Such a certificate has no extensions: its only name is the common name, and nothing
//! limits its use. It is accepted if a trusted certificate has signed it directly; webpki's algorithms check
//! the signature. Between them, only webpki judges what an intermediate certificate may sign.

use std::ops::RangeInclusive;

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use rustls::{CertificateError, Error as TlsError, OtherError, SignatureScheme};

use super::verify::Roots;
use crate::stream::certificate::{self, PublicKey, Signed};

/// The certificate is signed by none of the trusted ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is an X.509 version 1 certificate, and no trusted certificate has signed it directly. Issue it again as \
     version 3: openssl x509 -req with -extfile, or OpenSSL 3.2"
)]
pub(super) struct NotSignedDirectly;

/// Whether the certificate is one.
pub(super) fn is_one(certificate: &CertificateDer<'_>) -> bool {
    certificate::is_version_1(certificate)
}

/// Checks that a trusted certificate has signed this one, and that both are valid now.
pub(super) fn check_chain(
    roots: &Roots,
    end_entity: &CertificateDer<'_>,
    now: UnixTime,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<(), TlsError> {
    let signed = Signed::parse(end_entity).ok_or(CertificateError::BadEncoding)?;
    check_validity(certificate::validity(end_entity), now)?;
    let signs = |issuer: &&CertificateDer<'_>| {
        certificate::may_issue(issuer, signed.issuer)
            && check_validity(certificate::validity(issuer), now).is_ok()
            && PublicKey::parse(issuer).is_some_and(|key| {
                let of_algorithm = |it: &&&dyn SignatureVerificationAlgorithm| {
                    it.signature_alg_id().as_ref() == signed.algorithm
                };
                let mut candidates = algorithms.all.iter().filter(of_algorithm);
                candidates.any(|it| verifies(*it, &key, signed.message, signed.signature))
            })
    };
    match roots.certificates().iter().find(signs) {
        Some(_) => Ok(()),
        None => {
            Err(CertificateError::Other(OtherError(std::sync::Arc::new(NotSignedDirectly))).into())
        }
    }
}

/// Checks that `now` lies within the validity.
pub(super) fn check_validity(
    validity: Option<RangeInclusive<i64>>,
    now: UnixTime,
) -> Result<(), TlsError> {
    let validity = validity.ok_or(CertificateError::BadEncoding)?;
    match i64::try_from(now.as_secs()).unwrap_or(i64::MAX) {
        now if now < *validity.start() => Err(CertificateError::NotValidYet.into()),
        now if now > *validity.end() => Err(CertificateError::Expired.into()),
        _ => Ok(()),
    }
}

/// Checks the signature of a TLS 1.2 handshake by the certificate's key.
pub(super) fn check_tls12_signature(
    certificate: &CertificateDer<'_>,
    scheme: SignatureScheme,
    message: &[u8],
    signature: &[u8],
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<(), TlsError> {
    let key = PublicKey::parse(certificate).ok_or(CertificateError::BadEncoding)?;
    let mapped = algorithms.mapping.iter().find(|(known, _)| *known == scheme);
    let mut candidates = mapped.into_iter().flat_map(|(_, candidates)| *candidates);
    match candidates.any(|it| verifies(*it, &key, message, signature)) {
        true => Ok(()),
        false => Err(CertificateError::BadSignature.into()),
    }
}

fn verifies(
    algorithm: &dyn SignatureVerificationAlgorithm,
    key: &PublicKey<'_>,
    message: &[u8],
    signature: &[u8],
) -> bool {
    algorithm.public_key_alg_id().as_ref() == key.algorithm
        && algorithm.verify_signature(key.bits, message, signature).is_ok()
}
