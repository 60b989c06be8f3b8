//! A model of workers whose common rate follows a given curve.

use std::time::Duration;

use super::{GroupWork, Load, Reason, Scaling};

const MOST: usize = 16;
const WORK: GroupWork = GroupWork { bytes: 100_000, changes: 1000 };

/// Groups per second, by the number of workers.
type Curve = Box<dyn Fn(usize) -> f64>;

/// More workers help until `summit`; each beyond that takes away a part of the rate.
fn summit(base: f64, summit: usize, harm: f64) -> Curve {
    Box::new(move |workers| {
        let beyond = workers.saturating_sub(summit) as f64;
        base * workers.min(summit) as f64 * (1.0 - harm * beyond).max(0.1)
    })
}

struct Model {
    scaling: Scaling,
    curve: Curve,
    work: GroupWork,
    /// How long the rate takes to rise to two thirds of what it will be, in seconds.
    warm_up: f64,
    random: u64,
    now: f64,
    /// By worker, when its group was assigned, and when it ends.
    groups: Vec<Option<(f64, f64)>>,
    /// How long each new session prepares statements, in seconds, before its first group. It does so again
    /// after it was not used for ten seconds.
    preparing: f64,
    /// By worker, when its last group ended.
    used: Vec<f64>,
    /// How long sessions have prepared statements, all together.
    prepared: f64,
    /// Work that was applied, and work that the best number of workers could have applied.
    applied: f64,
    possible: f64,
}

impl Model {
    fn new(seed: u64, curve: Curve) -> Self {
        let (scaling, random) = (Scaling::new(MOST), seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut model = Self {
            scaling,
            curve,
            work: WORK,
            warm_up: 0.0,
            random,
            now: 0.0,
            groups: vec![None; MOST],
            preparing: 0.0,
            used: vec![-1e9; MOST],
            prepared: 0.0,
            applied: 0.0,
            possible: 0.0,
        };
        model.scaling.waits(true, Duration::ZERO);
        model
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.now)
    }

    /// Groups differ by a tenth.
    fn noise(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        0.9 + 0.2 * (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn rate(&self, workers: usize) -> f64 {
        let warm = 1.0 - (-(self.now + 0.05) / self.warm_up).exp();
        (self.curve)(workers) * warm
    }

    fn best(&self) -> f64 {
        (1..=MOST).map(&self.curve).fold(0.0, f64::max)
    }

    /// Lets the workers work for this many seconds. Returns the part of the best rate that they reached.
    fn run(&mut self, seconds: f64) -> f64 {
        let end = self.now + seconds;
        (self.applied, self.possible) = (0.0, 0.0);
        while self.now < end {
            let workers = self.scaling.workers();
            for worker in 0..workers {
                if self.groups[worker].is_none() {
                    let mut takes = workers as f64 / self.rate(workers) * self.noise();
                    if self.preparing > 0.0 && self.now - self.used[worker] > 10.0 {
                        self.scaling.prepared(worker, Duration::ZERO);
                        self.scaling.prepared(worker, Duration::from_secs_f64(self.preparing));
                        (self.prepared, takes) =
                            (self.prepared + self.preparing, takes + self.preparing);
                    }
                    self.groups[worker] = Some((self.now, self.now + takes));
                }
            }
            let ends = self.groups.iter().enumerate();
            let ends = ends.filter_map(|(worker, group)| Some((worker, (*group)?)));
            let next = ends.min_by(|one, other| one.1.1.total_cmp(&other.1.1));
            let (worker, (begun, ended)) = next.expect("somebody works");
            let took = ended - self.now;
            self.applied += took * self.rate(workers);
            self.possible += took * self.best();
            self.now = ended;
            self.groups[worker] = None;
            self.used[worker] = self.now;
            let (begun, now) = (Duration::from_secs_f64(begun), self.time());
            self.scaling.ended(worker, begun, self.work, false, now);
            self.scaling.look(Load::Heavy, self.scaling.workers(), now);
        }
        self.applied / self.possible
    }
}

fn curves() -> Vec<(String, Curve)> {
    let mut curves: Vec<(String, Curve)> = Vec::new();
    for best in [1, 2, 3, 4, 5, 7, 8, 11, 16] {
        for harm in [0.0, 0.05, 0.25] {
            for base in [7.0, 300.0] {
                let name = format!("{base} a second up to {best}, then -{harm}");
                curves.push((name, summit(base, best, harm)));
            }
        }
    }
    // Each further worker helps less.
    let damped = |workers: usize| 20.0 * workers as f64 / (1.0 + 0.1 * workers as f64);
    curves.push(("ever less".to_owned(), Box::new(damped)));
    curves
}

#[test]
fn the_best_number_is_found_and_kept() {
    for seed in 1..6 {
        for (name, curve) in curves() {
            let mut model = Model::new(seed, curve);
            model.run(25.0);
            let reached = model.run(60.0);
            assert!(reached >= 0.95, "{name}, seed {seed}: {reached}, {:?}", model.scaling);
        }
    }
}

#[test]
fn little_is_lost_on_the_way() {
    for seed in 1..6 {
        for (best, at_least) in [(1, 0.9), (2, 0.85), (4, 0.85), (16, 0.7)] {
            let mut model = Model::new(seed, summit(20.0, best, 0.1));
            let reached = model.run(20.0);
            assert!(reached >= at_least, "{best}, seed {seed}: {reached}");
        }
    }
}

/// Sessions prepare statements and read what is not cached, and groups grow. Whatever is tried
/// meanwhile is faster than what was measured before.
#[test]
fn a_rate_that_rises_by_itself_is_not_taken_for_a_gain() {
    for seed in 1..6 {
        for warm_up in [0.5, 1.0, 2.0] {
            let mut model = Model::new(seed, summit(100.0, 1, 0.1));
            model.warm_up = warm_up;
            for _ in 0..200 {
                model.run(0.05);
                assert_eq!(model.scaling.best, 1, "{warm_up}, seed {seed}: {:?}", model.scaling);
            }
        }
    }
}

#[test]
fn a_load_that_changes_its_kind_is_followed_within_seconds() {
    let kinds = [(1, 60.0), (16, 10.0), (4, 30.0), (1, 20.0), (8, 50.0)];
    for seed in 1..6 {
        let mut model = Model::new(seed, summit(20.0, 2, 0.1));
        model.run(30.0);
        for (best, base) in kinds {
            model.curve = summit(base, best, 0.1);
            model.run(15.0);
            let reached = model.run(15.0);
            assert!(reached >= 0.9, "{best}, seed {seed}: {reached}, {:?}", model.scaling);
            model.run(40.0);
        }
    }
}

/// The rate of the number in use stays what it was, so only a trial notices it.
#[test]
fn a_change_that_shows_only_with_more_workers_is_found() {
    for seed in 1..6 {
        let mut model = Model::new(seed, summit(20.0, 1, 0.1));
        model.run(120.0);
        model.curve = summit(20.0, 8, 0.1);
        model.run(45.0);
        let reached = model.run(20.0);
        assert!(reached >= 0.9, "seed {seed}: {reached}");
    }
}

#[test]
fn wider_changes_begin_a_new_search() {
    let mut model = Model::new(3, summit(20.0, 1, 0.1));
    model.run(60.0);
    model.work = GroupWork { bytes: 1_000_000, changes: 1000 };
    model.curve = summit(20.0, 8, 0.1);
    model.run(12.0);
    assert!(model.run(10.0) >= 0.9, "{:?}", model.scaling);
}

#[test]
fn without_a_load_nothing_is_learned() {
    let mut model = Model::new(3, summit(20.0, 6, 0.1));
    model.run(40.0);
    let (now, decision) = (model.time(), model.scaling.decision());
    for second in 1..1000 {
        let now = now + Duration::from_secs(second);
        model.scaling.ended(0, now, WORK, true, now);
        model.scaling.look(Load::Light, 4, now);
    }
    let workers = model.scaling.workers();
    assert!((5..=7).contains(&workers), "{decision:?}, {:?}", model.scaling);
    model.now += 1000.0;
    model.groups.fill(None);
    assert!(model.run(20.0) >= 0.85, "{:?}", model.scaling);
}

/// New sessions prepare the statements of many tables: they are tried only once that is a small part of the
/// time, and what they do meanwhile is not taken for what they can do.
#[test]
fn sessions_that_prepare_many_statements_are_tried_once_that_is_worth_it() {
    for seed in 1..6 {
        let mut model = Model::new(seed, summit(20.0, 1, 0.1));
        model.preparing = 2.0;
        model.run(10.0);
        assert!(model.prepared < 2.1, "seed {seed}: {}", model.prepared);
        let reason = model.scaling.decision().reason;
        assert_eq!(reason, Reason::TooManyStatements { workers: 4 }, "seed {seed}");
        model.run(110.0);
        assert!((4.0..=26.0).contains(&model.prepared), "seed {seed}: {}", model.prepared);
        let mut model = Model::new(seed, summit(20.0, 16, 0.1));
        model.preparing = 0.5;
        model.run(90.0);
        let reached = model.run(60.0);
        assert!(reached >= 0.95, "seed {seed}: {reached}, {:?}", model.scaling);
    }
}

/// Workers that mostly wait for the publisher show nothing about a larger number.
#[test]
fn what_does_not_wait_for_workers_gets_no_more() {
    let mut model = Model::new(3, summit(20.0, 16, 0.1));
    model.scaling.waits(false, Duration::ZERO);
    model.run(30.0);
    assert_eq!(model.scaling.workers(), 1);
    model.scaling.waits(true, model.time());
    model.run(45.0);
    assert_eq!(model.scaling.decision().workers, 16, "{:?}", model.scaling);
}

#[test]
fn sessions_that_cannot_be_had_are_not_waited_for() {
    let mut model = Model::new(3, summit(20.0, 16, 0.1));
    // Only three workers ever come.
    for tenth in 0..400_u64 {
        let now = Duration::from_millis(tenth * 100);
        let in_use = model.scaling.workers().min(3);
        for worker in 0..in_use {
            model.scaling.ended(worker, now, WORK, false, now);
        }
        model.scaling.look(Load::Heavy, in_use, now);
    }
    assert!(model.scaling.best <= 3, "{:?}", model.scaling);
}

#[test]
fn the_decision_says_why() {
    let mut model = Model::new(5, summit(20.0, 1, 0.2));
    assert_eq!(model.scaling.decision().reason, Reason::Unmeasured);
    model.run(3.9);
    let Reason::Measured { more: Some(more), fewer: None } = model.scaling.decision().reason else {
        panic!("{:?}", model.scaling)
    };
    assert_eq!(more.workers, 2);
    assert!((-40..=0).contains(&more.percent), "{more:?}");
}
