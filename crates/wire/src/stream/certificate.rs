//! The few facts of an X.509 certificate that rustls does not tell.
//!
//! A reader for well-formed DER that gives up (`None`) on anything else. It decides nothing
//! about trust: signatures and chains are checked by webpki.
//!
//! Source: RFC 5280, sections 4.1 and 4.2.1.6; RFC 4055 and RFC 5758 for the algorithms.

use std::ops::RangeInclusive;

const BOOLEAN: u8 = 0x01;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const CONTEXT_0: u8 = 0xa0;
const CONTEXT_3: u8 = 0xa3;
/// dNSName and iPAddress in a GeneralName.
const DNS_NAME: u8 = 0x82;
const IP_ADDRESS: u8 = 0x87;

/// 2.5.29.17
const SUBJECT_ALT_NAME: &[u8] = &[0x55, 0x1d, 0x11];
/// 2.5.4.3
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// 1.2.840.113549.1.1, the RSA signature algorithms
const PKCS_1: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01];
/// 1.2.840.10045.4, the ECDSA signature algorithms
const ECDSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04];
/// 2.16.840.1.101.3.4, NIST: .2 are hashes, .3 DSA signatures
const NIST: &[u8] = &[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04];

/// The hash function within a signature algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignatureHash {
    Md5,
    Sha1,
    Sha256,
    Sha384,
    Sha512,
}

/// One DER element after the other.
#[derive(Clone, Copy)]
struct Der<'d>(&'d [u8]);

impl<'d> Der<'d> {
    /// Tag, contents and the whole of the next element.
    fn next(&mut self) -> Option<(u8, &'d [u8], &'d [u8])> {
        let (&tag, rest) = self.0.split_first()?;
        let (&first, rest) = rest.split_first()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            // Up to four bytes of length; indefinite lengths are not DER.
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                let length = bytes.iter().fold(0_usize, |sum, &byte| sum << 8 | usize::from(byte));
                (length, rest)
            }
            _ => return None,
        };
        let (contents, after) = rest.split_at_checked(length)?;
        let whole = &self.0[..self.0.len() - after.len()];
        self.0 = after;
        Some((tag, contents, whole))
    }

    /// The contents of the next element, which must have this tag.
    fn expect(&mut self, wanted: u8) -> Option<&'d [u8]> {
        self.next().filter(|(tag, ..)| *tag == wanted).map(|(_, contents, _)| contents)
    }

    /// The contents of the next element if it has this tag; else nothing is taken.
    fn optional(&mut self, wanted: u8) -> Option<&'d [u8]> {
        if self.0.first() == Some(&wanted) { self.expect(wanted) } else { None }
    }
}

/// The parts of a TBSCertificate from its validity on.
struct Parts<'d> {
    validity: &'d [u8],
    subject: &'d [u8],
    /// The whole element.
    public_key: &'d [u8],
    rest: Der<'d>,
}

fn parts(certificate: &[u8]) -> Option<Parts<'_>> {
    let mut outer = Der(Der(certificate).expect(SEQUENCE)?);
    let mut tbs = Der(outer.expect(SEQUENCE)?);
    tbs.optional(CONTEXT_0);
    let (_serial, _algorithm, _issuer) = (tbs.next()?, tbs.next()?, tbs.next()?);
    let validity = tbs.expect(SEQUENCE)?;
    let subject = tbs.expect(SEQUENCE)?;
    let (_, _, public_key) = tbs.next()?;
    Some(Parts { validity, subject, public_key, rest: tbs })
}

/// The hash function of the certificate's signature.
pub(super) fn signature_hash(certificate: &[u8]) -> Option<SignatureHash> {
    let mut outer = Der(Der(certificate).expect(SEQUENCE)?);
    outer.expect(SEQUENCE)?;
    let mut algorithm = Der(outer.expect(SEQUENCE)?);
    let oid = algorithm.expect(OID)?;
    if let Some(arc) = oid.strip_prefix(PKCS_1) {
        return match arc {
            [4] => Some(SignatureHash::Md5),
            [5] => Some(SignatureHash::Sha1),
            [10] => pss_hash(algorithm),
            [11] => Some(SignatureHash::Sha256),
            [12] => Some(SignatureHash::Sha384),
            [13] => Some(SignatureHash::Sha512),
            _ => None,
        };
    }
    if let Some(arc) = oid.strip_prefix(ECDSA) {
        return match arc {
            [1] => Some(SignatureHash::Sha1),
            [3, 2] => Some(SignatureHash::Sha256),
            [3, 3] => Some(SignatureHash::Sha384),
            [3, 4] => Some(SignatureHash::Sha512),
            _ => None,
        };
    }
    match oid.strip_prefix(NIST) {
        Some([3, 2]) => Some(SignatureHash::Sha256),
        Some([3, 3]) => Some(SignatureHash::Sha384),
        Some([3, 4]) => Some(SignatureHash::Sha512),
        _ => None,
    }
}

/// RSASSA-PSS names its hash in the parameters; SHA-1 when it does not.
fn pss_hash(mut algorithm: Der<'_>) -> Option<SignatureHash> {
    let mut parameters = Der(algorithm.expect(SEQUENCE)?);
    let Some(hash) = parameters.optional(CONTEXT_0) else { return Some(SignatureHash::Sha1) };
    let oid = Der(Der(hash).expect(SEQUENCE)?).expect(OID)?;
    match oid.strip_prefix(NIST) {
        Some([2, 1]) => Some(SignatureHash::Sha256),
        Some([2, 2]) => Some(SignatureHash::Sha384),
        Some([2, 3]) => Some(SignatureHash::Sha512),
        _ => None,
    }
}

/// The SubjectPublicKeyInfo.
pub(crate) fn public_key(certificate: &[u8]) -> Option<&[u8]> {
    parts(certificate).map(|parts| parts.public_key)
}

/// The seconds since 1970 from and to which the certificate is valid.
pub(crate) fn validity(certificate: &[u8]) -> Option<RangeInclusive<i64>> {
    let mut times = Der(parts(certificate)?.validity);
    let (from, to) = (times.next()?, times.next()?);
    Some(seconds(from.0, from.1)?..=seconds(to.0, to.1)?)
}

/// `YYMMDDHHMMSSZ` or `YYYYMMDDHHMMSSZ`.
fn seconds(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number = |range: std::ops::Range<usize>| -> Option<i64> {
        std::str::from_utf8(digits.get(range)?).ok()?.parse().ok()
    };
    let (year, rest) = match (tag, digits.len()) {
        (UTC_TIME, 12) => (number(0..2)? + if number(0..2)? < 50 { 2000 } else { 1900 }, 2),
        (GENERALIZED_TIME, 14) => (number(0..4)?, 4),
        _ => return None,
    };
    let part = |at: usize| number(rest + 2 * at..rest + 2 * at + 2);
    let (month, day) = (part(0)?, part(1)?);
    // Days since 1970 of a civil date, with the year starting in March so that the leap day is
    // its last.
    let (shifted_year, shifted_month) =
        if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let era = shifted_year.div_euclid(400);
    let year_of_era = shifted_year.rem_euclid(400);
    let day_of_year = (153 * shifted_month + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = era * 146_097 + day_of_era - 719_468;
    Some(days * 86_400 + part(2)? * 3_600 + part(3)? * 60 + part(4)?)
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
    let mut parts = parts(certificate)?;
    let mut names = Names::default();
    let mut subject = Der(parts.subject);
    while let Some(set) = subject.optional(SET) {
        let mut attributes = Der(set);
        while let Some(attribute) = attributes.optional(SEQUENCE) {
            let mut attribute = Der(attribute);
            let oid = attribute.expect(OID)?;
            let (_, value, _) = attribute.next()?;
            // All string types of use here are supersets of ASCII, except two-byte ones, which
            // then match no host name. A NUL inside must not cut the name short.
            if let (COMMON_NAME, Ok(name)) = (oid, std::str::from_utf8(value))
                && !name.contains('\0')
            {
                names.common.push(name.to_owned());
            }
        }
    }
    let extensions = loop {
        match parts.rest.next() {
            None => return Some(names),
            Some((CONTEXT_3, contents, _)) => break Der(contents).expect(SEQUENCE)?,
            Some(_) => {}
        }
    };
    let mut extensions = Der(extensions);
    while let Some(extension) = extensions.optional(SEQUENCE) {
        let mut extension = Der(extension);
        if extension.expect(OID)? != SUBJECT_ALT_NAME {
            continue;
        }
        extension.optional(BOOLEAN);
        let mut alternatives = Der(Der(extension.expect(OCTET_STRING)?).expect(SEQUENCE)?);
        while let Some((tag, ..)) = alternatives.next() {
            names.has_dns_names |= tag == DNS_NAME;
            names.has_ip_addresses |= tag == IP_ADDRESS;
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
    }

    #[test]
    fn survives_truncation_and_damage() {
        let der = certificate(&rcgen::PKCS_ECDSA_P256_SHA256, &["a.example"]);
        for end in 0..der.len() {
            let _ = (signature_hash(&der[..end]), names(&der[..end]), validity(&der[..end]));
            let mut damaged = der.clone();
            damaged[end] ^= 0xff;
            let _ = (signature_hash(&damaged), names(&damaged), validity(&damaged));
        }
    }
}
