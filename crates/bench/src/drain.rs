//! The raw drain: reads one backlog without applying it, from copies of one slot, in alternating
//! rounds.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use pgoutput::{Column, Decoder, Frame, Lsn, Message, Streaming};
use testbed::servers::find_or_fetch;
use testbed::workload::tpcb;
use testbed::{Cluster, ClusterBuilder, ServerBinaries, postgres};
use wire::CopyChunk;

use crate::raw::{Drained, End, Source, by_receiver, by_recvlogical, tool_with_recvlogical};

pub(crate) const DATABASE: &str = "bench";
/// Copied for every round; never read itself.
const SLOT: &str = "backlog";
pub(crate) const PUBLICATION: &str = "bench";
/// Of the pgbench tables. The procedure knows their numbers of rows.
pub(crate) const SCALE: u32 = 10;

#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    /// Major version of the publisher
    #[arg(long, default_value_t = 18)]
    server: u16,

    /// TPC-B transactions of the backlog, six messages each
    #[arg(long, default_value_t = 100_000)]
    transactions: u32,

    /// Rounds; the median counts
    #[arg(long, default_value_t = 5)]
    rounds: usize,
}

pub(crate) fn run(args: &DrainArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let binaries = find_or_fetch(args.server)?;
    let publisher = publisher(&binaries).start()?;
    let end = prepare(&publisher, args.transactions, "")?;
    let recvlogical = tool_with_recvlogical(&binaries);
    if recvlogical.is_none() {
        eprintln!("no pg_recvlogical found: install PostgreSQL's client tools to compare with it");
    }
    let source = |slot| Source {
        publisher: &publisher,
        database: DATABASE,
        slot,
        publication: PUBLICATION,
        binary: false,
        two_phase: false,
        streaming: false,
        end: End::At(end),
    };
    let (mut native, mut received) = (Vec::new(), Vec::new());
    let mut chunks = Vec::new();
    for round in 0..args.rounds {
        // Every other round reverses the order, so that drift affects both readers equally.
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                if let Some(tool) = &recvlogical {
                    copy_slot(&publisher, "by_recvlogical")?;
                    native.push(by_recvlogical(&source("by_recvlogical"), tool)?);
                }
            } else {
                chunks.clear();
                copy_slot(&publisher, "by_receiver")?;
                received.push(by_receiver(&source("by_receiver"), |chunk| chunks.push(chunk))?);
            }
        }
    }
    let decoded = (0..args.rounds).map(|_| decode(&chunks)).collect::<Result<Vec<_>>>()?;
    let received = median(received);
    let decoded = median(decoded);
    ensure!(decoded.messages == received.messages, "decoding lost messages");
    println!("PostgreSQL {}, {} transactions, TCP", binaries.version(), args.transactions);
    println!("{:<22} {:>12} {:>10} {:>9}", "", "messages/s", "MB/s", "ratio");
    let line = |name: &str, drained: &Drained, ratio: f64| {
        println!(
            "{name:<22} {:>12.0} {:>10.1} {ratio:>8.2}x",
            drained.messages_per_second(),
            drained.bytes as f64 / drained.seconds / 1e6,
        );
    };
    let base = if native.is_empty() {
        received
    } else {
        // pg_recvlogical does not count messages, but it read the same backlog.
        Drained { messages: received.messages, bytes: received.bytes, ..median(native) }
    };
    if recvlogical.is_some() {
        line("pg_recvlogical", &base, 1.0);
    }
    line(
        "pgapace receiver",
        &received,
        received.messages_per_second() / base.messages_per_second(),
    );
    line("decode alone", &decoded, decoded.messages_per_second() / base.messages_per_second());
    let faster = received.messages_per_second().max(base.messages_per_second());
    println!("decode / raw drain: {:.1}", decoded.messages_per_second() / faster);
    Ok(())
}

/// A publisher of TPC-B transactions, not started.
pub(crate) fn publisher(binaries: &ServerBinaries) -> ClusterBuilder {
    Cluster::builder(binaries)
        .name("publisher")
        .setting("shared_buffers", "512MB")
        .setting("max_wal_size", "8GB")
        .setting("synchronous_commit", "off")
}

/// Writes the backlog and returns its end position. `publications`: SQL that makes others than that of all
/// tables. A walsender sees the catalogue of the time of a change, so they must exist before it.
pub(crate) fn prepare(publisher: &Cluster, transactions: u32, publications: &str) -> Result<Lsn> {
    publisher.create_database(DATABASE)?;
    let mut client = publisher.connect(DATABASE)?;
    tpcb::create_tables(&mut client, SCALE)?;
    client.batch_execute(&format!("CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"))?;
    client.batch_execute(publications)?;
    client.query_one("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", &[&SLOT])?;
    // A procedure runs the TPC-B transactions in the server, because only the backlog matters.
    client.batch_execute(
        "CREATE PROCEDURE tpcb(n int) LANGUAGE plpgsql AS $$
         DECLARE a int; t int; b int; d int;
         BEGIN
           FOR i IN 1..n LOOP
             a := 1 + random() * 999999; t := 1 + random() * 99; b := 1 + random() * 9;
             d := random() * 10000 - 5000;
             UPDATE pgbench_accounts SET abalance = abalance + d WHERE aid = a;
             UPDATE pgbench_tellers SET tbalance = tbalance + d WHERE tid = t;
             UPDATE pgbench_branches SET bbalance = bbalance + d WHERE bid = b;
             INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
               VALUES (t, b, a, d, now());
             COMMIT;
           END LOOP;
         END $$",
    )?;
    client.batch_execute(&format!("CALL tpcb({transactions})"))?;
    // One statement each, because VACUUM cannot run in the transaction that several statements
    // would share.
    client.batch_execute("VACUUM")?;
    client.batch_execute("CHECKPOINT")?;
    lsn(&mut client, "SELECT pg_current_wal_insert_lsn()::text")
}

fn lsn(client: &mut postgres::Client, sql: &str) -> Result<Lsn> {
    let text: String = client.query_one(sql, &[])?.get(0);
    Ok(text.parse()?)
}

/// Copies the slot for one reader, because reading a slot consumes its changes.
pub(crate) fn copy_slot(publisher: &Cluster, name: &str) -> Result<()> {
    let sql = format!(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
           WHERE slot_name = '{name}'; \
         SELECT pg_copy_logical_replication_slot('{SLOT}', '{name}')"
    );
    publisher.sql(DATABASE, &sql)?;
    Ok(())
}

/// Decodes the received chunks, including every column.
fn decode(chunks: &[CopyChunk]) -> Result<Drained> {
    let mut decoder = Decoder::new(Streaming::Off);
    let mut drained = Drained::default();
    let started = Instant::now();
    for (_, payload) in chunks.iter().flat_map(CopyChunk::frames) {
        let Frame::XLogData { payload, .. } = Frame::decode(payload)? else { continue };
        drained.messages += 1;
        drained.bytes += payload.len() as u64;
        let tuple = match decoder.decode(payload)? {
            Message::Insert(insert) => insert.new,
            Message::Update(update) => update.new,
            _ => continue,
        };
        let values = tuple.columns().map(|column| match column {
            Column::Text(value) | Column::Binary(value) => value.len(),
            Column::Null | Column::Unchanged => 0,
        });
        black_box(values.sum::<usize>());
    }
    drained.seconds = started.elapsed().as_secs_f64();
    Ok(drained)
}

fn median(mut rounds: Vec<Drained>) -> Drained {
    rounds.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    rounds[rounds.len() / 2]
}
