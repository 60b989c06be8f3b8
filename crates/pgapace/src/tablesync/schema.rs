//! Copying the publisher's schema to the subscriber with `pg_dump`, `psql` and `pg_restore` from
//! the PATH. Tables, and the objects that they need, are created before the table copy; indexes,
//! constraints and triggers after it.
//!
//! The progress is recorded. The first section is one transaction together with its record. The
//! second section cannot be one transaction; if it was interrupted, it is repeated, and existing
//! objects are ignored. A relation that only has the name of an index is not taken for it.
//!
//! If an interruption left tables under several snapshots, a row may refer to one that the stream brings; and
//! it may refer to a row that is not published, and never comes. Such a foreign key is created NOT VALID.
//! (Before 18, a partitioned table cannot have one.) Waiting for the stream would leave its table without
//! the constraint until then, and would need another stage of the subscription.
//!
//! The tools outlive a process that is killed. Their sessions are terminated before others begin.
//!
//! Tools of 17 and later set a parameter that servers before 17 lack. Its line is removed from the scripts for such a
//! subscriber. pg_restore cannot leave it out, so psql executes the second section too, one index after the other.

use std::collections::HashSet;
use std::fs::DirBuilder;
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use engine::table_name::TableName;
use wire::{Activity, ConnInfo, Rows, Session};

use crate::error::{Class, Failure, Result};
use crate::login_role::as_login_role;
use crate::publisher::publication::PublishedTable;
use crate::publisher::slot;
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::session::options_of_tools;
use crate::subscriber::state::{self, SchemaCopy, SubscriptionId};
use crate::table_name::sql_name;

const POLL: Duration = Duration::from_millis(20);
/// How long a session of an earlier process may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// Parameters that the tools get if the connection string has them. The tools must trust no server that
/// pgapace would not trust; one that is too old to know a parameter fails, and names it. The password goes
/// into the environment.
const KEYS: &[&str] = &[
    "host",
    "hostaddr",
    "port",
    "user",
    "dbname",
    "connect_timeout",
    "options",
    "passfile",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslcrl",
    "sslcertmode",
    "sslnegotiation",
    "channel_binding",
    "require_auth",
    "requirepeer",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "gssencmode",
    "krbsrvname",
    "target_session_attrs",
];
/// SQLSTATEs for existing objects: duplicate_table, duplicate_object, and a second primary key.
const EXISTS_ALREADY: [&str; 3] =
    [sqlstate::DUPLICATE_TABLE, sqlstate::DUPLICATE_OBJECT, sqlstate::INVALID_TABLE_DEFINITION];

/// A line in the head of the scripts that pg_dump and pg_restore of 17 and later write.
const NEWER_SETTING: &str = "SET transaction_timeout = 0;";
/// The first version of a server that accepts it.
const NEWER_SETTING_SINCE: u32 = 17;
/// Relations that may have objects of the second section.
const RELATIONS: &str = "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c \
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' \
      AND n.nspname NOT IN ('information_schema', 'pgapace')";
/// The subscriber has roles of its own.
const WITHOUT_ROLES: [&str; 2] = ["--no-owner", "--no-privileges"];
const OLD_PSQL: &str = "psql must be as new as pg_dump: install both from one package.";

/// The two servers of a schema copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SchemaCopier<'a> {
    pub(crate) publisher: &'a ConnInfo,
    pub(crate) subscriber: &'a ConnInfo,
    /// The subscriber's version.
    pub(crate) major: u32,
    pub(crate) id: SubscriptionId,
    /// Number of indexes that are built at the same time.
    pub(crate) jobs: usize,
    pub(crate) shutdown: &'a Shutdown,
    /// Shows that pgapace waits for a tool.
    pub(crate) activity: &'a Activity,
}

impl SchemaCopier<'_> {
    /// Creates the tables, in one transaction with the record.
    pub(crate) fn before(&self, control: &mut Session) -> Result<()> {
        end_leftovers(control, self.id)?;
        let directory = Directory::create()?;
        let file = directory.0.join("pre-data.sql");
        tracing::info!(event = "schema_copy_started", section = "pre-data", "copying the schema");
        self.dump("pre-data", "plain", &file, &[])?;
        self.adapt(&file)?;
        let record = format!(
            "UPDATE pgapace.subscription SET schema_copy = '{}' WHERE id = {}",
            SchemaCopy::After.name(),
            self.id.0
        );
        let mut psql = self.writing_tool("psql");
        psql.args(["--no-psqlrc", "--quiet", "--single-transaction", "-v", "ON_ERROR_STOP=1"])
            .arg("-f")
            .arg(&file)
            .args(["-c", &record]);
        let (succeeded, said) = self.run(&mut psql, "psql")?;
        if succeeded {
            return Ok(());
        }
        Err(Failure::new(
            Class::Subscriber,
            "the publisher's schema cannot be created on the subscriber",
        )
        .hint(hint_of(
            &said,
            "Nothing was created. Create the tables yourself, and omit --copy-schema.",
        ))
        .detail(said))
    }

    /// Creates indexes, constraints and triggers.
    pub(crate) fn after(
        &self,
        control: &mut Session,
        source: &mut Session,
        published: &[PublishedTable],
        begun: bool,
    ) -> Result<()> {
        end_leftovers(control, self.id)?;
        let directory = Directory::create()?;
        tracing::info!(event = "schema_copy_started", section = "post-data", "copying the schema");
        // Else all foreign keys are those of one snapshot of the publisher.
        let one_by_one = !begun
            && (has_several_snapshots(control, self.id)? || refer_elsewhere(source, published)?);
        let dump = directory.0.join("post-data.dump");
        self.dump_post_data(control, source, &dump)?;
        let script = directory.0.join("post-data.sql");
        self.convert(&dump, &script)?;
        let restores = !self.adapt(&script)? && !begun;
        if !begun {
            state::set_schema_copy(control, self.id, Some(SchemaCopy::Begun))?;
        }
        if restores {
            self.restore(&directory, &dump, one_by_one)?;
        }
        if !restores || one_by_one {
            // Nothing may exist yet.
            let first = !begun && !restores;
            self.execute_one_by_one(control, &directory, &script, first)?;
        }
        state::set_schema_copy(control, self.id, None)
    }

    /// Creates the objects of a dump, several at the same time. Foreign keys are left out if they are created
    /// one by one.
    fn restore(&self, directory: &Directory, dump: &Path, one_by_one: bool) -> Result<()> {
        let mut restore = self.writing_tool("pg_restore");
        restore.args(WITHOUT_ROLES).args(["--exit-on-error"]).arg(format!("--jobs={}", self.jobs));
        if one_by_one {
            restore.arg("--use-list").arg(self.list_without_foreign_keys(directory, dump)?);
        }
        let (succeeded, said) = self.run(restore.arg(dump), "pg_restore")?;
        if succeeded { Ok(()) } else { Err(not_created(said)) }
    }

    /// Creates the objects of a script that do not exist. If it is the `first` attempt, one that exists is an error.
    fn execute_one_by_one(
        &self,
        control: &mut Session,
        directory: &Directory,
        file: &Path,
        first: bool,
    ) -> Result<()> {
        let script = read(file)?;
        // Only to find names and foreign keys: psql executes the file with its own bytes.
        let script = String::from_utf8_lossy(&script);
        let mut errors = self.execute(file)?;
        if first && errors.iter().any(ScriptError::exists_already) {
            return Err(not_created(joined(&errors)));
        }
        refuse_other_relations(control, &errors, &script)?;
        errors.retain(|error| !error.exists_already());
        let keys: Vec<_> =
            errors.iter().filter_map(|error| invalid_foreign_key(error, &script)).collect();
        if !keys.is_empty() {
            self.create_not_valid(directory, &keys)?;
            // The script again: statements that depend on the foreign keys have failed.
            errors = self.execute(file)?;
            errors.retain(|error| !error.exists_already());
        }
        if errors.is_empty() { Ok(()) } else { Err(not_created(joined(&errors))) }
    }

    /// A tool that reads on the publisher.
    fn reading_tool(&self, name: &str) -> Command {
        tool(name, self.publisher, &application_name(self.id), None)
    }

    /// A tool that writes on the subscriber.
    fn writing_tool(&self, name: &str) -> Command {
        let options = options_of_tools(self.major);
        tool(name, self.subscriber, &application_name(self.id), Some(&options))
    }

    /// The table of contents of a dump, without foreign keys and comments on constraints.
    fn list_without_foreign_keys(&self, directory: &Directory, dump: &Path) -> Result<PathBuf> {
        let list = directory.0.join("post-data.list");
        let mut restore = Command::new("pg_restore");
        restore.arg("--list").arg("--file").arg(&list).arg(dump);
        quiet(&mut restore);
        let (succeeded, said) = self.run(&mut restore, "pg_restore")?;
        let failed = |said: String| Failure::internal(format!("cannot list a dump: {said}"));
        if !succeeded {
            return Err(failed(said));
        }
        let all = std::fs::read_to_string(&list).map_err(|error| failed(error.to_string()))?;
        let is_of_foreign_key = |line: &&str| {
            line.contains(" FK CONSTRAINT ")
                || line.contains(" COMMENT ") && line.contains(" CONSTRAINT ")
        };
        let chosen: Vec<_> = all.lines().filter(|line| !is_of_foreign_key(line)).collect();
        std::fs::write(&list, chosen.join("\n") + "\n")
            .map_err(|error| failed(error.to_string()))?;
        Ok(list)
    }

    /// Executes a script to its end. Returns the errors of its statements.
    fn execute(&self, file: &Path) -> Result<Vec<ScriptError>> {
        let mut psql = self.writing_tool("psql");
        psql.args(["--no-psqlrc", "--quiet", "-v", "VERBOSITY=sqlstate", "-f"]).arg(file);
        let (succeeded, said) = self.run(&mut psql, "psql")?;
        if succeeded { Ok(script_errors(&said, file)) } else { Err(not_created(said)) }
    }

    /// Creates foreign keys that are not checked for existing rows. The triggers that check new rows do
    /// not run in sessions that apply.
    fn create_not_valid(&self, directory: &Directory, keys: &[ForeignKey]) -> Result<()> {
        let file = directory.0.join("not-valid.sql");
        let statements: String =
            keys.iter().map(|key| format!("{} NOT VALID;\n", key.sql)).collect();
        let script = format!("SET client_encoding = 'UTF8';\nSET search_path = '';\n{statements}");
        write(&file, script.as_bytes())?;
        let mut errors = self.execute(&file)?;
        errors.retain(|error| !error.exists_already());
        if !errors.is_empty() {
            return Err(not_created(joined(&errors)));
        }
        for ForeignKey { table, constraint, .. } in keys {
            tracing::warn!(
                event = "foreign_key_not_valid",
                table,
                constraint,
                command = format!("ALTER TABLE {table} VALIDATE CONSTRAINT {constraint};"),
                "foreign key was created NOT VALID, because rows that it refers to are missing"
            );
        }
        Ok(())
    }

    /// Dumps what is created after the copy. Relations that the publisher has created since it was dumped
    /// first are left out, and named.
    fn dump_post_data(
        &self,
        control: &mut Session,
        source: &mut Session,
        file: &Path,
    ) -> Result<()> {
        // A relation that is created between both looks would be in the dump.
        let export = "SELECT pg_catalog.pg_export_snapshot()";
        let [_, exported, relations] = source
            .simple_each([slot::BEGIN_READING, export, RELATIONS])
            .map_err(|e| Failure::publisher(&e, "reading which relations exist"))?;
        let snapshot: String = field(&first_row(&exported, "pg_export_snapshot")?, 0)?;
        let left_out = absent(&names(&relations)?, &self.known_relations(control)?);
        let excluded = left_out.iter().map(|name| format!("--exclude-table={}", sql_name(name)));
        let mut options = vec![format!("--snapshot={snapshot}")];
        options.extend(excluded);
        self.dump("post-data", "custom", file, &options)?;
        source.simple("COMMIT").map_err(|e| Failure::publisher(&e, "releasing the snapshot"))?;
        if !left_out.is_empty() {
            let names: Vec<_> = left_out.iter().map(TableName::to_string).collect();
            tracing::warn!(
                event = "schema_left_out",
                relations = names.join(", "),
                "relations of the publisher that the subscriber lacks were left out of the schema copy"
            );
        }
        Ok(())
    }

    /// Relations of the subscriber, and the copied ones: of these, none is left out.
    fn known_relations(&self, control: &mut Session) -> Result<HashSet<TableName>> {
        let copied = format!(
            "SELECT schema_name, table_name FROM pgapace.relation \
             WHERE subscription = {} AND sync_lsn IS NOT NULL",
            self.id.0
        );
        let [relations, copied] = control
            .simple_each([RELATIONS, &copied])
            .map_err(|e| Failure::subscriber(&e, "reading which relations exist"))?;
        Ok(names(&relations)?.into_iter().chain(names(&copied)?).collect())
    }

    fn dump(&self, section: &str, format: &str, file: &Path, options: &[String]) -> Result<()> {
        let mut dump = self.reading_tool("pg_dump");
        // Large objects are in the section pre-data up to 16: without their contents, and with their oids. Later
        // versions know the option as --no-large-objects too.
        dump.args(WITHOUT_ROLES)
            .args(["--no-publications", "--no-subscriptions"])
            .args(["--no-blobs", "--exclude-schema=pgapace"])
            .arg(format!("--section={section}"))
            .arg(format!("--format={format}"))
            .args(options)
            .arg("--file")
            .arg(file);
        let (succeeded, said) = self.run(&mut dump, "pg_dump")?;
        if succeeded {
            return Ok(());
        }
        Err(Failure::new(Class::Publisher, "the publisher's schema cannot be read")
            .detail(said)
            .hint("pg_dump must have the publisher's major version, or a newer one."))
    }

    /// Makes a script of a dump.
    fn convert(&self, dump: &Path, script: &Path) -> Result<()> {
        let mut restore = Command::new("pg_restore");
        restore.args(WITHOUT_ROLES).arg("--file").arg(script).arg(dump);
        quiet(&mut restore);
        let (succeeded, said) = self.run(&mut restore, "pg_restore")?;
        if succeeded {
            return Ok(());
        }
        Err(Failure::internal(format!("cannot make a script of a dump: {said}")))
    }

    /// Removes from a script what the subscriber is too old for. Returns whether there was any.
    fn adapt(&self, script: &Path) -> Result<bool> {
        if self.major >= NEWER_SETTING_SINCE {
            return Ok(false);
        }
        let adapted = without_newer_setting(&read(script)?);
        if let Some(adapted) = &adapted {
            write(script, adapted)?;
        }
        Ok(adapted.is_some())
    }

    /// Runs a tool to its end. Returns whether it succeeded, and its error output.
    fn run(&self, command: &mut Command, name: &str) -> Result<(bool, String)> {
        let mut child = command.spawn().map_err(|error| {
            Failure::new(Class::Config, format!("cannot run {name}: {error}"))
                .hint("--copy-schema needs pg_dump, psql and pg_restore in the PATH.")
        })?;
        let mut errors = child.stderr.take();
        let read = move || {
            let mut said = Vec::new();
            if let Some(errors) = &mut errors {
                // Output that cannot be read is not shown.
                let _ = errors.read_to_end(&mut said);
            }
            String::from_utf8_lossy(&said).trim().to_owned()
        };
        let reader = match std::thread::Builder::new().name(name.to_owned()).spawn(read) {
            Ok(reader) => reader,
            Err(error) => {
                // It could not be heard.
                let ended = child.kill().and_then(|()| child.wait());
                tracing::debug!(?ended, name, "the tool was ended");
                return Err(Failure::refused_by_system("start a thread", &error));
            }
        };
        let ended = self.wait(&mut child, name);
        let said = reader.join().unwrap_or_default();
        Ok((ended?, said))
    }

    fn wait(&self, child: &mut Child, name: &str) -> Result<bool> {
        let failed = |error| Failure::internal(format!("waiting for {name}: {error}"));
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(status.success());
            }
            if self.shutdown.requested() {
                child.kill().map_err(failed)?;
                child.wait().map_err(failed)?;
                return Err(Failure::new(Class::Stopped, "stopped while copying the schema"));
            }
            self.activity.note();
            std::thread::sleep(POLL);
        }
    }
}

/// Relations of the publisher that are not known, in order.
fn absent(publisher: &[TableName], known: &HashSet<TableName>) -> Vec<TableName> {
    let mut absent: Vec<_> =
        publisher.iter().filter(|name| !known.contains(*name)).cloned().collect();
    absent.sort();
    absent
}

/// Reads schema and name of relations.
fn names(results: &[Rows]) -> Result<Vec<TableName>> {
    let rows = results.iter().flat_map(Rows::iter);
    rows.map(|row| Ok(TableName { schema: field(&row, 0)?, name: field(&row, 1)? })).collect()
}

/// An error of a statement, or of psql itself, about a line of a script.
#[derive(Debug, PartialEq, Eq)]
struct ScriptError {
    /// The last line of the statement, from 1 on.
    line: usize,
    sqlstate: String,
    said: String,
}

impl ScriptError {
    fn exists_already(&self) -> bool {
        EXISTS_ALREADY.contains(&self.sqlstate.as_str())
    }
}

fn joined(errors: &[ScriptError]) -> String {
    let said: Vec<_> = errors.iter().map(|error| error.said.as_str()).collect();
    said.join("; ")
}

/// The failure of a statement that creates an index, a constraint or a trigger.
fn not_created(said: String) -> Failure {
    let rest =
        "The tables are copied. Fix the cause, and start pgapace again: it creates the rest.";
    Failure::new(Class::Subscriber, "an index or constraint cannot be created on the subscriber")
        .hint(hint_of(&said, rest))
        .detail(said)
}

/// The hint after an error of psql; `otherwise` if psql understood the script.
fn hint_of(said: &str, otherwise: &'static str) -> &'static str {
    // The first command of scripts since the minor releases of August 2025.
    if said.contains("\\restrict") { OLD_PSQL } else { otherwise }
}

/// The script without the [`NEWER_SETTING`] in its head; `None` if it has none. The head ends at the first statement
/// that makes no setting.
fn without_newer_setting(script: &[u8]) -> Option<Vec<u8>> {
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

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file)
        .map_err(|error| Failure::internal(format!("cannot read {}: {error}", file.display())))
}

fn write(file: &Path, text: &[u8]) -> Result<()> {
    std::fs::write(file, text)
        .map_err(|error| Failure::internal(format!("cannot write {}: {error}", file.display())))
}

/// The lines of psql about a script that report an error.
///
/// With VERBOSITY=sqlstate, a line is `psql:FILE:LINE: ERROR:  42P07`. The word before the SQLSTATE is in
/// the server's language, so only the SQLSTATE counts. A line about the script without SQLSTATE is
/// psql's own error. After an error of the server psql continues, and exits with 0.
fn script_errors(said: &str, file: &Path) -> Vec<ScriptError> {
    let about = format!("psql:{}:", file.display());
    let errors = said.lines().filter_map(|said| {
        let line = said.strip_prefix(&about)?;
        let code = said.rsplit_once(":  ").map_or("", |(_, code)| code);
        if code.len() == 5 && matches!(code.get(..2), Some("00" | "01" | "02")) {
            return None;
        }
        let line = line.split_once(':').and_then(|(line, _)| line.parse().ok()).unwrap_or(0);
        Some(ScriptError { line, sqlstate: code.to_owned(), said: said.to_owned() })
    });
    errors.collect()
}

/// A foreign key of a script, as pg_dump writes it.
#[derive(Debug, PartialEq, Eq)]
struct ForeignKey {
    table: String,
    constraint: String,
    /// Without the semicolon.
    sql: String,
}

/// Refuses relations that have the name of an index of the script, and are not that index.
fn refuse_other_relations(
    control: &mut Session,
    errors: &[ScriptError],
    script: &str,
) -> Result<()> {
    let existing = errors.iter().filter(|error| error.sqlstate == sqlstate::DUPLICATE_TABLE);
    let indexes = existing.filter_map(|error| {
        let (index, table) = named_index(error, script)?;
        Some(format!("({}, {})", wire::quote_literal(&index), wire::quote_literal(&table)))
    });
    let indexes: Vec<_> = indexes.collect();
    if indexes.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "SELECT n.index, n.of FROM (VALUES {}) n (index, of) WHERE NOT EXISTS ( \
           SELECT FROM pg_catalog.pg_index i WHERE i.indexrelid = pg_catalog.to_regclass(n.index) \
             AND i.indrelid = pg_catalog.to_regclass(n.of)) ORDER BY 1 LIMIT 1",
        indexes.join(", ")
    );
    let results = control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "looking for the indexes of a schema copy"))?;
    let Some(row) = results.first().and_then(Rows::first) else { return Ok(()) };
    let (index, table): (String, String) = (field(&row, 0)?, field(&row, 1)?);
    Err(not_created(format!("another relation has the name of index {index} of table {table}")))
}

/// The name of an index that a statement would create, also for a constraint, and that of its table.
fn named_index(error: &ScriptError, script: &str) -> Option<(String, String)> {
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

/// The foreign key whose creation failed, because a row refers to one that does not exist.
fn invalid_foreign_key(error: &ScriptError, script: &str) -> Option<ForeignKey> {
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

/// Terminates sessions of tools that an earlier process has started, and waits until they have ended.
pub(crate) fn end_leftovers(control: &mut Session, id: SubscriptionId) -> Result<()> {
    let sql = format!(
        "SELECT pg_catalog.pg_terminate_backend({}, {}) \
         FROM pg_catalog.pg_stat_activity a \
         WHERE a.datname = pg_catalog.current_database() AND a.usename = session_user \
           AND a.application_name = {}",
        as_login_role("a.pid"),
        END_PATIENCE.as_millis(),
        wire::quote_literal(&application_name(id)),
    );
    control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "terminating sessions of an earlier schema copy"))?;
    Ok(())
}

/// The subscription is named by its number: of a long name, the server would cut the end.
fn application_name(id: SubscriptionId) -> String {
    format!("pgapace schema {}", id.0)
}

/// A tool with the connection string of a server. `options` go before its own.
fn tool(name: &str, info: &ConnInfo, application_name: &str, options: Option<&str>) -> Command {
    let given = |key: &str| info.get(key).map(str::to_owned);
    // The last one counts.
    let value = |key: &str| match (key, given(key), options) {
        ("options", Some(given), Some(ours)) => Some(format!("{given} {ours}")),
        ("options", None, Some(ours)) => Some(ours.to_owned()),
        (_, given, _) => given,
    };
    let parts: Vec<_> = KEYS
        .iter()
        .filter_map(|key| value(key).map(|value| (key, value)))
        .map(|(key, value)| format!("{key}='{}'", value.replace('\\', "\\\\").replace('\'', "\\'")))
        .collect();
    let mut command = Command::new(name);
    command
        .arg(format!("--dbname={}", parts.join(" ")))
        .arg("--no-password")
        .env("PGAPPNAME", application_name);
    quiet(&mut command);
    match info.get("password") {
        Some(password) => command.env("PGPASSWORD", password),
        None => command.env_remove("PGPASSWORD"),
    };
    command
}

/// Only the errors of the tool are read.
fn quiet(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
}

/// Whether the tables were copied under more than one snapshot.
fn has_several_snapshots(control: &mut Session, id: SubscriptionId) -> Result<bool> {
    let sql = format!(
        "SELECT pg_catalog.count(DISTINCT sync_lsn) > 1 FROM pgapace.relation \
         WHERE subscription = {}",
        id.0
    );
    let results = control
        .simple(&sql)
        .map_err(|e| Failure::subscriber(&e, "reading the snapshots of the tables"))?;
    boolean(&first_row(&results, "count")?, 0)
}

/// Whether a published table has a foreign key that refers to a table of which not all rows are published.
fn refer_elsewhere(source: &mut Session, published: &[PublishedTable]) -> Result<bool> {
    let oids = |tables: &mut dyn Iterator<Item = &PublishedTable>| {
        let oids: Vec<_> = tables.map(|table| table.oid.to_string()).collect();
        format!("'{{{}}}'::pg_catalog.oid[]", oids.join(","))
    };
    let all = oids(&mut published.iter());
    let whole = oids(&mut published.iter().filter(|table| table.filters.is_empty()));
    // A partition has the foreign keys of its partitioned table, and its rows are published under either name.
    let sql = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_constraint c WHERE c.contype = 'f' \
           AND ARRAY(SELECT c.conrelid::pg_catalog.oid UNION \
             SELECT relid::pg_catalog.oid FROM pg_catalog.pg_partition_ancestors(c.conrelid)) && {all} \
           AND NOT ARRAY(SELECT c.confrelid::pg_catalog.oid UNION \
             SELECT relid::pg_catalog.oid FROM pg_catalog.pg_partition_ancestors(c.confrelid)) && {whole})"
    );
    let results = source
        .simple(&sql)
        .map_err(|e| Failure::publisher(&e, "reading foreign keys of published tables"))?;
    boolean(&first_row(&results, "EXISTS")?, 0)
}

/// A private directory, removed when dropped.
struct Directory(PathBuf);

impl Directory {
    fn create() -> Result<Self> {
        let nanos = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        let path =
            std::env::temp_dir().join(format!("pgapace-schema-{}-{nanos}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            Failure::internal(format!("cannot create directory {}: {error}", path.display()))
        })?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(
                event = "directory_left",
                directory = %self.0.display(),
                %error,
                "could not remove a temporary directory"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use wire::ConnInfo;

    use super::{
        NEWER_SETTING, ScriptError, invalid_foreign_key, named_index, script_errors, tool,
        without_newer_setting,
    };

    #[test]
    fn errors_of_a_script_are_judged_by_their_sqlstate() {
        let said = "WARNING: password file \"/p\" has group or world access\n\
                    psql:/tmp/s.sql:2: ERROR:  42P07\n\
                    psql:/tmp/s.sql:3: ERREUR:  42710\n\
                    psql:/tmp/s.sql:4: FEHLER:  23505\n\
                    psql:/tmp/s.sql:5: ERROR:  42P16\n\
                    psql:/tmp/s.sql:6: HINWEIS:  00000\n\
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
                error(4, "23505", "FEHLER:  23505"),
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

    #[test]
    fn the_tools_check_the_server_as_pgapace_does() {
        let text = "host=/tmp dbname=d channel_binding=require requirepeer=postgres \
                    sslnegotiation=direct sslmode=verify-full require_auth=scram-sha-256 sslcertmode=disable";
        let given = |text: &str| {
            let info = ConnInfo::parse_with_env(text, &|_| None, None).unwrap();
            let command = tool("psql", &info, "", Some("-c a=x\\ y"));
            command.get_args().next().unwrap().to_string_lossy().into_owned()
        };
        let argument = given(text);
        for parameter in [
            "channel_binding='require'",
            "requirepeer='postgres'",
            "sslnegotiation='direct'",
            "require_auth='scram-sha-256'",
            "sslcertmode='disable'",
        ] {
            assert!(argument.contains(parameter), "{parameter}: {argument}");
        }
        assert!(argument.contains("options='-c a=x\\\\ y'"), "{argument}");
        let argument = given("host=/tmp dbname=d options='-c b=z'");
        assert!(argument.contains("options='-c b=z -c a=x\\\\ y'"), "{argument}");
        assert!(!argument.contains("ssl") && !argument.contains("require"), "{argument}");
    }
}
