//! Worker scaling: how many apply workers are in use.
//!
//! More sessions than processors are slower than fewer: measured on 2 processors with both servers on
//! them, one worker applies `tpcb` a third faster than four. Where reads come from a disk, or the
//! subscriber is far away, eight or sixteen are several times faster than one. pgapace can query neither
//! the number of processors nor what they are waiting for. So it tries: it measures what the workers
//! apply per second, then the same with another number, and keeps the better one.
//!
//! ```text
//!             a search or a glance is due
//!   Holding ───────────────────────────────► Trial of another number
//!      ▲                                        │
//!      └────────────────────────────────────────┘
//!          better: it is kept, and the next number is tried
//!          not better: the old one is measured again before the next trial
//! ```
//!
//! * Rates are compared only while work waits: a subscription without a load learns nothing. See
//!   [`Load`].
//! * Rates of different kinds of load are not compared. A load changes its kind when its changes get
//!   wider or narrower, or when the same number of workers suddenly applies more or less. Then the
//!   search begins anew.
//! * A rate that rises by itself is not compared: sessions that are new prepare their statements and read
//!   what is not cached, and groups grow. So a search begins once the rate no longer rises: until then,
//!   whatever is tried would seem to be better.
//! * A trial of more workers must be cheap. Each new session prepares the statements of all tables anew:
//!   for 400 tables of 80 columns that took the backend 2.4 s, and a search tried three sessions before
//!   the first had spent 5 s on its work. So sessions are opened for trials once that costs less than
//!   a fifth of the time in which work has waited.
//! * More workers must gain something that noise does not explain. Fewer must lose nothing that can be
//!   measured, because each session costs memory on the subscriber.
//!
//! How long workers wait for locks, dependencies or their turn would not shorten the search: such waits
//! show that more workers gain nothing only after they have been tried, and their absence does not show
//! that there are processors for more.

mod meter;
mod search;
mod sessions;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use meter::GroupWork;
use meter::{Measurement, Meter};
use search::Search;
use sessions::Sessions;

/// Factor by which the rate must increase with more workers.
const WORTH: f64 = 1.05;
/// Part of the rate that fewer workers may lose, in one trial and in all trials of a search.
const LOSS: f64 = 0.03;
/// Factor between two rates, and between two widths of changes, from which on the load is another one.
const OTHER_RATE: f64 = 1.3;
const OTHER_WIDTH: f64 = 1.5;
/// Factor of the rate, from one measurement to the next, from which on it is still rising.
const RISING: f64 = 1.15;
/// In percent.
const CLEARLY_WORSE: i16 = -10;
/// The longest measurement of a trial, in those of the number that it is compared with.
const LONGEST_TRIAL: u32 = 4;
/// The longest measurement, except that one group is always waited for.
const LONGEST: Duration = Duration::from_secs(5);
/// How long sessions may take to open.
const OPENING: Duration = Duration::from_secs(3);
/// Pause between two searches. It grows while nothing changes.
const FIRST_PAUSE: Duration = Duration::from_secs(4);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A search is followed by a pause of this many times what its trials have lost, up to the second
/// value: trials must cost little.
const PAUSE_FOR_LOSS: f64 = 33.0;
const LONGEST_PAUSE_FOR_LOSS: Duration = Duration::from_secs(60);
/// The part (1 in n) of the time with a heavy load that sessions may prepare statements for trials.
const PREPARING_PART: u32 = 5;
/// Part of the time in which work must wait, so that more workers can help.
const SATURATED: f64 = 0.5;

/// Whether the number of workers limits the rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// The number of workers does not limit the rate: any number does.
    Light,
    /// The publisher is behind, or all workers are busy and enough waits for a group.
    Heavy,
}

/// Why this number of workers is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The number was set.
    Fixed,
    /// Transactions are committed one by one, and one worker does that faster than several.
    OneByOne,
    /// There was no backlog yet.
    Unmeasured,
    /// For a trial of this number, sessions would have to prepare statements for too long.
    TooManyStatements {
        /// The number.
        workers: u16,
    },
    /// The number is compared with another one.
    Trial {
        /// The number that is in use otherwise.
        than: u16,
    },
    /// Others were tried.
    Measured {
        /// The lowest number above that was tried.
        more: Option<Tried>,
        /// The highest number below that was tried.
        fewer: Option<Tried>,
    },
}

/// A number of workers that was not better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tried {
    /// The number.
    pub workers: u16,
    /// The rate with this number above that with the number in use, in percent.
    pub percent: i16,
}

/// How many workers are in use for a heavy load, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// The number.
    pub workers: u16,
    /// The reason.
    pub reason: Reason,
}

impl Decision {
    /// The number was set.
    #[must_use]
    pub fn fixed(workers: usize) -> Self {
        Self { workers: short(workers), reason: Reason::Fixed }
    }
}

#[derive(Debug)]
enum Phase {
    Holding,
    Trial { tried: usize, base: Measurement },
}

/// Decides how many workers are in use.
#[derive(Debug)]
pub struct Scaling {
    most: usize,
    /// The best number so far.
    best: usize,
    phase: Phase,
    meter: Meter,
    search: Option<Search>,
    /// Whether the next glance looks far.
    far: bool,
    /// The rate of the best number.
    usual: Option<Measurement>,
    /// Whether it no longer rises by itself.
    settled: bool,
    /// Measurements in a row that differ from it.
    differs: u32,
    /// The part of the rate that is left after fewer workers were accepted in this search.
    kept: f64,
    /// How many seconds the trials of this search have lost.
    lost: f64,
    next_search: Duration,
    pause: Duration,
    /// Since when other workers are there than are to be in use.
    opening_since: Option<Duration>,
    sessions: Sessions,
    /// The number whose trial would still cost too much.
    too_dear: Option<usize>,
    more: Option<Tried>,
    fewer: Option<Tried>,
}

impl Scaling {
    /// One worker is in use first.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            most,
            best: 1,
            phase: Phase::Holding,
            meter: Meter::new(most),
            search: Some(Search::full(most)),
            far: false,
            usual: None,
            settled: false,
            differs: 0,
            kept: 1.0,
            lost: 0.0,
            next_search: Duration::ZERO,
            pause: FIRST_PAUSE,
            opening_since: None,
            sessions: Sessions::new(most),
            too_dear: None,
            more: None,
            fewer: None,
        }
    }

    /// So many workers are to be in use for a heavy load.
    #[must_use]
    pub fn workers(&self) -> usize {
        match self.phase {
            Phase::Holding => self.best,
            Phase::Trial { tried, .. } => tried,
        }
    }

    /// The number for a heavy load, and the reason.
    #[must_use]
    pub fn decision(&self) -> Decision {
        let reason = match self.phase {
            Phase::Trial { .. } => Reason::Trial { than: short(self.best) },
            Phase::Holding if let Some(workers) = self.too_dear => {
                Reason::TooManyStatements { workers: short(workers) }
            }
            Phase::Holding if self.usual.is_none() && self.more.or(self.fewer).is_none() => {
                Reason::Unmeasured
            }
            Phase::Holding => Reason::Measured { more: self.more, fewer: self.fewer },
        };
        Decision { workers: short(self.workers()), reason }
    }

    /// Whether the best number is being searched: then groups should not take long.
    #[must_use]
    pub fn is_searching(&self) -> bool {
        self.too_dear.is_none() && self.search.as_ref().is_some_and(Search::is_full)
    }

    /// Whether work waits for a worker from now on.
    pub fn waits(&mut self, waits: bool, now: Duration) {
        self.meter.waits(waits, now);
    }

    /// Discards the measurement so far: nothing came for a while, or a group whose rate does not depend
    /// on the number of workers.
    pub fn interrupted(&mut self, now: Duration) {
        self.meter.restart(now);
    }

    /// The statements of a worker's session took so long to prepare, all together.
    pub fn prepared(&mut self, worker: usize, time: Duration) {
        let more = self.sessions.prepared(worker, time);
        self.meter.preparing(worker, more);
    }

    /// A group has ended. `idle`: its worker has nothing more to do.
    pub fn ended(
        &mut self,
        worker: usize,
        assigned: Duration,
        work: GroupWork,
        idle: bool,
        now: Duration,
    ) {
        self.meter.ended(worker, assigned, work, idle, now);
    }

    /// Decides about the number of workers. `in_use`: how many workers get groups.
    pub fn look(&mut self, load: Load, in_use: usize, now: Duration) {
        self.sessions.look(load == Load::Heavy, now);
        if load == Load::Light {
            self.phase = Phase::Holding;
            self.opening_since = None;
            return self.meter.restart(now);
        }
        if in_use != self.workers() {
            self.meter.restart(now);
            let since = *self.opening_since.get_or_insert(now);
            if now.saturating_sub(since) >= OPENING {
                self.not_to_be_had(in_use, now);
            }
            return;
        }
        self.opening_since = None;
        let longest = match &self.phase {
            Phase::Holding => LONGEST,
            Phase::Trial { base, .. } => {
                (base.took * LONGEST_TRIAL).clamp(Duration::from_secs(1), LONGEST)
            }
        };
        let Some(measured) = self.meter.result(in_use, longest, now) else { return };
        match std::mem::replace(&mut self.phase, Phase::Holding) {
            Phase::Holding => self.held(measured, now),
            Phase::Trial { tried, base } => self.tried(tried, base, measured, now),
        }
    }

    /// The sessions for so many workers are not to be had.
    fn not_to_be_had(&mut self, in_use: usize, now: Duration) {
        self.opening_since = None;
        if matches!(self.phase, Phase::Holding) {
            self.best = in_use.clamp(1, self.most);
            self.usual = None;
        }
        self.phase = Phase::Holding;
        self.end_search(now);
    }

    fn held(&mut self, measured: Measurement, now: Duration) {
        if self.too_dear.is_some() && self.sessions.afford(self.best + 1) {
            // Groups are smaller during a search.
            (self.too_dear, self.usual, self.settled) = (None, None, false);
            return self.meter.restart(now);
        }
        if self.is_searching() && !self.settled {
            let before = self.usual.replace(measured);
            if before.is_none_or(|before| measured.rate > before.rate * RISING) {
                return self.meter.go_on(now);
            }
            self.settled = true;
        }
        let other = self.usual.is_some_and(|usual| is_other_width(&usual, &measured));
        let differs = self.usual.is_some_and(|usual| is_other_rate(&usual, &measured));
        self.differs = if differs { self.differs + 1 } else { 0 };
        if other || self.differs >= 2 {
            (self.next_search, self.pause, self.differs) = (now, FIRST_PAUSE, 0);
            self.begin_search(Search::full(self.most));
            self.usual = Some(measured);
            return self.meter.go_on(now);
        }
        if differs {
            // Once is no proof.
            return self.meter.go_on(now);
        }
        self.usual = Some(match self.usual {
            Some(usual) => Measurement { rate: (usual.rate + measured.rate) / 2.0, ..measured },
            None => measured,
        });
        if self.search.is_none() && now >= self.next_search {
            self.glance();
        }
        self.try_next(measured, now);
    }

    /// Looks near and far in turn. Where the next number was clearly worse, numbers farther away are
    /// even worse, and a trial of them would cost much.
    fn glance(&mut self) {
        let mut search = Search::glance(self.most, self.far);
        let tried = [self.more, self.fewer].into_iter().flatten();
        for tried in tried.filter(|tried| self.far && tried.percent <= CLEARLY_WORSE) {
            search.refused(self.best, tried.workers.into());
        }
        self.begin_search(search);
        self.far = !self.far;
    }

    fn begin_search(&mut self, search: Search) {
        (self.search, self.settled) = (Some(search), false);
        (self.kept, self.lost, self.too_dear) = (1.0, 0.0, None);
    }

    /// Tries the next number of the search, if there is one.
    fn try_next(&mut self, base: Measurement, now: Duration) {
        if self.too_dear.is_some() {
            return self.meter.go_on(now);
        }
        let Some(search) = &mut self.search else { return self.meter.go_on(now) };
        while let Some(candidate) = search.candidate(self.best) {
            let mut numbers = (self.best.min(candidate - 1) + 1..=candidate).rev();
            // A load that does not wait for workers is not faster with more of them.
            if candidate > self.best && base.saturated < SATURATED {
                search.refused(self.best, candidate);
            } else if let Some(tried) = numbers.find(|workers| self.sessions.afford(*workers)) {
                self.sessions.spend(tried);
                self.phase = Phase::Trial { tried, base };
                return self.meter.restart(now);
            } else if search.is_full() {
                (self.too_dear, self.usual, self.differs) = (Some(candidate), None, 0);
                return self.meter.restart(now);
            } else {
                search.refused(self.best, candidate);
            }
        }
        let was_searching = self.is_searching();
        self.end_search(now);
        if was_searching {
            // Groups are larger from now on, and rates are others.
            (self.usual, self.differs) = (None, 0);
            self.meter.restart(now);
        } else {
            self.meter.go_on(now);
        }
    }

    fn end_search(&mut self, now: Duration) {
        self.search = None;
        let for_loss = Duration::from_secs_f64(self.lost * PAUSE_FOR_LOSS);
        self.next_search = now + self.pause.max(for_loss.min(LONGEST_PAUSE_FOR_LOSS));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    fn tried(&mut self, tried: usize, base: Measurement, measured: Measurement, now: Duration) {
        if is_other_width(&base, &measured) {
            // It is tried again after the load was measured with the number before.
            self.usual = None;
            return self.meter.restart(now);
        }
        let gain = measured.rate / base.rate.max(f64::MIN_POSITIVE);
        let better = if tried > self.best {
            gain >= WORTH
        } else {
            gain >= 1.0 - LOSS && gain.min(1.0) * self.kept >= 1.0 - LOSS
        };
        let Some(search) = &mut self.search else { return self.meter.restart(now) };
        if !better {
            search.refused(self.best, tried);
            self.lost += (1.0 - gain).max(0.0) * measured.took.as_secs_f64();
            self.note(tried, gain);
            return self.meter.restart(now);
        }
        search.accepted(self.best, tried);
        if tried < self.best {
            self.kept *= gain.min(1.0);
        }
        let before = std::mem::replace(&mut self.best, tried);
        (self.more, self.fewer, self.pause) = (None, None, FIRST_PAUSE);
        self.note(before, 1.0 / gain);
        self.usual = Some(measured);
        self.try_next(measured, now);
    }

    /// A number that is not in use applied this factor of what the one in use does.
    fn note(&mut self, workers: usize, factor: f64) {
        #[expect(clippy::cast_possible_truncation, reason = "it is between these bounds")]
        let percent = ((factor - 1.0) * 100.0).round().clamp(-100.0, 999.0) as i16;
        let tried = Some(Tried { workers: short(workers), percent });
        if workers > self.best {
            self.more = tried;
        } else {
            self.fewer = tried;
        }
    }
}

fn is_other_width(one: &Measurement, other: &Measurement) -> bool {
    let ratio = one.width / other.width;
    !(1.0 / OTHER_WIDTH..=OTHER_WIDTH).contains(&ratio)
}

fn is_other_rate(one: &Measurement, other: &Measurement) -> bool {
    let ratio = one.rate / other.rate;
    !(1.0 / OTHER_RATE..=OTHER_RATE).contains(&ratio)
}

fn short(workers: usize) -> u16 {
    u16::try_from(workers).unwrap_or(u16::MAX)
}
