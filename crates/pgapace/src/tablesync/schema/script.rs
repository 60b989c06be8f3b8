//! What the scripts of pg_dump and pg_restore say, and what psql says about them.

use std::path::Path;

use crate::sqlstate;

/// SQLSTATEs for existing objects: duplicate_table, duplicate_object, and a second primary key.
const EXISTS_ALREADY: [&str; 3] =
    [sqlstate::DUPLICATE_TABLE, sqlstate::DUPLICATE_OBJECT, sqlstate::INVALID_TABLE_DEFINITION];
/// A line in the head of the scripts that pg_dump and pg_restore of 17 and later write.
const NEWER_SETTING: &str = "SET transaction_timeout = 0;";
/// The first version of a server that accepts it.
pub(super) const NEWER_SETTING_SINCE: u32 = 17;

/// An error of a statement, or of psql itself, about a line of a script.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ScriptError {
    /// The last line of the statement, from 1 on.
    line: usize,
    pub(super) sqlstate: String,
    said: String,
}

impl ScriptError {
    pub(super) fn exists_already(&self) -> bool {
        EXISTS_ALREADY.contains(&self.sqlstate.as_str())
    }
}

pub(super) fn joined(errors: &[ScriptError]) -> String {
    let said: Vec<_> = errors.iter().map(|error| error.said.as_str()).collect();
    said.join("; ")
}

/// The lines of psql about a script that report an error.
///
/// With VERBOSITY=verbose, a line is `psql:FILE:LINE: ERROR:  42P07: MESSAGE`, and lines follow that quote rows. The word
/// before the SQLSTATE is in the server's language, so only the SQLSTATE counts. A line about the script without SQLSTATE is
/// psql's own error. After an error of the server psql continues, and exits with 0.
pub(super) fn script_errors(said: &str, file: &Path) -> Vec<ScriptError> {
    let about = format!("psql:{}:", file.display());
    let errors = said.lines().filter_map(|said| {
        let line = said.strip_prefix(&about)?;
        let code = said.split_once(":  ").and_then(|(_, said)| said.split(':').next());
        let code = code.filter(|code| code.len() == 5).unwrap_or_default();
        if matches!(code.get(..2), Some("00" | "01" | "02")) {
            return None;
        }
        let line = line.split_once(':').and_then(|(line, _)| line.parse().ok()).unwrap_or(0);
        Some(ScriptError { line, sqlstate: code.to_owned(), said: said.to_owned() })
    });
    errors.collect()
}

/// The lines of a table of contents that are chosen.
pub(super) fn chosen(contents: &[u8], is_chosen: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    contents
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| is_chosen(line))
        .flatten()
        .copied()
        .collect()
}

/// Whether a line of a table of contents is of a foreign key, or of a comment on a constraint.
pub(super) fn is_of_foreign_key(line: &[u8]) -> bool {
    contains(line, " FK CONSTRAINT ")
        || contains(line, " COMMENT ") && contains(line, " CONSTRAINT ")
}

/// Whether a line of a table of contents is of an event trigger.
pub(super) fn is_of_event_trigger(line: &[u8]) -> bool {
    contains(line, " EVENT TRIGGER ")
}

fn contains(line: &[u8], text: &str) -> bool {
    line.windows(text.len()).any(|window| window == text.as_bytes())
}

/// The script without the [`NEWER_SETTING`] in its head; `None` if it has none. The head ends at the first statement
/// that makes no setting.
pub(super) fn without_newer_setting(script: &[u8]) -> Option<Vec<u8>> {
    const HEAD: [&str; 4] = ["--", "SET ", "SELECT pg_catalog.set_config(", "\\restrict "];
    let mut start = 0;
    for line in script.split_inclusive(|byte| *byte == b'\n') {
        let text = line.trim_ascii_end();
        if text == NEWER_SETTING.as_bytes() {
            return Some([&script[..start], &script[start + line.len()..]].concat());
        }
        if !text.is_empty() && !HEAD.iter().any(|begin| text.starts_with(begin.as_bytes())) {
            return None;
        }
        start += line.len();
    }
    None
}

/// The name of an index that a statement would create, also for a constraint, and that of its table.
pub(super) fn named_index(error: &ScriptError, script: &str) -> Option<(String, String)> {
    let lines: Vec<_> = script.lines().take(error.line).collect();
    let begins = |line: &&str| line.starts_with("ALTER TABLE ") || line.starts_with("CREATE ");
    let sql = lines[lines.iter().rposition(begins)?..].join("\n");
    let without_only = |rest: &str| rest.strip_prefix("ONLY ").unwrap_or(rest).to_owned();
    let (index, schema, table) = if let Some(rest) = sql.strip_prefix("ALTER TABLE ") {
        let rest = without_only(rest);
        let (schema, table, rest) = qualified(&rest)?;
        let (constraint, _) = identifier(rest.strip_prefix("\n    ADD CONSTRAINT ")?)?;
        (constraint.to_owned(), schema.to_owned(), table.to_owned())
    } else {
        let rest = sql.strip_prefix("CREATE ")?;
        let rest = rest.strip_prefix("UNIQUE ").unwrap_or(rest).strip_prefix("INDEX ")?;
        let (index, rest) = identifier(rest)?;
        let rest = without_only(rest.strip_prefix(" ON ")?);
        let (schema, table, _) = qualified(&rest)?;
        (index.to_owned(), schema.to_owned(), table.to_owned())
    };
    // A name of another encoding cannot be looked for.
    let names = (format!("{schema}.{index}"), format!("{schema}.{table}"));
    let lossy = |name: &String| name.contains(char::REPLACEMENT_CHARACTER);
    (!lossy(&names.0) && !lossy(&names.1)).then_some(names)
}

/// Splits schema and name, as they are written, from what follows.
fn qualified(text: &str) -> Option<(&str, &str, &str)> {
    let (schema, rest) = identifier(text)?;
    let (name, rest) = identifier(rest.strip_prefix('.')?)?;
    Some((schema, name, rest))
}

/// Splits an identifier, as it is written, from what follows.
fn identifier(text: &str) -> Option<(&str, &str)> {
    let end = match text.strip_prefix('"') {
        None => text.find([' ', '.', '(', ';', '\n']).unwrap_or(text.len()),
        Some(quoted) => {
            let mut rest = quoted;
            loop {
                // Two quotes stand for one.
                rest = &rest[rest.find('"')? + 1..];
                match rest.strip_prefix('"') {
                    Some(after) => rest = after,
                    None => break text.len() - rest.len(),
                }
            }
        }
    };
    (end > 0).then(|| text.split_at(end))
}

/// A foreign key of a script, as pg_dump writes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ForeignKey {
    pub(super) table: String,
    pub(super) constraint: String,
    /// Without the semicolon.
    pub(super) sql: String,
}

/// The foreign key whose creation failed, because a row refers to one that does not exist.
pub(super) fn invalid_foreign_key(error: &ScriptError, script: &str) -> Option<ForeignKey> {
    if error.sqlstate != sqlstate::FOREIGN_KEY_VIOLATION {
        return None;
    }
    // Its name or its columns may have a line break.
    let lines: Vec<_> = script.lines().take(error.line).collect();
    let first = lines.iter().rposition(|line| line.starts_with("ALTER TABLE "))?;
    let statement = &lines[first..];
    if statement.iter().filter(|line| line.ends_with(';')).count() > 1 {
        return None;
    }
    let sql = statement.join("\n");
    if sql.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    let sql = sql.strip_suffix(';')?;
    let named = sql.strip_prefix("ALTER TABLE ")?;
    let named = named.strip_prefix("ONLY ").unwrap_or(named);
    let (table, rest) = named.split_once("\n    ADD CONSTRAINT ")?;
    let (constraint, _) = rest.split_once(" FOREIGN KEY ")?;
    let (table, constraint) = (table.to_owned(), constraint.to_owned());
    Some(ForeignKey { table, constraint, sql: sql.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{
        NEWER_SETTING, ScriptError, invalid_foreign_key, named_index, script_errors,
        without_newer_setting,
    };

    #[test]
    fn errors_of_a_script_are_judged_by_their_sqlstate() {
        let said = "WARNING: password file \"/p\" has group or world access\n\
                    psql:/tmp/s.sql:2: ERROR:  42P07: relation \"a:  b\" already exists\n\
                    LOCATION:  heap_create_with_catalog, heap.c:1164\n\
                    psql:/tmp/s.sql:3: ERREUR:  42710\n\
                    psql:/tmp/s.sql:4: FEHLER:  23505: doppelt\n\
                    DETAIL:  Key (a)=(1)\n\
                    psql:/tmp/s.sql:5: ERROR:  42P16\n\
                    psql:/tmp/s.sql:6: HINWEIS:  00000: gut\n\
                    psql:/tmp/s.sql:7: WARNUNG:  01000\n\
                    psql:/tmp/s.sql:8: error: invalid command \\restrict";
        let error = |line, sqlstate: &str, said: &str| ScriptError {
            line,
            sqlstate: sqlstate.to_owned(),
            said: format!("psql:/tmp/s.sql:{line}: {said}"),
        };
        let mut errors = script_errors(said, Path::new("/tmp/s.sql"));
        errors.retain(|error| !error.exists_already());
        assert_eq!(
            errors,
            [
                error(4, "23505", "FEHLER:  23505: doppelt"),
                error(8, "", "error: invalid command \\restrict")
            ]
        );
    }

    #[test]
    fn a_setting_of_newer_tools_is_removed_from_the_head_only() {
        let head = "--\n-- dump of 17.6\n--\n\n\\restrict abc\nSET lock_timeout = 0;\n";
        let rest = "SELECT pg_catalog.set_config('search_path', '', false);\n\
                    CREATE FUNCTION public.f() RETURNS void LANGUAGE sql AS '\n";
        let newer = format!("{head}{NEWER_SETTING}\n{rest}{NEWER_SETTING}\n';\n");
        let adapted = format!("{head}{rest}{NEWER_SETTING}\n';\n");
        assert_eq!(without_newer_setting(newer.as_bytes()), Some(adapted.clone().into_bytes()));
        assert_eq!(without_newer_setting(adapted.as_bytes()), None);
        assert_eq!(without_newer_setting(b"SET x = 0;\n"), None);
    }

    #[test]
    fn a_foreign_key_that_fails_is_found_in_the_script() {
        let script = "SET x = y;\n\nALTER TABLE ONLY s.child\n    ADD CONSTRAINT \"a b\" FOREIGN KEY (p) \
                      REFERENCES s.parent(id) ON DELETE CASCADE;\n\n\n--\nCREATE INDEX i ON t (a);\n";
        let failed = |line, sqlstate: &str| {
            let (sqlstate, said) = (sqlstate.to_owned(), String::new());
            invalid_foreign_key(&ScriptError { line, sqlstate, said }, script)
        };
        let key = failed(4, "23503").unwrap();
        assert_eq!((key.table.as_str(), key.constraint.as_str()), ("s.child", "\"a b\""));
        assert!(key.sql.starts_with("ALTER TABLE ONLY s.child\n"), "{}", key.sql);
        assert!(key.sql.ends_with("ON DELETE CASCADE"), "{}", key.sql);
        assert_eq!(failed(4, "42830"), None);
        assert_eq!(failed(8, "23503"), None);
        assert_eq!(failed(1, "23503"), None);
    }

    #[test]
    fn an_index_that_exists_is_found_in_the_script() {
        let script = "SET x = y;\n\nALTER TABLE ONLY s.\"a \"\"b\"\n    ADD CONSTRAINT \"a.b\" UNIQUE (p);\n\n\n\
                      CREATE INDEX i ON s.t USING btree (a);\nCREATE UNIQUE INDEX \"x\ny\" ON ONLY s.t USING \
                      btree (a);\nCREATE TRIGGER t AFTER INSERT ON s.t;\n";
        let named = |line| {
            let (sqlstate, said) = ("42P07".to_owned(), String::new());
            named_index(&ScriptError { line, sqlstate, said }, script)
        };
        let names = |index: &str, table: &str| Some((index.to_owned(), table.to_owned()));
        assert_eq!(named(4), names("s.\"a.b\"", "s.\"a \"\"b\""));
        assert_eq!(named(7), names("s.i", "s.t"));
        assert_eq!(named(9), names("s.\"x\ny\"", "s.t"));
        assert_eq!(named(10), None);
        assert_eq!(named(1), None);
    }
}
