//! The pair of sessions of a copy worker: one on the publisher, which reads under the snapshot, and
//! one on the subscriber. They execute one job after another, and are opened again after a failure.
//!
//! A session of the subscriber may hold a lock on a table for hours. Meanwhile the publisher's session must hold no
//! lock: DDL of the publisher would wait for it, and every later query behind that DDL. So a table is locked on the
//! subscriber first, as the native table sync does. A lock on the publisher lasts until the rows are read. Small tables
//! that share round trips are read first, and wait for locks of the subscriber only for [`BATCH_PATIENCE`]. After that,
//! each of them is copied by itself.

use rustc_hash::FxHashSet;
use wire::{CopyIn, Param, Reply, Session, TransactionStatus, quote_ident};

use crate::apply::blockers::WatchedCopy;
use crate::error::{Class, Failure, Result};
use crate::sqlstate;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{boolean, first_row};
use crate::subscriber::format::{MISREAD_HINT, MisreadColumn, Search, has_infinite_interval};
use crate::subscriber::named::named;
use crate::subscriber::session::{BEGIN, Purpose, settings_sql};
use crate::subscriber::state::ownership::{self, OwnedEpoch};
use crate::subscriber::state::table_name_arrays;
use crate::subscriber::statement::copy::{CopiedColumns, TYPES_SQL, is_of_changed_types};
use crate::subscriber::writer_tag::{Writer, WriterTag};
use crate::tablesync::SyncContext;
use crate::tablesync::copy_display::Meter;
use crate::tablesync::copy_source::CopySource;
use crate::tablesync::foreign_keys;
use crate::tablesync::indexes;
use crate::tablesync::plan::{Item, Part};
use crate::tablesync::snapshot::Snapshot;
use crate::tablesync::table_state::{self, Complete};

/// How long a batch waits for a lock of another session of the subscriber.
const BATCH_PATIENCE: &str = "1s";
/// Bytes of queued data of a batch that are sent before more is read.
const QUEUE_BYTES: usize = 4 << 20;

/// Bytes copied between two updates of the meter.
const METERED_BYTES: u64 = 64 << 10;

/// Selects the tables that ANALYZE accepts. For all partitions of the table too, the role must own
/// it, own the database, or have MAINTAIN (`vacuum_is_permitted_for_relation` in `vacuum.c`).
const MAY_ANALYZE_SQL: &str = concat!(
    "\
WITH RECURSIVE tree AS (
  SELECT w.ord, c.oid, c.relkind, c.relowner
  FROM ROWS FROM (pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]))
    WITH ORDINALITY AS w (schema_name, table_name, ord)
  JOIN pg_catalog.pg_class c ON ",
    named!("c", "w.schema_name", "w.table_name"),
    "
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
  OR pg_catalog.pg_has_role(d.datdba, 'USAGE') {MAINTAIN})"
);

/// The consequence of a failed job.
#[derive(Debug)]
pub(super) enum JobFailure {
    /// The table has changed since the snapshot: on the publisher, or its definition on the subscriber. It is read
    /// again, and copied under another snapshot.
    Changed(Failure),
    /// The table cannot be copied, but others can.
    Table(Failure),
    /// The table cannot be copied with its indexes built after its rows.
    Indexes(Failure),
    /// Nothing can be copied now.
    Run(Failure),
}

/// The sessions of one worker.
pub(super) struct CopySessions {
    publisher: Session,
    subscriber: Session,
    tag: Option<WriterTag>,
    /// Makes the settings of the subscriber's session again. A trigger that fires for the rows of a copy may change
    /// them.
    settings: String,
    /// While others stream, the monitor sees whom the session waits for.
    _watched: Option<WatchedCopy>,
}

/// Rows and bytes that a job has copied.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Transferred {
    pub(super) rows: u64,
    pub(super) bytes: u64,
}

impl CopySessions {
    pub(super) fn open(
        context: SyncContext<'_>,
        snapshot: &Snapshot,
        number: usize,
    ) -> Result<Self> {
        let publisher = snapshot.open(context.publisher)?;
        let mut subscriber = context.subscriber.connect(Purpose::Copy)?;
        let watched = context.watch.map(|watch| watch.watch(subscriber.backend_pid()));
        // A later run terminates this session, or waits for its end, before it reads the tables'
        // state.
        ownership::join(&mut subscriber, context.id)?;
        context.subscriber.see_commits(&mut subscriber)?;
        let (tags, writer) = (context.options.tags, Writer::Copy(number));
        let tag = WriterTag::attach(&mut subscriber, context.id, tags, writer)?;
        let (citus, encoding) = (context.subscriber.has_citus(), context.subscriber.encoding());
        let settings = settings_sql(&subscriber, Purpose::Copy, citus, encoding);
        Ok(Self { publisher, subscriber, tag, settings, _watched: watched })
    }

    /// Ends the sessions of a worker that has no more jobs.
    pub(super) fn close(mut self) {
        if let Some(tag) = self.tag.take() {
            tag.release(&mut self.subscriber);
        }
    }

    pub(super) fn cancel_handles(&self) -> [wire::CancelHandle; 2] {
        [self.publisher.cancel_handle(), self.subscriber.cancel_handle()]
    }

    /// Copies small tables in one transaction of the subscriber, with few round trips.
    pub(super) fn batch(
        &mut self,
        items: &[&Item],
        owner: OwnedEpoch,
        snapshot: &Snapshot,
        meter: &Meter,
    ) -> std::result::Result<Vec<Transferred>, JobFailure> {
        let source = CopySource::new(items.iter().map(|item| (*item, &item.parts[0])));
        begin_reading(&mut self.publisher, snapshot)?;
        items.iter().try_for_each(|item| refuse_misread(&mut self.publisher, item))?;
        let what = format!("{} small tables", items.len());
        let from = |e: &wire::Error| publisher_failure(e, &format!("copying {what}"));
        let into = |e: &wire::Error| batch_failure(e, &format!("copying into {what}"));
        let copies: Vec<_> = items
            .iter()
            .map(|item| format!("COPY {} TO STDOUT{}", item.parts[0].source, format_of(item)))
            .collect();
        source.queue_lock(&mut self.publisher);
        self.publisher.queue_simple(&format!("{}; COMMIT", copies.join("; ")));
        self.publisher.flush().map_err(|e| from(&e))?;
        if let Some(changed) =
            source.read_change(&mut self.publisher, &what).map_err(|e| from(&e))?
        {
            // The results of the COPYs are not read: the caller opens other sessions.
            return Err(JobFailure::Changed(changed));
        }
        let patience = format!("SET LOCAL lock_timeout = '{BATCH_PATIENCE}'");
        for sql in [BEGIN, &self.settings, &patience] {
            queue_statement(&mut self.subscriber, sql).map_err(|e| into(&e))?;
        }
        let mut moved = Vec::with_capacity(items.len());
        let mut complete = Complete::default();
        for item in items {
            queue_statement(&mut self.subscriber, &copy_in(item)).map_err(|e| into(&e))?;
            let publisher = &mut self.publisher;
            let searched = searched(item);
            let mut found = false;
            let one = self
                .subscriber
                .queue_copy_data(|data| {
                    let mut one = Transferred::default();
                    loop {
                        match publisher.next_reply()? {
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
            if item.subscriber.fires_triggers {
                for sql in [&self.settings, &patience] {
                    queue_statement(&mut self.subscriber, sql).map_err(|e| into(&e))?;
                }
            }
            complete.push(&item.published, one.rows, item.generation);
            meter.add(item.bytes);
            moved.push(one);
            if self.subscriber.queued() > QUEUE_BYTES {
                self.subscriber.flush().map_err(|e| into(&e))?;
            }
        }
        self.publisher.read_to_ready().map_err(|e| from(&e))?;
        let types = types_params(items);
        let types = types.iter().map(|text| Param::Text(text.as_bytes()));
        let queued = self
            .subscriber
            .queue_statement(TYPES_SQL, &[], types)
            .and_then(|()| complete.queue(&mut self.subscriber, owner, snapshot.lsn))
            .and_then(|()| queue_statement(&mut self.subscriber, "COMMIT"));
        queued.map_err(|e| into(&e))?;
        self.subscriber.queue_sync();
        self.subscriber.flush().map_err(|e| into(&e))?;
        self.subscriber.read_to_ready().map_err(|e| into(&e))?;
        Ok(moved)
    }

    /// Copies a table, or a part of one, in one transaction of the subscriber. With
    /// `indexes_after`, indexes that can be rebuilt are built after the rows.
    pub(super) fn part(
        &mut self,
        item: &Item,
        part: &Part,
        indexes_after: bool,
        owner: OwnedEpoch,
        snapshot: &Snapshot,
        meter: &Meter,
    ) -> std::result::Result<Transferred, JobFailure> {
        let name = item.published.name.to_string();
        let into = |e: &wire::Error| subscriber_failure(e, &format!("copying into {name}"));
        let removed = if indexes_after {
            indexes::begin_without(
                &mut self.subscriber,
                owner.id,
                &item.subscriber,
                &self.settings,
            )?
        } else {
            let sql = format!("{BEGIN}; {}", self.settings);
            self.subscriber.simple(&sql).map_err(|e| into(&e))?;
            None
        };
        let moved = if item.published.columns.is_empty() {
            self.rows_without_columns(item, part, snapshot)?
        } else {
            self.stream(item, part, snapshot, meter)?
        };
        let types = types_params(&[item]);
        let types = types.each_ref().map(|text| Some(text.as_str()));
        self.subscriber.query(TYPES_SQL, &types).map_err(|e| into(&e))?;
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
        recorded.map_err(JobFailure::Run)?;
        self.subscriber.simple("COMMIT").map_err(|e| into(&e))?;
        Ok(moved)
    }

    /// Collects statistics, because without them the first queries on the subscriber would get bad
    /// plans. Each table has its own statement, so that a failure does not affect the others (an
    /// expression of CREATE STATISTICS may fail for a row). Autovacuum tries such a table again.
    /// Returns whether the sessions can be used again.
    ///
    /// After a request to stop, its caller cancels the statements: that is no failure.
    pub(super) fn analyze(&mut self, items: &[&Item], shutdown: &Shutdown) -> bool {
        let stopped = |error: &wire::Error| {
            let stopped =
                shutdown.requested() && error.sqlstate() == Some(sqlstate::QUERY_CANCELED);
            if stopped {
                tracing::info!(
                    event = "analyze_stopped",
                    "copied tables are not analyzed, because a stop was requested"
                );
            }
            stopped
        };
        let items = match self.may_analyze(items) {
            Ok(items) => items,
            Err(error) if stopped(&error) => return false,
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
            let Err(error) = self.subscriber.read_to_ready() else { return true };
            if stopped(&error) {
                return false;
            }
            tracing::warn!(
                event = "analyze_failed",
                table = item.published.name.to_string(),
                sqlstate = error.sqlstate(),
                %error,
                "could not analyze copied table"
            );
            error.server_error().is_some_and(|error| !error.is_fatal())
        })
    }

    /// Returns the tables that the role may analyze. For others, the server would log a warning.
    fn may_analyze<'i>(&mut self, items: &[&'i Item]) -> wire::Result<Vec<&'i Item>> {
        let names = items.iter().map(|item| &item.published.name);
        let [schemas, names] = table_name_arrays(names);
        let maintain = if self.subscriber.server_version().major() >= 17 {
            "OR pg_catalog.has_table_privilege(t.oid, 'MAINTAIN')"
        } else {
            ""
        };
        let rows = self.subscriber.query(
            &MAY_ANALYZE_SQL.replace("{MAINTAIN}", maintain),
            &[Some(&schemas), Some(&names)],
        )?;
        let may: FxHashSet<usize> =
            rows.iter().filter_map(|row| row.get(0).and_then(|text| text.parse().ok())).collect();
        let chosen = items.iter().enumerate().filter(|(index, _)| may.contains(&(index + 1)));
        Ok(chosen.map(|(_, item)| *item).collect())
    }

    /// Transfers the COPY data unchanged.
    fn stream(
        &mut self,
        item: &Item,
        part: &Part,
        snapshot: &Snapshot,
        meter: &Meter,
    ) -> std::result::Result<Transferred, JobFailure> {
        let name = item.published.name.to_string();
        let into = |e: &wire::Error| subscriber_failure(e, &format!("copying into {name}"));
        let mut input = self.subscriber.copy_in(&copy_in(item)).map_err(|e| into(&e))?;
        let bytes = match read_into(&mut self.publisher, &mut input, item, part, snapshot, meter) {
            Ok(bytes) => bytes,
            Err(trouble) => {
                if let Err(error) = input.abort("the rows could not be read") {
                    tracing::debug!(%error, "ending the copy");
                }
                return Err(trouble);
            }
        };
        let rows = input.finish().map_err(|e| into(&e))?;
        Ok(Transferred { rows, bytes })
    }

    /// Copies a table without columns by the number of its rows, because COPY cannot transfer such
    /// rows.
    fn rows_without_columns(
        &mut self,
        item: &Item,
        part: &Part,
        snapshot: &Snapshot,
    ) -> std::result::Result<Transferred, JobFailure> {
        let name = item.published.name.to_string();
        let from = |e: &wire::Error| publisher_failure(e, &format!("counting {name}"));
        begin_reading(&mut self.publisher, snapshot)?;
        lock_source(&mut self.publisher, item, part)?;
        let sql =
            format!("SELECT pg_catalog.count(*) FROM {} AS rows", item.published.copy_source());
        let [results, _] = self.publisher.simple_each([&sql, "COMMIT"]).map_err(|e| from(&e))?;
        let rows: u64 = results
            .first()
            .and_then(wire::Rows::first)
            .and_then(|row| row.get(0).and_then(|text| text.parse().ok()))
            .ok_or_else(|| JobFailure::Run(Failure::internal("count returned no number")))?;
        let sql = format!(
            "INSERT INTO {} SELECT FROM pg_catalog.generate_series(1, {rows})",
            item.subscriber.sql_name()
        );
        self.subscriber
            .simple(&sql)
            .map_err(|e| subscriber_failure(&e, &format!("filling {name}")))?;
        Ok(Transferred { rows, bytes: 0 })
    }
}

/// Begins a transaction under the snapshot, unless the session has just been opened, with one.
fn begin_reading(
    publisher: &mut Session,
    snapshot: &Snapshot,
) -> std::result::Result<(), JobFailure> {
    match publisher.transaction_status() {
        TransactionStatus::Idle => snapshot.import(publisher).map_err(JobFailure::Run),
        _ => Ok(()),
    }
}

/// Sends the rows of the part to the subscriber; returns their bytes. The locks on the publisher end with them.
fn read_into(
    publisher: &mut Session,
    input: &mut CopyIn<'_>,
    item: &Item,
    part: &Part,
    snapshot: &Snapshot,
    meter: &Meter,
) -> std::result::Result<u64, JobFailure> {
    let name = item.published.name.to_string();
    let from = |e: &wire::Error| publisher_failure(e, &format!("copying {name}"));
    let into = |e: &wire::Error| subscriber_failure(e, &format!("copying into {name}"));
    begin_reading(publisher, snapshot)?;
    lock_source(publisher, item, part)?;
    refuse_misread(publisher, item)?;
    let sql = format!("COPY {} TO STDOUT{}", part.source, format_of(item));
    let mut out = publisher.copy_out(&sql).map_err(|e| from(&e))?;
    let (mut bytes, mut metered) = (0, 0);
    let searched = searched(item);
    while let Some(data) = out.next().map_err(|e| from(&e))? {
        if let Some(column) = searched
            && has_infinite_interval(data, item.binary)
        {
            return Err(misread(item, column));
        }
        bytes += data.len() as u64;
        // Not for each row, because all workers share the counter.
        if bytes - metered >= METERED_BYTES {
            meter.add(bytes - metered);
            metered = bytes;
        }
        input.send(data).map_err(|e| into(&e))?;
    }
    meter.add(bytes - metered);
    drop(out);
    publisher.simple("COMMIT").map_err(|e| from(&e))?;
    Ok(bytes)
}

/// Locks what the part reads, and refuses it if it has changed since the snapshot.
fn lock_source(
    publisher: &mut Session,
    item: &Item,
    part: &Part,
) -> std::result::Result<(), JobFailure> {
    let name = item.published.name.to_string();
    let from = |e: &wire::Error| publisher_failure(e, &format!("copying {name}"));
    let source = CopySource::new([(item, part)]);
    source.queue_lock(publisher);
    publisher.flush().map_err(|e| from(&e))?;
    let changed = source.read_change(publisher, &name).map_err(|e| from(&e))?;
    changed.map_or(Ok(()), |failure| Err(JobFailure::Changed(failure)))
}

/// Refuses a table with a value that the subscriber would misread.
fn refuse_misread(publisher: &mut Session, item: &Item) -> std::result::Result<(), JobFailure> {
    for column in &item.misread {
        let Search::Condition(condition) = &column.search else { continue };
        let sql = item.published.any_row(condition);
        let name = item.published.name.to_string();
        let found = publisher
            .simple(&sql)
            .map_err(|e| publisher_failure(&e, &format!("checking the values of {name}")))?;
        let row = first_row(&found, "EXISTS").map_err(JobFailure::Run)?;
        if boolean(&row, 0).map_err(JobFailure::Run)? {
            return Err(misread(item, column));
        }
    }
    Ok(())
}

/// The first column whose values are checked in each row.
fn searched(item: &Item) -> Option<&MisreadColumn> {
    item.misread.iter().find(|column| column.search == Search::Row)
}

fn misread(item: &Item, column: &MisreadColumn) -> JobFailure {
    let (name, column) = (item.published.name.to_string(), &column.name);
    let failure = Failure::new(
        Class::Apply,
        format!(
            "cannot copy {name}: the subscriber would read a value of column {column} as a \
             different value"
        ),
    );
    JobFailure::Table(failure.hint(MISREAD_HINT))
}

fn copy_in(item: &Item) -> String {
    let columns: Vec<_> = item.published.columns.iter().map(|c| quote_ident(&c.name)).collect();
    let (table, format) = (item.subscriber.sql_name(), format_of(item));
    format!("COPY {table} ({}) FROM STDIN{format}", columns.join(", "))
}

fn format_of(item: &Item) -> &'static str {
    if item.binary { " WITH (FORMAT binary)" } else { "" }
}

/// The parameters of [`TYPES_SQL`]: all parts of a table go into the table that was read before the copy, because
/// COPY finds it by its name.
fn types_params(items: &[&Item]) -> [String; 5] {
    let mut columns = CopiedColumns::default();
    items.iter().for_each(|item| item.subscriber.add_copied(&item.published, &mut columns));
    columns.params()
}

fn queue_statement(session: &mut Session, sql: &str) -> wire::Result<()> {
    session.queue_statement(sql, &[], [].into_iter())
}

fn publisher_failure(error: &wire::Error, doing: &str) -> JobFailure {
    let failure = Failure::publisher(error, doing);
    match failure.sqlstate.as_deref() {
        _ if failure.is_transient() => JobFailure::Run(failure),
        // A table, column or schema no longer exists.
        Some(
            sqlstate::UNDEFINED_TABLE | sqlstate::UNDEFINED_COLUMN | sqlstate::INVALID_SCHEMA_NAME,
        ) => JobFailure::Changed(failure),
        _ => JobFailure::Table(failure),
    }
}

/// The failure of a batch. After [`BATCH_PATIENCE`], its tables are copied one by one.
fn batch_failure(error: &wire::Error, doing: &str) -> JobFailure {
    match subscriber_failure(error, doing) {
        JobFailure::Run(failure)
            if failure.sqlstate.as_deref() == Some(sqlstate::LOCK_NOT_AVAILABLE) =>
        {
            JobFailure::Table(failure)
        }
        trouble => trouble,
    }
}

pub(super) fn subscriber_failure(error: &wire::Error, doing: &str) -> JobFailure {
    if is_of_changed_types(error) {
        return JobFailure::Changed(Failure::new(
            Class::Subscriber,
            format!(
                "{doing}: the table was replaced, or types of its columns were changed, since it was read"
            ),
        ));
    }
    let mut failure = Failure::subscriber(error, doing);
    if failure.sqlstate.as_deref() == Some(sqlstate::DISK_FULL) {
        // Other tables may be in another tablespace, or may need less space.
        let hint = failure.hint.as_deref().unwrap_or("Make room on the subscriber's disk.");
        let hint = format!("{hint} The table is copied again.");
        return JobFailure::Table(failure.hint(hint));
    }
    if failure.is_transient() {
        return JobFailure::Run(failure);
    }
    if failure.sqlstate.as_deref().is_some_and(|code| matches!(code.get(..2), Some("22" | "23"))) {
        failure.class = Class::Apply;
    }
    if failure.sqlstate.as_deref() == Some(sqlstate::FOREIGN_KEY_VIOLATION) {
        failure = failure.hint(foreign_keys::HINT);
    }
    // For example "COPY t, line 3, column id: …".
    if let Some(place) = error.server_error().and_then(|server| server.where_.as_deref()) {
        let place = place.lines().next().unwrap_or_default();
        let detail = failure.detail.take();
        failure = failure.detail(match detail {
            Some(detail) => format!("{detail} ({place})"),
            None => place.to_owned(),
        });
    }
    JobFailure::Table(failure)
}
