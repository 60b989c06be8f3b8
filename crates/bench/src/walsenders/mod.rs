//! Several walsenders for one publication: the possible gain where a publisher writes faster than one
//! walsender decodes.
//!
//! The backlog is published in K parts by row filters, each with a slot of its own. The streams are read
//! at the same time and merged into whole transactions, which must be the same for every K. Every
//! walsender reads the whole WAL, so the sum of their CPU time grows with K. The CPU time of each
//! walsender bounds the rate on a machine with a processor for each.

mod merge;

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher as _;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use pgoutput::{Decoder, Frame, Lsn, Message, Streaming};
use testbed::Cluster;
use testbed::servers::find_or_fetch;
use wire::CopyChunk;

use crate::drain::{DATABASE, copy_slot, prepare, publisher};
use crate::raw::{Drained, End, Source, by_receiver};
use crate::walsenders::merge::{Change, Merge, Transaction};

#[derive(Debug, Args)]
pub(crate) struct WalsendersArgs {
    /// Major version of the publisher; row filters exist since 15
    #[arg(long, default_value_t = 18)]
    server: u16,

    /// TPC-B transactions of the backlog
    #[arg(long, default_value_t = 100_000)]
    transactions: u32,

    /// Numbers of walsenders, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    walsenders: Vec<usize>,

    /// Rounds; the fastest counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// The measured costs of one number of walsenders.
struct Measured {
    walsenders: usize,
    seconds: f64,
    /// CPU seconds of all walsenders, and of the one that took most.
    all_cpu: f64,
    most_cpu: f64,
    transactions: u64,
    /// A hash of all transactions, with their changes in order.
    hash: u64,
}

pub(crate) fn run(args: &WalsendersArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    ensure!(args.server >= 15, "row filters exist since PostgreSQL 15");
    ensure!(args.walsenders.iter().all(|count| (1..=64).contains(count)), "--walsenders: 1 to 64");
    let binaries = find_or_fetch(args.server)?;
    let publisher = publisher(&binaries)
        .setting("max_wal_senders", "80")
        .setting("max_replication_slots", "80")
        .start()?;
    let publications: String =
        args.walsenders.iter().map(|count| publications_of(*count)).collect();
    let end = prepare(&publisher, args.transactions, &publications)?;
    println!("PostgreSQL {}, {} transactions, TCP", binaries.version(), args.transactions);
    println!(
        "{:>10} {:>14} {:>16} {:>16} {:>18}",
        "walsenders", "seconds", "CPU us/tx, all", "CPU us/tx, most", "bound, x one"
    );
    let mut one: Option<Measured> = None;
    for walsenders in args.walsenders.iter().copied() {
        let mut rounds = Vec::new();
        for _ in 0..args.rounds {
            rounds.push(measure(&publisher, walsenders, end)?);
        }
        let measured = rounds
            .into_iter()
            .min_by(|a, b| a.seconds.total_cmp(&b.seconds))
            .context("no round was measured")?;
        ensure!(
            measured.transactions == u64::from(args.transactions),
            "{walsenders} walsenders have sent {} transactions",
            measured.transactions
        );
        let first = one.get_or_insert(Measured { ..measured });
        ensure!(
            (measured.hash, measured.transactions) == (first.hash, first.transactions),
            "{walsenders} walsenders have sent other transactions than {}",
            first.walsenders
        );
        let per_transaction = |cpu: f64| cpu * 1e6 / measured.transactions as f64;
        println!(
            "{:>10} {:>14.2} {:>16.2} {:>16.2} {:>17.2}x",
            walsenders,
            measured.seconds,
            per_transaction(measured.all_cpu),
            per_transaction(measured.most_cpu),
            first.most_cpu / measured.most_cpu,
        );
    }
    println!("the merged transactions are the same for every number of walsenders");
    Ok(())
}

fn publication(walsenders: usize, part: usize) -> String {
    format!("part_{walsenders}_{part}")
}

/// SQL that publishes the tables in parts, by the remainder of a column that every row has.
fn publications_of(walsenders: usize) -> String {
    let one = |part: usize| {
        let filter = |table: &str, column: &str| match walsenders {
            1 => format!("TABLE {table}"),
            _ => format!("TABLE {table} WHERE ({column} % {walsenders} = {part})"),
        };
        format!(
            "CREATE PUBLICATION {} FOR {}, {}, {}, {};",
            publication(walsenders, part),
            filter("pgbench_accounts", "aid"),
            filter("pgbench_tellers", "tid"),
            filter("pgbench_branches", "bid"),
            filter("pgbench_history", "aid"),
        )
    };
    (0..walsenders).map(one).collect()
}

/// Reads the backlog once, with so many walsenders at the same time.
fn measure(publisher: &Cluster, walsenders: usize, end: Lsn) -> Result<Measured> {
    let slots: Vec<String> = (0..walsenders).map(|part| format!("part_{part}")).collect();
    for slot in &slots {
        copy_slot(publisher, slot)?;
    }
    let publications: Vec<String> =
        (0..walsenders).map(|part| publication(walsenders, part)).collect();
    let (sender, chunks) = channel();
    let started = Instant::now();
    let (drained, mut merged) = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..walsenders)
            .map(|part| {
                let sender: Sender<(usize, CopyChunk)> = sender.clone();
                let source = Source {
                    publisher,
                    database: DATABASE,
                    slot: &slots[part],
                    publication: &publications[part],
                    binary: false,
                    two_phase: false,
                    streaming: false,
                    end: End::At(end),
                };
                scope.spawn(move || {
                    by_receiver(&source, |chunk| {
                        // Without the other side there is an error, which ends the round.
                        let _ = sender.send((part, chunk));
                    })
                })
            })
            .collect();
        drop(sender);
        let mut merged = Merged::new(walsenders);
        let merging = chunks.iter().try_for_each(|(part, chunk)| merged.take(part, &chunk));
        let drained: Result<Vec<Drained>> = readers
            .into_iter()
            .map(|reader| reader.join().map_err(|_| anyhow!("a reader has panicked"))?)
            .collect();
        merging.and(drained.map(|drained| (drained, merged)))
    })?;
    ensure!(merged.merge.pop().is_none() && merged.is_complete(), "a transaction was cut off");
    let cpu = drained.iter().map(|drained| drained.walsender_cpu);
    Ok(Measured {
        walsenders,
        seconds: started.elapsed().as_secs_f64(),
        all_cpu: cpu.clone().sum(),
        most_cpu: cpu.fold(0.0, f64::max),
        transactions: merged.transactions,
        hash: merged.hash.finish(),
    })
}

/// Decodes the streams and merges them.
struct Merged {
    decoders: Vec<Decoder>,
    open: Vec<Option<Transaction>>,
    merge: Merge,
    transactions: u64,
    hash: DefaultHasher,
}

impl Merged {
    fn new(walsenders: usize) -> Self {
        Self {
            decoders: (0..walsenders).map(|_| Decoder::new(Streaming::Off)).collect(),
            open: vec![None; walsenders],
            merge: Merge::new(walsenders),
            transactions: 0,
            hash: DefaultHasher::new(),
        }
    }

    fn is_complete(&self) -> bool {
        self.open.iter().all(Option::is_none)
    }

    fn take(&mut self, part: usize, chunk: &CopyChunk) -> Result<()> {
        for (_, payload) in chunk.frames() {
            match Frame::decode(payload)? {
                Frame::XLogData { start, payload, .. } => self.message(part, start, payload)?,
                Frame::Keepalive { wal_end, .. } => self.merge.pass(part, wal_end),
                Frame::PrimaryStatus { .. } => {}
            }
        }
        while let Some(whole) = self.merge.pop() {
            self.transactions += 1;
            self.hash.write_u64(whole.commit_lsn.as_u64());
            self.hash.write_u32(whole.xid.0);
            for change in &whole.changes {
                self.hash.write_u64(change.lsn.as_u64());
                self.hash.write_u64(change.hash);
            }
        }
        Ok(())
    }

    fn message(&mut self, part: usize, lsn: Lsn, payload: &[u8]) -> Result<()> {
        let open = &mut self.open[part];
        match self.decoders[part].decode(payload)? {
            Message::Begin(begin) => {
                let (commit_lsn, xid) = (begin.final_lsn, begin.xid);
                *open = Some(Transaction { commit_lsn, xid, changes: Vec::new() });
            }
            Message::Commit(_) => {
                let whole = open.take().context("a commit without its begin")?;
                self.merge.push(part, whole);
            }
            Message::Insert(_) | Message::Update(_) | Message::Delete(_) | Message::Truncate(_) => {
                let mut hasher = DefaultHasher::new();
                hasher.write(payload);
                let change = Change { lsn, kind: payload[0], hash: hasher.finish() };
                open.as_mut().context("a change outside of a transaction")?.changes.push(change);
            }
            _ => {}
        }
        Ok(())
    }
}
