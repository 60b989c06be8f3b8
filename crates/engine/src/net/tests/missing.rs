//! Random changes of a table without a key, of which the subscriber lacks rows: a set skips the changes that would
//! find nothing one by one, or it does not know which these are.

use proptest::prelude::*;

use super::history::History;
use super::rules;
use crate::key::KeyForm;
use crate::net::{Row, Seek, Step, TableFolding, TableRules};
use pgoutput::{Column, Message};

/// The second value may be equal to another one with other bytes.
type Values = [String; 2];

fn values(row: &Row<'_>) -> Values {
    let value = |column: Column<'_>| match column {
        Column::Text(value) => str::from_utf8(value).unwrap().to_owned(),
        _ => panic!("{column:?}"),
    };
    let values: Vec<_> = row.columns().map(value).collect();
    values.try_into().unwrap()
}

fn equal(one: &Values, other: &Values) -> bool {
    let number = |row: &Values| row[1].parse::<f64>().unwrap();
    one[0] == other[0] && number(one) == number(other)
}

/// A change of the publisher: the row that it picks, and what it makes of it.
#[derive(Debug, Clone)]
struct Change {
    inserts: bool,
    pick: usize,
    new: Option<Values>,
}

/// The rows of the subscriber, and the changes that found no row.
#[derive(Debug, PartialEq)]
struct Applied {
    rows: Vec<Values>,
    missing: Vec<u32>,
}

impl Applied {
    fn sorted(mut self) -> Self {
        self.rows.sort();
        self.missing.sort_unstable();
        self
    }
}

/// Executes the changes on the publisher's rows, and returns what it sends.
fn publish(rows: &mut Vec<Values>, changes: &[Change]) -> History {
    let mut history = History::default();
    for Change { inserts, pick, new } in changes {
        if *inserts {
            let Some(new) = new else { continue };
            history.push(&format!("I {}", new.join(" ")));
            rows.push(new.clone());
            continue;
        }
        let Some(at) = pick.checked_rem(rows.len()) else { continue };
        let old = rows.swap_remove(at);
        match new {
            Some(new) => {
                history.push(&format!("U O {} N {}", old.join(" "), new.join(" ")));
                rows.push(new.clone());
            }
            None => history.push(&format!("DO {}", old.join(" "))),
        }
    }
    history
}

/// One by one, a change takes the identical row, or else one that is equal.
fn one_by_one(mut rows: Vec<Values>, history: &History) -> Applied {
    let mut missing = Vec::new();
    for (number, (_, message)) in (0..).zip(history.messages()) {
        let (old, new) = match message {
            Message::Insert(insert) => (None, Some(insert.new)),
            Message::Update(update) => (update.old.map(|old| *old.tuple()), Some(update.new)),
            Message::Delete(delete) => (Some(*delete.old.tuple()), None),
            _ => panic!("{message:?}"),
        };
        if let Some(old) = old.map(|old| values(&Row::Sent(old))) {
            let identical = rows.iter().position(|row| *row == old);
            let Some(at) = identical.or_else(|| rows.iter().position(|row| equal(row, &old)))
            else {
                missing.push(number);
                continue;
            };
            rows.remove(at);
        }
        rows.extend(new.map(|new| values(&Row::Sent(new))));
    }
    Applied { rows, missing }.sorted()
}

/// A row of a segment that one statement looks for, and what becomes of it.
struct Looks<'s, 'a> {
    old: &'s Row<'a>,
    seek: &'s Seek<'a>,
    new: Option<&'s Row<'a>>,
}

/// As the statement does it. Returns false if it is not known which changes find nothing.
fn execute(applied: &mut Applied, looks: &[Looks<'_, '_>]) -> bool {
    let before = applied.rows.clone();
    let mut written = Vec::new();
    for Looks { old, seek, new } in looks {
        let wanted = values(old);
        if let Some(at) = applied.rows.iter().position(|row| *row == wanted) {
            applied.rows.remove(at);
            written.extend(new.map(values));
            continue;
        }
        let mut looked_for = std::iter::once(*old).chain(&seek.passed).map(values);
        let is_there = looked_for.any(|wanted| before.iter().any(|row| equal(row, &wanted)));
        if is_there || seek.changes.is_empty() {
            return false;
        }
        applied.missing.extend(seek.changes.iter().map(|at| at.change));
    }
    applied.rows.append(&mut written);
    true
}

fn as_sets(rows: Vec<Values>, history: &History, rules: &[TableRules]) -> Option<Applied> {
    let mut applied = Applied { rows, missing: Vec::new() };
    for step in history.fold(rules) {
        let Step::Segment(segment) = step else { panic!("{step:?}") };
        let seeks = &segment.seeks;
        let lists = segment.deletes.iter().zip(&seeks.deletes);
        let deletes: Vec<_> =
            lists.map(|(old, seek)| Looks { old: &old.row, seek, new: None }).collect();
        let lists = segment.updates.iter().zip(&seeks.updates);
        let updates: Vec<_> = lists
            .map(|(update, seek)| {
                let old = &update.old.as_ref().expect("a whole row").row;
                Looks { old, seek, new: Some(&update.new) }
            })
            .collect();
        if !execute(&mut applied, &deletes) || !execute(&mut applied, &updates) {
            return None;
        }
        applied.rows.extend(segment.inserts.iter().map(values));
    }
    Some(applied.sorted())
}

fn row() -> impl Strategy<Value = Values> {
    let first = prop::sample::select(vec!["1", "2", "3", "4", "5", "6", "7", "8"]);
    let second = prop::sample::select(vec!["1", "1.0", "2", "3"]);
    (first, second).prop_map(|(first, second)| [first.to_owned(), second.to_owned()])
}

fn change() -> impl Strategy<Value = Change> {
    (0_u8..4, 0_usize..32, row()).prop_map(|(kind, pick, new)| Change {
        inserts: kind == 0,
        pick,
        new: (kind != 1).then_some(new),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn a_set_skips_what_finds_nothing_one_by_one(
        rows in prop::collection::vec(row(), 0..8),
        lost in any::<u32>(),
        extra in prop::collection::vec(row(), 0..2),
        changes in prop::collection::vec(change(), 1..8),
        told_apart in 0_usize..3,
    ) {
        let forms = vec![(0, KeyForm::Bytes), (1, KeyForm::Numeric)];
        let told_apart = forms.into_iter().take(told_apart).collect();
        let rules = [TableRules { seeks: true, told_apart, ..rules(0, 2, TableFolding::WholeRow) }];
        let mut publisher = rows.clone();
        let history = publish(&mut publisher, &changes);
        let kept = |place: usize| lost.wrapping_shr(u32::try_from(place).unwrap()) & 3 != 0;
        let mut subscriber: Vec<_> =
            rows.into_iter().enumerate().filter(|(place, _)| kept(*place)).map(|(_, row)| row).collect();
        subscriber.extend(extra);
        let expected = one_by_one(subscriber.clone(), &history);
        if let Some(found) = as_sets(subscriber, &history, &rules) {
            prop_assert_eq!(found, expected);
        }
    }
}
