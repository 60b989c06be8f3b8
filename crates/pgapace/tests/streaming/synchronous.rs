//! A publisher that waits for the subscription, with streamed transactions.

use testbed::compare::TableName;
use testbed::{Pair, Result, Stop};

use crate::support::{DB, NAME, PATIENCE, Site, wait_while_running};

fn rows(from: u32, count: u32) -> String {
    format!(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 6) \
         FROM generate_series({from}, {from} + {count} - 1) i"
    )
}

/// A streamed transaction is durable on the subscriber when its COMMIT returns. Either the session
/// of the stream commits synchronously, if a flush is fast, or the durability session makes it
/// durable. Concurrent transactions wait only for their own commit.
#[test]
fn a_streamed_commit_that_has_returned_survives_a_crash() -> Result<()> {
    for (major, slow) in [(15, false), (15, true), (18, false), (18, true)] {
        let mut lazy = vec![("wal_writer_delay", "10s"), ("wal_writer_flush_after", "2GB")];
        if slow {
            lazy.extend([("commit_delay", "5000"), ("commit_siblings", "0"), ("fsync", "on")]);
        }
        let mut site = Site::of(Pair::start_with(
            major,
            major,
            |builder| builder.setting("logical_decoding_work_mem", "64kB"),
            |builder| lazy.iter().fold(builder, |b, (name, value)| b.setting(*name, *value)),
        )?)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        let mut run = site.spawn_streaming(&site.program())?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let program = site.program().args(["--workers", "4"]);
        let mut told = 0;
        for round in 1..=3 {
            let mut run = site.spawn_streaming(&program)?;
            let (mut open, mut other) = (site.publisher.connect(DB)?, site.publisher.connect(DB)?);
            for client in [&mut open, &mut other] {
                client.batch_execute("SET statement_timeout = '60s'")?;
            }
            open.batch_execute(&format!("BEGIN; {}", rows(round * 10_000, 1500)))?;
            let early = "SELECT count(*) FROM pg_stat_activity a JOIN pg_locks l USING (pid) \
                         WHERE l.relation = 't'::regclass AND l.mode = 'RowExclusiveLock' \
                           AND a.application_name LIKE 'pgapace%apply%'";
            wait_while_running(&mut run, "the stream to be applied", PATIENCE, || {
                Ok(site.subscriber.query_one_text(DB, early)? == "1")
            })?;
            for id in 0..5 {
                other.batch_execute(&format!("INSERT INTO t VALUES (-{round}{id}, 'small')"))?;
            }
            open.batch_execute(&rows(round * 10_000 + 5000, 500))?;
            open.batch_execute("COMMIT")?;
            told += 2005;
            run.kill9()?;
            site.subscriber.restart(Stop::Immediate)?;
            let there = site.subscriber.query_one_text(DB, "SELECT count(*) FROM t")?;
            assert_eq!(there, told.to_string(), "{major}, slow: {slow}, round {round}");
        }
        let streamed = "SELECT sum(stream_count) > 0 FROM pg_stat_replication_slots";
        assert_eq!(site.publisher.query_one_text(DB, streamed)?, "t", "nothing was streamed");
        // The transactions between them are applied.
        let run = site.spawn_streaming(&program)?;
        site.publisher.sql(DB, "SET statement_timeout = '60s'; INSERT INTO t VALUES (0, 'y')")?;
        site.expect_equal(&[TableName::from("t")]).inspect_err(|_| eprintln!("{}", run.log()))?;
    }
    Ok(())
}
