//! Server version numbers.

use std::fmt;

/// A server version in the form of `server_version_num`: 180006 is 18.6, 90624 is 9.6.24.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerVersion(pub u32);

impl ServerVersion {
    /// Parses the `server_version` parameter: `18.6 (Debian 18.6-1)`, `19beta1`, `20devel`,
    /// `9.6.24`. A pre-release has minor version 0, as in `server_version_num`.
    pub fn parse(text: &str) -> Option<ServerVersion> {
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let mut parts = text[..end].split('.').map(|part| {
            if part.is_empty() { None } else { part.parse::<u32>().ok().filter(|&n| n < 10_000) }
        });
        let major = parts.next()??;
        let minor = parts.next().flatten().unwrap_or(0);
        if major >= 10 {
            return Some(ServerVersion(major * 10_000 + minor));
        }
        let patch = parts.next().flatten().unwrap_or(0);
        Some(ServerVersion(major * 10_000 + minor * 100 + patch))
    }

    /// The major version: 18 for 18.6. Before version 10 this is the first number only.
    pub fn major(self) -> u32 {
        self.0 / 10_000
    }

    /// The minor version: 6 for 18.6.
    pub fn minor(self) -> u32 {
        self.0 % 10_000
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, rest) = (self.major(), self.minor());
        if major >= 10 {
            write!(f, "{major}.{rest}")
        } else {
            write!(f, "{major}.{}.{}", rest / 100, rest % 100)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_servers_report() {
        for (text, number, shown) in [
            ("18.6 (Debian 18.6-1.pgdg12+1)", 180_006, "18.6"),
            ("15.18", 150_018, "15.18"),
            ("19beta1", 190_000, "19.0"),
            ("19rc1", 190_000, "19.0"),
            ("20devel", 200_000, "20.0"),
            ("9.6.24", 90_624, "9.6.24"),
            ("14.23 (Ubuntu)", 140_023, "14.23"),
        ] {
            let version = ServerVersion::parse(text).unwrap();
            assert_eq!(version.0, number, "{text}");
            assert_eq!(version.to_string(), shown);
        }
        assert_eq!(ServerVersion::parse("18.6").unwrap().major(), 18);
        for text in ["", "devel", ".1", "99999999999.1"] {
            assert_eq!(ServerVersion::parse(text), None, "{text}");
        }
    }
}
