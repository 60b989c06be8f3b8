//! Errors of a server about text that an encoding lacks, or that is no text in it.

use wire::ServerError;

use crate::sqlstate;

/// The function of the server that refuses a character (`mbutils.c`). Others have its SQLSTATE too.
const ROUTINE: &str = "report_untranslatable_char";

/// The next step if bytes that are not UTF-8 are a name.
pub(crate) const NAMES_HINT: &str = "Where a database has encoding SQL_ASCII, names of schemas, tables, columns and \
    types must be UTF-8. Rename what has another name (ALTER … RENAME TO …), or publish other tables.";

/// Where the value comes from that a server refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// From a table, as it is now: it can be changed there.
    Table,
    /// From the publisher's WAL, which stays as it is.
    Wal,
}

/// The next step after a walsender has refused a value: the slot cannot pass it.
pub(crate) const IN_STREAM_HINT: &str = "The value is in the publisher's WAL, so the slot cannot pass it. Change it on the \
    publisher, stop pgapace run, and pgapace rebase makes a new slot, and mends the rows that differ. For other such values \
    use a subscriber database with encoding SQL_ASCII.";

/// The next step, without its full stop; `None` if the error is about something else.
pub(crate) fn remedy(said: &ServerError, origin: Origin) -> Option<String> {
    let other = |encoding: &str| match origin {
        Origin::Table => format!(
            "Change the value on the publisher, or use a subscriber database with encoding {encoding}"
        ),
        Origin::Wal => format!("Use a subscriber database with encoding {encoding}"),
    };
    if said.code == sqlstate::CHARACTER_NOT_IN_REPERTOIRE {
        let other = other("SQL_ASCII");
        return Some(format!("The value has bytes that are no text in this encoding. {other}"));
    }
    if said.routine.as_deref() != Some(ROUTINE) {
        return None;
    }
    // The message ends with the encoding in quotes. It may be in any language.
    let encoding = said.message.strip_suffix('"').and_then(|text| text.rsplit('"').next());
    let lacks = encoding.map_or_else(
        || "The encoding of the database lacks this character".to_owned(),
        |encoding| format!("Encoding {encoding} lacks this character"),
    );
    Some(format!("{lacks}. {}", other("UTF8")))
}

#[cfg(test)]
mod tests {
    use wire::ServerError;

    use super::{Origin, remedy};

    #[test]
    fn the_encoding_is_that_of_the_message() {
        let of = |code: &str, routine: &str, message: &str| {
            let mut said = ServerError::default();
            code.clone_into(&mut said.code);
            message.clone_into(&mut said.message);
            said.routine = Some(routine.to_owned());
            remedy(&said, Origin::Table)
        };
        let message = "character with byte sequence 0xe6 in encoding \"UTF8\" has no equivalent in encoding \"LATIN1\"";
        let lacks = of("22P05", "report_untranslatable_char", message).unwrap();
        assert!(lacks.starts_with("Encoding LATIN1 lacks"), "{lacks}");
        let other = of("22P05", "report_untranslatable_char", "le caractère « é »").unwrap();
        assert!(other.starts_with("The encoding of the database"), "{other}");
        assert_eq!(of("22P05", "json_errsave_error", "unsupported Unicode escape sequence"), None);
        assert!(of("22021", "report_invalid_encoding", "0xe9").is_some());
    }
}
