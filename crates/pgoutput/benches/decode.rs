//! Throughput of decoding, without and with iterating over every column.
//!
//! The fastest publisher sends about half a million messages per second. At a rate of 5.5 million,
//! decoding leaves nine tenths of a core for everything else.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pgoutput::{
    Begin, Column, Commit, Decoder, Frame, Insert, Lsn, Message, OldTuple, RelId, Streaming,
    Timestamp, Tuple, TupleBuilder, Update, Xid, builder,
};

/// Packets as a publisher sends them: frames with one message each.
struct Stream {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

/// Too large for the first two levels of cache, as in real use.
const STREAM_BYTES: usize = 8 << 20;
/// The frame in front of each message.
const FRAME_BYTES: usize = 25;

impl Stream {
    /// Fills the stream with units of work. `work` sends the messages of one unit.
    fn new(mut work: impl FnMut(u32, &mut dyn FnMut(Message<'_>))) -> Self {
        let mut stream = Self { bytes: Vec::new(), ends: Vec::new() };
        for number in 0.. {
            if stream.bytes.len() >= STREAM_BYTES {
                break;
            }
            work(number, &mut |message| {
                stream.bytes.extend(builder::in_frame(Lsn(1), Timestamp(1), &message));
                stream.ends.push(stream.bytes.len());
            });
        }
        stream
    }

    fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let packet = &self.bytes[start..end];
            start = end;
            packet
        })
    }

    /// Number of messages, and their bytes without the frames.
    fn throughput(&self) -> Throughput {
        let elements = self.ends.len();
        let bytes = self.bytes.len() - elements * FRAME_BYTES;
        Throughput::ElementsAndBytes {
            elements: u64::try_from(elements).unwrap(),
            bytes: u64::try_from(bytes).unwrap(),
        }
    }
}

/// pgbench's default transaction: three updates without the old row and one insert.
fn tpcb() -> Stream {
    let filler = " ".repeat(84);
    Stream::new(move |number, send| {
        let balance = i64::from(number.wrapping_mul(2_654_435_761) % 1_000_000) - 500_000;
        let account = TupleBuilder::new()
            .text((number % 10_000_000).to_string())
            .text("17")
            .text(balance.to_string())
            .text(&filler);
        let teller = TupleBuilder::new().text("173").text("17").text(balance.to_string()).null();
        let branch = TupleBuilder::new().text("17").text(balance.to_string()).null();
        let history = TupleBuilder::new()
            .text("173")
            .text("17")
            .text((number % 10_000_000).to_string())
            .text("-4711")
            .text("2026-08-22 10:11:12.131415")
            .null();
        send(begin(number));
        for (relation, row) in [(16385, &account), (16388, &teller), (16391, &branch)] {
            let new = row.tuple();
            send(Message::Update(Update { xid: None, relation: RelId(relation), old: None, new }));
        }
        send(insert(16394, history.tuple()));
        send(commit());
    })
}

/// Rows of about 190 bytes, ten thousand per transaction.
fn bulk_insert() -> Stream {
    let text = "0123456789abcdef".repeat(7);
    Stream::new(move |transaction, send| {
        send(begin(transaction));
        for number in 0..10_000 {
            let row = TupleBuilder::new()
                .text((transaction * 10_000 + number).to_string())
                .text("2026-08-22 10:11:12.131415+00")
                .text("12345.67")
                .text("t")
                .text(&text)
                .null();
            send(insert(16400, row.tuple()));
        }
        send(commit());
    })
}

/// Fifty columns, with the old row.
fn wide_update() -> Stream {
    Stream::new(|number, send| {
        let mut row = TupleBuilder::new();
        for column in 0..50_u32 {
            match column % 10 {
                9 => row.push(Column::Null),
                8 => row.push(Column::Unchanged),
                _ => row.push(Column::Text(format!("value {}", number + column).as_bytes())),
            }
        }
        let old = Some(OldTuple::Full(row.tuple()));
        send(begin(number));
        send(Message::Update(Update { xid: None, relation: RelId(16410), old, new: row.tuple() }));
        send(commit());
    })
}

fn begin(number: u32) -> Message<'static> {
    Message::Begin(Begin { final_lsn: Lsn(1), commit_time: Timestamp(1), xid: Xid(number + 1) })
}

fn insert(relation: u32, new: Tuple<'_>) -> Message<'_> {
    Message::Insert(Insert { xid: None, relation: RelId(relation), new })
}

fn commit() -> Message<'static> {
    let (commit_lsn, end_lsn, commit_time) = (Lsn(1), Lsn(2), Timestamp(1));
    Message::Commit(Commit { flags: 0, commit_lsn, end_lsn, commit_time })
}

/// Accesses the position and length of every column, as a user of the row does.
fn walk(tuple: &Tuple<'_>) -> usize {
    tuple
        .columns()
        .map(|column| match column {
            Column::Null | Column::Unchanged => 1,
            Column::Text(value) | Column::Binary(value) => black_box(value).len(),
        })
        .sum()
}

fn walk_message(message: &Message<'_>) -> usize {
    match message {
        Message::Insert(insert) => walk(&insert.new),
        Message::Update(update) => {
            update.old.as_ref().map_or(0, |old| walk(old.tuple())) + walk(&update.new)
        }
        _ => 0,
    }
}

fn decode(c: &mut Criterion) {
    for (name, stream) in
        [("tpcb", tpcb()), ("bulk_insert", bulk_insert()), ("wide_update", wide_update())]
    {
        let mut group = c.benchmark_group(name);
        group.throughput(stream.throughput()).sample_size(30);
        group.bench_function("decode", |bencher| {
            bencher.iter(|| {
                let mut decoder = Decoder::new(Streaming::Parallel);
                for packet in stream.packets() {
                    black_box(decoder.decode(&packet[FRAME_BYTES..]).unwrap());
                }
            });
        });
        group.bench_function("decode_and_walk", |bencher| {
            bencher.iter(|| {
                let mut decoder = Decoder::new(Streaming::Parallel);
                for packet in stream.packets() {
                    black_box(walk_message(&decoder.decode(&packet[FRAME_BYTES..]).unwrap()));
                }
            });
        });
        group.bench_function("frame_decode_and_walk", |bencher| {
            bencher.iter(|| {
                let mut decoder = Decoder::new(Streaming::Parallel);
                for packet in stream.packets() {
                    let Frame::XLogData { payload, .. } = Frame::decode(packet).unwrap() else {
                        unreachable!("the stream holds log data only");
                    };
                    black_box(walk_message(&decoder.decode(payload).unwrap()));
                }
            });
        });
        group.finish();
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
