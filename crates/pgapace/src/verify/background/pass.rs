//! One pass: some tables are compared under one barrier, or more if it takes long.

use std::sync::Mutex;
use std::time::Duration;

use engine::table_name::TableName;
use wire::Session;

use super::NamedColumns;
use super::watch::Watch;
use crate::barrier::taker::{BarrierManner, BarrierTaker};
use crate::config::Subscription as Config;
use crate::error::{Class, Result};
use crate::observe::board::Board;
use crate::publisher::session::Publisher;
use crate::stopping::shutdown::Shutdown;
use crate::subscriber::session::{Purpose, Subscriber};
use crate::subscriber::state::Subscription;
use crate::subscriber::state::verification::{self, ALL_ROWS, VerificationKind, Verifier};
use crate::verify::exclusive;
use crate::verify::keeper::Servers;
use crate::verify::plan::TablePlan;
use crate::verify::prepare::{Scope, prepare};
use crate::verify::progress::Progress;
use crate::verify::rate::Pace;
use crate::verify::record::{self, Recorder, TableRecord};
use crate::verify::run::{Manner, Verification};
use crate::verify::whole::Passes;
use crate::verify::work::{TableWork, Work};

/// Age at which snapshots are renewed, because they hold back VACUUM.
const LIFETIME: Duration = Duration::from_secs(600);
/// Differences of each table that are recorded.
const MOST_DIFFERENCES: u64 = 10_000;

/// The configuration and servers that all passes share.
pub(super) struct Pass<'a> {
    pub(super) config: &'a Config,
    pub(super) board: &'a Board,
    /// The end of the process.
    pub(super) ended: &'a Shutdown,
    pub(super) publisher: &'a Publisher,
    pub(super) subscriber: &'a Subscriber,
    pub(super) row: &'a Subscription,
}

impl Pass<'_> {
    /// Compares these tables. Returns false if a verb or a session that waits for a lock came
    /// first.
    pub(super) fn tables(
        &self,
        mut control: Session,
        tables: &[TableName],
        named: &mut NamedColumns,
    ) -> Result<bool> {
        let (config, row) = (self.config, self.row);
        if !exclusive::begin_background(&mut control, row.id)? {
            return Ok(false);
        }
        let scope =
            Scope { tables: tables.to_vec(), except: Vec::new(), share: None, condition: None };
        let mut look = self.publisher.connect_to_look()?;
        let mut local = self.subscriber.connect(Purpose::Verify)?;
        let prepared = prepare(&mut look, &mut local, config, row, &scope)?;
        drop((look, local));
        let plans = &prepared.plans;
        plans.iter().for_each(|plan| self.name_columns(plan, named));
        let (work, records) = self.begin(&mut control, plans)?;
        let rate = Some(config.verify_max_rate);
        let manner = Manner { jobs: 1, rate, lifetime: LIFETIME, go_on: None };
        let over = Shutdown::default();
        let watch = Watch::start(self.subscriber, row.id, self.ended, &over)?;
        let recorder = Recorder::new(control, row.id, MOST_DIFFERENCES, records);
        let verification = Verification {
            plans,
            manner: &manner,
            scope: &scope,
            shutdown: &over,
            recorder: recorder.in_background(&config.name),
            progress: Progress::on(self.board.clone()),
            work: Mutex::new(Work::new(work, None)),
            pace: Mutex::new(Pace::new(manner.rate)),
            passes: Passes::default(),
            entrance: Mutex::default(),
        };
        let servers = Servers {
            publisher: self.publisher,
            subscriber: self.subscriber,
            publications: &config.publications,
        };
        let mut source = BarrierTaker {
            tables,
            config,
            publisher: self.publisher,
            subscriber: self.subscriber,
            row,
            manner: BarrierManner::BACKGROUND,
            shutdown: &over,
            runner: None,
        };
        let compared = verification.run(&servers, &mut source, &prepared.definitions);
        drop(watch);
        let counts = match compared {
            Ok(counts) => counts,
            Err(failure) if failure.class == Class::Stopped => return Ok(false),
            Err(failure) => return Err(failure),
        };
        tracing::info!(
            event = "tables_verified",
            subscription = config.name,
            tables = counts.len(),
            rows = counts.iter().map(|counts| counts.rows).sum::<u64>(),
            differences = counts.iter().map(|counts| counts.differences()).sum::<u64>(),
            "tables were compared with the publisher's"
        );
        Ok(true)
    }

    /// Logs which columns of a table cannot be compared, once in a process.
    fn name_columns(&self, plan: &TablePlan, named: &mut NamedColumns) {
        let columns: Vec<_> = plan.not_comparable.iter().map(|(name, _)| name.clone()).collect();
        let before = named.insert(plan.name.clone(), columns.clone());
        if columns.is_empty() || before.is_some_and(|before| before == columns) {
            return;
        }
        let reasons: Vec<_> = plan
            .not_comparable
            .iter()
            .map(|(column, reason)| format!("{column}: {reason}"))
            .collect();
        tracing::warn!(
            event = "columns_not_compared",
            subscription = self.config.name,
            table = plan.name.to_string(),
            columns = columns.join(", "),
            reason = reasons.join("; "),
            "columns cannot be compared; the others of the table are"
        );
    }

    /// Records the beginning of each table, or goes on with it where it was interrupted.
    fn begin(
        &self,
        control: &mut Session,
        plans: &[TablePlan],
    ) -> Result<(Vec<TableWork>, Vec<TableRecord>)> {
        let id = self.row.id;
        let mut known = verification::read(control, id)?;
        known.retain(|one| one.kind == VerificationKind::Begun);
        let (mut work, mut records) = (Vec::new(), Vec::new());
        for plan in plans {
            let left = plan.columns_left();
            let found =
                known.iter().find(|one| (one.name == plan.name) && one.columns_left == left);
            match found {
                Some(found) => {
                    let (table, record) = record::resume(control, id, plan, found)?;
                    work.push(table);
                    records.push(record);
                }
                None => {
                    let rows = [plan.record()];
                    let begun =
                        verification::begin(control, id, Verifier::Background, &rows, ALL_ROWS)?;
                    records.push(TableRecord::begun(&begun, plan));
                    work.push(TableWork::new(plan.method));
                }
            }
        }
        Ok((work, records))
    }
}
