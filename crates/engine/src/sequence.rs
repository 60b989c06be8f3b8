//! The position to set for a sequence of the subscriber, given the position on the publisher.
//!
//! Logical replication does not send changes of sequences, so pgapace copies their values now and
//! then. A sequence only moves in the direction of its increment: one that went back would return
//! values that rows already have. With `CYCLE` a lower value can also be a new round, so there the
//! user must decide.

/// The state of a sequence relation (`last_value`, `is_called`). `last_value` already includes the
/// values that sessions have cached, so nothing else is needed to continue the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The last value that was returned, or reserved by a session.
    pub last_value: i64,
    /// If false, `nextval` returns `last_value` itself next.
    pub is_called: bool,
}

/// The part of a sequence's definition (`pg_sequence`) that determines its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// `INCREMENT`; never zero.
    pub increment: i64,
    /// `MINVALUE`.
    pub min: i64,
    /// `MAXVALUE`.
    pub max: i64,
    /// `CYCLE`.
    pub cycle: bool,
}

/// The sequence on one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Its definition.
    pub definition: Definition,
    /// Its position.
    pub position: Position,
}

/// Rules for copying the value of a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rules {
    /// Number of values to skip beyond the publisher's position, for values that the publisher
    /// still hands out.
    pub margin: u64,
    /// Whether to set the subscriber's sequence back.
    pub allow_backwards: bool,
}

/// The change of the subscriber's sequence that its position on the publisher requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Set it.
    Set {
        /// The new position.
        to: Position,
        /// Whether the bounds of the sequence had no room for the whole margin.
        margin_cut: bool,
    },
    /// Nothing: it has that position already.
    Same,
    /// Nothing: it is beyond that position.
    Ahead {
        /// Whether a sequence cycles: the publisher's may have started a new round.
        cycles: bool,
    },
    /// Nothing: the value is outside the bounds of the subscriber's sequence.
    OutOfBounds {
        /// The bound that the value violates: `MINVALUE` or `MAXVALUE` of the subscriber's
        /// sequence.
        bound: i64,
    },
    /// Nothing: one sequence ascends and the other descends.
    OppositeDirections,
}

/// Decides whether, and to which position, the subscriber's sequence is set.
#[must_use]
pub fn decide(publisher: Sequence, subscriber: Sequence, rules: Rules) -> Decision {
    let bounds = subscriber.definition;
    let ascending = publisher.definition.increment > 0;
    if ascending != (bounds.increment > 0) {
        return Decision::OppositeDirections;
    }
    let (to, margin_cut) = with_margin(publisher, bounds, rules.margin);
    let order = |position: Position| {
        let value = i128::from(position.last_value);
        (if ascending { value } else { -value }, position.is_called)
    };
    match order(to).cmp(&order(subscriber.position)) {
        std::cmp::Ordering::Equal => return Decision::Same,
        std::cmp::Ordering::Less if !rules.allow_backwards => {
            return Decision::Ahead { cycles: publisher.definition.cycle || bounds.cycle };
        }
        _ => {}
    }
    if to.last_value > bounds.max {
        Decision::OutOfBounds { bound: bounds.max }
    } else if to.last_value < bounds.min {
        Decision::OutOfBounds { bound: bounds.min }
    } else {
        Decision::Set { to, margin_cut }
    }
}

/// The publisher's position, advanced by as many steps of the margin as the bounds of both
/// sequences allow.
fn with_margin(publisher: Sequence, bounds: Definition, margin: u64) -> (Position, bool) {
    let Position { last_value, is_called } = publisher.position;
    let Definition { increment, min, max, .. } = publisher.definition;
    let step = i128::from(increment);
    let end = if step > 0 { max.min(bounds.max) } else { min.max(bounds.min) };
    // Zero if the value is already beyond the end, so that it stays as it is.
    let room = ((i128::from(end) - i128::from(last_value)) / step).max(0);
    let steps = i128::from(margin).min(room);
    let moved = i128::from(last_value) + steps * step;
    let last_value = i64::try_from(moved).unwrap_or(end);
    (Position { last_value, is_called }, steps < i128::from(margin))
}

#[cfg(test)]
mod tests {
    use super::{Decision, Definition, Position, Rules, Sequence, decide};
    use proptest::prelude::*;

    fn sequence(last_value: i64, is_called: bool, increment: i64, min: i64, max: i64) -> Sequence {
        Sequence {
            definition: Definition { increment, min, max, cycle: false },
            position: Position { last_value, is_called },
        }
    }

    fn up(last_value: i64, is_called: bool) -> Sequence {
        sequence(last_value, is_called, 1, 1, i64::MAX)
    }

    fn set(last_value: i64, is_called: bool) -> Decision {
        Decision::Set { to: Position { last_value, is_called }, margin_cut: false }
    }

    const MARGIN: fn(u64) -> Rules = |margin| Rules { margin, allow_backwards: false };
    const BACK: Rules = Rules { margin: 0, allow_backwards: true };

    #[test]
    fn values_move_forward_only_unless_asked() {
        let rules = Rules::default();
        assert_eq!(decide(up(10, true), up(1, false), rules), set(10, true));
        assert_eq!(decide(up(10, true), up(10, false), rules), set(10, true));
        assert_eq!(decide(up(10, true), up(10, true), rules), Decision::Same);
        assert_eq!(decide(up(10, false), up(10, true), rules), Decision::Ahead { cycles: false });
        assert_eq!(decide(up(10, false), up(11, true), rules), Decision::Ahead { cycles: false });
        assert_eq!(decide(up(10, false), up(11, true), BACK), set(10, false));
    }

    #[test]
    fn descending_sequences_move_down() {
        let down = |value, called| sequence(value, called, -3, -100, -1);
        assert_eq!(decide(down(-13, true), down(-10, true), Rules::default()), set(-13, true));
        let ahead = decide(down(-10, true), down(-13, true), Rules::default());
        assert_eq!(ahead, Decision::Ahead { cycles: false });
        assert_eq!(decide(down(-13, true), down(-10, true), MARGIN(2)), set(-19, true));
        assert_eq!(
            decide(down(-13, true), down(-10, true), MARGIN(1000)),
            Decision::Set { to: Position { last_value: -100, is_called: true }, margin_cut: true }
        );
    }

    #[test]
    fn values_out_of_bounds_and_cycles_are_reported() {
        let small = sequence(1, false, 1, 1, 2_147_483_647);
        let wide = up(3_000_000_000, true);
        let bound = Decision::OutOfBounds { bound: 2_147_483_647 };
        assert_eq!(decide(wide, small, Rules::default()), bound);
        let down = sequence(-1, false, -1, -10, -1);
        assert_eq!(decide(up(5, true), down, Rules::default()), Decision::OppositeDirections);
        let cycling = |value| Sequence {
            definition: Definition { cycle: true, ..up(1, true).definition },
            ..up(value, true)
        };
        let ahead = Decision::Ahead { cycles: true };
        assert_eq!(decide(cycling(3), cycling(900), Rules::default()), ahead);
        assert_eq!(decide(cycling(3), cycling(900), BACK), set(3, true));
    }

    proptest! {
        #[test]
        fn a_decision_never_repeats_values(
            step in prop_oneof![1..1000i64, -1000..0i64, Just(i64::MAX), Just(i64::MIN)],
            published in any::<i64>(), subscribed in any::<i64>(),
            called in any::<(bool, bool)>(), bounds in any::<(i64, i64)>(), margin in any::<u64>(),
        ) {
            let (min, max) = (bounds.0.min(bounds.1), bounds.0.max(bounds.1));
            let publisher = sequence(published, called.0, step, i64::MIN, i64::MAX);
            let subscriber = sequence(subscribed.clamp(min, max), called.1, step, min, max);
            if let Decision::Set { to, margin_cut } = decide(publisher, subscriber, MARGIN(margin)) {
                prop_assert!((min..=max).contains(&to.last_value));
                let forward = |from: i64, to: i64| if step > 0 { from <= to } else { from >= to };
                prop_assert!(forward(subscriber.position.last_value, to.last_value));
                prop_assert!(forward(published, to.last_value));
                let moved = (i128::from(to.last_value) - i128::from(published)) / i128::from(step);
                prop_assert_eq!(moved < i128::from(margin), margin_cut);
            }
        }
    }
}
