//! Tables that hold rows already, which are compared with the publisher's instead of copied: after a lost
//! slot, or on a subscriber that was restored from a backup.
//!
//! Nothing is applied to these tables meanwhile, so their rows stay as they are. The publisher's rows are
//! those of the snapshot, whose LSN becomes the table's sync LSN. All rows of a table that differ are
//! written in one transaction, which also records that the table is copied. An interruption leaves a table
//! as it was, or equal; the next run compares it again under another snapshot.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use engine::table_name::TableName;
use engine::table_sync::TableSyncState;
use rustc_hash::FxHashMap;
use wire::Session;

use super::{Snapshot, SyncContext};
use crate::check::opposite;
use crate::config::{IfNotEmpty, Subscription as Config};
use crate::error::{Class, Failure, Result};
use crate::publisher::publication::{self, PublishedTable};
use crate::publisher::session::Publisher;
use crate::repair::{self, BatchSize, WriteWay};
use crate::sqlstate;
use crate::stopping::interrupt::interruptible;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::catalogue::{field, first_row};
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::verification::{self, Counts, TableOf, VerificationNumber, Verifier};
use crate::subscriber::state::{self, SchemaCopy, Subscription, ownership};
use crate::subscriber::writer_tag::{Writer, WriterTag};
use crate::tablesync::blocked::is_of_its_tables;
use crate::tablesync::copy_display::LINES_EVERY;
use crate::tablesync::subscriber_tables::{self, Obstacle};
use crate::tablesync::table_state::{Begun, Complete};
use crate::verify::keeper::Servers;
use crate::verify::pair::{Held, PairSource, SnapshotPair};
use crate::verify::plan::TablePlan;
use crate::verify::prepare::{Prepared, Scope, plan, refuse};
use crate::verify::progress::Progress;
use crate::verify::rate::Pace;
use crate::verify::record::{Recorder, TableRecord};
use crate::verify::requirements::{managed_by_citus, not_all_published, shared};
use crate::verify::run::{Manner, Verification};
use crate::verify::sessions::Read;
use crate::verify::whole::Passes;
use crate::verify::work::{TableWork, Work};

/// The checks before anything is changed. Completes "stopped during …", as the one below.
pub(crate) const CHECKS: &str = "the checks of the rebase";
const DOING: &str = "table sync";
/// Differences that are read at once, at most. A table without a key is read as a whole for each batch.
const BATCH: usize = 10_000;

/// The snapshot of the publisher, with one of the subscriber.
struct Pairs<'a> {
    context: SyncContext<'a>,
    snapshot: &'a Snapshot,
    /// A table was truncated or rewritten on the publisher: the snapshot does not show it any more. Or a table or
    /// publication was altered, and is to be planned with anew.
    changed: &'a AtomicBool,
    taken: bool,
}

impl PairSource for Pairs<'_> {
    fn take(&mut self) -> Result<Held> {
        if std::mem::replace(&mut self.taken, true) {
            self.changed.store(true, Ordering::Release);
            return Err(Failure::new(
                Class::Publisher,
                "a table was truncated or rewritten while it was compared",
            ));
        }
        let mut exporter = self.context.subscriber.connect(Purpose::Verify)?;
        let exported = exporter
            .simple_each([
                crate::publisher::slot::BEGIN_READING,
                "SELECT pg_catalog.pg_export_snapshot()",
            ])
            .map_err(|e| Failure::subscriber(&e, "exporting a snapshot"))?;
        let pair = SnapshotPair {
            lsn: self.snapshot.lsn,
            publisher: self.snapshot.name().to_owned(),
            subscriber: field(&first_row(&exported[1], "pg_export_snapshot")?, 0)?,
        };
        Ok(Held::new(pair, vec![exporter]))
    }

    fn definitions_changed(&mut self) {
        self.changed.store(true, Ordering::Release);
    }
}

/// The next step if the publisher does not send all changes of a table.
const NOT_ALL_PUBLISHED: &str = "\
A rebase deletes rows that only the subscriber has, also those that it keeps on purpose. To keep them: pgapace drop, then \
pgapace run --copy-data=false. Copy missing rows yourself, and other tables with pgapace resync";

/// The same before a first start has recorded anything.
const NOT_ALL_PUBLISHED_AT_FIRST: &str = "\
A rebase deletes rows that only the subscriber has, also those that it keeps on purpose. To keep them: pgapace run \
--copy-data=false. Copy missing rows yourself, and other tables with pgapace resync";

/// The same where the settings keep them, with the flag that says otherwise.
const KEPT: &str = "\
A rebase deletes rows that only the subscriber has, and if-not-empty = keep keeps them. If none of them is to stay: pgapace \
rebase --if-not-empty rebase. To keep them: pgapace drop; pgapace run --copy-data=false --until current, which creates a slot \
and copies nothing; then pgapace verify, and pgapace repair without --delete-extra";

/// Refuses the rebase of a subscription whose settings keep rows of the subscriber's own.
pub(crate) fn refuse_kept(config: &Config) -> Result<()> {
    if config.if_not_empty != IfNotEmpty::Keep {
        return Ok(());
    }
    let message = format!(
        "a rebase of subscription {} would delete rows that if-not-empty = keep keeps",
        config.name
    );
    Err(Failure::new(Class::Config, message).hint(format!("{KEPT}.")))
}

/// The failure for a slot, with the other ways where the settings keep rows that the rebase of its hint would delete.
pub(crate) fn or_keep(config: &Config, failure: Failure) -> Failure {
    let hint = failure.hint.as_deref().filter(|hint| hint.contains("pgapace rebase"));
    match hint.map(|hint| format!("{hint} {KEPT}.")) {
        Some(hint) if config.if_not_empty == IfNotEmpty::Keep => failure.hint(hint),
        _ => failure,
    }
}

/// The next step if Citus manages a table.
const BY_CITUS: &str = "TRUNCATE the table on the subscriber, so that it is copied";

/// The next step if another subscription changes a table, too.
const SHARED: &str = "A rebase would delete the rows of the other subscription. pgapace drop, and DELETE the rows of this \
publisher on the subscriber, if it has any; then pgapace run --if-not-empty keep copies them beside the others";

/// Checks that a rebase can compare the tables that hold rows, and copy the others. Tables that are blocked already stop
/// no other table: returns those of them that can be neither compared nor copied. Changes nothing.
pub(crate) fn check(
    control: &mut Session,
    (publisher, subscriber): (&Publisher, &Subscriber),
    publications: &[String],
    row: &Subscription,
    shutdown: &Shutdown,
) -> Result<Vec<TableName>> {
    if row.schema_copy == Some(SchemaCopy::Before) {
        return Ok(Vec::new());
    }
    let mut look = publisher.connect_to_look()?;
    let mut local = subscriber.connect(Purpose::Verify)?;
    let users = [publisher.user(), subscriber.user()];
    let sessions = [&look, &local].map(Session::cancel_handle);
    interruptible(shutdown, &sessions, CHECKS, || {
        check_tables(control, (&mut look, &mut local), (publications, users), row)
    })
}

fn check_tables(
    control: &mut Session,
    (look, local): (&mut Session, &mut Session),
    (publications, users): (&[String], [&str; 2]),
    row: &Subscription,
) -> Result<Vec<TableName>> {
    let published = publication::tables(look, publications)?;
    let states = state::relations_by_name(control, row.id)?;
    let is_blocked = |table: &PublishedTable| {
        states.get(&table.name).is_some_and(|state| state.state == TableSyncState::Blocked)
    };
    let (mut filled, mut unfit) = (Vec::new(), Vec::new());
    let judged = subscriber_tables::fit(control, &published, |_, _| true)?;
    for (table, judged) in published.into_iter().zip(judged) {
        match judged {
            Ok(_) => {}
            Err(Obstacle::NotEmpty) => filled.push(table),
            Err(Obstacle::Absent | Obstacle::Unfit(_)) => unfit.push(table),
        }
    }
    let (left, unfit): (Vec<_>, Vec<_>) = unfit.into_iter().partition(is_blocked);
    subscriber_tables::fitting(control, &unfit)?;
    let (blocked, filled): (Vec<_>, Vec<_>) = filled.into_iter().partition(is_blocked);
    let mut prepare = |tables: &[PublishedTable]| {
        let sessions = (&mut *look, &mut *local);
        prepare(sessions, ((&row.name, publications), users), tables, NOT_ALL_PUBLISHED).map(|_| ())
    };
    if !filled.is_empty() {
        prepare(&filled)?;
    }
    let mut left: Vec<_> = left.iter().map(|table| table.name.clone()).collect();
    for table in blocked {
        match prepare(std::slice::from_ref(&table)) {
            Err(failure) if !is_of_its_tables(&failure) => return Err(failure),
            Err(_) => left.push(table.name),
            Ok(()) => {}
        }
    }
    Ok(left)
}

/// Checks that a first start can compare the tables that hold rows. It changes nothing, so it comes before the
/// settings are recorded and the slot is created: afterwards, no other setting would be accepted.
pub(crate) fn check_first_start(
    control: &mut Session,
    (publisher, subscriber): (&Publisher, &Subscriber),
    of: (&str, &[String]),
    tables: &[PublishedTable],
    shutdown: &Shutdown,
) -> Result<()> {
    let judged = subscriber_tables::fit(control, tables, |_, _| true)?;
    let filled = tables.iter().zip(judged);
    let filled = filled.filter(|(_, judged)| matches!(judged, Err(Obstacle::NotEmpty)));
    let filled: Vec<_> = filled.map(|(table, _)| table.clone()).collect();
    if filled.is_empty() {
        return Ok(());
    }
    let mut look = publisher.connect_to_look()?;
    let mut local = subscriber.connect(Purpose::Verify)?;
    let users = [publisher.user(), subscriber.user()];
    let sessions = [&look, &local].map(Session::cancel_handle);
    interruptible(shutdown, &sessions, CHECKS, || {
        let sessions = (&mut look, &mut local);
        prepare(sessions, (of, users), &filled, NOT_ALL_PUBLISHED_AT_FIRST).map(|_| ())
    })
}

/// Plans the comparison of tables that hold rows, `of` a subscription with publications. `next_step` is that for tables of which not all changes are
/// published.
fn prepare(
    (look, local): (&mut Session, &mut Session),
    ((name, publications), users): ((&str, &[String]), [&str; 2]),
    published: &[PublishedTable],
    next_step: &str,
) -> Result<(Scope, Prepared)> {
    let problems = not_all_published(look, publications, published)?.into_iter();
    let problems = problems.map(|problem| problem.with_hint(next_step));
    let by_citus = managed_by_citus(local, published)?.into_iter();
    let by_citus = by_citus.map(|problem| problem.with_hint(BY_CITUS));
    let shared = shared(local, name, published)?.into_iter();
    let shared = shared.map(|problem| problem.with_hint(SHARED));
    refuse(problems.chain(by_citus).chain(shared).collect())?;
    let scope = Scope {
        tables: published.iter().map(|table| table.name.clone()).collect(),
        except: Vec::new(),
        share: None,
        condition: None,
    };
    let prepared = plan(look, local, (publications, users), &scope)?;
    check_comparable(&prepared.plans)?;
    Ok((scope, prepared))
}

/// Compares tables, and makes their rows equal. Returns why tables must be compared again under another
/// snapshot.
pub(super) fn tables(
    context: SyncContext<'_>,
    control: &mut Session,
    snapshot: &Snapshot,
    published: &[PublishedTable],
) -> Result<Vec<Failure>> {
    if published.is_empty() {
        return Ok(Vec::new());
    }
    let mut look = context.publisher.connect_to_look()?;
    let mut local = context.subscriber.connect(Purpose::Verify)?;
    let users = [context.publisher.user(), context.subscriber.user()];
    let of = (context.subscription, context.publications);
    let sessions = [&look, &local].map(Session::cancel_handle);
    let (scope, prepared) = interruptible(context.shutdown, &sessions, DOING, || {
        let sessions = (&mut look, &mut local);
        let planned = prepare(sessions, (of, users), published, NOT_ALL_PUBLISHED)?;
        opposite::warn(&mut look, &mut local, &planned.0.tables)?;
        Ok(planned)
    })?;
    drop((look, local));
    let owner = context.owner();
    let mut begun = Begun::default();
    published.iter().for_each(|table| begun.push(table, 0, 1, None));
    let generations = begun.record(control, owner, snapshot.lsn)?;
    let (comparison, counts) = match compare(context, control, snapshot, (&scope, &prepared))? {
        Compared::Rows(comparison, counts) => (comparison, counts),
        Compared::Changed(failure) => return Ok(vec![failure]),
    };
    let by_name: FxHashMap<_, _> = published.iter().map(|table| (&table.name, table)).collect();
    let plans = &prepared.plans;
    let mut of_tables = Vec::with_capacity(plans.len());
    let mut equal = Complete::default();
    for (plan, counts) in plans.iter().zip(counts) {
        let table = by_name.get(&plan.name);
        let (Some(table), Some(generation)) = (table, generations.get(&plan.name)) else {
            return Err(Failure::internal("a table was compared that was not asked for"));
        };
        if counts.differences() == 0 {
            equal.push(table, counts.rows, *generation);
        }
        of_tables.push((plan, counts, *table, *generation));
    }
    // All at once: thousands of tables that are equal take no session and no transaction each.
    equal.record(control, owner, snapshot.lsn)?;
    let mut again = Vec::new();
    for (plan, counts, table, generation) in of_tables {
        let repaired = if counts.differences() == 0 {
            repair::Repaired::default()
        } else {
            let mut complete = Complete::default();
            complete.push(table, counts.rows, generation);
            let writing = RowsWritten::of(plan, counts.differences());
            let of = ((plan, comparison), writing);
            let made = make_equal(context, control, snapshot, of, &complete)?;
            let Read::Rows(repaired) = made else {
                let message = format!("table {} was truncated or rewritten meanwhile", plan.name);
                again.push(Failure::new(Class::Publisher, message));
                continue;
            };
            repaired
        };
        tracing::info!(
            event = "table_rebased",
            table = plan.name.to_string(),
            lsn = %snapshot.lsn,
            rows = counts.rows,
            inserted = repaired.inserted,
            updated = repaired.updated,
            deleted = repaired.deleted,
            "table was compared with the publisher's and made equal"
        );
    }
    Ok(again)
}

/// What a comparison has found.
enum Compared {
    /// Its number, and the counts of each table.
    Rows(VerificationNumber, Vec<Counts>),
    /// The tables must be compared again under another snapshot.
    Changed(Failure),
}

/// Compares tables with the snapshot's, and records the differences.
fn compare(
    context: SyncContext<'_>,
    control: &mut Session,
    snapshot: &Snapshot,
    (scope, prepared): (&Scope, &Prepared),
) -> Result<Compared> {
    let (owner, plans) = (context.owner(), &prepared.plans);
    let changed = AtomicBool::new(false);
    let mut source = Pairs { context, snapshot, changed: &changed, taken: false };
    let rows: Vec<_> = plans.iter().map(TablePlan::record).collect();
    let comparison = verification::begin(control, owner.id, Verifier::Verb, &rows, &scope.text())?;
    let manner = Manner {
        jobs: context.options.workers,
        rate: None,
        lifetime: Duration::from_secs(u64::MAX >> 1),
        go_on: None,
    };
    let mut recorder = context.subscriber.connect(Purpose::Control)?;
    // It ends if another process becomes the owner, whose differences these are not.
    ownership::join(&mut recorder, owner.id)?;
    let compared = Verification {
        plans,
        manner: &manner,
        scope,
        shutdown: context.shutdown,
        recorder: Recorder::new(
            recorder,
            owner.id,
            u64::MAX,
            plans.iter().map(|plan| TableRecord::begun(&comparison, plan)).collect(),
        ),
        progress: Progress::new(prepared.rows),
        work: Mutex::new(Work::new(
            plans.iter().map(|plan| TableWork::new(plan.method)).collect(),
            None,
        )),
        pace: Mutex::new(Pace::new(None)),
        passes: Passes::default(),
        entrance: Mutex::default(),
    };
    let servers = Servers {
        publisher: context.publisher,
        subscriber: context.subscriber,
        publications: context.publications,
    };
    match compared.run(&servers, &mut source, &prepared.definitions) {
        Ok(counts) => Ok(Compared::Rows(comparison.number, counts)),
        Err(failure) if changed.load(Ordering::Acquire) => Ok(Compared::Changed(failure)),
        Err(failure) => Err(failure),
    }
}

/// A column that cannot be compared could not be made equal.
fn check_comparable(plans: &[TablePlan]) -> Result<()> {
    if let Some(plan) = plans.iter().find(|plan| !plan.not_comparable.is_empty()) {
        let (column, reason) = &plan.not_comparable[0];
        return Err(Failure::new(
            Class::Mismatch,
            format!("column {column} of table {} cannot be compared: {reason}", plan.name),
        )
        .hint("TRUNCATE the table on the subscriber, so that it is copied."));
    }
    Ok(())
}

/// Logs how many rows of a table are written, because each that differs is read again by its key.
struct RowsWritten {
    table: String,
    rows: u64,
    of: u64,
    last_line: Instant,
}

impl RowsWritten {
    fn of(plan: &TablePlan, differences: u64) -> Self {
        let (table, last_line) = (plan.name.to_string(), Instant::now());
        let written = Self { table, rows: 0, of: differences, last_line };
        written.log();
        written
    }

    fn add(&mut self, rows: usize) {
        self.rows += rows as u64;
        if self.last_line.elapsed() >= LINES_EVERY {
            self.last_line = Instant::now();
            self.log();
        }
    }

    fn log(&self) {
        let Self { table, rows, of, .. } = self;
        tracing::info!(
            event = "table_rebase_progress",
            table,
            rows,
            of,
            "making rows equal to the publisher's"
        );
    }
}

/// Writes the rows of a table that differ, in one transaction; or nothing, if the snapshot no longer shows the
/// publisher's rows.
fn make_equal(
    context: SyncContext<'_>,
    control: &mut Session,
    snapshot: &Snapshot,
    ((plan, number), mut written): ((&TablePlan, VerificationNumber), RowsWritten),
    complete: &Complete,
) -> Result<Read<repair::Repaired>> {
    let owner = context.owner();
    let found_by = &repair::Verifications::one(number);
    let mut theirs = snapshot.open(context.publisher)?;
    let mut ours = context.subscriber.connect(Purpose::Copy)?;
    ownership::join(&mut ours, owner.id)?;
    // The first copy worker has the same origin afterwards.
    let tags = context.options.tags;
    let tag = WriterTag::attach(&mut ours, owner.id, tags, Writer::Copy(0))?;
    let sessions = [theirs.cancel_handle(), ours.cancel_handle()];
    let writing =
        |e: &wire::Error| Failure::subscriber(e, &format!("making table {} equal", plan.name));
    let repaired = interruptible(context.shutdown, &sessions, DOING, || {
        let mut write = |ours: &mut Session, way| -> Result<Read<repair::Repaired>> {
            let mut sum = repair::Repaired::default();
            let (mut after, mut sizes) = (0, BatchSize::new(BATCH));
            loop {
                let batch =
                    repair::differences(control, owner.id, (plan, found_by), after, sizes.next())?;
                let Some(last) = repair::last_id(&batch) else { return Ok(Read::Rows(sum)) };
                after = last;
                let made = repair::write_batch(&mut theirs, ours, plan, &batch, way)?;
                let Read::Rows((repaired, bytes)) = made else { return Ok(Read::Rewritten) };
                sizes.read(batch.len(), bytes);
                written.add(batch.len());
                sum.add(repaired);
            }
        };
        ours.simple("BEGIN").map_err(|e| writing(&e))?;
        let repaired = match write(&mut ours, WriteWay::Update) {
            Err(failure) if failure.sqlstate.as_deref().is_some_and(sqlstate::is_taken_value) => {
                // Unique values move between rows of different batches: all of them are deleted before
                // the first one is inserted.
                ours.simple("ROLLBACK; BEGIN").map_err(|e| writing(&e))?;
                let deleted = write(&mut ours, WriteWay::Delete)?;
                let inserted = write(&mut ours, WriteWay::Insert)?;
                match deleted.and(inserted) {
                    Read::Rows((deleted, inserted)) => {
                        Read::Rows(repair::Repaired { deleted: deleted.deleted, ..inserted })
                    }
                    Read::Rewritten => Read::Rewritten,
                }
            }
            written => written?,
        };
        let Read::Rows(repaired) = repaired else {
            ours.simple("ROLLBACK").map_err(|e| writing(&e))?;
            return Ok(Read::Rewritten);
        };
        ours.simple(&verification::made_equal_sql(TableOf {
            id: owner.id,
            name: &plan.name,
            number,
        }))
        .map_err(|e| writing(&e))?;
        complete.record(&mut ours, owner, snapshot.lsn)?;
        ours.simple("COMMIT").map_err(|e| writing(&e))?;
        Ok(Read::Rows(repaired))
    })?;
    if let Some(tag) = tag {
        tag.release(&mut ours);
    }
    Ok(repaired)
}
