//! Facts of an X.509 certificate that rustls does not expose.
//!
//! Nothing here verifies a signature: webpki and its algorithms do. A certificate that cannot be parsed
//! yields `None`.
//!
//! Source: RFC 5280, sections 4.1 and 4.2.1.6; RFC 4055 and RFC 5758 for the algorithms.

use std::ops::RangeInclusive;

use x509_parser::asn1_rs::Any;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::oid_registry::{
    OID_HASH_SHA1, OID_NIST_HASH_SHA256, OID_NIST_HASH_SHA384, OID_NIST_HASH_SHA512,
    OID_PKCS1_MD5WITHRSAENC, OID_PKCS1_SHA1WITHRSA, OID_PKCS1_SHA256WITHRSA,
    OID_PKCS1_SHA384WITHRSA, OID_PKCS1_SHA512WITHRSA, OID_SIG_ECDSA_WITH_SHA256,
    OID_SIG_ECDSA_WITH_SHA384, OID_SIG_ECDSA_WITH_SHA512, Oid,
};
use x509_parser::prelude::FromDer;
use x509_parser::signature_algorithm::SignatureAlgorithm;
use x509_parser::x509::X509Version;

/// The hash function within a signature algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignatureHash {
    Md5,
    Sha1,
    Sha256,
    Sha384,
    Sha512,
}

/// Hash functions by the OIDs of hashes and of signature algorithms with PKCS #1 v1.5 or ECDSA.
const HASHES: [(Oid<'static>, SignatureHash); 12] = [
    (OID_PKCS1_MD5WITHRSAENC, SignatureHash::Md5),
    (OID_PKCS1_SHA1WITHRSA, SignatureHash::Sha1),
    (OID_PKCS1_SHA256WITHRSA, SignatureHash::Sha256),
    (OID_PKCS1_SHA384WITHRSA, SignatureHash::Sha384),
    (OID_PKCS1_SHA512WITHRSA, SignatureHash::Sha512),
    (OID_SIG_ECDSA_WITH_SHA256, SignatureHash::Sha256),
    (OID_SIG_ECDSA_WITH_SHA384, SignatureHash::Sha384),
    (OID_SIG_ECDSA_WITH_SHA512, SignatureHash::Sha512),
    (OID_HASH_SHA1, SignatureHash::Sha1),
    (OID_NIST_HASH_SHA256, SignatureHash::Sha256),
    (OID_NIST_HASH_SHA384, SignatureHash::Sha384),
    (OID_NIST_HASH_SHA512, SignatureHash::Sha512),
];

fn parse(der: &[u8]) -> Option<X509Certificate<'_>> {
    X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate)
}

fn hash_of(oid: &Oid<'_>) -> Option<SignatureHash> {
    HASHES.iter().find(|(known, _)| known == oid).map(|(_, hash)| *hash)
}

/// The hash function of the certificate's signature; RSASSA-PSS names it in its parameters.
pub(super) fn signature_hash(certificate: &[u8]) -> Option<SignatureHash> {
    let certificate = parse(certificate)?;
    let algorithm = &certificate.signature_algorithm;
    match SignatureAlgorithm::try_from(algorithm) {
        Ok(SignatureAlgorithm::RSASSA_PSS(parameters)) => hash_of(parameters.hash_algorithm_oid()),
        _ => hash_of(&algorithm.algorithm),
    }
}

/// The SubjectPublicKeyInfo, as DER.
pub(crate) fn public_key(certificate: &[u8]) -> Option<&[u8]> {
    parse(certificate).map(|certificate| certificate.tbs_certificate.subject_pki.raw)
}

/// Whether it is an X.509 version 1 certificate, which has no extensions.
pub(crate) fn is_version_1(certificate: &[u8]) -> bool {
    parse(certificate).is_some_and(|certificate| {
        certificate.version() == X509Version::V1 && certificate.extensions().is_empty()
    })
}

/// The parts of a public key that algorithms verify with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublicKey<'c> {
    /// The content of the AlgorithmIdentifier.
    pub(crate) algorithm: &'c [u8],
    pub(crate) bits: &'c [u8],
}

impl<'c> PublicKey<'c> {
    /// That of a certificate.
    pub(crate) fn parse(certificate: &'c [u8]) -> Option<Self> {
        let info = any(public_key(certificate)?)?.1;
        let (rest, algorithm) = any(info)?;
        Some(Self { algorithm, bits: whole_bits(any(rest)?.1)? })
    }
}

/// What the issuer of a certificate has signed, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signed<'c> {
    /// The name of the issuer, as DER.
    pub(crate) issuer: &'c [u8],
    pub(crate) message: &'c [u8],
    /// The content of the AlgorithmIdentifier.
    pub(crate) algorithm: &'c [u8],
    pub(crate) signature: &'c [u8],
}

impl<'c> Signed<'c> {
    pub(crate) fn parse(certificate: &'c [u8]) -> Option<Self> {
        let parsed = parse(certificate)?;
        // The algorithm is within what is signed, too: both must be the same.
        if parsed.signature_algorithm != parsed.tbs_certificate.signature {
            return None;
        }
        let issuer = parsed.tbs_certificate.issuer.as_raw();
        let (_, content) = any(certificate)?;
        let (rest, _) = any(content)?;
        let message = content.get(..content.len() - rest.len())?;
        let (rest, algorithm) = any(rest)?;
        Some(Self { issuer, message, algorithm, signature: whole_bits(any(rest)?.1)? })
    }
}

/// Whether a trusted certificate has this name, and may sign certificates: one of version 1 may that
/// is its own issuer, and another must be an authority. One with name constraints may not, because nothing would check them.
pub(crate) fn may_issue(certificate: &[u8], name: &[u8]) -> bool {
    let Some(parsed) = parse(certificate) else { return false };
    if parsed.tbs_certificate.subject.as_raw() != name {
        return false;
    }
    if is_version_1(certificate) {
        return parsed.tbs_certificate.issuer.as_raw() == name;
    }
    let authority = parsed.basic_constraints().is_ok_and(|it| it.is_some_and(|it| it.value.ca));
    let signs = parsed.key_usage().is_ok_and(|it| it.is_none_or(|it| it.value.key_cert_sign()));
    let serves = parsed
        .extended_key_usage()
        .is_ok_and(|it| it.is_none_or(|it| it.value.any || it.value.server_auth));
    authority && signs && serves && matches!(parsed.name_constraints(), Ok(None))
}

/// What follows the next DER element, and its content.
fn any(der: &[u8]) -> Option<(&[u8], &[u8])> {
    Any::from_der(der).ok().map(|(rest, element)| (rest, element.data))
}

/// The bytes of a BIT STRING without unused bits.
fn whole_bits(content: &[u8]) -> Option<&[u8]> {
    match content.split_first() {
        Some((0, bits)) => Some(bits),
        _ => None,
    }
}

/// The seconds since 1970 from and to which the certificate is valid.
pub(crate) fn validity(certificate: &[u8]) -> Option<RangeInclusive<i64>> {
    let certificate = parse(certificate)?;
    let validity = certificate.validity();
    Some(validity.not_before.timestamp()..=validity.not_after.timestamp())
}

/// Names a certificate is for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) common: Vec<String>,
    pub(crate) has_dns_names: bool,
    pub(crate) has_ip_addresses: bool,
}

/// The subject's common names, and which kinds of alternative names there are.
pub(crate) fn names(certificate: &[u8]) -> Option<Names> {
    let certificate = parse(certificate)?;
    // A NUL inside must not cut the name short.
    let common = certificate.subject().iter_common_name();
    let common = common.filter_map(|name| name.as_str().ok()).filter(|name| !name.contains('\0'));
    let mut names = Names { common: common.map(str::to_owned).collect(), ..Names::default() };
    if let Some(alternatives) = certificate.subject_alternative_name().ok()? {
        for name in &alternatives.value.general_names {
            names.has_dns_names |= matches!(name, GeneralName::DNSName(_));
            names.has_ip_addresses |= matches!(name, GeneralName::IPAddress(_));
        }
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, SignatureAlgorithm};

    use super::*;

    fn certificate(algorithm: &'static SignatureAlgorithm, names: &[&str]) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "db.example");
        params.not_before = rcgen::date_time_ymd(2024, 2, 29);
        params.not_after = rcgen::date_time_ymd(2051, 3, 1);
        for name in names {
            params.subject_alt_names.push(match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            });
        }
        let key = KeyPair::generate_for(algorithm).unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn finds_the_hash_of_the_signature() {
        let cases = [
            (&rcgen::PKCS_ECDSA_P256_SHA256, Some(SignatureHash::Sha256)),
            (&rcgen::PKCS_ECDSA_P384_SHA384, Some(SignatureHash::Sha384)),
            (&rcgen::PKCS_ED25519, None),
        ];
        for (algorithm, hash) in cases {
            assert_eq!(signature_hash(&certificate(algorithm, &[])), hash);
        }
    }

    #[test]
    fn reads_names_and_validity() {
        let der = certificate(&rcgen::PKCS_ECDSA_P256_SHA256, &["a.example", "10.0.0.1"]);
        let found = names(&der).unwrap();
        assert_eq!(found.common, ["db.example"]);
        assert!(found.has_dns_names && found.has_ip_addresses);
        // date -u -d 2024-02-29 +%s; date -u -d 2051-03-01 +%s
        assert_eq!(validity(&der), Some(1_709_164_800..=2_561_241_600));
        let bare = names(&certificate(&rcgen::PKCS_ECDSA_P256_SHA256, &[])).unwrap();
        assert!(!bare.has_dns_names && !bare.has_ip_addresses);
        assert!(public_key(&der).is_some());
        let signed = Signed::parse(&der).unwrap();
        let key = PublicKey::parse(&der).unwrap();
        assert!(signed.message.len() > key.bits.len() && !signed.signature.is_empty());
        assert!(!is_version_1(&der) && !may_issue(&der, signed.issuer), "it is no authority");
    }

    #[test]
    fn survives_truncation_and_damage() {
        let der = certificate(&rcgen::PKCS_ECDSA_P256_SHA256, &["a.example"]);
        for end in 0..der.len() {
            let _ = (signature_hash(&der[..end]), names(&der[..end]), validity(&der[..end]));
            let mut damaged = der.clone();
            damaged[end] ^= 0xff;
            let _ = (signature_hash(&damaged), names(&damaged), validity(&damaged));
            let _ = (Signed::parse(&damaged), PublicKey::parse(&damaged), may_issue(&damaged, b""));
        }
    }
}
