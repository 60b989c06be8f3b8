//! The surroundings of the engine's intake: dispatcher, subscriber's tables, notes of prepared transactions.

use std::sync::Arc;

use engine::assemble::Prepared;
use engine::deferred::DeferredTables;
use engine::dispatch::{Dispatch, DispatchSettings, TableId};
use engine::intake::{MissedSkip, PreparedTransaction, Surroundings};
use engine::net::TableFolding;
use engine::progress::Progress;
use engine::relation::RemoteRelation;
use engine::sync_lsn::SyncLsn;
use engine::table_name::TableName;
use engine::transaction::{TransactionHead, TransactionPart};
use engine::work::Table;
use engine::writeset::LockRules;
use pgoutput::{Lsn, RelId, Timestamp, Xid};

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::run::setting::broken;
use crate::simulation::spool::Spool;
use crate::simulation::stream::table;
use crate::simulation::subscriber::PreparedHere;
use crate::simulation::worker::{PlainWork, Work};

/// A table of the subscriber.
#[derive(Debug)]
pub(crate) struct TableMap {
    pub(crate) table: usize,
    pub(crate) locks: LockRules,
    pub(crate) fold: TableFolding,
    pub(super) has_single_updates: bool,
}

impl Table for TableMap {
    fn id(&self) -> TableId {
        let oid = u32::try_from(self.table).expect("few tables") + 1;
        TableId { published: RelId(oid), oid, root: self.locks.root, relations: 2 }
    }

    fn locks(&self) -> Option<&LockRules> {
        Some(&self.locks)
    }

    fn fold(&self) -> &TableFolding {
        &self.fold
    }

    fn has_single_updates(&self) -> bool {
        self.has_single_updates
    }

    fn is_under_rules(&self) -> bool {
        false
    }

    fn is_under_rules_of_time(&self) -> bool {
        false
    }
}

/// The dispatcher, the subscriber's tables, and what the subscriber is to be told.
#[derive(Debug)]
pub(crate) struct Outside {
    pub(crate) dispatch: Dispatch<Work>,
    pub(super) tables: Vec<Arc<TableMap>>,
    /// Only this table is applied, from here on.
    pub(crate) only: Option<(usize, SyncLsn)>,
    /// This table is not known before its first change, which has its copy begin.
    pub(crate) unknown: Option<usize>,
    /// Its copy is to begin, and transactions leave its changes out.
    pub(crate) begun: bool,
    pub(crate) without: bool,
    /// To be noted as about to be prepared, and notes that are not needed any more.
    pub(super) notes: Vec<PreparedHere>,
    pub(super) forgotten: Vec<PreparedHere>,
    /// How often prepared transactions were counted.
    counts: u32,
    pub(super) sabotage: Sabotage,
}

impl Outside {
    pub(crate) fn new(history: &History, dispatch: DispatchSettings, sabotage: Sabotage) -> Self {
        let maps = (0..history.rules.len()).map(|table| {
            let rules = &history.rules[table];
            let has_single_updates = rules.has_single_updates();
            let (locks, fold) = (history.locks[table].clone(), rules.fold.clone());
            Arc::new(TableMap { table, locks, fold, has_single_updates })
        });
        let dispatch = Dispatch::new(broken(dispatch, sabotage));
        let (notes, forgotten) = (Vec::new(), Vec::new());
        let tables = maps.collect();
        let (only, unknown, begun, without, counts) = (None, None, false, false, 0);
        Self { dispatch, tables, only, unknown, begun, without, notes, forgotten, counts, sabotage }
    }

    /// Nothing is noted of transactions that are prepared.
    pub(crate) fn forget_notes(&mut self) {
        self.notes.clear();
        self.forgotten.clear();
    }

    pub(crate) fn map(&self, table: usize) -> Arc<TableMap> {
        Arc::clone(&self.tables[table])
    }
}

impl PreparedTransaction for PreparedHere {
    fn xid(&self) -> Xid {
        self.xid
    }

    fn prepare_lsn(&self) -> Lsn {
        self.prepare_lsn
    }

    fn gid(&self) -> &'static str {
        ""
    }

    fn prepare_time(&self) -> Option<Timestamp> {
        Some(self.time)
    }

    fn describe(&self) -> String {
        format!("transaction {}", self.xid)
    }
}

impl Surroundings for Outside {
    type Table = TableMap;
    type Prepared = PreparedHere;
    type Copied = ();
    type Spool = Spool;
    type Error = String;

    fn dispatch(&mut self, plain: PlainWork, outstanding: usize) {
        self.dispatch.on_their_way(outstanding);
        self.dispatch.push(Work { plain, sabotage: self.sabotage });
    }

    fn is_drained(&self) -> bool {
        self.dispatch.is_drained()
    }

    fn is_idle(&self) -> bool {
        self.dispatch.is_idle()
    }

    fn goal(&self) -> Option<Lsn> {
        None
    }

    fn is_own(&self, _: &RemoteRelation) -> bool {
        false
    }

    fn is_gone(&self, _: &RemoteRelation, _: Lsn) -> bool {
        false
    }

    fn knows(&self, relation: &Arc<RemoteRelation>, _: Lsn) -> bool {
        self.unknown != Some(table(relation.id))
    }

    fn is_another(&mut self, _: &Arc<RemoteRelation>, _: Lsn) -> bool {
        false
    }

    fn add_table(
        &mut self,
        relation: &RemoteRelation,
        _: TransactionHead,
        deferred: &mut DeferredTables<()>,
        progress: &Progress,
    ) -> Result<bool, String> {
        if self.unknown.take() != Some(table(relation.id)) {
            return Err("a table is not known".to_owned());
        }
        deferred.begin(relation.name.clone(), progress);
        self.begun = true;
        Ok(true)
    }

    fn table(
        &mut self,
        part: &TransactionPart,
        relation: usize,
        commit_lsn: Lsn,
    ) -> Result<Option<Arc<TableMap>>, String> {
        let table = table(part.relations()[relation].id);
        let applied = self.only.is_none_or(|(only, from)| only == table && from.passes(commit_lsn));
        Ok(applied.then(|| Arc::clone(&self.tables[table])))
    }

    fn may_be_prepared(
        &mut self,
        relations: &[Arc<RemoteRelation>],
        lsn: Lsn,
    ) -> Result<bool, String> {
        let is_ahead = self
            .only
            .filter(|(_, from)| !from.passes(lsn))
            .is_some_and(|(only, _)| relations.iter().any(|relation| table(relation.id) == only));
        Ok(!is_ahead)
    }

    fn prepare_as(&self, prepared: &Prepared) -> PreparedHere {
        let Prepared { xid, prepare_lsn, prepare_time: time, .. } = *prepared;
        PreparedHere { xid, prepare_lsn, time }
    }

    /// Now and then others have taken all places.
    fn note_prepared(
        &mut self,
        prepared: &[PreparedHere],
        without: &[&TableName],
    ) -> Result<usize, String> {
        self.without |= !without.is_empty();
        self.notes.extend(prepared);
        self.counts += 1;
        Ok(if self.counts.is_multiple_of(3) { usize::MAX / 2 } else { 0 })
    }

    /// No insert of the simulation lacks a value.
    fn mark_lacking(&mut self, _: &[&Self::Table], _: Lsn) -> Result<(), String> {
        Err("no insert lacks a value".to_owned())
    }

    fn lacks_places(&mut self) {}

    fn forget_prepared(&mut self, prepared: PreparedHere) {
        self.forgotten.push(prepared);
    }

    fn skipped(&mut self, _: Lsn, _: Lsn, _: Xid) -> Result<(), String> {
        Ok(())
    }

    fn missed_skip(&mut self, _: MissedSkip) -> Result<(), String> {
        Ok(())
    }

    fn unsent_prepare(&mut self, _: &str, _: Xid, _: Lsn) {}
}
