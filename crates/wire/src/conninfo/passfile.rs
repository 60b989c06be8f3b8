//! The password file.
//!
//! Source: `passwordFromFile` in `src/interfaces/libpq/fe-connect.c`,
//! <https://www.postgresql.org/docs/current/libpq-pgpass.html>.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The values that a line must match.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'w> {
    pub(crate) host: &'w str,
    pub(crate) port: &'w str,
    pub(crate) dbname: &'w str,
    pub(crate) user: &'w str,
}

/// Looks up the password in `file`. A missing file is not an error. A file that other users can
/// read is ignored with a warning, once for the file: each session looks here.
pub(crate) fn lookup(file: &Path, wanted: Wanted<'_>) -> Option<String> {
    let metadata = fs::metadata(file).ok()?;
    let problem = if !metadata.is_file() {
        Some("password file is not a plain file")
    } else if metadata.permissions().mode() & 0o077 != 0 {
        Some("password file has group or world access; permissions should be u=rw (0600) or less")
    } else {
        None
    };
    if has_problem(file, problem) {
        return None;
    }
    let text = fs::read(file).ok()?;
    search(&String::from_utf8_lossy(&text), wanted)
}

/// Notes what is wrong with the file, if anything, and warns of it once. A file that is mended is forgotten.
fn has_problem(file: &Path, problem: Option<&'static str>) -> bool {
    static WARNED: Mutex<BTreeMap<PathBuf, &'static str>> = Mutex::new(BTreeMap::new());
    let mut warned = WARNED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(problem) = problem else {
        warned.remove(file);
        return false;
    };
    if warned.insert(file.to_owned(), problem) != Some(problem) {
        tracing::warn!(event = "password_file_ignored", file = %file.display(), "{problem}");
    }
    true
}

/// Returns the password of the first matching line.
fn search(text: &str, wanted: Wanted<'_>) -> Option<String> {
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let mut rest = line.trim_end_matches('\r');
        for token in [wanted.host, wanted.port, wanted.dbname, wanted.user] {
            rest = match_field(rest, token)?;
        }
        // The password uses the same escapes; any field after it is ignored.
        let mut password = String::new();
        let mut chars = rest.chars();
        while let Some(c) = chars.next() {
            match c {
                ':' => break,
                '\\' => password.push(chars.next().unwrap_or('\\')),
                c => password.push(c),
            }
        }
        Some(password)
    })
}

/// Matches the first field of `line` and returns the text after its colon. The field matches if it
/// is `*` or equals `token`; in it `\:` is a colon and `\\` a backslash.
fn match_field<'l>(line: &'l str, token: &str) -> Option<&'l str> {
    if let Some(rest) = line.strip_prefix("*:") {
        return Some(rest);
    }
    let mut expected = token.chars();
    let mut chars = line.char_indices();
    while let Some((at, c)) = chars.next() {
        let c = match c {
            ':' => return expected.next().is_none().then(|| &line[at + 1..]),
            '\\' => chars.next().map(|(_, escaped)| escaped)?,
            c => c,
        };
        if expected.next() != Some(c) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted<'w>(host: &'w str, dbname: &'w str) -> Wanted<'w> {
        Wanted { host, port: "5432", dbname, user: "u" }
    }

    #[test]
    fn first_match_wins_with_wildcards() {
        let text = "# comment\nother:*:*:*:no\nhost:5432:db:u:first\n*:*:*:*:any\n";
        assert_eq!(search(text, wanted("host", "db")).as_deref(), Some("first"));
        assert_eq!(search(text, wanted("host", "else")).as_deref(), Some("any"));
        assert_eq!(search("host:5433:db:u:x", wanted("host", "db")), None);
        assert_eq!(search("host:5432:db", wanted("host", "db")), None);
        assert_eq!(search("hos:5432:db:u:x\n", wanted("host", "db")), None);
        assert_eq!(search("hostt:5432:db:u:x\n", wanted("host", "db")), None);
    }

    #[test]
    fn escapes_in_fields_and_password() {
        let text = r"\:\:1:5432:a\\b:u:p\:q\\r";
        assert_eq!(search(text, wanted("::1", r"a\b")).as_deref(), Some(r"p:q\r"));
        assert_eq!(search("h:5432:d:u:pw:ignored", wanted("h", "d")).as_deref(), Some("pw"));
        assert_eq!(search("h:5432:d:u:", wanted("h", "d")).as_deref(), Some(""));
        assert_eq!(search("h:5432:d:u:pä\r\n", wanted("h", "d")).as_deref(), Some("pä"));
    }

    #[test]
    fn ignores_a_file_that_others_can_read() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pgpass");
        fs::write(&file, "*:*:*:*:secret\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(lookup(&file, wanted("h", "d")), None);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(lookup(&file, wanted("h", "d")).as_deref(), Some("secret"));
        assert_eq!(lookup(&dir.path().join("missing"), wanted("h", "d")), None);
        assert_eq!(lookup(dir.path(), wanted("h", "d")), None);
    }
}
