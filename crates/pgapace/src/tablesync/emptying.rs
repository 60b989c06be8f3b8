//! Emptying subscriber tables that hold rows before they are copied.
//!
//! `--truncate` is a decision of the user about rows that exist now. It names the table, and the
//! snapshot of the subscriber under which the table was found not to be empty. Rows that were
//! written later are not part of the decision, so a table with such rows is not emptied. For the
//! same reason the decision is valid only once: later, the rows of the copy are newer than the
//! snapshot.
//!
//! Nothing empties a table that another subscription changes too (`subscriber/other_subscriptions.rs`).

use std::str::FromStr;

use engine::table_name::TableName;
use wire::{Session, quote_literal};

use crate::cli::table_name::{argument, split};
use crate::error::{Class, Failure, Result};
use crate::publisher::dump_command::shell_quoted;
use crate::publisher::publication::PublishedTable;
use crate::sqlstate;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::citus;
use crate::subscriber::other_subscriptions;
use crate::subscriber::state::RelationState;
use crate::subscriber::state::ownership::OwnedEpoch;
use crate::subscriber::statement::truncate::truncate_or_delete;
use crate::subscriber::writer_tag::{Writer, WriterTag};
use crate::tablesync::SyncContext;
use crate::tablesync::subscriber_tables::{self, SubscriberTable};
use crate::tablesync::table_state::reset_sql;

/// Maximum number of tables that the hint lists one by one.
const NAMED: usize = 20;

/// The next step for a table that holds rows of another subscription.
const KEEP_HINT: &str = "\
If these are other rows, as those of another publisher: pass --if-not-empty keep to copy into the tables and keep \
their rows. Or drop the other subscription if it no longer applies changes.";

/// The next step for a table with rows of this subscription, too.
const SHARED_HINT: &str = "\
Nothing tells the rows of this subscription from theirs. To copy a table again, take it out of the publication, \
start pgapace, DELETE its rows of this publisher on the subscriber, and publish it again, with --if-not-empty keep. \
For all tables: pgapace drop, DELETE, and pgapace run --if-not-empty keep.";

/// The hint of a table that can be neither truncated nor emptied by DELETE.
const FIRES_HINT: &str = "\
If triggers of the foreign key are enabled for replica sessions (ENABLE ALWAYS or ENABLE REPLICA), deleting \
the rows would change rows of the other table. Empty both tables on the subscriber, or pgapace resync both; \
or ALTER TABLE … ENABLE TRIGGER … on the subscriber, for the triggers that pg_trigger shows for the \
referenced table with tgenabled A or R.";

/// One value of `--truncate`: `schema.table@snapshot`, or `schema.*@snapshot`. The name is read as in other arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TruncateDecision {
    schema: String,
    /// `None` for all published tables of the schema.
    table: Option<String>,
    /// A `pg_snapshot` of the subscriber, as text.
    snapshot: String,
}

impl FromStr for TruncateDecision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let explained = || {
            format!(
                "\"{text}\" is not schema.table@snapshot: start without --truncate, and copy the \
                 values from the error about tables that are not empty"
            )
        };
        let (name, snapshot) = text.rsplit_once('@').ok_or_else(explained)?;
        let is_snapshot = snapshot.split(':').count() == 3
            && snapshot.bytes().all(|b| b.is_ascii_digit() || b":,".contains(&b));
        let TableName { schema, name: table } = split(name);
        if !is_snapshot || schema.is_empty() || table.is_empty() {
            return Err(explained());
        }
        Ok(Self { schema, table: (table != "*").then_some(table), snapshot: snapshot.to_owned() })
    }
}

impl TruncateDecision {
    fn is_about(&self, table: &PublishedTable) -> bool {
        self.schema == table.name.schema
            && self.table.as_ref().is_none_or(|name| *name == table.name.name)
    }
}

/// A table that may be emptied, and the snapshot of the subscriber that the decision refers to.
pub(crate) type Emptied = (PublishedTable, String);

/// Checks that the tables to copy are empty, except those that the user decided to empty. Returns
/// the latter if they hold rows.
pub(crate) fn decide(
    session: &mut Session,
    subscription: &str,
    (published, subscribers): (&[PublishedTable], &[SubscriberTable]),
    decisions: &[TruncateDecision],
) -> Result<Vec<Emptied>> {
    // `s.t` takes precedence over `s.*`.
    let decision_about = |table: &PublishedTable| {
        let about = decisions.iter().filter(|decision| decision.is_about(table));
        about.max_by_key(|decision| decision.table.is_some())
    };
    for decision in decisions {
        if !published.iter().any(|table| decision.is_about(table)) {
            let table = decision.table.as_deref().unwrap_or("*");
            return Err(Failure::new(
                Class::Mismatch,
                format!("--truncate names {}.{table}, which is not published", decision.schema),
            )
            .hint("With publish_via_partition_root, use the name of the root table."));
        }
    }
    let filled = subscriber_tables::filled(session, subscribers)?;
    let all: Vec<_> = filled.iter().map(|index| &subscribers[*index]).collect();
    refuse_shared(session, subscription, &all, KEEP_HINT)?;
    let named = |index: &usize| decision_about(&published[*index]).is_some();
    if let Some(index) =
        filled.iter().find(|index| named(index) && subscribers[**index].is_managed_by_citus())
    {
        // Its rows are in shards: when they were written cannot be read.
        let table = subscribers[*index].name.to_string();
        return Err(Failure::new(
            Class::Mismatch,
            format!("--truncate cannot empty {table}, which Citus manages"),
        )
        .hint(format!("On the subscriber: TRUNCATE {};", subscribers[*index].sql_name())));
    }
    let (mut emptied, mut undecided, mut checks) = (Vec::new(), Vec::new(), Vec::new());
    for index in filled {
        match decision_about(&published[index]) {
            Some(decision) => {
                checks.push((&subscribers[index], decision.snapshot.as_str()));
                emptied.push((published[index].clone(), decision.snapshot.clone()));
            }
            None => undecided.push(&subscribers[index]),
        }
    }
    refuse(session, subscription, &undecided, true)?;
    expect_unwritten(session, &checks)?;
    Ok(emptied)
}

/// Returns an error with the possible next steps if any table holds rows. Some of them are only for the first start.
pub(crate) fn refuse(
    session: &mut Session,
    subscription: &str,
    filled: &[&SubscriberTable],
    first_start: bool,
) -> Result<()> {
    if filled.is_empty() {
        return Ok(());
    }
    refuse_shared(session, subscription, filled, KEEP_HINT)?;
    let names: Vec<_> = filled.iter().map(|table| table.name.to_string()).collect();
    let failure = Failure::new(
        Class::Mismatch,
        format!("subscriber tables are not empty: {}", names.join(", ")),
    );
    let with_rows = "pass --if-not-empty rebase to compare their rows with the publisher's and make them \
                     equal, or keep to copy into them and keep their rows";
    if !first_start {
        return Err(failure.hint(format!("TRUNCATE them on the subscriber; or {with_rows}.")));
    }
    let results = session
        .simple("SELECT pg_catalog.pg_current_snapshot()")
        .map_err(|e| Failure::subscriber(&e, "checking whether tables are empty"))?;
    let snapshot =
        first_row(&results, "pg_current_snapshot")?.get(0).unwrap_or_default().to_owned();
    let mut options: Vec<_> = if filled.len() <= NAMED {
        filled.iter().map(|table| argument(&table.name)).collect()
    } else {
        let all = |schema: &str| TableName { schema: schema.to_owned(), name: "*".to_owned() };
        filled.iter().map(|table| argument(&all(&table.name.schema))).collect()
    };
    options.dedup();
    let options: Vec<_> = options
        .iter()
        .map(|name| format!("--truncate {}", shell_quoted(&format!("{name}@{snapshot}"))))
        .collect();
    Err(failure.hint(format!(
        "TRUNCATE them on the subscriber; or let pgapace empty them once, if nothing writes to \
         them before, with {}; or {with_rows}; or pass --copy-data=false if they already hold the \
         publisher's rows as of the slot.",
        options.join(" ")
    )))
}

/// Returns an error if another subscription changes any of these tables, too.
pub(crate) fn refuse_shared(
    session: &mut Session,
    subscription: &str,
    tables: &[&SubscriberTable],
    hint: &str,
) -> Result<()> {
    let keys: Vec<_> = tables.iter().map(|table| table.name.clone()).collect();
    let what = "tables with rows of other subscriptions are not emptied";
    other_subscriptions::refuse(session, subscription, &keys, (what, hint))
}

/// Checks that no row of these tables was written after the table's snapshot.
fn expect_unwritten(session: &mut Session, tables: &[(&SubscriberTable, &str)]) -> Result<()> {
    // A row contains the lower 32 bits of the 64-bit transaction id that wrote it. The id is the
    // latest assigned one with these bits. Rows written by initdb are older than any snapshot.
    for (table, snapshot) in tables {
        let sql = format!(
            "SELECT EXISTS (SELECT FROM {table} t CROSS JOIN ( \
               SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) \
                 ::pg_catalog.text::pg_catalog.int8 AS next) n \
             WHERE NOT pg_catalog.pg_visible_in_snapshot(greatest(3, n.next \
               - ((n.next - t.xmin::pg_catalog.text::pg_catalog.int8) & 4294967295)) \
               ::pg_catalog.text::pg_catalog.xid8, {snapshot}::pg_catalog.pg_snapshot))",
            table = table.sql_only(),
            snapshot = quote_literal(snapshot)
        );
        let results =
            session.simple(&sql).map_err(|e| Failure::subscriber(&e, "checking for newer rows"))?;
        if boolean(&first_row(&results, "the check for newer rows")?, 0)? {
            return Err(Failure::new(
                Class::Mismatch,
                format!(
                    "rows of {} were written after the decision to empty the table",
                    table.name
                ),
            )
            .hint(
                "Find out what writes to the table. If the rows are not needed, TRUNCATE it, or \
                 start without --truncate to see the value to pass now.",
            ));
        }
    }
    Ok(())
}

/// Empties tables, and resets the state of their copy: tables in which an earlier copy left rows,
/// and tables that the user decided to empty.
pub(crate) fn empty(
    control: &mut Session,
    context: SyncContext<'_>,
    tables: &[(&SubscriberTable, Option<&RelationState>)],
) -> Result<()> {
    let shared: Vec<_> = tables.iter().map(|(table, _)| *table).collect();
    refuse_shared(control, context.subscription, &shared, SHARED_HINT)?;
    // The first copy worker has the same origin afterwards.
    let (tags, writer) = (context.options.tags, Writer::Copy(0));
    let tag = WriterTag::attach(control, context.id, tags, writer)?;
    let emptied = empty_tagged(control, context.owner(), tables);
    if let Some(tag) = tag {
        tag.release(control);
    }
    emptied
}

/// Empties the tables in one transaction if the server's lock table has room for them and their indexes,
/// because TRUNCATE wants tables that are linked by foreign keys together.
fn empty_tagged(
    control: &mut Session,
    owner: OwnedEpoch,
    tables: &[(&SubscriberTable, Option<&RelationState>)],
) -> Result<()> {
    let Err(failure) = empty_together(control, owner, tables) else {
        let shown: Vec<_> = tables.iter().map(|(table, _)| table.name.to_string()).collect();
        tracing::info!(
            event = "tables_emptied",
            tables = shown.join(", "),
            "tables were emptied before their copy"
        );
        return Ok(());
    };
    if control.is_broken() {
        return Err(failure);
    }
    control
        .simple("ROLLBACK")
        .map_err(|e| Failure::subscriber(&e, "emptying tables before their copy"))?;
    if failure.sqlstate.as_deref() != Some(sqlstate::OUT_OF_MEMORY) || tables.len() < 2 {
        return Err(failure);
    }
    let (some, others) = tables.split_at(tables.len() / 2);
    empty_tagged(control, owner, some)?;
    empty_tagged(control, owner, others)
}

fn empty_together(
    control: &mut Session,
    owner: OwnedEpoch,
    tables: &[(&SubscriberTable, Option<&RelationState>)],
) -> Result<()> {
    let names: Vec<_> = tables.iter().map(|(table, _)| &table.name).collect();
    let reset = reset_sql(owner, &names);
    let subscribers: Vec<_> = tables.iter().map(|(table, _)| table.sql_only()).collect();
    let decided: Vec<_> = tables
        .iter()
        .filter_map(|(table, state)| Some((*table, (*state)?.empty_snapshot.as_deref()?)))
        .collect();
    let failed = |e: &wire::Error| Failure::subscriber(e, "emptying tables before their copy");
    if !decided.is_empty() {
        // No session may write between the check and the end.
        let names: Vec<_> = decided.iter().map(|(table, _)| table.sql_only()).collect();
        control
            .simple(&format!("BEGIN; LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", names.join(", ")))
            .map_err(|e| failed(&e))?;
        expect_unwritten(control, &decided)?;
        control.simple("SAVEPOINT locked").map_err(|e| failed(&e))?;
    }
    let (undo, end) =
        if decided.is_empty() { ("", "") } else { ("ROLLBACK TO locked; ", "; COMMIT") };
    // Citus follows TRUNCATE only in this role.
    let role = if tables.iter().any(|(table, _)| table.is_managed_by_citus()) {
        format!("{}; ", citus::ORIGIN_ROLE)
    } else {
        String::new()
    };
    let truncate = format!("{role}TRUNCATE TABLE {}", subscribers.join(", "));
    match control.simple(&format!("{truncate}; {reset}{end}")) {
        Ok(_) => Ok(()),
        // A table that is not part of the copy references one of these.
        Err(error) if error.sqlstate() == Some(sqlstate::FEATURE_NOT_SUPPORTED) => {
            let oids: Vec<_> = tables.iter().map(|(table, _)| table.sql_oid()).collect();
            let delete = truncate_or_delete(&truncate, &subscribers, &oids.join(", "), "");
            let deleted = control.simple(&format!("{undo}{delete}; {reset}{end}"));
            deleted.map(|_| ()).map_err(|e| {
                let failure = failed(&e);
                if e.sqlstate() == Some(sqlstate::FEATURE_NOT_SUPPORTED) {
                    failure.hint(FIRES_HINT)
                } else {
                    failure
                }
            })
        }
        Err(error) => Err(failed(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::TruncateDecision;

    #[test]
    fn decisions_name_a_table_and_a_snapshot() {
        let of =
            |text: &str| text.parse::<TruncateDecision>().map(|d| (d.schema, d.table, d.snapshot));
        let found = |schema: &str, table: Option<&str>, snapshot: &str| {
            Ok((schema.to_owned(), table.map(str::to_owned), snapshot.to_owned()))
        };
        assert_eq!(of("public.t@753:753:"), found("public", Some("t"), "753:753:"));
        assert_eq!(of("t@7:9:7,8"), found("public", Some("t"), "7:9:7,8"));
        assert_eq!(of("a b.c@d.e@7:9:"), found("a b", Some("c@d.e"), "7:9:"));
        assert_eq!(of("s.*@7:9:"), found("s", None, "7:9:"));
        assert_eq!(of("\"we.ird\".\"t.x\"@7:9:"), found("we.ird", Some("t.x"), "7:9:"));
        assert_eq!(of("\"we.ird\".\"*\"@7:9:"), found("we.ird", None, "7:9:"));
        for wrong in ["", "true", "public.t", "public.t@", "public.t@now", "@7:9:", "t@7:9"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
