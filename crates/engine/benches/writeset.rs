//! The cost of the writeset for the leader: decoding a change, computing its keys, and looking them
//! up; and the memory of the locks in flight.

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use engine::group::GroupSeq;
use engine::key::KeyForm;
use engine::writeset::{
    LockColumn, LockRules, RowLock, UniqueLock, Verdict, Writeset, WritesetLimits,
};
use pgoutput::{Insert, Message, RelId, TupleBuilder, Update, builder, decode_change};

/// Changes of one group, and number of groups in flight: as many as four workers have.
const CHANGES: u32 = 4_000;
const IN_FLIGHT: usize = 8;
/// Number of groups that the benchmark repeats: far more than are in flight.
const GROUPS: u32 = 64;

/// Payloads one after the other, as in the receive buffers.
#[derive(Default)]
struct Changes {
    bytes: Vec<u8>,
    /// Table and end of each payload.
    ends: Vec<(usize, usize)>,
}

impl Changes {
    fn push(&mut self, table: usize, message: &Message<'_>) {
        self.bytes.extend(builder::encoded(message));
        self.ends.push((table, self.bytes.len()));
    }

    fn update(&mut self, table: usize, new: &TupleBuilder) {
        let new = new.tuple();
        self.push(
            table,
            &Message::Update(Update { xid: None, relation: RelId(1), old: None, new }),
        );
    }

    fn messages(&self) -> impl Iterator<Item = (usize, Message<'_>)> {
        let mut start = 0;
        self.ends.iter().map(move |&(table, end)| {
            let message = decode_change(&self.bytes[start..end], false).unwrap();
            start = end;
            (table, message)
        })
    }
}

fn scattered(number: u32) -> u32 {
    number.wrapping_mul(2_654_435_761) % 10_000_000
}

fn table(root: u32, row: RowLock) -> LockRules {
    LockRules {
        root,
        identity: 1,
        row,
        unique: Vec::new(),
        foreign: Vec::new(),
        referenced: Vec::new(),
        whole_table: false,
        user_code: false,
    }
}

fn key() -> RowLock {
    RowLock::Key(vec![LockColumn { column: 0, form: KeyForm::Integer, in_identity: true }])
}

/// pgbench's default transaction: accounts, tellers, branches, history.
fn tpcb() -> (Vec<LockRules>, Vec<Changes>) {
    let filler = " ".repeat(84);
    let group = |group: u32| {
        let mut changes = Changes::default();
        for number in 0..CHANGES / 4 {
            let id = scattered(group * CHANGES + number);
            let (teller, branch) = ((id % 1000).to_string(), (id % 100).to_string());
            let id = id.to_string();
            let row = TupleBuilder::new();
            changes.update(0, &row.text(&id).text(&branch).text("-4711").text(&filler));
            let row = TupleBuilder::new();
            changes.update(1, &row.text(&teller).text(&branch).text("99").null());
            changes.update(2, &TupleBuilder::new().text(&branch).text("99").null());
            let history = TupleBuilder::new().text(&teller).text(&branch).text(&id).text("-4711");
            let (relation, new) = (RelId(1), history.tuple());
            changes.push(3, &Message::Insert(Insert { xid: None, relation, new }));
        }
        changes
    };
    let tables = vec![table(0, key()), table(1, key()), table(2, key()), table(3, RowLock::Table)];
    (tables, (0..GROUPS).map(group).collect())
}

/// Updates by key; with `unique` there is a unique index on the second column.
fn updates(unique: bool) -> (Vec<LockRules>, Vec<Changes>) {
    let filler = "0123456789abcdef".repeat(7);
    let group = |group: u32| {
        let mut changes = Changes::default();
        for number in 0..CHANGES {
            let id = scattered(group * CHANGES + number).to_string();
            let row = TupleBuilder::new().text(&id).text(format!("user{id}@example.org"));
            changes.update(0, &row.text("12345.67").text(&filler).null());
        }
        changes
    };
    let mut rules = table(0, key());
    if unique {
        rules.unique.push(UniqueLock {
            id: 7,
            columns: vec![LockColumn { column: 1, form: KeyForm::Bytes, in_identity: false }],
            certain: true,
            nulls_not_distinct: false,
        });
    }
    (vec![rules], (0..GROUPS).map(group).collect())
}

/// Groups that are opened and commit in order.
struct Traffic {
    writeset: Writeset,
    in_flight: VecDeque<GroupSeq>,
    next: GroupSeq,
}

impl Traffic {
    fn new() -> Self {
        let writeset = Writeset::new(WritesetLimits::default(), true);
        Self { writeset, in_flight: VecDeque::new(), next: GroupSeq(1) }
    }

    /// Runs one more group, and returns how many of its changes are dependent.
    fn group(&mut self, tables: &[LockRules], changes: &Changes) -> usize {
        if self.in_flight.len() == IN_FLIGHT
            && let Some(oldest) = self.in_flight.pop_front()
        {
            self.writeset.committed(oldest);
        }
        self.writeset.open(self.next, None);
        let dependent = changes
            .messages()
            .filter(|(table, message)| {
                self.writeset.change(&tables[*table], message) == Verdict::Dependent
            })
            .count();
        black_box(self.writeset.close());
        self.in_flight.push_back(self.next);
        self.next = self.next.next();
        dependent
    }
}

fn writeset(c: &mut Criterion) {
    let cases =
        [("tpcb", tpcb()), ("updates", updates(false)), ("updates_with_unique", updates(true))];
    for (name, (tables, groups)) in cases {
        let mut traffic = Traffic::new();
        let mut dependent = 0;
        for changes in groups.iter().chain(&groups) {
            dependent += traffic.group(&tables, changes);
        }
        let all = groups.len() * 2 * CHANGES as usize;
        let (keys, bytes) = (traffic.writeset.len(), traffic.writeset.bytes());
        println!(
            "{name}: {} changes in flight hold {keys} keys in {bytes} bytes: {:.1} for a key, {:.1} \
             for a change; {:.2} % of the changes are dependent",
            IN_FLIGHT * CHANGES as usize,
            bytes as f64 / keys as f64,
            bytes as f64 / (IN_FLIGHT * CHANGES as usize) as f64,
            dependent as f64 * 100.0 / all as f64,
        );
        let mut bench = c.benchmark_group(name);
        bench.throughput(Throughput::Elements(u64::from(CHANGES))).sample_size(30);
        let mut next = groups.iter().cycle();
        bench.bench_function("decode", |bencher| {
            bencher.iter(|| {
                for message in next.next().unwrap().messages() {
                    black_box(message);
                }
            });
        });
        bench.bench_function("decode_and_lock", |bencher| {
            bencher.iter(|| traffic.group(&tables, next.next().unwrap()));
        });
        bench.finish();
    }
}

/// Whole rows without a key: the cost of a column must not grow with their number.
fn whole_rows(c: &mut Criterion) {
    let mut bench = c.benchmark_group("whole_rows");
    for columns in [16, 160, 1600] {
        let column = |column| LockColumn { column, form: KeyForm::Bytes, in_identity: true };
        let tables = [table(0, RowLock::WholeRow((0..columns).map(column).collect()))];
        let mut changes = Changes::default();
        for number in 0..16_000 / columns {
            let row = (0..columns).fold(TupleBuilder::new(), |row, column| {
                row.text((number * columns + column).to_string())
            });
            let (relation, new) = (RelId(1), row.tuple());
            changes.push(0, &Message::Insert(Insert { xid: None, relation, new }));
        }
        let mut traffic = Traffic::new();
        bench.throughput(Throughput::Elements(16_000)).sample_size(30);
        bench.bench_function(columns.to_string(), |bencher| {
            bencher.iter(|| traffic.group(&tables, &changes));
        });
    }
    bench.finish();
}

criterion_group!(benches, writeset, whole_rows);
criterion_main!(benches);
