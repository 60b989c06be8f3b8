//! Repairing the differences that `pgapace verify` recorded.
//!
//! A row is never written as it was when the difference was found. Each batch has a barrier of its own
//! ([`crate::barrier`]), at an LSN L2, that holds the stream. Meanwhile the subscriber shows the state of the
//! publisher at L2, but for the differences. The rows of the batch are read from both servers again. What
//! still differs is written in one transaction, which also removes the batch from `pgapace.difference` and from
//! the counts of its verification, and lets the stream go on when it commits. So no change slips between the read and the write, and a batch is
//! either repaired or untouched, whatever fails.
//!
//! That commit waits for no synchronous standby, because the stream would wait too. When the stream goes on, another
//! commit waits, before the next batch.
//!
//! The transaction has no progress of its own. Everything before L2 is committed before it, and a server
//! that crashes loses commits only from the end of its WAL. So if the repair survives, all of these commits
//! do, with their progress.

mod batch;
mod copies;
mod row;
mod size;

pub(crate) use self::size::BatchSize;

use engine::table_name::TableName;
use pgoutput::Lsn;
use serde::Serialize;
use wire::{Session, quote_literal};

use crate::barrier::taker::{BarrierTaker, TakenBarrier};
use crate::error::{Class, Failure, Result};
use crate::publisher::session::Publisher;
use crate::publisher::slot::BEGIN_READING;
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, parse_name_array};
use crate::subscriber::session::{self, Purpose, Subscriber};
use crate::subscriber::state::verification::VerificationNumber;
use crate::subscriber::state::verification::differences::{settle_sql, unrecorded};
use crate::subscriber::state::{SubscriptionId, ownership, progress};
use crate::subscriber::writer_tag::{TagRules, Writer, WriterTag};
use crate::verify::plan::TablePlan;
use crate::verify::requirements::check_ready;
use crate::verify::sessions::Read;

/// How many barriers a batch may need: the stream may go on, or the table be rewritten, before it is read.
const ATTEMPTS: usize = 5;

/// How differences are repaired.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RepairOptions {
    /// Only print the statements.
    pub(crate) dry_run: bool,
    /// Whether the sessions tag their commits.
    pub(crate) tags: TagRules,
    /// Delete rows that only the subscriber has.
    pub(crate) delete_extra: bool,
    /// Recorded differences that are repaired at once.
    pub(crate) batch: usize,
}

/// Counts of the rows that were written, or would be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Repaired {
    pub(crate) inserted: u64,
    pub(crate) updated: u64,
    pub(crate) deleted: u64,
    /// Differences that were gone when their rows were read again.
    pub(crate) gone: u64,
    /// Rows that only the subscriber has, and that were left.
    pub(crate) extra: u64,
}

impl Repaired {
    pub(crate) fn add(&mut self, other: Self) {
        self.inserted += other.inserted;
        self.updated += other.updated;
        self.deleted += other.deleted;
        self.gone += other.gone;
        self.extra += other.extra;
    }
}

/// Why a table is not repaired, or only in part.
#[derive(Debug)]
pub(crate) enum RepairFailure {
    /// Other tables may fare better.
    OfTable(Failure),
    /// Other tables would fail in the same way: a session was lost, there is no barrier, or a stop was requested.
    OfAll(Failure),
}

impl From<Failure> for RepairFailure {
    fn from(failure: Failure) -> Self {
        match failure.class == Class::Stopped || failure.is_connection_lost() {
            true => Self::OfAll(failure),
            false => Self::OfTable(failure),
        }
    }
}

/// A recorded difference.
#[derive(Debug, Clone)]
pub(crate) struct Difference {
    id: i64,
    /// The values of the key columns, or of all compared columns without a key, in the order of the plan.
    values: Vec<Option<String>>,
}

/// Repairs the differences of a subscription.
pub(crate) struct Repairer<'a> {
    pub(crate) taker: BarrierTaker<'a>,
    pub(crate) publisher: &'a Publisher,
    pub(crate) subscriber: &'a Subscriber,
    pub(crate) id: SubscriptionId,
    pub(crate) options: RepairOptions,
    pub(crate) shutdown: &'a Shutdown,
}

impl Repairer<'_> {
    /// Repairs the differences of one table that these verifications recorded. `print` gets the statements
    /// of a dry run, and `sum` counts the batches that were repaired, also if a later one fails.
    pub(crate) fn table(
        &mut self,
        control: &mut Session,
        (plan, found_by): (&TablePlan, &Verifications),
        print: &mut dyn FnMut(&str),
        sum: &mut Repaired,
    ) -> std::result::Result<(), RepairFailure> {
        if !plan.left_of_key.is_empty() {
            return Err(not_told_apart(plan, &plan.left_of_key).into());
        }
        let (mut after, mut sizes) = (0, BatchSize::new(self.options.batch));
        loop {
            if self.shutdown.requested() {
                let stopped = Failure::new(Class::Stopped, "stopped; whole batches were repaired");
                return Err(stopped.into());
            }
            let size = sizes.next();
            let sessions = [control.cancel_handle()];
            let batch = interruptible(self.shutdown, &sessions, DOING, || {
                differences(control, self.id, (plan, found_by), after, size)
            })?;
            let Some(last) = last_id(&batch) else { return Ok(()) };
            match self.batch(plan, &batch, print) {
                Err(RepairFailure::OfTable(failure))
                    if failure.sqlstate.as_deref().is_some_and(sqlstate::is_taken_value) =>
                {
                    // If this is the last batch, no later one has the row that uses the value.
                    if batch.len() < size {
                        return Err(self.value_in_use(control, plan, failure)?.into());
                    }
                    sizes.widen();
                }
                repaired => {
                    let (repaired, bytes) = repaired?;
                    sizes.read(batch.len(), bytes);
                    sum.add(repaired);
                    after = last;
                }
            }
        }
    }

    /// The failure for a value that a row uses which is not repaired, with what to do about that row.
    fn value_in_use(
        &self,
        control: &mut Session,
        plan: &TablePlan,
        failure: Failure,
    ) -> Result<Failure> {
        let counted = unrecorded(control, self.id)?;
        let next = match counted.iter().find(|(table, _)| *table == plan.name) {
            Some((_, count)) => format!(
                "The row that uses the value may be one of {count} that differ and are not recorded. Run pgapace verify \
                 with a greater --max-differences, and repair again."
            ),
            None if self.options.delete_extra => {
                "A row that is not repaired uses the value. Run pgapace verify and repair again; if it says the same, \
                 look for that row on the subscriber."
                    .to_owned()
            }
            None => "If a row that only the subscriber has uses the value, repair with --delete-extra."
                .to_owned(),
        };
        Ok(failure.hint(format!("The batch is rolled back. {next}")))
    }

    fn batch(
        &mut self,
        plan: &TablePlan,
        batch: &[Difference],
        print: &mut dyn FnMut(&str),
    ) -> std::result::Result<(Repaired, usize), RepairFailure> {
        let mut failed = None;
        for _ in 0..ATTEMPTS {
            let taken = self.taker.take_barrier(!self.options.dry_run);
            let taken = taken.map_err(RepairFailure::OfAll)?;
            let written = match self.options.dry_run {
                true => self.show(plan, batch, taken, print)?,
                false => self.write(plan, batch, taken)?,
            };
            match written {
                Written::Batch(repaired, bytes) => return Ok((repaired, bytes)),
                Written::Nothing(failure) => failed = Some(failure),
            }
        }
        let failed =
            failed.unwrap_or_else(|| Failure::internal("a repair makes an attempt at least"));
        Err(failed.into())
    }

    /// Prints the statements for a batch.
    fn show(
        &self,
        plan: &TablePlan,
        batch: &[Difference],
        taken: TakenBarrier,
        print: &mut dyn FnMut(&str),
    ) -> Result<Written> {
        let (mut theirs, mut ours) = taken.pair().open(self.publisher, self.subscriber)?;
        drop(taken);
        let sessions = [theirs.cancel_handle(), ours.cancel_handle()];
        let read = interruptible(self.shutdown, &sessions, DOING, || {
            batch::read(&mut theirs, &mut ours, plan, batch, false)
        })?;
        let Read::Rows(found) = read else { return Ok(Written::Nothing(rewritten(plan))) };
        let statements = found.statements(self.options.delete_extra);
        statements.iter().for_each(|statement| print(&format!("{};", statement.sql)));
        Ok(Written::Batch(found.repaired(self.options.delete_extra), found.bytes))
    }

    /// Repairs a batch while the stream is held.
    fn write(
        &self,
        plan: &TablePlan,
        batch: &[Difference],
        mut taken: TakenBarrier,
    ) -> Result<Written> {
        let mut theirs = self.publisher.connect_to_look()?;
        let import = format!(
            "{BEGIN_READING}; SET TRANSACTION SNAPSHOT {}; {BRIEFLY}",
            quote_literal(&taken.publisher)
        );
        if let Err(error) = theirs.simple(&import) {
            // It was gone, or is not one of this publisher.
            return Ok(Written::Nothing(Failure::publisher(&error, "importing the snapshot")));
        }
        let mut ours = self.subscriber.connect(Purpose::DurableApply)?;
        session::commit_locally(&mut ours)?;
        let sessions = [theirs.cancel_handle(), ours.cancel_handle()];
        interruptible(self.shutdown, &sessions, DOING, || {
            let written = self.write_held(plan, batch, &mut taken, (&mut theirs, &mut ours))?;
            if matches!(written, Written::Batch(..)) {
                let gives_up = || self.shutdown.requested();
                let nothing = (Lsn::INVALID, Lsn::INVALID);
                progress::flush_unless(&mut ours, self.id, nothing, &|| None, &gives_up)?;
            }
            Ok(written)
        })
    }

    /// The same by these sessions: the publisher's, under the snapshot of the barrier, and the subscriber's.
    fn write_held(
        &self,
        plan: &TablePlan,
        batch: &[Difference],
        taken: &mut TakenBarrier,
        (theirs, ours): (&mut Session, &mut Session),
    ) -> Result<Written> {
        // A later run of the subscription terminates this session before it applies anything.
        ownership::join(ours, self.id)?;
        let tag = WriterTag::attach(ours, self.id, self.options.tags, Writer::Repair)?;
        taken.writes_from(ours.backend_pid())?;
        let writing = |e: &wire::Error| Failure::subscriber(e, &format!("repairing {}", plan.name));
        let held = ours
            .simple(&format!("BEGIN; {BRIEFLY}; {}", taken.write_sql()))
            .map_err(|e| writing(&e))?;
        if held.last().is_none_or(wire::Rows::is_empty) {
            return Ok(Written::Nothing(stream_went_on()));
        }
        check_ready(ours, self.taker.row, std::slice::from_ref(&plan.name))?;
        let found = read_to_write(theirs, ours, plan, batch).map_err(|e| locked(e, plan))?;
        let Read::Rows(found) = found else { return Ok(Written::Nothing(rewritten(plan))) };
        let repaired = found.write(ours, self.options.delete_extra, &writing)?;
        let ids: Vec<_> =
            found.settled(self.options.delete_extra).map(|id| id.to_string()).collect();
        ours.simple(&format!("{}; COMMIT", settle_sql(&ids))).map_err(|e| writing(&e))?;
        if let Some(tag) = tag {
            tag.release(ours);
        }
        log_batch(plan, taken.lsn, repaired);
        Ok(Written::Batch(repaired, found.bytes))
    }
}

/// The work that a request to stop interrupts, for the log.
pub(crate) const DOING: &str = "the repair";

/// The result of an attempt to repair a batch.
enum Written {
    /// Its rows, and the bytes that were read.
    Batch(Repaired, usize),
    /// Why nothing was written. Another barrier may help.
    Nothing(Failure),
}

fn stream_went_on() -> Failure {
    Failure::new(Class::Busy, "the stream went on before a batch was written, again and again")
        .hint("Repair with a smaller --batch. The batches before this one are repaired.")
}

fn rewritten(plan: &TablePlan) -> Failure {
    Failure::new(
        Class::Busy,
        format!(
            "table {} was truncated or rewritten on the publisher after the snapshot, again and again",
            plan.name
        ),
    )
    .hint("Repair when nothing truncates or rewrites it. The batches before this one are repaired.")
}

/// While a batch is written the stream is held. So neither session waits for a lock for long: on the
/// subscriber, the holder may be an open transaction of the publisher, which cannot end before the stream goes
/// on. Nor does a repair that is suspended hold the stream for longer than a barrier may.
const BRIEFLY: &str = "SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '60s'; \
     SET LOCAL idle_in_transaction_session_timeout = '60s'";

/// Names the sessions that may hold a lock that a repair needs.
fn locked(failure: Failure, plan: &TablePlan) -> Failure {
    if failure.sqlstate.as_deref() != Some(sqlstate::LOCK_NOT_AVAILABLE) {
        return failure;
    }
    let table = plan.name.to_string();
    let (message, holder) = match failure.class {
        Class::Publisher => (
            format!("table {table} is locked on the publisher"),
            "Another session of the publisher holds it, such as one with an ALTER TABLE: see pg_locks.",
        ),
        _ => (
            format!("a row of {table} that is to be repaired is locked"),
            "A long transaction of the publisher that is applied while it is open, a prepared transaction, \
             or another session of the subscriber holds it.",
        ),
    };
    let next = "Repair again when that has ended; the batches before this one are repaired.";
    Failure::new(Class::Busy, message).detail(failure.to_string()).hint(format!("{holder} {next}"))
}

/// The next differences of a table that these verifications recorded.
pub(crate) fn differences(
    control: &mut Session,
    id: SubscriptionId,
    (plan, found_by): (&TablePlan, &Verifications),
    after: i64,
    most: usize,
) -> Result<Vec<Difference>> {
    let names: Vec<&str> = match plan.key.is_empty() {
        false => plan.key.iter().map(String::as_str).collect(),
        true => plan.columns.iter().map(|column| column.name.as_str()).collect(),
    };
    let source = if plan.key.is_empty() { "row_values" } else { "key" };
    let literals: Vec<_> = names.iter().map(|name| quote_literal(name)).collect();
    let values = literals.iter().map(|name| format!(", {source} ->> {name}"));
    // If the key has other columns now, neither server finds the row, and the difference would be taken for
    // gone.
    let same_columns = format!(
        "{source} ?& ARRAY[{}]::pg_catalog.text[] \
         AND (SELECT pg_catalog.count(*) FROM pg_catalog.jsonb_object_keys({source})) = {}",
        literals.join(", "),
        literals.len()
    );
    let sql = format!(
        "SELECT id, ({same_columns}) IS NOT TRUE{} FROM pgapace.difference d \
         WHERE subscription = {} AND schema_name = {} AND table_name = {} AND id > {after} \
           AND {FOUND_BY} = ANY ('{}'::pg_catalog.int8[]) ORDER BY id LIMIT {most}",
        values.collect::<String>(),
        id.0,
        quote_literal(&plan.name.schema),
        quote_literal(&plan.name.name),
        found_by.0,
    );
    let rows = control
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading pgapace.difference"))?;
    let any_bytes = control.parameter("server_encoding") == Some("SQL_ASCII");
    let difference = |row: wire::Row<'_>| {
        if row.get(1) == Some("t") {
            return Err(Failure::new(
                Class::Mismatch,
                format!("{} has other columns or another key than when it was verified", plan.name),
            )
            .hint("Run pgapace verify again."));
        }
        let values = (0..names.len()).map(|column| row.get(column + 2).map(str::to_owned));
        let values: Vec<_> = values.collect();
        // The verification could not record other bytes. Neither server finds the row, and the difference
        // would be taken for gone.
        if any_bytes && values.iter().flatten().any(|v| v.contains(char::REPLACEMENT_CHARACTER)) {
            return Err(not_utf8(plan));
        }
        Ok(Difference { id: field(&row, 0)?, values })
    };
    rows.iter().map(difference).collect()
}

/// A row that cannot be found or written again.
fn not_utf8(plan: &TablePlan) -> Failure {
    Failure::new(
        Class::Mismatch,
        format!("a row of {} that differs has text that is not UTF-8", plan.name),
    )
    .hint(
        "A copy of the table makes it equal: pgapace resync; in a rebase, TRUNCATE it on the subscriber, so \
         that it is copied.",
    )
}

/// The failure for rows of which each may be the one that differs: a repair could write another one.
fn not_told_apart(plan: &TablePlan, columns: &[String]) -> Failure {
    let (table, columns) = (&plan.name, columns.join(", "));
    Failure::new(
        Class::Mismatch,
        format!(
            "rows of {table} cannot be told apart without columns that were not compared: {columns}"
        ),
    )
    .hint(format!(
        "Run pgapace verify with these columns, and repair again. If they cannot be compared, a copy of the table makes \
         it equal: pgapace resync {table}."
    ))
}

/// The greatest id of a batch, behind which the next one begins.
pub(crate) fn last_id(batch: &[Difference]) -> Option<i64> {
    batch.last().map(|difference| difference.id)
}

/// How rows that differ are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteWay {
    /// Each is inserted, updated or deleted.
    Update,
    /// All that the subscriber has are deleted, before they are inserted.
    Delete,
    /// All that the publisher has are inserted.
    Insert,
}

/// Reads the rows of a batch from both sessions. That of the subscriber, which locks them, writes afterwards as the
/// sessions that apply do.
fn read_to_write(
    theirs: &mut Session,
    ours: &mut Session,
    plan: &TablePlan,
    batch: &[Difference],
) -> Result<Read<batch::FoundRows>> {
    session::read_values(ours)?;
    let found = batch::read(theirs, ours, plan, batch, true)?;
    session::write_values(ours)?;
    Ok(found)
}

/// Reads the rows of a batch from both sessions, and makes them equal in the transaction of `ours`. Returns
/// the bytes that were read too. Nothing is written if the table was rewritten on the publisher.
pub(crate) fn write_batch(
    theirs: &mut Session,
    ours: &mut Session,
    plan: &TablePlan,
    batch: &[Difference],
    way: WriteWay,
) -> Result<Read<(Repaired, usize)>> {
    let explain =
        |e: &wire::Error| Failure::subscriber(e, &format!("making rows of {} equal", plan.name));
    let Read::Rows(found) = read_to_write(theirs, ours, plan, batch)? else {
        return Ok(Read::Rewritten);
    };
    // Both servers have the rows as they had them when they were compared.
    if way != WriteWay::Insert && found.absent > 0 {
        return Err(Failure::new(
            Class::Mismatch,
            format!(
                "{} rows of {} that differed are on neither server any more",
                found.absent, plan.name
            ),
        )
        .hint("If another session of the subscriber deleted them, start again."));
    }
    let written = match way {
        WriteWay::Update | WriteWay::Insert => found.write(ours, true, &explain),
        WriteWay::Delete if found.has_local_columns() => {
            return Err(Failure::new(
                Class::Mismatch,
                format!(
                    "unique values moved between rows of table {}, whose columns that are not \
                     replicated would be lost",
                    plan.name
                ),
            )
            .hint("Drop the unique index on the subscriber, and create it again afterwards."));
        }
        WriteWay::Delete => found.delete(ours, &explain),
    };
    Ok(Read::Rows((written?, found.bytes)))
}

/// Rows that have become equal meanwhile are none that were repaired.
fn log_batch(plan: &TablePlan, lsn: Lsn, repaired: Repaired) {
    if repaired.inserted + repaired.updated + repaired.deleted == 0 {
        return;
    }
    tracing::info!(
        event = "rows_repaired",
        table = plan.name.to_string(),
        %lsn,
        inserted = repaired.inserted,
        updated = repaired.updated,
        deleted = repaired.deleted,
        "rows were repaired"
    );
}

/// Recorded differences of a table, by verifications that left the same columns out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedDifferences {
    pub(crate) name: TableName,
    /// Columns that were not compared. They are left alone.
    pub(crate) columns_left: Vec<String>,
    pub(crate) found_by: Verifications,
}

/// Numbers of verifications, as an array of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verifications(String);

impl Verifications {
    pub(crate) fn one(number: VerificationNumber) -> Self {
        Self(format!("{{{}}}", number.0))
    }
}

/// The number of a difference's verification; early versions of pgapace recorded none.
const FOUND_BY: &str = "coalesce(d.verification, -1)";

/// The recorded differences of all tables. Two verifications of a table may differ in the columns that they left out:
/// one of a verb, and one in the background.
pub(crate) fn recorded(
    control: &mut Session,
    id: SubscriptionId,
) -> Result<Vec<RecordedDifferences>> {
    let sql = format!(
        "SELECT d.schema_name, d.table_name, coalesce(v.columns_left, '{{}}'), \
           pg_catalog.array_agg(DISTINCT {FOUND_BY}) \
         FROM pgapace.difference d LEFT JOIN pgapace.verification v ON v.subscription = d.subscription \
           AND v.schema_name = d.schema_name AND v.table_name = d.table_name \
           AND v.verification = d.verification \
         WHERE d.subscription = {} GROUP BY 1, 2, 3 ORDER BY 1, 2, 3",
        id.0
    );
    let rows = control
        .query(&sql, &[])
        .map_err(|e| Failure::subscriber(&e, "reading pgapace.difference"))?;
    let recorded = |row: wire::Row<'_>| {
        Ok(RecordedDifferences {
            name: TableName { schema: field(&row, 0)?, name: field(&row, 1)? },
            columns_left: parse_name_array(&field::<String>(&row, 2)?)?,
            found_by: Verifications(field(&row, 3)?),
        })
    };
    rows.iter().map(recorded).collect()
}

/// Divides them into rounds with each table once, because a table is planned with the columns to leave out.
pub(crate) fn rounds(recorded: Vec<RecordedDifferences>) -> Vec<Vec<RecordedDifferences>> {
    let mut rounds: Vec<Vec<RecordedDifferences>> = Vec::new();
    for one in recorded {
        let of_table = |other: &RecordedDifferences| other.name == one.name;
        match rounds.iter_mut().find(|round| !round.iter().any(of_table)) {
            Some(round) => round.push(one),
            None => rounds.push(vec![one]),
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::{RecordedDifferences, TableName, Verifications, rounds};

    #[test]
    fn each_round_has_a_table_once() {
        let one = |name: &str, columns: &[&str]| RecordedDifferences {
            name: TableName { schema: "s".to_owned(), name: name.to_owned() },
            columns_left: columns.iter().map(|name| (*name).to_owned()).collect(),
            found_by: Verifications("{1}".to_owned()),
        };
        let all = [one("a", &[]), one("a", &["c"]), one("b", &["c"]), one("a", &["d"])];
        let [a, again, b, last] = all.clone();
        assert_eq!(rounds(all.to_vec()), [vec![a, b], vec![again], vec![last]]);
    }
}
