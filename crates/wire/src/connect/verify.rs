//! Verification of the server's certificate by libpq's rules.
//!
//! webpki checks chains, names and signatures. This module adds four rules of libpq (and OpenSSL)
//! that webpki does not have:
//! - The chain can be checked without the name (`verify-ca`), or not at all.
//! - A certificate that is itself in the root file is trusted.
//! - The common name counts when the certificate has no alternative name.
//! - A certificate may be of X.509 version 1.
//!
//! Every mode checks the signature of the handshake, which proves that the server holds the key of
//! its certificate. Channel binding depends on that proof.
//!
//! Source: `pgtls_verify_peer_name_matches_certificate_guts`,
//! `src/interfaces/libpq/fe-secure-openssl.c`.

use std::net::IpAddr;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
    verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};

use super::version_1;
use crate::stream::certificate;

/// Trusted certificates.
#[derive(Debug)]
pub(super) struct Roots {
    store: RootCertStore,
    certificates: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// Builds the roots from the user's file: every certificate in it must be usable.
    pub(super) fn new(
        certificates: Vec<CertificateDer<'static>>,
    ) -> std::result::Result<Roots, String> {
        let mut store = RootCertStore::empty();
        for certificate in &certificates {
            store.add(certificate.clone()).map_err(|error| error.to_string())?;
        }
        Ok(Roots { store, certificates })
    }

    pub(super) fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.certificates
    }

    /// Builds the roots from the system's certificates and skips those that webpki cannot parse.
    pub(super) fn lenient(certificates: Vec<CertificateDer<'static>>) -> Roots {
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(certificates.iter().cloned());
        Roots { store, certificates }
    }
}

/// Verifies server certificates by the rules at the head of this module.
#[derive(Debug)]
pub(super) struct Verifier {
    /// `None` trusts every certificate.
    pub(super) roots: Option<Roots>,
    pub(super) check_name: bool,
    /// The host name as the user wrote it.
    pub(super) host: String,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
}

impl Verifier {
    fn check_chain(
        &self,
        roots: &Roots,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), TlsError> {
        if roots.certificates.iter().any(|trusted| trusted.as_ref() == end_entity.as_ref()) {
            return version_1::check_validity(certificate::validity(end_entity), now);
        }
        if version_1::is_one(end_entity) {
            return version_1::check_chain(roots, end_entity, now, &self.algorithms);
        }
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(end_entity)?,
            &roots.store,
            intermediates,
            now,
            self.algorithms.all,
        )
    }

    fn check_name(
        &self,
        end_entity: &CertificateDer<'_>,
        name: &ServerName<'_>,
    ) -> Result<(), TlsError> {
        let error = if version_1::is_one(end_entity) {
            // It has no alternative names.
            CertificateError::NotValidForName.into()
        } else {
            match verify_server_name(&ParsedCertificate::try_from(end_entity)?, name) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            }
        };
        let names = certificate::names(end_entity).unwrap_or_default();
        let has_alternatives = match self.host.parse::<IpAddr>() {
            Ok(_) => names.has_ip_addresses,
            Err(_) => names.has_dns_names,
        };
        if !has_alternatives && names.common.iter().any(|name| name_matches(name, &self.host)) {
            return Ok(());
        }
        Err(error)
    }
}

/// Whether a name in a certificate matches the host; a leading `*.` stands for one label.
fn name_matches(pattern: &str, host: &str) -> bool {
    if pattern.eq_ignore_ascii_case(host) {
        return true;
    }
    match (pattern.strip_prefix("*."), host.split_once('.')) {
        (Some(domain), Some((label, rest))) => {
            !label.is_empty() && domain.contains('.') && domain.eq_ignore_ascii_case(rest)
        }
        _ => false,
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        if let Some(roots) = &self.roots {
            self.check_chain(roots, end_entity, intermediates, now)?;
            if self.check_name {
                self.check_name(end_entity, server_name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        if version_1::is_one(cert) {
            let (scheme, signature) = (dss.scheme, dss.signature());
            version_1::check_tls12_signature(cert, scheme, message, signature, &self.algorithms)?;
            return Ok(HandshakeSignatureValid::assertion());
        }
        verify_tls12_signature(message, cert, dss, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        match verify_tls13_signature(message, cert, dss, &self.algorithms) {
            // webpki cannot parse an X.509 version 1 certificate. Its key can still be checked.
            Err(TlsError::InvalidCertificate(
                CertificateError::BadEncoding | CertificateError::Other(_),
            )) => {
                let key = certificate::public_key(cert)
                    .ok_or(TlsError::InvalidCertificate(CertificateError::BadEncoding))?;
                let key = SubjectPublicKeyInfoDer::from(key);
                verify_tls13_signature_with_raw_key(message, &key, dss, &self.algorithms)
            }
            result => result,
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::name_matches;

    #[test]
    fn common_names_match_as_in_libpq() {
        assert!(name_matches("db.example.com", "DB.example.com"));
        assert!(name_matches("*.example.com", "db.example.com"));
        assert!(name_matches("10.0.0.1", "10.0.0.1"));
        assert!(!name_matches("*.example.com", "example.com"));
        assert!(!name_matches("*.example.com", "a.b.example.com"));
        assert!(!name_matches("*.example.com", ".example.com"));
        assert!(!name_matches("*.com", "example.com"));
        assert!(!name_matches("*", "localhost"));
        assert!(!name_matches("d*.example.com", "db.example.com"));
    }
}
