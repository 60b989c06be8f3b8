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
//! Event triggers are created last, in one transaction with the record that all is created: no other statement of the
//! script runs under them, whatever was interrupted. One that forbids DDL would refuse it.
//!
//! The tools outlive a process that is killed. Their sessions are terminated before others begin.
//!
//! Tools of 17 and later set a parameter that servers before 17 lack. Its line is removed from the scripts for such a
//! subscriber. pg_restore cannot leave it out, so psql executes the second section too, one index after the other.

mod script;
mod tools;

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use engine::table_name::TableName;
use wire::{Activity, ConnInfo, Rows, Session};

use crate::error::{Class, Failure, Result};
use crate::publisher::publication::PublishedTable;
use crate::publisher::slot;
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::session::options_of_tools;
use crate::subscriber::state::{self, SchemaCopy, SubscriptionId};
use crate::table_name::sql_name;
use script::{
    ForeignKey, NEWER_SETTING_SINCE, ScriptError, chosen, invalid_foreign_key, is_of_event_trigger,
    is_of_foreign_key, joined, named_index, script_errors, without_newer_setting,
};
pub(crate) use tools::end_leftovers;
use tools::{Directory, application_name, quiet, tool};

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
        let file = directory.file("pre-data.sql");
        tracing::info!(event = "schema_copy_started", section = "pre-data", "copying the schema");
        self.dump("pre-data", "plain", &file, &[])?;
        self.adapt(&file)?;
        let record = format!(
            "UPDATE pgapace.subscription SET schema_copy = '{}' WHERE id = {}",
            SchemaCopy::After.name(),
            self.id.0
        );
        let (succeeded, said) = self.execute_with(&file, &record)?;
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
        let dump = directory.file("post-data.dump");
        self.dump_post_data(control, source, &dump)?;
        let contents = self.contents(&directory, &dump)?;
        let script = directory.file("post-data.sql");
        let others = directory.file("others.list");
        write(&others, &chosen(&contents, |line| !is_of_event_trigger(line)))?;
        self.convert(&dump, &others, &script)?;
        let restores = !self.adapt(&script)? && !begun;
        if !begun {
            state::set_schema_copy(control, self.id, Some(SchemaCopy::Begun))?;
        }
        if restores {
            if one_by_one {
                let kept = |line: &[u8]| !is_of_event_trigger(line) && !is_of_foreign_key(line);
                write(&others, &chosen(&contents, kept))?;
            }
            self.restore(&dump, &others)?;
        }
        if !restores || one_by_one {
            // Nothing may exist yet.
            let first = !begun && !restores;
            self.execute_one_by_one(control, &directory, &script, first)?;
        }
        let triggers = chosen(&contents, is_of_event_trigger);
        if !triggers.is_empty() {
            let list = directory.file("event-triggers.list");
            write(&list, &triggers)?;
            return self.create_event_triggers(&directory, &dump, &list);
        }
        state::set_schema_copy(control, self.id, None)
    }

    /// Creates the event triggers, in one transaction with the record that all is created.
    fn create_event_triggers(&self, directory: &Directory, dump: &Path, list: &Path) -> Result<()> {
        let script = directory.file("event-triggers.sql");
        self.convert(dump, list, &script)?;
        self.adapt(&script)?;
        let record =
            format!("UPDATE pgapace.subscription SET schema_copy = NULL WHERE id = {}", self.id.0);
        let (succeeded, said) = self.execute_with(&script, &record)?;
        if succeeded { Ok(()) } else { Err(not_created(said)) }
    }

    /// Executes a script in one transaction with a record.
    fn execute_with(&self, script: &Path, record: &str) -> Result<(bool, String)> {
        let mut psql = self.writing_tool("psql");
        psql.args(["--no-psqlrc", "--quiet", "--single-transaction", "-v", "ON_ERROR_STOP=1"])
            .arg("-f")
            .arg(script)
            .args(["-c", record]);
        self.run(&mut psql, "psql")
    }

    /// Creates the objects of a dump that are in the list, several at the same time.
    fn restore(&self, dump: &Path, list: &Path) -> Result<()> {
        let mut restore = self.writing_tool("pg_restore");
        restore.args(WITHOUT_ROLES).args(["--exit-on-error"]).arg(format!("--jobs={}", self.jobs));
        restore.arg("--use-list").arg(list);
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

    /// The table of contents of a dump. Its names have the encoding of the dump.
    fn contents(&self, directory: &Directory, dump: &Path) -> Result<Vec<u8>> {
        let list = directory.file("post-data.list");
        let mut restore = Command::new("pg_restore");
        restore.arg("--list").arg("--file").arg(&list).arg(dump);
        quiet(&mut restore);
        let (succeeded, said) = self.run(&mut restore, "pg_restore")?;
        if succeeded {
            return read(&list);
        }
        Err(Failure::internal(format!("cannot list a dump: {said}")))
    }

    /// Executes a script to its end. Returns the errors of its statements.
    fn execute(&self, file: &Path) -> Result<Vec<ScriptError>> {
        let mut psql = self.writing_tool("psql");
        psql.args(["--no-psqlrc", "--quiet", "-v", "VERBOSITY=verbose", "-f"]).arg(file);
        let (succeeded, said) = self.run(&mut psql, "psql")?;
        if succeeded { Ok(script_errors(&said, file)) } else { Err(not_created(said)) }
    }

    /// Creates foreign keys that are not checked for existing rows. The triggers that check new rows do
    /// not run in sessions that apply.
    fn create_not_valid(&self, directory: &Directory, keys: &[ForeignKey]) -> Result<()> {
        let file = directory.file("not-valid.sql");
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

    /// Makes a script of the objects of a dump that are in the list.
    fn convert(&self, dump: &Path, list: &Path, script: &Path) -> Result<()> {
        let mut restore = Command::new("pg_restore");
        restore.args(WITHOUT_ROLES).arg("--use-list").arg(list);
        restore.arg("--file").arg(script).arg(dump);
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
        tools::run(command, name, self.shutdown, self.activity)
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

fn read(file: &Path) -> Result<Vec<u8>> {
    std::fs::read(file)
        .map_err(|error| Failure::internal(format!("cannot read {}: {error}", file.display())))
}

fn write(file: &Path, text: &[u8]) -> Result<()> {
    std::fs::write(file, text)
        .map_err(|error| Failure::internal(format!("cannot write {}: {error}", file.display())))
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
