//! A certificate authority for the tests, with files for server and client.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    SanType, SignatureAlgorithm,
};
use tempfile::TempDir;

type Authority = CertifiedIssuer<'static, KeyPair>;

/// All certificates and keys of a test, as files in a temporary directory.
pub(crate) struct Certificates {
    dir: TempDir,
    server: Vec<(String, String)>,
}

/// The name in the server's certificates, besides `localhost`.
pub(crate) const SERVER_NAME: &str = "db.pgapace.test";

impl Certificates {
    pub(crate) fn new() -> Certificates {
        let root = authority("pgapace test root");
        let other = authority("another root");
        let mut made = Certificates { dir: tempfile::tempdir().unwrap(), server: Vec::new() };
        made.client_file("root.crt", &root.pem(), 0o644);
        made.client_file("other.crt", &other.pem(), 0o644);
        made.server_file("root.crt", root.pem());

        let names = ["localhost", SERVER_NAME];
        for (file, algorithm) in [
            ("server", &rcgen::PKCS_ECDSA_P256_SHA256),
            ("p384", &rcgen::PKCS_ECDSA_P384_SHA384),
            ("ed25519", &rcgen::PKCS_ED25519),
        ] {
            // The key is always P-256; only the issuer's signature differs.
            let issuer = authority_for(algorithm, file);
            made.client_file(&format!("{file}-root.crt"), &issuer.pem(), 0o644);
            let issuer = if file == "server" { &root } else { &issuer };
            made.server_pair(file, "server", &names, issuer);
        }
        // A certificate with a common name but no alternative names.
        made.server_pair("common", SERVER_NAME, &[], &root);
        made.server_pair("address", "server", &["127.0.0.1"], &root);

        // A self-signed certificate, as `openssl req -x509` makes it.
        let own = authority(SERVER_NAME);
        made.server_file("own.crt", own.pem());
        made.server_file("own.key", own.key().serialize_pem());
        made.client_file("own.crt", &own.pem(), 0o644);

        let (certificate, key) = issue("u_cert", &[], &root);
        made.client_file("client.crt", &certificate, 0o644);
        made.client_file("client.key", &key, 0o600);
        made.client_file("open.key", &key, 0o644);
        let (certificate, key) = issue("u_cert", &[], &other);
        made.client_file("foreign.crt", &certificate, 0o644);
        made.client_file("foreign.key", &key, 0o600);
        made
    }

    /// Files for the server's data directory.
    pub(crate) fn server_files(&self) -> Vec<(String, String)> {
        self.server.clone()
    }

    /// The path of a client file.
    pub(crate) fn path(&self, name: &str) -> String {
        self.file(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn client_file(&self, name: &str, text: &str, mode: u32) {
        fs::write(self.file(name), text).unwrap();
        fs::set_permissions(self.file(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn server_file(&mut self, name: &str, text: impl Into<String>) {
        self.server.push((name.to_owned(), text.into()));
    }

    fn server_pair(&mut self, file: &str, common_name: &str, names: &[&str], issuer: &Authority) {
        let (certificate, key) = issue(common_name, names, issuer);
        self.server_file(&format!("{file}.crt"), certificate);
        self.server_file(&format!("{file}.key"), key);
    }
}

fn params(common_name: &str, names: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    for name in names {
        params.subject_alt_names.push(match name.parse() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName((*name).try_into().unwrap()),
        });
    }
    params
}

fn authority(name: &str) -> Authority {
    authority_for(&rcgen::PKCS_ECDSA_P256_SHA256, name)
}

fn authority_for(algorithm: &'static SignatureAlgorithm, name: &str) -> Authority {
    let mut params = params(name, &[]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate_for(algorithm).unwrap()).unwrap()
}

fn issue(common_name: &str, names: &[&str], issuer: &Authority) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let certificate = params(common_name, names).signed_by(&key, issuer).unwrap();
    (certificate.pem(), key.serialize_pem())
}
