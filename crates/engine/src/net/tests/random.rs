//! Random histories: net changes leave the same rows as the changes one by one, and conflict with
//! the subscriber's rows if and only if those do.

use proptest::prelude::*;

use super::history::History;
use super::model::{Model, PARTITIONS, holds_new};
use super::{keyed, rules};
use crate::key::KeyForm;
use crate::net::{TableFolding, TableRules};
use pgoutput::RelId;

/// Topmost relations.
const ROOTS: usize = 9;

fn partition(storage: u32, fold: TableFolding) -> TableRules {
    TableRules {
        published: RelId(storage),
        storage: Some(storage),
        moves: true,
        ..rules(7, 3, fold)
    }
}

/// With `parent`, the last table is the parent of the two partitions before it.
fn tables(parent: bool) -> Vec<TableRules> {
    let two = vec![(1, KeyForm::Blanks), (0, KeyForm::Numeric)];
    let numeric = || TableFolding::Key(vec![(0, KeyForm::Numeric)]);
    let tables = vec![
        TableRules { moves: true, ..rules(0, 3, numeric()) },
        rules(0, 3, numeric()),
        // Their TRUNCATEs may be left out.
        TableRules { storage: Some(1), moves: true, ..rules(1, 3, TableFolding::Key(two)) },
        TableRules { storage: Some(2), ..rules(2, 3, TableFolding::WholeRow) },
        TableRules { storage: Some(3), ..rules(3, 3, TableFolding::Append) },
        rules(4, 3, TableFolding::Never { user_code: false }),
        rules(5, 3, TableFolding::Never { user_code: true }),
        TableRules { columns: 3, updates_alone: true, ..keyed(6) },
        partition(PARTITIONS[0], numeric()),
        partition(PARTITIONS[1], numeric()),
        rules(if parent { 7 } else { 8 }, 3, numeric()),
    ];
    assert!(tables.iter().all(|rules| (rules.root as usize) < ROOTS));
    tables
}

/// A change that the publisher makes if its tables allow it.
#[derive(Debug, Clone)]
struct Candidate {
    table: usize,
    kind: Kind,
    /// Selects one of the existing rows.
    pick: usize,
    /// The old row, for a change that ignores the publisher's rows.
    old: [&'static str; 3],
    new: [&'static str; 3],
    /// The change is sent even if no publisher could make it: net changes must not hide that
    /// either.
    force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Insert,
    Update,
    UpdateKey,
    UpdateSameKey,
    UpdateFull,
    Delete,
    DeleteFull,
    Truncate,
}

impl Candidate {
    /// The change as text; `None` if there is no row for it.
    fn text(&self, model: &Model, rules: &TableRules) -> Option<String> {
        let Self { table, kind, .. } = *self;
        let key = |column| match &rules.fold {
            TableFolding::Key(key) => key.iter().any(|&(at, _)| at == column),
            _ => column == 0,
        };
        let mut new = self.new.map(str::to_owned);
        if kind == Kind::Insert {
            return Some(format!("{table}:I {}", new.join(" ")));
        }
        if kind == Kind::Truncate {
            return Some(format!("T {table} {}", self.pick % 11));
        }
        let rows = &model.rows[rules.root as usize];
        let old = if self.force {
            self.old.map(str::to_owned)
        } else {
            let row = rows.get(self.pick.checked_rem(rows.len())?)?;
            [0, 1, 2].map(|at| row[at].as_ref().map_or("-".into(), |value| value.replace(' ', "_")))
        };
        for (column, new) in new.iter_mut().enumerate() {
            let same = kind == Kind::UpdateSameKey && *new != "u" || kind == Kind::Update;
            if same && key(column) {
                new.clone_from(&old[column]);
            }
        }
        let mut key_only = old.clone();
        for (column, old) in key_only.iter_mut().enumerate() {
            if !key(column) {
                "-".clone_into(old);
            }
        }
        let (old, key_only, new) = (old.join(" "), key_only.join(" "), new.join(" "));
        Some(match kind {
            Kind::Update => format!("{table}:U {new}"),
            Kind::UpdateKey | Kind::UpdateSameKey => format!("{table}:U K {key_only} N {new}"),
            Kind::UpdateFull => format!("{table}:U O {old} N {new}"),
            Kind::Delete => format!("{table}:D {key_only}"),
            Kind::DeleteFull => format!("{table}:DO {old}"),
            Kind::Insert | Kind::Truncate => unreachable!("made above"),
        })
    }
}

fn row(unchanged: bool) -> impl Strategy<Value = [&'static str; 3]> {
    let column = move |choices: &[&'static str]| {
        let usable = choices.iter().copied().filter(|&value| unchanged || value != "u");
        prop::sample::select(usable.collect::<Vec<_>>())
    };
    [
        column(&["1", "1", "2", "2", "3", "1.0", "2.00", "u"]),
        column(&["a", "a", "b", "a_", "u"]),
        column(&["x", "y", "z", "-", "u", "u"]),
    ]
}

fn candidate(force: f64) -> impl Strategy<Value = Candidate> {
    let kind = prop_oneof![
        8 => Just(Kind::Insert),
        8 => Just(Kind::Update),
        4 => Just(Kind::UpdateKey),
        4 => Just(Kind::UpdateSameKey),
        6 => Just(Kind::UpdateFull),
        4 => Just(Kind::Delete),
        4 => Just(Kind::DeleteFull),
    ];
    let kind = prop_oneof![92 => kind, 8 => Just(Kind::Truncate)];
    let table = prop::sample::select(vec![
        0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 6, 7, 8, 8, 8, 9, 9, 9, 10,
    ]);
    let rows = (row(false), row(true));
    (table, kind, 0_usize..24, rows, prop::bool::weighted(force)).prop_map(
        |(table, kind, pick, (old, new), force)| Candidate { table, kind, pick, old, new, force },
    )
}

/// Mostly updates of keys, of one table with few rows: these take keys of each other.
fn moving_candidate() -> impl Strategy<Value = Candidate> {
    let kind = prop_oneof![
        3 => Just(Kind::Insert),
        2 => Just(Kind::Update),
        8 => Just(Kind::UpdateKey),
        1 => Just(Kind::Delete),
    ];
    let key = || prop::sample::select(vec!["1", "2", "3", "4", "5", "1.0"]);
    let rest = || (prop::sample::select(vec!["a", "b"]), prop::sample::select(vec!["x", "y", "u"]));
    (kind, 0_usize..24, key(), rest()).prop_map(|(kind, pick, key, (second, third))| Candidate {
        table: 0,
        kind,
        pick,
        old: ["1", "a", "x"],
        new: [key, second, if kind == Kind::Insert { "z" } else { third }],
        force: false,
    })
}

fn candidates(most: usize, force: f64) -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::vec(candidate(force), 0..most)
}

/// Applies the changes that the publisher can make, and returns what it sent.
fn run(model: &mut Model, candidates: &[Candidate], parent: bool) -> History {
    let tables = tables(parent);
    let mut sent = History::default();
    for candidate in candidates {
        let Some(text) = candidate.text(model, &tables[candidate.table]) else { continue };
        let change = History::new(&text);
        let (touched, message) = change.messages().next().unwrap();
        // A row that its partition cannot hold is only noticed if it is still there at the end of the segment.
        let forced = candidate.force && holds_new(&tables[candidate.table], &message);
        if model.execute(&tables, touched, &message).is_ok() || forced {
            sent.push(&text);
        }
    }
    sent
}

/// Compares both ways of execution. With `exact`, the spelling of keys must be the same too.
fn compare(
    subscriber: &Model,
    history: &History,
    parent: bool,
    exact: bool,
) -> Result<bool, TestCaseError> {
    let tables = tables(parent);
    let mut expected = subscriber.clone().one_by_one(&tables, history);
    let mut found = subscriber.clone().in_steps(&tables, history);
    if !exact {
        for model in expected.iter_mut().chain(&mut found) {
            model.forget_spelling(&tables);
        }
    }
    prop_assert_eq!(&found, &expected);
    Ok(expected.is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn on_the_tables_of_the_publisher_net_changes_are_the_changes_one_by_one(
        before in candidates(60, 0.0),
        parent in any::<bool>(),
        history in candidates(200, 0.0),
    ) {
        let mut publisher = Model { rows: vec![Vec::new(); ROOTS] };
        run(&mut publisher, &before, parent);
        let subscriber = publisher.clone();
        let history = run(&mut publisher, &history, parent);
        prop_assert!(compare(&subscriber, &history, parent, true)?, "the publisher could do it");
    }

    #[test]
    fn rows_that_get_other_keys_are_those_of_the_changes_one_by_one(
        before in prop::collection::vec(moving_candidate(), 0..20),
        deviation in prop::collection::vec(moving_candidate(), 0..2),
        history in prop::collection::vec(moving_candidate(), 0..20),
    ) {
        let mut publisher = Model { rows: vec![Vec::new(); ROOTS] };
        run(&mut publisher, &before, false);
        let subscriber = publisher.clone();
        let mut other = publisher.clone();
        run(&mut other, &deviation, false);
        let history = run(&mut publisher, &history, false);
        prop_assert!(compare(&subscriber, &history, false, true)?, "the publisher could do it");
        compare(&other, &history, false, false)?;
    }

    #[test]
    fn on_other_tables_net_changes_conflict_if_and_only_if_the_changes_do_one_by_one(
        before in candidates(60, 0.0),
        parent in any::<bool>(),
        deviation in candidates(8, 0.0),
        history in candidates(60, 0.0),
    ) {
        let mut publisher = Model { rows: vec![Vec::new(); ROOTS] };
        run(&mut publisher, &before, parent);
        let mut subscriber = publisher.clone();
        run(&mut subscriber, &deviation, parent);
        let history = run(&mut publisher, &history, parent);
        compare(&subscriber, &history, parent, false)?;
    }

    #[test]
    fn changes_that_no_publisher_could_make_conflict_as_they_do_one_by_one(
        before in candidates(60, 0.0),
        parent in any::<bool>(),
        history in candidates(60, 0.02),
    ) {
        let mut publisher = Model { rows: vec![Vec::new(); ROOTS] };
        run(&mut publisher, &before, parent);
        let subscriber = publisher.clone();
        let history = run(&mut publisher, &history, parent);
        compare(&subscriber, &history, parent, false)?;
    }
}
