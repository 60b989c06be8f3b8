//! Texts for people in the tables of schema `pgapace`: messages, hints, reasons.
//!
//! The server converts them to the encoding of its database. They may contain characters which that
//! encoding lacks: they come from the publisher, from a configuration file or from pgapace itself. No
//! such text is worth a run that fails, so these characters are replaced. Names of schemas, tables and
//! subscriptions must stay exact, and pass without this.

use std::borrow::Cow;

use wire::Session;

/// The characters that a database can surely store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Repertoire {
    last: char,
}

impl Repertoire {
    /// Of the database of this session.
    pub(crate) fn of(session: &Session) -> Self {
        Self::of_encoding(session.parameter("server_encoding").unwrap_or_default())
    }

    /// All encodings of servers contain ASCII. LATIN1 contains the first 256 characters of Unicode. A
    /// database with SQL_ASCII stores any bytes.
    fn of_encoding(encoding: &str) -> Self {
        let last = match encoding {
            "UTF8" | "SQL_ASCII" => char::MAX,
            "LATIN1" => '\u{ff}',
            _ => '\u{7f}',
        };
        Self { last }
    }

    /// The text without the characters that the database may lack. No database can store NUL.
    pub(crate) fn storable(self, text: &str) -> Cow<'_, str> {
        let lacks = |c: char| c == '\0' || c > self.last;
        if !text.contains(lacks) {
            return Cow::Borrowed(text);
        }
        let mut storable = String::with_capacity(text.len());
        for c in text.chars() {
            match c {
                '…' if lacks(c) => storable.push_str("..."),
                c if lacks(c) => storable.push('?'),
                c => storable.push(c),
            }
        }
        Cow::Owned(storable)
    }
}

#[cfg(test)]
mod tests {
    use super::Repertoire;

    #[test]
    fn characters_that_the_encoding_lacks_are_replaced() {
        let stored = |encoding| Repertoire::of_encoding(encoding).storable("é… €\0!").into_owned();
        assert_eq!(stored("UTF8"), "é… €?!");
        assert_eq!(stored("SQL_ASCII"), "é… €?!");
        assert_eq!(stored("LATIN1"), "é... ??!");
        assert_eq!(stored("WIN1252"), "?... ??!");
        assert_eq!(stored(""), "?... ??!");
    }
}
