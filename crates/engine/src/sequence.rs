//! Where a sequence of the subscriber is to stand, given where the publisher's stands.
//!
//! A sequence has no changes in the stream, so its value is carried over now and then. Values only
//! move in the direction of the increment: a sequence that goes back hands out values that rows
//! have already. `CYCLE` makes that legal, so there a lower value may mean either; it is left to the
//! user to say.

/// What a sequence relation holds (`last_value`, `is_called`). Values that sessions have cached are
/// behind `last_value`, so nothing else is needed to continue it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The last value that was handed out, or is reserved by a session.
    pub last_value: i64,
    /// False: `last_value` itself is handed out next.
    pub is_called: bool,
}

/// A sequence's definition, as far as values depend on it (`pg_sequence`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Definition {
    /// Never zero.
    pub increment: i64,
    /// `MINVALUE`.
    pub min: i64,
    /// `MAXVALUE`.
    pub max: i64,
    /// `CYCLE`.
    pub cycle: bool,
}

/// One side's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Its definition.
    pub definition: Definition,
    /// Where it stands.
    pub position: Position,
}

/// How a sequence is to be carried over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rules {
    /// Values to be left out beyond the publisher's, for those that it still hands out.
    pub margin: u64,
    /// Whether the subscriber's sequence may be set to a value that it has passed.
    pub allow_backwards: bool,
}

/// What is to be done with the subscriber's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It is to be set.
    Set {
        /// To this.
        to: Position,
        /// The bounds of the sequence left no room for all of the margin.
        margin_cut: bool,
    },
    /// It stands there already.
    Same,
    /// It has passed that value.
    Ahead {
        /// The sequences cycle: the publisher's may also have begun again.
        cycles: bool,
    },
    /// The value does not fit between the subscriber's bounds, of which this one is in the way.
    OutOfBounds {
        /// `MINVALUE` or `MAXVALUE` of the subscriber's sequence.
        bound: i64,
    },
    /// One counts up and the other down.
    OppositeDirections,
}

/// Decides where the subscriber's sequence is to stand.
#[must_use]
pub fn decide(publisher: Sequence, subscriber: Sequence, rules: Rules) -> Decision {
    let (theirs, ours) = (publisher.definition, subscriber.definition);
    if (theirs.increment > 0) != (ours.increment > 0) {
        return Decision::OppositeDirections;
    }
    let ascending = theirs.increment > 0;
    let (to, margin_cut) = with_margin(publisher, ours, rules.margin);
    let place = |position: Position| {
        let value = i128::from(position.last_value);
        (if ascending { value } else { -value }, position.is_called)
    };
    match place(to).cmp(&place(subscriber.position)) {
        std::cmp::Ordering::Equal => return Decision::Same,
        std::cmp::Ordering::Less if !rules.allow_backwards => {
            return Decision::Ahead { cycles: theirs.cycle || ours.cycle };
        }
        _ => {}
    }
    if to.last_value > ours.max {
        Decision::OutOfBounds { bound: ours.max }
    } else if to.last_value < ours.min {
        Decision::OutOfBounds { bound: ours.min }
    } else {
        Decision::Set { to, margin_cut }
    }
}

/// The publisher's position, moved on by as many steps of the margin as the bounds of both sides
/// leave room for.
fn with_margin(publisher: Sequence, ours: Definition, margin: u64) -> (Position, bool) {
    let Position { last_value, is_called } = publisher.position;
    let theirs = publisher.definition;
    let step = i128::from(theirs.increment);
    let end = if step > 0 { theirs.max.min(ours.max) } else { theirs.min.max(ours.min) };
    // As often as it fits; a value beyond the end stays what it is.
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
    fn what_does_not_fit_is_said() {
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
            theirs in any::<i64>(), ours in any::<i64>(),
            called in any::<(bool, bool)>(), bounds in any::<(i64, i64)>(), margin in any::<u64>(),
        ) {
            let (min, max) = (bounds.0.min(bounds.1), bounds.0.max(bounds.1));
            let publisher = sequence(theirs, called.0, step, i64::MIN, i64::MAX);
            let subscriber = sequence(ours.clamp(min, max), called.1, step, min, max);
            if let Decision::Set { to, margin_cut } = decide(publisher, subscriber, MARGIN(margin)) {
                prop_assert!((min..=max).contains(&to.last_value));
                let forward = |from: i64, to: i64| if step > 0 { from <= to } else { from >= to };
                prop_assert!(forward(subscriber.position.last_value, to.last_value));
                prop_assert!(forward(theirs, to.last_value));
                let moved = (i128::from(to.last_value) - i128::from(theirs)) / i128::from(step);
                prop_assert_eq!(moved < i128::from(margin), margin_cut);
            }
        }
    }
}
