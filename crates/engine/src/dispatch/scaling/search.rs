//! Chooses the number of workers that is tried next.
//!
//! A search encloses the best number: `fewer` is the highest number below it that was worse, `more` the
//! lowest above it that was not better. It doubles or halves until both are known, and then tries the
//! numbers between them. That finds the best number of every curve with one summit. A glance tries one number
//! on each side only: it notices that the curve has changed. If a number is accepted, the glance
//! becomes a search.

/// A search, or a glance.
#[derive(Debug, Clone)]
pub(super) struct Search {
    most: usize,
    kind: Kind,
    /// The highest number below that was worse; 0 if none was.
    fewer: usize,
    /// The lowest number above that was not better.
    more: Option<usize>,
    upwards: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// From one worker, this number is tried first.
    Full { first: usize },
    /// One number on each side: the next ones, or those twice as far away.
    Glance { far: bool },
}

impl Search {
    /// Finds the best number. From one worker, four are tried before two: the trial of two costs as
    /// much, and where reads or round trips are slow, four gain more.
    pub(super) fn full(most: usize) -> Self {
        Self { most, kind: Kind::Full { first: 4 }, fewer: 0, more: None, upwards: true }
    }

    /// Looks whether the best number has changed.
    pub(super) fn glance(most: usize, far: bool) -> Self {
        Self { most, kind: Kind::Glance { far }, fewer: 0, more: None, upwards: true }
    }

    /// Whether it finds the best number.
    pub(super) fn is_full(&self) -> bool {
        matches!(self.kind, Kind::Full { .. })
    }

    /// The number to compare with `now`, the best so far; `None` if the search has ended.
    pub(super) fn candidate(&self, now: usize) -> Option<usize> {
        let sides = [self.above(now), self.below(now)];
        let [first, second] = if self.upwards { sides } else { [sides[1], sides[0]] };
        first.or(second)
    }

    fn above(&self, now: usize) -> Option<usize> {
        let step = match self.kind {
            Kind::Glance { .. } if self.more.is_some() => return None,
            Kind::Glance { far: false } => (now / 4).max(1),
            Kind::Full { first } if now == 1 && self.more.is_none() => first - 1,
            Kind::Glance { far: true } | Kind::Full { .. } => now,
        };
        match self.more {
            None => (now < self.most).then(|| (now + step).min(self.most)),
            Some(more) => (more > now + 1).then(|| usize::midpoint(now, more)),
        }
    }

    fn below(&self, now: usize) -> Option<usize> {
        let between = (now > self.fewer + 1).then(|| usize::midpoint(self.fewer, now));
        match self.kind {
            Kind::Glance { .. } if self.fewer > 0 => None,
            Kind::Glance { far: false } => (now > 1).then(|| now - (now / 4).max(1)),
            Kind::Glance { far: true } | Kind::Full { .. } => between,
        }
    }

    /// `tried` is better than `now`, and takes its place.
    pub(super) fn accepted(&mut self, now: usize, tried: usize) {
        self.kind = Kind::Full { first: 2 };
        self.upwards = tried > now;
        if self.upwards {
            self.fewer = self.fewer.max(now);
        } else {
            self.more = Some(now);
        }
    }

    /// `tried` is not better than `now`.
    pub(super) fn refused(&mut self, now: usize, tried: usize) {
        self.upwards = tried < now;
        if tried > now {
            self.more = Some(tried);
        } else {
            self.fewer = self.fewer.max(tried);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Search;

    /// Searches the summit of a curve. Returns the numbers tried.
    fn climb(mut search: Search, from: usize, curve: impl Fn(usize) -> f64) -> (usize, Vec<usize>) {
        let (mut now, mut tried) = (from, Vec::new());
        while let Some(next) = search.candidate(now) {
            assert!((1..=16).contains(&next) && next != now, "{tried:?}");
            tried.push(next);
            if curve(next) > curve(now) {
                search.accepted(now, next);
                now = next;
            } else {
                search.refused(now, next);
            }
        }
        (now, tried)
    }

    #[test]
    fn every_summit_is_found() {
        for summit in 1..=16_usize {
            for from in 1..=16 {
                let curve = |workers: usize| -(workers.abs_diff(summit) as f64);
                let (found, tried) = climb(Search::full(16), from, curve);
                assert_eq!(found, summit, "from {from}: {tried:?}");
                assert!(tried.len() <= 9, "from {from} to {summit}: {tried:?}");
            }
        }
    }

    #[test]
    fn a_glance_tries_two_numbers() {
        let flat = |_| 1.0;
        assert_eq!(climb(Search::glance(16, false), 8, flat), (8, vec![10, 6]));
        assert_eq!(climb(Search::glance(16, true), 8, flat), (8, vec![16, 4]));
        assert_eq!(climb(Search::glance(16, false), 1, flat), (1, vec![2]));
        assert_eq!(climb(Search::glance(16, false), 16, flat), (16, vec![12]));
        assert_eq!(climb(Search::glance(16, false), 8, |workers| workers as f64).0, 16);
        assert_eq!(climb(Search::glance(1, false), 1, flat), (1, vec![]));
    }
}
