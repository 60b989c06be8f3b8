//! The transactions of a random workload.

use std::fmt;

use fastrand::Rng;

use super::tables::{Table, Tables, choose};

/// Changed rows of one workload at scale 1.
const CHANGES: u64 = 120_000;
const MAX_TRANSACTIONS: u64 = 60_000;

/// How many changes a transaction has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    Medium,
    /// Most are small, some are not.
    Mixed,
    /// One or two statements, each of which changes many rows.
    Large,
}

/// The change that one or a few statements make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Update,
    UpdateText,
    UpdateNothing,
    UpdateToast,
    UpdateRange,
    Insert,
    Delete,
    /// A row is deleted and inserted again.
    Replace,
    Upsert,
    /// A row gets a new key.
    MoveKey,
    /// A row gets a key that another row has just given up.
    HandKeyOver,
    /// A unique value that no row had.
    NewUnique,
    SwapUnique,
    /// An update that a savepoint undoes.
    Undone,
    /// A row comes, and the oldest that came goes.
    Queue,
}

const ACTIONS: [(Action, u32); 15] = [
    (Action::Update, 12),
    (Action::UpdateText, 4),
    (Action::UpdateNothing, 1),
    (Action::UpdateToast, 2),
    (Action::UpdateRange, 2),
    (Action::Insert, 6),
    (Action::Delete, 3),
    (Action::Replace, 2),
    (Action::Upsert, 3),
    (Action::MoveKey, 2),
    (Action::HandKeyOver, 1),
    (Action::NewUnique, 2),
    (Action::SwapUnique, 1),
    (Action::Undone, 1),
    (Action::Queue, 2),
];

/// One kind of transaction.
#[derive(Debug)]
struct Kind {
    weight: u64,
    actions: Vec<Action>,
    /// PL/pgSQL statements.
    body: String,
    changes: u64,
}

/// The kinds of transactions, and how often each comes.
#[derive(Debug)]
pub(super) struct Mix {
    size: Size,
    /// Exponent of a random number between 0 and 1: the larger, the more often the first rows change.
    skew: u64,
    kinds: Vec<Kind>,
}

impl Mix {
    pub(super) fn random(rng: &mut Rng, tables: &Tables) -> Self {
        let sizes = [Size::Small, Size::Small, Size::Medium, Size::Mixed, Size::Large];
        let size = *choose(rng, &sizes);
        let skew = *choose(rng, &[1, 1, 1, 3, 8]);
        let kinds =
            (0..*choose(rng, &[1, 2, 4])).map(|_| Kind::random(rng, tables, size, skew)).collect();
        Self { size, skew, kinds }
    }

    /// Changed rows of one transaction, on average and at least one.
    pub(super) fn changes(&self) -> u64 {
        let changes: u64 = self.kinds.iter().map(|kind| kind.weight * kind.changes).sum();
        (changes / self.weight()).max(1)
    }

    fn weight(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.weight).sum::<u64>().max(1)
    }

    /// The number of transactions at scale 1.
    pub(super) fn transactions(&self) -> u64 {
        (CHANGES / self.changes()).min(MAX_TRANSACTIONS)
    }

    /// Declarations and body of a procedure that executes so many transactions.
    pub(super) fn procedure(&self, transactions: u64) -> String {
        let mut choice = String::new();
        let mut below = 0;
        for kind in &self.kinds {
            below += kind.weight;
            let word = if choice.is_empty() { "IF" } else { "ELSIF" };
            choice += &format!("{word} kind < {below} THEN\n{}", kind.body);
        }
        format!(
            "DECLARE kind int; k bigint; other bigint; value int; another int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 kind := floor(random() * {});
                 {choice}END IF;
                 COMMIT;
               END LOOP;
             END",
            self.weight()
        )
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} transactions", self.size)?;
        if self.skew > 1 {
            write!(f, ", skew {}", self.skew)?;
        }
        for kind in &self.kinds {
            let (shown, more) = kind.actions.split_at(kind.actions.len().min(5));
            let dots = if more.is_empty() { "" } else { " …" };
            write!(f, "; {} × {shown:?}{dots}", kind.weight)?;
        }
        Ok(())
    }
}

impl Kind {
    fn random(rng: &mut Rng, tables: &Tables, size: Size, skew: u64) -> Self {
        let number = match size {
            Size::Small => *choose(rng, &[1, 1, 2, 3]),
            Size::Medium => *choose(rng, &[3, 8, 15]),
            Size::Mixed => *choose(rng, &[1, 3, 30]),
            Size::Large => *choose(rng, &[1, 2]),
        };
        let mut kind = Self {
            weight: *choose(rng, &[1, 1, 5, 50]),
            actions: Vec::new(),
            body: String::new(),
            changes: 0,
        };
        for _ in 0..number {
            let table = choose(rng, &tables.0);
            let many = match size {
                Size::Large => *choose(rng, &[1, 300, 2000]),
                _ => *choose(rng, &[1, 1, 1, 5, 40]),
            };
            let action = possible(action(rng), table);
            let statements = Statements { table, tables, many, skew };
            let (sql, changes) = statements.of(action);
            kind.actions.push(action);
            kind.body += &sql;
            kind.changes += changes;
        }
        kind
    }
}

fn action(rng: &mut Rng) -> Action {
    let mut number = rng.u32(0..ACTIONS.iter().map(|(_, weight)| weight).sum());
    for (action, weight) in ACTIONS {
        match number.checked_sub(weight) {
            Some(left) => number = left,
            None => return action,
        }
    }
    Action::Update
}

/// The action itself, or another one if the table does not allow it.
fn possible(action: Action, table: &Table) -> Action {
    let moves_values = matches!(action, Action::NewUnique | Action::SwapUnique);
    let needs_key =
        matches!(action, Action::Upsert | Action::MoveKey | Action::HandKeyOver | Action::Replace);
    match action {
        Action::UpdateToast if !table.toast => Action::UpdateText,
        _ if moves_values && !table.unique => Action::Update,
        _ if needs_key && table.key.unique().is_none() => Action::Update,
        _ => action,
    }
}

/// The statements of actions on one table.
struct Statements<'a> {
    table: &'a Table,
    tables: &'a Tables,
    /// Rows of a statement that changes many.
    many: u64,
    skew: u64,
}

impl Statements<'_> {
    /// PL/pgSQL, and the number of rows that it changes.
    fn of(&self, action: Action) -> (String, u64) {
        let table = &self.table.name;
        let key = self.table.key;
        let (row, other_row) = (key.value("k"), key.value("other"));
        let pick = format!("k := {};\n", self.random_row());
        let update = |set: &str| format!("UPDATE {table} SET {set} WHERE id = {row};\n");
        let new_key = key.value("nextval('next')");
        match action {
            Action::Update => (pick + &update("v = v + 1"), 1),
            Action::UpdateText => (pick + &update("v = v + 1, s = md5(i::text)"), 1),
            Action::UpdateNothing => (pick + &update("v = v"), 1),
            Action::UpdateToast => (pick + &update("big = repeat(md5(i::text), 100)"), 1),
            Action::UpdateRange => {
                let keys = key.value("q");
                let last = format!("k + {}", self.many - 1);
                let sql = format!(
                    "UPDATE {table} SET v = v + 1 \
                     WHERE id IN (SELECT {keys} FROM generate_series(k, {last}) q);\n"
                );
                (pick + &sql, self.many)
            }
            Action::Insert => {
                let rows = self.many;
                let sql = format!(
                    "INSERT INTO {table} (id) SELECT {new_key} FROM generate_series(1, {rows});\n"
                );
                (sql, rows)
            }
            Action::Delete => {
                let sql = format!("DELETE FROM {table} WHERE id = {row};\n{}", self.put_back());
                (pick + &sql, 1)
            }
            Action::Replace => {
                let sql = format!(
                    "DELETE FROM {table} WHERE id = {row};
                     INSERT INTO {table} (id, v) VALUES ({row}, i);\n"
                );
                (pick + &sql, 2)
            }
            Action::Upsert => {
                let unique = key.unique().unwrap_or("id");
                let sql = format!(
                    "INSERT INTO {table} (id, v) VALUES ({row}, i)
                     ON CONFLICT ({unique}) DO UPDATE SET v = {table}.v + 1;\n"
                );
                (pick + &sql, 1)
            }
            Action::MoveKey => (pick + &update(&format!("id = {new_key}")) + &self.put_back(), 1),
            Action::HandKeyOver => {
                let sql = format!(
                    "other := {};
                     IF k <> other THEN
                       UPDATE {table} SET id = {new_key} WHERE id = {row};
                       UPDATE {table} SET id = {row} WHERE id = {other_row};
                       {}END IF;\n",
                    self.random_row(),
                    self.put_back()
                );
                (pick + &sql, 2)
            }
            Action::NewUnique => (pick + &update("one = nextval('next')::int"), 1),
            Action::SwapUnique => (pick + &self.swap(), 3),
            Action::Undone => {
                let sql = format!(
                    "BEGIN
                       {}RAISE EXCEPTION 'undone';
                     EXCEPTION WHEN raise_exception THEN NULL;
                     END;\n",
                    update("v = v + 1")
                );
                (pick + &sql, 0)
            }
            Action::Queue => {
                let first = self.tables.next_key();
                let oldest = key.value(&format!("{first} + i - 1"));
                let sql = format!(
                    "INSERT INTO {table} (id) VALUES ({new_key});
                     DELETE FROM {table} WHERE id = {oldest};\n"
                );
                (sql, 2)
            }
        }
    }

    /// Inserts row `k` if the last statement did not find it: a workload does not run out of rows.
    fn put_back(&self) -> String {
        let table = &self.table.name;
        let row = self.table.key.value("k");
        format!("IF NOT FOUND THEN INSERT INTO {table} (id) VALUES ({row}); END IF;\n")
    }

    /// Two rows exchange their unique values.
    fn swap(&self) -> String {
        let table = &self.table.name;
        let (row, other) = (self.table.key.value("k"), self.table.key.value("other"));
        format!(
            "other := {};
             SELECT one INTO value FROM {table} WHERE id = {row} LIMIT 1;
             SELECT one INTO another FROM {table} WHERE id = {other} LIMIT 1;
             IF value <> another THEN
               UPDATE {table} SET one = NULL WHERE one = value;
               UPDATE {table} SET one = value WHERE one = another;
               UPDATE {table} SET one = another WHERE id = {row} AND one IS NULL;
             END IF;\n",
            self.random_row()
        )
    }

    fn random_row(&self) -> String {
        format!("1 + floor(power(random(), {}) * {})::bigint", self.skew, self.table.rows)
    }
}
