//! The rustls configuration: trusted roots, client certificate, protocol versions.
//!
//! Source: `initialize_SSL` in `src/interfaces/libpq/fe-secure-openssl.c`,
//! <https://www.postgresql.org/docs/current/libpq-ssl.html>.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, SignatureScheme, SupportedProtocolVersion};

use super::verify::{Roots, Verifier};
use crate::conninfo::{ConnInfo, Host, Place, SslCertMode, SslMode, TlsVersion};
use crate::error::{Error, Result};
use crate::protection::Verified;
use crate::stream::{ALPN, certificate};

/// The TLS configuration of one connection.
pub(super) struct Client {
    pub(super) config: Arc<ClientConfig>,
    pub(super) requires_client_certificate: bool,
    pub(super) verified: Verified,
    /// Set when the server requests a client certificate.
    pub(super) asked: Arc<AtomicBool>,
}

pub(super) fn was_asked(asked: &AtomicBool) -> bool {
    asked.load(Ordering::Acquire)
}

/// Builds the TLS configuration that the connection string describes.
pub(super) fn client(info: &ConnInfo, host: &Host) -> Result<Client> {
    let settings = info.settings();
    let provider = Arc::new(ring::default_provider());
    let (roots, check_name) = (roots(info)?, settings.sslmode == SslMode::VerifyFull);
    let verified = match (&roots, check_name) {
        (None, _) => Verified::Nothing,
        (Some(_), false) => Verified::Chain,
        (Some(_), true) => Verified::Name,
    };
    let verifier = Verifier {
        roots,
        check_name,
        host: host.name.clone(),
        algorithms: provider.signature_verification_algorithms,
    };
    let asked = Arc::new(AtomicBool::new(false));
    let certificate = match settings.sslcertmode {
        SslCertMode::Disable => None,
        SslCertMode::Allow | SslCertMode::Require => client_certificate(info, &provider)?,
    };
    let requires_client_certificate = settings.sslcertmode == SslCertMode::Require;
    if requires_client_certificate && certificate.is_none() {
        return Err(Error::Tls("sslcertmode=require, but there is no client certificate".into()));
    }
    let versions: Vec<&'static SupportedProtocolVersion> =
        [(TlsVersion::V1_2, &TLS12), (TlsVersion::V1_3, &TLS13)]
            .into_iter()
            .filter(|(version, _)| (settings.ssl_min..=settings.ssl_max).contains(version))
            .map(|(_, version)| version)
            .collect();
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(|error| Error::Tls(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(OwnCertificate {
            certificate,
            asked: Arc::clone(&asked),
        }));
    config.alpn_protocols = vec![ALPN.to_vec()];
    // rustls does not send a name that is not valid in DNS; the caller has replaced it with an
    // address.
    config.enable_sni = settings.sslsni && host.place != Place::Socket;
    Ok(Client { config: Arc::new(config), requires_client_certificate, verified, asked })
}

/// The trusted root certificates. Without a root file nothing is verified, unless `sslmode` demands
/// it. With a root file the chain is always verified, regardless of `sslmode`.
fn roots(info: &ConnInfo) -> Result<Option<Roots>> {
    if info.get("sslrootcert") == Some("system") {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            let reason = found.errors.first().map(ToString::to_string).unwrap_or_default();
            return Err(Error::Tls(format!(
                "could not load system root certificate paths: {reason}"
            )));
        }
        return Ok(Some(Roots::lenient(found.certs)));
    }
    let verify = info.settings().sslmode >= SslMode::VerifyCa;
    let Some(file) = file(info, "sslrootcert", "root.crt") else {
        return match verify {
            false => Ok(None),
            true => Err(Error::Tls(
                "could not get home directory to locate root certificate file\nEither provide the \
                 file, use the system's trusted roots with sslrootcert=system, or change sslmode \
                 to disable server certificate verification."
                    .to_owned(),
            )),
        };
    };
    if !file.exists() {
        return match verify {
            false => Ok(None),
            true => Err(Error::Tls(format!(
                "root certificate file \"{}\" does not exist\nEither provide the file, use the \
                 system's trusted roots with sslrootcert=system, or change sslmode to disable \
                 server certificate verification.",
                file.display()
            ))),
        };
    }
    if info.user_file("root.crl").is_some_and(|file| file.exists()) {
        tracing::warn!(
            event = "revocation_list_ignored",
            "~/.postgresql/root.crl is not used: revocation lists are not supported"
        );
    }
    let problem = |error: String| {
        Error::Tls(format!("could not read root certificate file \"{}\": {error}", file.display()))
    };
    let certificates = certificates(&file).map_err(problem)?;
    Roots::new(certificates).map(Some).map_err(problem)
}

/// The client certificate and its key, if the files exist.
fn client_certificate(
    info: &ConnInfo,
    provider: &CryptoProvider,
) -> Result<Option<Arc<CertifiedKey>>> {
    let Some(cert_file) = file(info, "sslcert", "postgresql.crt") else { return Ok(None) };
    match fs::metadata(&cert_file) {
        Ok(_) => {}
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => {
            return Err(Error::Tls(format!(
                "could not open certificate file \"{}\": {error}",
                cert_file.display()
            )));
        }
    }
    let chain = certificates(&cert_file).map_err(|error| {
        Error::Tls(format!("could not read certificate file \"{}\": {error}", cert_file.display()))
    })?;
    let Some(key_file) = file(info, "sslkey", "postgresql.key") else {
        return Err(Error::Tls("certificate present, but not private key file".to_owned()));
    };
    check_key_file(&key_file)?;
    let problem = |error: &dyn std::fmt::Display| {
        Error::Tls(format!("could not load private key file \"{}\": {error}", key_file.display()))
    };
    let key = private_key(&key_file).map_err(|error| problem(&error))?;
    let key = provider.key_provider.load_private_key(key).map_err(|error| problem(&error))?;
    // A certificate of X.509 version 1 is one for libpq too, so webpki does not parse it here.
    let own = key.public_key();
    let certified = chain.first().and_then(|certificate| certificate::public_key(certificate));
    if own.zip(certified).is_some_and(|(own, certified)| own.as_ref() != certified) {
        return Err(Error::Tls(format!(
            "certificate does not match private key file \"{}\"",
            key_file.display()
        )));
    }
    Ok(Some(Arc::new(CertifiedKey::new(chain, key))))
}

/// Reads a private key in PEM or DER form.
fn private_key(file: &Path) -> std::result::Result<PrivateKeyDer<'static>, String> {
    use rustls::pki_types::pem::Error as PemError;
    match PrivateKeyDer::from_pem_file(file) {
        Ok(key) => Ok(key),
        Err(PemError::NoItemsFound) => {
            let bytes = fs::read(file).map_err(|error| error.to_string())?;
            let encrypted = bytes.windows(9).any(|it| it == b"ENCRYPTED");
            PrivateKeyDer::try_from(bytes).map_err(|_| match encrypted {
                true => format!(
                    "it has a passphrase, which is not supported. Write it without one: openssl pkey -in {} \
                     -out … and name that file with sslkey",
                    file.display()
                ),
                false => "it has no private key in PEM or DER form".to_owned(),
            })
        }
        Err(error) => Err(error.to_string()),
    }
}

/// A private key must not be readable by other users; a key that root owns may be readable by its
/// group.
fn check_key_file(file: &Path) -> Result<()> {
    let metadata = match fs::metadata(file) {
        Ok(metadata) => metadata,
        Err(error) if is_missing(&error) => {
            return Err(Error::Tls(format!(
                "certificate present, but not private key file \"{}\"",
                file.display()
            )));
        }
        Err(error) => {
            return Err(Error::Tls(format!(
                "could not stat private key file \"{}\": {error}",
                file.display()
            )));
        }
    };
    if !metadata.is_file() {
        return Err(Error::Tls(format!(
            "private key file \"{}\" is not a regular file",
            file.display()
        )));
    }
    let forbidden = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    if metadata.permissions().mode() & forbidden != 0 {
        return Err(Error::Tls(format!(
            "private key file \"{}\" has group or world access; file must have permissions u=rw \
             (0600) or less if owned by the current user, or permissions u=rw,g=r (0640) or less \
             if owned by root",
            file.display()
        )));
    }
    Ok(())
}

/// The file that a parameter names, or else the default file in `~/.postgresql`.
fn file(info: &ConnInfo, parameter: &str, default: &str) -> Option<PathBuf> {
    info.get(parameter).map(PathBuf::from).or_else(|| info.user_file(default))
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn certificates(file: &Path) -> std::result::Result<Vec<CertificateDer<'static>>, String> {
    let found: std::result::Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(file).map_err(|error| error.to_string())?.collect();
    match found {
        Ok(found) if found.is_empty() => Err("it has no certificate in PEM form".to_owned()),
        Ok(found) => Ok(found),
        Err(error) => Err(error.to_string()),
    }
}

/// Presents the client certificate to a server that requests it, and records the request.
#[derive(Debug)]
struct OwnCertificate {
    certificate: Option<Arc<CertifiedKey>>,
    asked: Arc<AtomicBool>,
}

impl ResolvesClientCert for OwnCertificate {
    fn resolve(&self, _issuers: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.asked.store(true, Ordering::Release);
        self.certificate.clone()
    }

    fn has_certs(&self) -> bool {
        self.certificate.is_some()
    }
}
