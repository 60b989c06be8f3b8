//! One pair of sessions: the publisher's, which reads under the snapshot, and the subscriber's. They
//! are used for one job after the other; after a failure they are opened anew.

use rustc_hash::FxHashSet;
use wire::{Reply, Session, quote_ident};

use crate::error::{Class, Failure, Result};
use crate::subscriber::catalogue::{boolean, field, first_row};
use crate::subscriber::format::{MISREAD_HINT, MisreadColumn, Search, has_infinite_interval};
use crate::subscriber::session::Purpose;
use crate::subscriber::state::name_array;
use crate::subscriber::state::ownership;
use crate::tablesync::SyncContext;
use crate::tablesync::indexes;
use crate::tablesync::plan::{Item, Part};
use crate::tablesync::progress::Meter;
use crate::tablesync::snapshot::Snapshot;
use crate::tablesync::table_state::{self, Complete, Owner};

/// Tables after which the publisher's session starts a new transaction under the same snapshot:
/// until then it holds a lock on each of them.
const TABLES_PER_TRANSACTION: usize = 300;
/// Queued data of a batch that is sent before the rest is read.
const QUEUE_BYTES: usize = 4 << 20;

/// What is copied between two looks of the meter.
const METERED_BYTES: u64 = 64 << 10;

/// Which of these tables ANALYZE takes: for all of a table's partitions too, the role must be the
/// owner's, or that of the owner of the database, or hold MAINTAIN (`vacuum_is_permitted_for_relation`).
const MAY_ANALYZE_SQL: &str = "\
WITH RECURSIVE tree AS (
  SELECT w.ord, c.oid, c.relkind, c.relowner
  FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, table_name, ord)
  JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema_name
  JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.table_name
  UNION ALL
  SELECT t.ord, p.oid, p.relkind, p.relowner
  FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND t.relkind = 'p'
  JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid
)
SELECT t.ord
FROM tree t
JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
GROUP BY t.ord
HAVING pg_catalog.bool_and(pg_catalog.pg_has_role(t.relowner, 'USAGE')
  OR pg_catalog.pg_has_role(d.datdba, 'USAGE') {MAINTAIN})";

/// What becomes of a job that failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The table has changed on the publisher since the snapshot: it needs another one.
    Changed(Failure),
    /// The table cannot be copied; others can.
    Table(Failure),
    /// The table cannot be copied with its indexes behind its rows.
    Indexes(Failure),
    /// Nothing can be copied now.
    Run(Failure),
}

/// Sessions of one worker.
pub(super) struct Lane {
    source: Session,
    subscriber: Session,
    /// Tables that the publisher's transaction has touched.
    touched: usize,
}

/// What a job has moved.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moved {
    pub(super) rows: u64,
    pub(super) bytes: u64,
}

impl Lane {
    pub(super) fn open(context: SyncContext<'_>, snapshot: &Snapshot) -> Result<Self> {
        let source = snapshot.open(context.publisher)?;
        let mut subscriber = context.subscriber.connect(Purpose::Copy)?;
        // A later run ends this session, or waits for it, before it looks at the tables.
        ownership::join(&mut subscriber, context.id)?;
        Ok(Self { source, subscriber, touched: 0 })
    }

    pub(super) fn cancel_handles(&self) -> [wire::CancelHandle; 2] {
        [self.source.cancel_handle(), self.subscriber.cancel_handle()]
    }

    /// Copies small tables in one transaction of the subscriber, in two round trips.
    pub(super) fn batch(
        &mut self,
        items: &[&Item],
        owner: Owner,
        snapshot: &Snapshot,
        meter: &Meter,
    ) -> std::result::Result<Vec<Moved>, Trouble> {
        self.renew(snapshot, items.len()).map_err(Trouble::Run)?;
        items.iter().try_for_each(|item| self.refuse_misread(item))?;
        let what = || match items {
            [one] => one.published.display_name(),
            _ => format!("{} small tables", items.len()),
        };
        let from = |e: &wire::Error| publisher_trouble(e, &format!("copying {}", what()));
        let into = |e: &wire::Error| subscriber_trouble(e, &format!("copying into {}", what()));
        let copies: Vec<_> = items
            .iter()
            .map(|item| format!("COPY {} TO STDOUT{}", item.parts[0].source, format_of(item)))
            .collect();
        let relations = || items.iter().flat_map(|item| &item.relations);
        self.source.queue_simple(&format!("{}; {}", look(items), copies.join("; ")));
        self.source.flush().map_err(|e| from(&e))?;
        let now = self.read_filenodes().map_err(|e| from(&e))?;
        if now.iter().ne(relations().map(|relation| &relation.filenode)) {
            // What comes of the COPYs is not read: the caller opens another session.
            return Err(Trouble::Changed(rewritten(&what())));
        }
        queue_statement(&mut self.subscriber, "BEGIN").map_err(|e| into(&e))?;
        let mut moved = Vec::with_capacity(items.len());
        let mut complete = Complete::default();
        for item in items {
            queue_statement(&mut self.subscriber, &copy_in(item)).map_err(|e| into(&e))?;
            let source = &mut self.source;
            let searched = searched(item);
            let mut found = false;
            let one = self
                .subscriber
                .queue_copy_data(|data| {
                    let mut one = Moved::default();
                    loop {
                        match source.next_reply()? {
                            Reply::CopyData(bytes) => {
                                found |=
                                    searched.is_some() && has_infinite_interval(bytes, item.binary);
                                data.put(bytes);
                                data.end_row();
                                one.bytes += bytes.len() as u64;
                            }
                            Reply::CommandComplete(tag) => {
                                one.rows = wire::affected_rows(tag);
                                return Ok(one);
                            }
                            Reply::Error(error) => return Err(wire::Error::Server(error)),
                            _ => {}
                        }
                    }
                })
                .map_err(|e| from(&e))?;
            if let Some(column) = searched.filter(|_| found) {
                return Err(misread(item, column));
            }
            complete.push(&item.published, one.rows, item.generation);
            meter.add(item.bytes);
            moved.push(one);
            if self.subscriber.queued() > QUEUE_BYTES {
                self.subscriber.flush().map_err(|e| into(&e))?;
            }
        }
        end_of_statement(&mut self.source).map_err(|e| from(&e))?;
        let queued = complete
            .queue(&mut self.subscriber, owner, snapshot.lsn)
            .and_then(|()| queue_statement(&mut self.subscriber, "COMMIT"));
        queued.map_err(|e| into(&e))?;
        self.subscriber.queue_sync();
        self.subscriber.flush().map_err(|e| into(&e))?;
        end_of_statement(&mut self.subscriber).map_err(|e| into(&e))?;
        Ok(moved)
    }

    /// Copies a table, or a part of one, in a transaction of the subscriber.
    ///
    /// `indexes_after`: what can be built after the rows is.
    pub(super) fn part(
        &mut self,
        item: &Item,
        part: &Part,
        indexes_after: bool,
        owner: Owner,
        snapshot: &Snapshot,
        meter: &Meter,
    ) -> std::result::Result<Moved, Trouble> {
        self.renew(snapshot, 1).map_err(Trouble::Run)?;
        self.refuse_misread(item)?;
        let name = item.published.display_name();
        let from = |e: &wire::Error| publisher_trouble(e, &format!("copying {name}"));
        let into = |e: &wire::Error| subscriber_trouble(e, &format!("copying into {name}"));
        // Parts: the table is locked by who planned them.
        if !item.is_split() {
            self.source.queue_simple(&look(&[item]));
            self.source.flush().map_err(|e| from(&e))?;
            let now = self.read_filenodes().map_err(|e| from(&e))?;
            end_of_statement(&mut self.source).map_err(|e| from(&e))?;
            if now.iter().ne(item.relations.iter().map(|relation| &relation.filenode)) {
                return Err(Trouble::Changed(rewritten(&name)));
            }
        }
        let removed = if indexes_after {
            indexes::begin_without(&mut self.subscriber, owner.id, &item.subscriber)?
        } else {
            self.subscriber.simple("BEGIN").map_err(|e| into(&e))?;
            None
        };
        let moved = if item.published.columns.is_empty() {
            self.rows_without_columns(item)?
        } else {
            self.stream(item, part, meter)?
        };
        if let Some(removed) = removed {
            meter.set_building();
            removed.build(&mut self.subscriber)?;
        }
        let recorded = if item.is_split() {
            let rows = moved.rows;
            table_state::part_done(
                &mut self.subscriber,
                owner,
                &item.published,
                item.generation,
                rows,
            )
            .map(|_| ())
        } else {
            let mut complete = Complete::default();
            complete.push(&item.published, moved.rows, item.generation);
            complete.record(&mut self.subscriber, owner, snapshot.lsn)
        };
        recorded.map_err(Trouble::Run)?;
        self.subscriber.simple("COMMIT").map_err(|e| into(&e))?;
        Ok(moved)
    }

    /// Collects statistics: without them the first queries on the subscriber would be planned badly.
    /// Each table has a statement of its own, so that one whose statistics cannot be computed (an
    /// expression of CREATE STATISTICS may fail for a row) leaves the others theirs; autovacuum
    /// tries again later. Returns whether the sessions can be used again.
    pub(super) fn analyze(&mut self, items: &[&Item]) -> bool {
        let items = match self.may_analyze(items) {
            Ok(items) => items,
            Err(error) => {
                tracing::warn!(event = "analyze_failed", %error, "could not analyze copied tables");
                return false;
            }
        };
        let queued = items.iter().try_for_each(|item| {
            let sql = format!("ANALYZE {}", item.subscriber.sql_name());
            queue_statement(&mut self.subscriber, &sql)?;
            self.subscriber.queue_sync();
            Ok(())
        });
        if let Err(error) = queued.and_then(|()| self.subscriber.flush()) {
            tracing::warn!(event = "analyze_failed", %error, "could not analyze copied tables");
            return false;
        }
        items.iter().all(|item| {
            let Err(error) = end_of_statement(&mut self.subscriber) else { return true };
            tracing::warn!(
                event = "analyze_failed",
                table = item.published.display_name(),
                sqlstate = error.sqlstate(),
                %error,
                "could not analyze copied table"
            );
            error.server_error().is_some_and(|error| !error.is_fatal())
        })
    }

    /// The tables that the role may analyze: for others the server would log a warning.
    fn may_analyze<'i>(&mut self, items: &[&'i Item]) -> wire::Result<Vec<&'i Item>> {
        let (schemas, names): (Vec<_>, Vec<_>) = items
            .iter()
            .map(|item| (item.published.schema.clone(), item.published.name.clone()))
            .unzip();
        let maintain = if self.subscriber.server_version().major() >= 17 {
            "OR pg_catalog.has_table_privilege(t.oid, 'MAINTAIN')"
        } else {
            ""
        };
        let rows = self.subscriber.query(
            &MAY_ANALYZE_SQL.replace("{MAINTAIN}", maintain),
            &[Some(&name_array(&schemas)), Some(&name_array(&names))],
        )?;
        let may: FxHashSet<usize> =
            rows.iter().filter_map(|row| row.get(0).and_then(|text| text.parse().ok())).collect();
        let chosen = items.iter().enumerate().filter(|(index, _)| may.contains(&(index + 1)));
        Ok(chosen.map(|(_, item)| *item).collect())
    }

    /// A table with a value that would be read as another one is not copied.
    fn refuse_misread(&mut self, item: &Item) -> std::result::Result<(), Trouble> {
        for column in &item.misread {
            let Search::Condition(condition) = &column.search else { continue };
            let sql = item.published.any_row(condition);
            let name = item.published.display_name();
            let found = self
                .source
                .simple(&sql)
                .map_err(|e| publisher_trouble(&e, &format!("looking at the values of {name}")))?;
            let row = first_row(&found, "EXISTS").map_err(Trouble::Run)?;
            if boolean(&row, 0).map_err(Trouble::Run)? {
                return Err(misread(item, column));
            }
        }
        Ok(())
    }

    /// Bytes as they come.
    fn stream(
        &mut self,
        item: &Item,
        part: &Part,
        meter: &Meter,
    ) -> std::result::Result<Moved, Trouble> {
        let name = item.published.display_name();
        let from = |e: &wire::Error| publisher_trouble(e, &format!("copying {name}"));
        let into = |e: &wire::Error| subscriber_trouble(e, &format!("copying into {name}"));
        let sql = format!("COPY {} TO STDOUT{}", part.source, format_of(item));
        let mut out = self.source.copy_out(&sql).map_err(|e| from(&e))?;
        let mut input = self.subscriber.copy_in(&copy_in(item)).map_err(|e| into(&e))?;
        let (mut bytes, mut metered) = (0, 0);
        let searched = searched(item);
        loop {
            match out.next() {
                Ok(Some(data)) => {
                    if let Some(column) = searched
                        && has_infinite_interval(data, item.binary)
                    {
                        return Err(misread(item, column));
                    }
                    bytes += data.len() as u64;
                    // Not for each row: all workers count in one place.
                    if bytes - metered >= METERED_BYTES {
                        meter.add(bytes - metered);
                        metered = bytes;
                    }
                    input.send(data).map_err(|e| into(&e))?;
                }
                Ok(None) => break,
                Err(error) => {
                    let trouble = from(&error);
                    if let Err(error) = input.abort("the publisher failed") {
                        tracing::debug!(%error, "ending the copy");
                    }
                    return Err(trouble);
                }
            }
        }
        meter.add(bytes - metered);
        let rows = input.finish().map_err(|e| into(&e))?;
        Ok(Moved { rows, bytes })
    }

    /// A table without columns has rows all the same; COPY has no way to say them.
    fn rows_without_columns(&mut self, item: &Item) -> std::result::Result<Moved, Trouble> {
        let name = item.published.display_name();
        let sql =
            format!("SELECT pg_catalog.count(*) FROM {} AS rows", item.published.copy_source());
        let results = self
            .source
            .simple(&sql)
            .map_err(|e| publisher_trouble(&e, &format!("counting {name}")))?;
        let rows: u64 = results
            .first()
            .and_then(wire::Rows::first)
            .and_then(|row| row.get(0).and_then(|text| text.parse().ok()))
            .ok_or_else(|| Trouble::Run(Failure::internal("count returned no number")))?;
        let sql = format!(
            "INSERT INTO {} SELECT FROM pg_catalog.generate_series(1, {rows})",
            item.subscriber.sql_name()
        );
        self.subscriber
            .simple(&sql)
            .map_err(|e| subscriber_trouble(&e, &format!("filling {name}")))?;
        Ok(Moved { rows, bytes: 0 })
    }

    /// Starts a new transaction on the publisher when the present one holds many locks.
    fn renew(&mut self, snapshot: &Snapshot, tables: usize) -> Result<()> {
        if self.touched + tables > TABLES_PER_TRANSACTION && self.touched > 0 {
            snapshot.import(&mut self.source, "COMMIT; ")?;
            self.touched = 0;
        }
        self.touched += tables;
        Ok(())
    }

    /// Takes the answers to [`look`].
    fn read_filenodes(&mut self) -> wire::Result<Vec<u32>> {
        let mut filenodes = Vec::new();
        let mut statements = 0;
        while statements < 2 {
            match self.source.next_reply()? {
                Reply::DataRow(row) => {
                    let text = row.get(0).and_then(|text| std::str::from_utf8(text).ok());
                    filenodes.push(text.and_then(|text| text.parse().ok()).unwrap_or(0));
                }
                Reply::CommandComplete(_) => statements += 1,
                Reply::Error(error) => return Err(wire::Error::Server(error)),
                _ => {}
            }
        }
        Ok(filenodes)
    }
}

/// Locks the tables and reads the file nodes that they have then: two statements. With the lock
/// nothing rewrites them any more.
pub(super) fn look(items: &[&Item]) -> String {
    let locks: Vec<_> = items.iter().map(|item| item.lock_name()).collect();
    let oids: Vec<_> = items
        .iter()
        .flat_map(|item| &item.relations)
        .map(|relation| relation.oid.to_string())
        .collect();
    format!(
        "LOCK TABLE {} IN ACCESS SHARE MODE; \
         SELECT coalesce(pg_catalog.pg_relation_filenode(o.oid), 0) \
         FROM pg_catalog.unnest('{{{}}}'::pg_catalog.oid[]) WITH ORDINALITY AS o (oid, ord) \
         ORDER BY o.ord",
        locks.join(", "),
        oids.join(",")
    )
}

/// Locks tables for as long as the session's transaction lasts; returns which of them were
/// rewritten since the snapshot.
pub(super) fn lock(source: &mut Session, items: &[&Item]) -> Result<Vec<bool>> {
    let failed = |e: &wire::Error| Failure::publisher(e, "locking tables that are to be copied");
    let results = source.simple(&look(items)).map_err(|e| failed(&e))?;
    let rows = results.get(1).ok_or_else(|| Failure::internal("a query returned nothing"))?;
    let now = rows.iter().map(|row| field(&row, 0)).collect::<Result<Vec<u32>>>()?;
    let mut now = now.into_iter();
    Ok(items
        .iter()
        .map(|item| {
            let same = item.relations.iter().filter(|r| now.next() == Some(r.filenode)).count();
            same < item.relations.len()
        })
        .collect())
}

/// The first column whose values are looked for in each row.
fn searched(item: &Item) -> Option<&MisreadColumn> {
    item.misread.iter().find(|column| column.search == Search::Row)
}

fn misread(item: &Item, column: &MisreadColumn) -> Trouble {
    let (name, column) = (item.published.display_name(), &column.name);
    let failure = Failure::new(
        Class::Apply,
        format!(
            "cannot copy {name}: the subscriber would read a value of column {column} as another value"
        ),
    );
    Trouble::Table(failure.hint(MISREAD_HINT))
}

pub(super) fn rewritten(name: &str) -> Failure {
    Failure::new(
        Class::Publisher,
        format!("{name} was truncated or rewritten on the publisher since the snapshot"),
    )
}

fn copy_in(item: &Item) -> String {
    let columns: Vec<_> = item.published.columns.iter().map(|c| quote_ident(&c.name)).collect();
    let (table, format) = (item.subscriber.sql_name(), format_of(item));
    format!("COPY {table} ({}) FROM STDIN{format}", columns.join(", "))
}

fn format_of(item: &Item) -> &'static str {
    if item.binary { " WITH (FORMAT binary)" } else { "" }
}

fn queue_statement(session: &mut Session, sql: &str) -> wire::Result<()> {
    session.queue_parse("", sql, &[]);
    session.queue_bind("", std::iter::empty())?;
    session.queue_execute();
    Ok(())
}

/// Takes replies up to ReadyForQuery.
fn end_of_statement(session: &mut Session) -> wire::Result<()> {
    let mut failed = None;
    loop {
        match session.next_reply()? {
            Reply::Ready(_) => return failed.map_or(Ok(()), Err),
            Reply::Error(error) => {
                let fatal = error.is_fatal();
                let error = wire::Error::Server(error);
                if fatal {
                    return Err(error);
                }
                failed.get_or_insert(error);
            }
            _ => {}
        }
    }
}

fn publisher_trouble(error: &wire::Error, doing: &str) -> Trouble {
    let failure = Failure::publisher(error, doing);
    match failure.sqlstate.as_deref() {
        _ if failure.transient => Trouble::Run(failure),
        // A table, a column, a schema that is gone.
        Some("42P01" | "42703" | "3F000") => Trouble::Changed(failure),
        _ => Trouble::Table(failure),
    }
}

pub(super) fn subscriber_trouble(error: &wire::Error, doing: &str) -> Trouble {
    let mut failure = Failure::subscriber(error, doing);
    if failure.sqlstate.as_deref() == Some("53100") {
        // The others may have room elsewhere, or need less.
        return Trouble::Table(failure.hint("Make room on the subscriber: it is tried again."));
    }
    if failure.transient {
        return Trouble::Run(failure);
    }
    if failure.sqlstate.as_deref().is_some_and(|code| matches!(code.get(..2), Some("22" | "23"))) {
        failure.class = Class::Apply;
    }
    // "COPY t, line 3, column id: …"
    if let Some(place) = error.server_error().and_then(|server| server.where_.as_deref()) {
        let place = place.lines().next().unwrap_or_default();
        let detail = failure.detail.take();
        failure = failure.detail(match detail {
            Some(detail) => format!("{detail} ({place})"),
            None => place.to_owned(),
        });
    }
    Trouble::Table(failure)
}
