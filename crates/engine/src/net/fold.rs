//! The folder: which segment collects a change, and when a segment ends.

use pgoutput::Message;
use rustc_hash::{FxHashMap, FxHashSet};

use super::append::Append;
use super::keyed::Keyed;
use super::whole_row::WholeRow;
use super::{ChangeAt, Segment, Step, TableFolding, TableRules};

/// Folds the changes of one group. `'a` is the lifetime of the received bytes.
///
/// Each table has a lane of its own, except where a group changes a partitioned table: all tables below
/// its topmost relation share a lane then. Table versions of one relation always do: if the subscriber's table
/// behind its name is another one in the middle of a transaction, all tables share a lane.
#[derive(Debug)]
pub struct Folder<'t, 'a> {
    tables: &'t [TableRules],
    /// Index into `lanes`, for each table version.
    lane_of: Vec<usize>,
    lanes: Vec<Lane<'t, 'a>>,
    /// Number of segments opened so far.
    opened: usize,
    steps: Vec<Step<'a>>,
}

/// A lane and its open segment, which may be empty.
#[derive(Debug)]
struct Lane<'t, 'a> {
    table: usize,
    /// Whether several tables share it.
    shared: bool,
    /// The last step of the lane is a TRUNCATE of its table.
    emptied: Option<Emptied>,
    /// Number of segments that were opened before this one.
    opened: usize,
    collector: Collector<'t, 'a>,
}

/// A TRUNCATE before the open segment.
#[derive(Debug, Clone, Copy)]
struct Emptied {
    /// It has also restarted the table's sequences.
    restarted: bool,
}

#[derive(Debug)]
enum Collector<'t, 'a> {
    /// No change of the lane could be folded yet.
    None,
    Keyed(Keyed<'t, 'a>),
    WholeRow(WholeRow<'t, 'a>),
    Append(Append<'a>),
}

/// Whether the versions of a published table have different places on the subscriber.
fn is_one_relation_in_two_places(tables: &[TableRules]) -> bool {
    if tables.len() < 2 {
        return false;
    }
    let mut places = FxHashMap::default();
    tables.iter().any(|rules| {
        let place = (rules.root, rules.storage);
        places.insert(rules.published, place).is_some_and(|before| before != place)
    })
}

impl<'t, 'a> Folder<'t, 'a> {
    /// A folder for a group with changes of these table versions.
    #[must_use]
    pub fn new(tables: &'t [TableRules]) -> Self {
        let mut places = FxHashMap::default();
        let mut lanes = Vec::new();
        let together = is_one_relation_in_two_places(tables);
        let shared: FxHashSet<u32> =
            tables.iter().filter(|rules| rules.storage.is_none()).map(|rules| rules.root).collect();
        let lane_of = tables
            .iter()
            .map(|rules| {
                let storage = rules.storage.filter(|_| !shared.contains(&rules.root));
                let place = if together { (0, None) } else { (rules.root, storage) };
                *places.entry(place).or_insert_with(|| {
                    let shared = place.1.is_none();
                    let (emptied, collector) = (None, Collector::None);
                    lanes.push(Lane { table: 0, shared, emptied, opened: 0, collector });
                    lanes.len() - 1
                })
            })
            .collect();
        Self { tables, lane_of, lanes, opened: 0, steps: Vec::new() }
    }

    /// Takes an insert, update or delete of table version `table`.
    ///
    /// # Panics
    /// If there is no such table version.
    #[inline]
    pub fn push(&mut self, at: ChangeAt, table: usize, message: &Message<'a>) {
        let rules = &self.tables[table];
        let alone = match rules.fold {
            TableFolding::Never { user_code } => {
                if user_code {
                    self.close_all();
                    // User code may fill any table.
                    self.lanes.iter_mut().for_each(|lane| lane.emptied = None);
                }
                true
            }
            TableFolding::AsSent => true,
            TableFolding::Key(_) | TableFolding::WholeRow | TableFolding::Append => {
                rules.updates_alone && matches!(message, Message::Update(_))
            }
        };
        if alone || !self.collect(at, table, message) {
            self.close(self.lane_of[table]);
            self.lanes[self.lane_of[table]].emptied = None;
            self.steps.push(Step::Alone(at));
        }
    }

    /// Takes a truncate of these table versions.
    ///
    /// A table that was emptied before in the group, and into which rows were only inserted since, is as
    /// empty without these rows and without this TRUNCATE. That saves files, locks and flushes where a table
    /// is filled and emptied again and again. Rows before the first TRUNCATE are executed: they may
    /// conflict with rows of the subscriber. Nobody else can write to the table behind it.
    ///
    /// # Panics
    /// If there is no such table version.
    pub fn push_truncate(&mut self, at: ChangeAt, tables: &[usize], message: &Message<'a>) {
        let restarts = matches!(message, Message::Truncate(truncate) if truncate.restart_identity);
        if tables.iter().all(|&table| self.is_emptied_again(table, restarts)) {
            for &table in tables {
                drop(self.lanes[self.lane_of[table]].collector.close(table));
            }
            return;
        }
        let runs_user_code =
            |&table: &usize| self.tables[table].fold == TableFolding::Never { user_code: true };
        let user_code = tables.iter().any(runs_user_code);
        if user_code {
            self.close_all();
            self.lanes.iter_mut().for_each(|lane| lane.emptied = None);
        }
        for &table in tables {
            self.close(self.lane_of[table]);
            let lane = &mut self.lanes[self.lane_of[table]];
            lane.emptied = (!lane.shared && !user_code).then_some(Emptied { restarted: restarts });
        }
        self.steps.push(Step::Alone(at));
    }

    /// Whether a TRUNCATE leaves this table as the last one did.
    fn is_emptied_again(&self, table: usize, restarts: bool) -> bool {
        let lane = &self.lanes[self.lane_of[table]];
        lane.emptied.is_some_and(|emptied| emptied.restarted || !restarts)
            && lane.collector.needs_no_row()
    }

    /// Closes every open segment and returns the steps.
    #[must_use]
    pub fn finish(mut self) -> Vec<Step<'a>> {
        self.close_all();
        self.steps
    }

    /// Adds a change to the open segment of its table. Returns false, and adds nothing, if the
    /// change must be executed alone.
    #[inline]
    fn collect(&mut self, at: ChangeAt, table: usize, message: &Message<'a>) -> bool {
        let place = self.lane_of[table];
        if self.lanes[place].table != table
            || matches!(self.lanes[place].collector, Collector::None)
        {
            self.close(place);
            let lane = &mut self.lanes[place];
            lane.table = table;
            lane.collector = Collector::new(&self.tables[table]);
        }
        let lane = &mut self.lanes[place];
        if lane.collector.is_empty() {
            lane.opened = self.opened;
            self.opened += 1;
        }
        match &mut lane.collector {
            Collector::Keyed(keyed) => keyed.push(at, message),
            Collector::WholeRow(whole_row) => whole_row.push(at, message),
            Collector::Append(append) => append.push(message),
            Collector::None => false,
        }
    }

    fn close_all(&mut self) {
        let mut open: Vec<usize> = (0..self.lanes.len()).collect();
        open.sort_unstable_by_key(|&place| self.lanes[place].opened);
        for place in open {
            self.close(place);
        }
    }

    fn close(&mut self, place: usize) {
        let lane = &mut self.lanes[place];
        if lane.collector.is_empty() {
            return;
        }
        let segment = lane.collector.close(lane.table);
        // A WholeRow segment is empty if all of its rows were inserted and deleted again.
        if !segment.is_empty() {
            lane.emptied = None;
            self.steps.push(Step::Segment(segment));
        }
    }
}

impl<'t, 'a> Collector<'t, 'a> {
    fn new(rules: &'t TableRules) -> Self {
        match &rules.fold {
            TableFolding::Key(key) => {
                let moves = rules.moves && !rules.seeks;
                Self::Keyed(
                    Keyed::new(key, &rules.written, rules.columns)
                        .seeking(rules.seeks)
                        .moving(moves),
                )
            }
            TableFolding::WholeRow => {
                let told_apart = rules.seeks.then_some(&*rules.told_apart);
                Self::WholeRow(WholeRow::new(rules.columns, told_apart))
            }
            TableFolding::Append => Self::Append(Append::new(rules.columns)),
            TableFolding::AsSent | TableFolding::Never { .. } => Self::None,
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        match self {
            Self::None => true,
            Self::Keyed(keyed) => keyed.is_empty(),
            Self::WholeRow(whole_row) => whole_row.is_empty(),
            Self::Append(append) => append.is_empty(),
        }
    }

    /// Whether it can be executed on an empty table.
    fn needs_no_row(&self) -> bool {
        match self {
            Self::None | Self::Append(_) => true,
            Self::Keyed(keyed) => keyed.needs_no_row(),
            Self::WholeRow(whole_row) => whole_row.needs_no_row(),
        }
    }

    /// Returns the net changes and empties the segment, but keeps its memory for the next one.
    fn close(&mut self, table: usize) -> Segment<'a> {
        match self {
            Self::None => Segment { table, ..Segment::default() },
            Self::Keyed(keyed) => keyed.close(table),
            Self::WholeRow(whole_row) => whole_row.close(table),
            Self::Append(append) => append.close(table),
        }
    }
}
