//! The cost of folding one change: decoding it again, its key, its entry, and the net changes.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use engine::key::KeyForm;
use engine::net::{ChangeAt, Folder, TableFolding, TableRules};
use pgoutput::{
    Insert, Message, OldTuple, RelId, Tuple, TupleBuilder, Update, builder, decode_change,
};

/// Changes of one group.
const CHANGES: u32 = 40_000;

/// Payloads one after the other, as in the receive buffers.
#[derive(Default)]
struct Group {
    bytes: Vec<u8>,
    /// Table and end of each payload.
    changes: Vec<(usize, usize)>,
}

impl Group {
    fn push(&mut self, table: usize, message: &Message<'_>) {
        self.bytes.extend(builder::encoded(message));
        self.changes.push((table, self.bytes.len()));
    }

    fn update(&mut self, table: usize, new: Tuple<'_>) {
        let relation = RelId(u32::try_from(table).unwrap());
        self.push(table, &Message::Update(Update { xid: None, relation, old: None, new }));
    }

    fn insert(&mut self, table: usize, new: Tuple<'_>) {
        let relation = RelId(u32::try_from(table).unwrap());
        self.push(table, &Message::Insert(Insert { xid: None, relation, new }));
    }

    fn messages(&self) -> impl Iterator<Item = (usize, Message<'_>)> {
        let mut start = 0;
        self.changes.iter().map(move |&(table, end)| {
            let message = decode_change(&self.bytes[start..end], false).unwrap();
            start = end;
            (table, message)
        })
    }
}

fn scattered(number: u32) -> u32 {
    number.wrapping_mul(2_654_435_761) % 1_000_000
}

fn rules(root: u32, columns: usize, fold: TableFolding) -> TableRules {
    TableRules {
        published: RelId(root),
        root,
        storage: None,
        columns,
        fold,
        updates_alone: false,
        moves: true,
        seeks: false,
        told_apart: Vec::new(),
        written: Vec::new(),
    }
}

fn key() -> TableFolding {
    TableFolding::Key(vec![(0, KeyForm::Bytes)])
}

/// pgbench's default transaction: accounts, tellers, branches, history.
fn tpcb() -> (Vec<TableRules>, Group) {
    let filler = " ".repeat(84);
    let mut group = Group::default();
    for number in 0..CHANGES / 4 {
        let id = scattered(number).to_string();
        let account = TupleBuilder::new().text(&id).text("1").text("-4711").text(&filler);
        let teller =
            TupleBuilder::new().text((number % 100).to_string()).text("1").text("99").null();
        let branch = TupleBuilder::new().text((number % 10).to_string()).text("99").null();
        let history = TupleBuilder::new()
            .text("17")
            .text("1")
            .text(&id)
            .text("-4711")
            .text("2026-08-22 10:11:12.131415")
            .null();
        group.update(0, account.tuple());
        group.update(1, teller.tuple());
        group.update(2, branch.tuple());
        group.insert(3, history.tuple());
    }
    let tables = vec![
        rules(0, 4, key()),
        rules(1, 4, key()),
        rules(2, 3, key()),
        rules(3, 6, TableFolding::Append),
    ];
    (tables, group)
}

/// One update per change; `id` determines the keys and their order.
fn updates(id: fn(u32) -> u32) -> (Vec<TableRules>, Group) {
    let filler = "0123456789abcdef".repeat(7);
    let mut group = Group::default();
    for number in 0..CHANGES {
        let row = TupleBuilder::new()
            .text(id(number).to_string())
            .text("2026-08-22 10:11:12.131415+00")
            .text("12345.67")
            .text("t")
            .text(&filler)
            .null();
        group.update(0, row.tuple());
    }
    (vec![rules(0, 6, key())], group)
}

/// Updates under REPLICA IDENTITY FULL without a key.
fn whole_rows() -> (Vec<TableRules>, Group) {
    let mut group = Group::default();
    for number in 0..CHANGES {
        let row = |balance: u32| {
            TupleBuilder::new()
                .text(scattered(number).to_string())
                .text(balance.to_string())
                .text("x")
        };
        let (old, new) = (row(number), row(number + 1));
        let old = Some(OldTuple::Full(old.tuple()));
        group.push(
            0,
            &Message::Update(Update { xid: None, relation: RelId(0), old, new: new.tuple() }),
        );
    }
    (vec![rules(0, 3, TableFolding::WholeRow)], group)
}

fn fold(c: &mut Criterion) {
    let cases = [
        ("tpcb", tpcb()),
        ("updates_in_order", updates(|number| number + 100_000)),
        ("updates_scattered", updates(scattered)),
        ("updates_hot", updates(|number| number % 100)),
        ("whole_rows", whole_rows()),
    ];
    for (name, (tables, group)) in cases {
        let mut bench = c.benchmark_group(name);
        bench.throughput(Throughput::Elements(u64::from(CHANGES))).sample_size(20);
        bench.bench_function("decode", |bencher| {
            bencher.iter(|| {
                for message in group.messages() {
                    black_box(message);
                }
            });
        });
        bench.bench_function("decode_and_fold", |bencher| {
            bencher.iter(|| {
                let mut folder = Folder::new(&tables);
                for (change, (table, message)) in (0..).zip(group.messages()) {
                    folder.push(ChangeAt { part: 0, change }, table, &message);
                }
                folder.finish()
            });
        });
        bench.finish();
    }
}

criterion_group!(benches, fold);
criterion_main!(benches);
