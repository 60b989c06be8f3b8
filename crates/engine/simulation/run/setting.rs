//! How a run is set up.

use std::time::Duration;

use engine::assemble::PartLimits;
use engine::dispatch::{DispatchSettings, Pacing};
use engine::group::GroupLimits;
use engine::writeset::WritesetLimits;

use crate::simulation::Sabotage;
use crate::simulation::history::History;
use crate::simulation::rng::Rng;

/// How a run is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) dispatch: DispatchSettings,
    /// The longest time that passes with one event.
    pub(crate) tick: Duration,
    /// How old transactions are when they are sent.
    pub(crate) behind: Duration,
    /// How eager each worker and its session are.
    pub(crate) speeds: [(usize, usize); 4],
    /// How parts and blocks are cut.
    pub(super) parts: PartLimits,
    /// How often the publisher sends blocks of transactions that are open.
    pub(super) eager: usize,
    /// How many transactions that are open may be applied at once.
    pub(crate) streams: usize,
    /// How long a transaction is held before it is prepared on the subscriber, and how many may be.
    pub(super) hold: Option<Duration>,
    pub(super) most_prepared: usize,
    /// Whether tables are attached to others all the time.
    pub(crate) moves: bool,
}

impl Setting {
    pub(crate) fn random(rng: &mut Rng, ordered: bool, history: &History) -> Self {
        let speed = |rng: &mut Rng| (rng.one_of(&[1, 4, 16]), rng.one_of(&[1, 4, 16]));
        let at_last = Duration::from_secs(10);
        let pacing = Pacing {
            depth: 2 + rng.below(3),
            window: rng.one_of(&[1, 16]),
            far_depth: 6,
            few_changes: rng.one_of(&[0, 2, 16]),
            counted_changes: rng.one_of(&[4, 100]),
            ready_groups: rng.one_of(&[1, 2]),
            outstanding: rng.one_of(&[1, 4, 64]),
            victims: rng.one_of(&[1, 4]),
            want_after: Duration::from_micros(10),
            idle: Duration::from_micros(100),
            tenure: Duration::from_micros(500),
            serialized_term: rng.one_of(&[Duration::from_millis(5), Duration::from_secs(10)]),
            stream_worth: rng.one_of(&[1, 100]),
            stream_gathering: rng.one_of(&[Duration::ZERO, Duration::from_millis(2)]),
            savepoint_spacing: rng.one_of(&[1, 80]),
            savepoints: rng.one_of(&[1, 512]),
            redone: rng.one_of(&[0, 1000]),
            // Mostly, transactions that are committed one by one soon go side by side.
            turn: if rng.chance(1, 8) { Duration::from_micros(200) } else { Duration::ZERO },
            run: rng.one_of(&[1, 4, 256]),
            run_time: if rng.chance(1, 8) { Duration::from_millis(20) } else { Duration::ZERO },
            side_by_side: rng.one_of(&[Duration::ZERO, at_last, at_last]),
            row_versions: rng.one_of(&[1, 2, 256]),
            table_changes: rng.one_of(&[1, 64]),
            ..Pacing::MEASURED
        };
        let transactions = rng.one_of(&[1, 2, 4, 16]);
        let dispatch = DispatchSettings {
            workers: 1 + rng.below(4),
            vary: rng.chance(1, 4),
            scaled: false,
            ordered,
            round_trip: rng.one_of(&[Duration::ZERO, Duration::from_millis(5)]),
            group: GroupLimits {
                transactions,
                thin_transactions: if transactions == 1 { 1 } else { 16 },
                changes: rng.one_of(&[2, 8, 100]),
                bytes: 1000,
            },
            lock_table: rng.one_of(&[usize::MAX, 4, 16]),
            writeset: WritesetLimits {
                keys_per_table: rng.one_of(&[1, 3, 1000]),
                keys: rng.one_of(&[5, 1000]),
            },
            deadlock_timeout: rng.one_of(&[Duration::ZERO, Duration::from_millis(50)]),
            pacing,
        };
        let parts = PartLimits {
            bytes: 1000,
            changes: rng.one_of(&[2, 6, 100, 100]),
            spooled_bytes: rng.one_of(&[0, 200, 100_000]),
            block_bytes: rng.one_of(&[64, 1000]),
        };
        let at_once = Some(Duration::ZERO);
        let hold = [None, at_once, at_once, at_once, Some(Duration::from_micros(500))];
        Self {
            dispatch,
            tick: Duration::from_micros(rng.one_of(&[10, 200, 5000])),
            behind: rng.one_of(&[Duration::ZERO, Duration::from_secs(1)]),
            speeds: [speed(rng), speed(rng), speed(rng), speed(rng)],
            parts,
            eager: if history.streams { rng.one_of(&[0, 1, 4]) } else { 0 },
            streams: rng.one_of(&[0, 1, 3]),
            hold: rng.one_of(&hold),
            most_prepared: rng.one_of(&[0, 1, 20, 20, 20]),
            moves: rng.chance(1, 16),
        }
    }
}

/// The setting, without what a broken rule would keep.
pub(super) fn broken(setting: DispatchSettings, sabotage: Sabotage) -> DispatchSettings {
    let DispatchSettings { pacing, writeset, .. } = setting;
    match sabotage {
        Sabotage::UnboundedWriteset => {
            let writeset = WritesetLimits { keys: usize::MAX, ..writeset };
            DispatchSettings { writeset, ..setting }
        }
        Sabotage::UnboundedQueue => {
            let pacing = Pacing { depth: 1000, far_depth: 1000, ..pacing };
            DispatchSettings { pacing, ..setting }
        }
        Sabotage::HastySerialization => {
            DispatchSettings { pacing: Pacing { victims: 1, ..pacing }, ..setting }
        }
        _ => setting,
    }
}
