//! A name whose encoding is not known.

use std::fmt::{self, Display, Formatter};

/// A name without its terminating zero byte, as the publisher sends it: in the encoding of the client, or, where
/// a database has encoding SQL_ASCII, in whatever encoding the application wrote it.
///
/// It is shown with `\xHH` for each byte that is not UTF-8. So it must not be known by what is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawName<'a>(pub &'a [u8]);

impl Display for RawName<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            f.write_str(chunk.valid())?;
            chunk.invalid().iter().try_for_each(|byte| write!(f, "\\x{byte:02X}"))?;
        }
        Ok(())
    }
}

impl<'a> From<&'a str> for RawName<'a> {
    fn from(name: &'a str) -> Self {
        Self(name.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_utf8_are_escaped() {
        assert_eq!(RawName::from("größe").to_string(), "größe");
        assert_eq!(RawName(b"caf\xE9_\xFF\xC3").to_string(), r"caf\xE9_\xFF\xC3");
    }
}
