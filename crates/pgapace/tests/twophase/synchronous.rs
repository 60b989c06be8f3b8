//! A publisher that waits for the subscription, with prepared transactions.

use std::time::{Duration, Instant};

use testbed::{Pair, Result, TableName};

use crate::support::{DB, NAME, Site, one_or_all};

/// PREPARE returns when the transaction is prepared on the subscriber, and COMMIT PREPARED when it
/// is committed there. Several connections do this concurrently.
#[test]
fn prepare_returns_when_it_is_prepared_on_the_subscriber() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
        let program = site.program().args(["--two-phase", "--status-interval", "10"]);
        let mut run = site.spawn_streaming(&program)?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let run = site.spawn_streaming(&program)?;
        let started = Instant::now();
        let clients: Vec<_> = (0..8)
            .map(|number| {
                let mut client = site.publisher.connect(DB)?;
                let mut subscriber = site.subscriber.connect(DB)?;
                Ok(std::thread::spawn(move || -> std::result::Result<(), String> {
                    let text = |e: testbed::postgres::Error| e.to_string();
                    client.batch_execute("SET statement_timeout = '60s'").map_err(text)?;
                    for round in 0..5 {
                        let id = number * 100 + round;
                        let gid = format!("g{number}");
                        client
                            .batch_execute(&format!(
                                "BEGIN; INSERT INTO t VALUES ({id}, 'x'); \
                                 PREPARE TRANSACTION '{gid}'"
                            ))
                            .map_err(text)?;
                        let sql = format!(
                            "SELECT count(*) FROM pgapace.prepared p \
                             JOIN pg_prepared_xacts x ON x.gid = p.name WHERE p.gid = '{gid}'"
                        );
                        let here: i64 = subscriber.query_one(&sql, &[]).map_err(text)?.get(0);
                        if here != 1 {
                            return Err(format!("{gid} is not prepared on the subscriber"));
                        }
                        let end = if round % 4 == 3 { "ROLLBACK" } else { "COMMIT" };
                        client.batch_execute(&format!("{end} PREPARED '{gid}'")).map_err(text)?;
                    }
                    Ok(())
                }))
            })
            .collect::<Result<_>>()?;
        for client in clients {
            let done = client.join().expect("a client panicked");
            assert_eq!(done, Ok(()), "{}", run.log());
        }
        let took = started.elapsed();
        assert!(took < Duration::from_secs(60), "{took:?}:\n{}", run.log());
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// A table is blocked, because a row of it does not fit. Its changes are left out, and everybody else goes on.
#[test]
fn prepare_returns_with_changes_of_a_blocked_table() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables(
            "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)",
        )?;
        site.subscriber.sql(DB, "ALTER TABLE u ADD CHECK (id > 0)")?;
        let program = site.program().args(["--two-phase", "--on-table-error", "block"]);
        let mut run = site.spawn_streaming(&program)?;
        site.publisher.sql(DB, "INSERT INTO u VALUES (0)")?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let mut run = site.spawn_streaming(&program)?;
        let mut client = site.publisher.connect(DB)?;
        let done = client
            .batch_execute("SET statement_timeout = '60s'")
            .and_then(|()| {
                client.batch_execute(
                    "BEGIN; INSERT INTO t VALUES (1); INSERT INTO u VALUES (1); PREPARE TRANSACTION 'x'",
                )
            })
            .and_then(|()| client.batch_execute("INSERT INTO t VALUES (2)"))
            .and_then(|()| client.batch_execute("COMMIT PREPARED 'x'"));
        assert!(done.is_ok(), "{done:?}:\n{}", run.log());
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// A table that the transaction creates is not there, when its changes are to be prepared: it was created in a savepoint
/// that was rolled back, and a block with it was sent before; or the transaction has dropped it again.
#[test]
fn prepare_returns_with_changes_of_a_table_that_is_not_there() -> Result<()> {
    let create =
        "CREATE TABLE gone (id int PRIMARY KEY); INSERT INTO gone SELECT generate_series(1, 3000)";
    for &major in one_or_all(&[15, 18]) {
        let work_mem = ("logical_decoding_work_mem", "64kB");
        let mut site = Site::of(Pair::start_with(
            major,
            major,
            |builder| builder.setting(work_mem.0, work_mem.1),
            |builder| builder,
        )?)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        let program = site.program().arg("--two-phase");
        let mut run = site.spawn_streaming(&program)?;
        site.wait_until_applied(&mut run)?;
        run.kill9()?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let mut run = site.spawn_streaming(&program)?;
        let mut client = site.publisher.connect(DB)?;
        client.batch_execute("SET statement_timeout = '60s'")?;
        let undone = format!("SAVEPOINT s; {create}; ROLLBACK TO s");
        for (id, changes) in [(1, undone), (2, format!("{create}; DROP TABLE gone"))] {
            let prepare =
                format!("BEGIN; INSERT INTO t VALUES ({id}); {changes}; PREPARE TRANSACTION 'x'");
            let done = client
                .batch_execute(&prepare)
                .and_then(|()| client.batch_execute(&format!("INSERT INTO t VALUES ({id}0)")))
                .and_then(|()| client.batch_execute("COMMIT PREPARED 'x'"));
            assert!(done.is_ok(), "{id}: {done:?}:\n{}", run.log());
        }
        site.wait_until_applied(&mut run)?;
        let skipped = run.log().matches("table_changes_skipped").count();
        assert!(skipped <= 4, "{skipped}:\n{}", run.log());
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}
