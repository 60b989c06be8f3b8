//! docs/questions.md: each question of an operator has its answer. Each test makes a situation, asks as the
//! document says, and looks for what the document shows. With PGAPACE_SAMPLES=directory the answers are written
//! there.

use std::path::PathBuf;

use testbed::postgres::Client;
use testbed::program::Process;
use testbed::{Error, Result, TableName, wait_until};

use crate::support::small_disk::SmallDisk;
use crate::support::{DB, NAME, PATIENCE, Site, finish, pgapace};

/// Writes an answer to where the document is made.
fn sample(name: &str, text: &str) {
    if let Some(directory) = std::env::var_os("PGAPACE_SAMPLES") {
        let file = PathBuf::from(directory).join(format!("{name}.txt"));
        std::fs::write(file, text).expect("a directory for samples");
    }
}

/// Exit code, and standard output with standard error behind it.
fn ask(site: &Site, verb: &str, args: &[&str]) -> (Option<i32>, String) {
    let subscriber = site.subscriber.conninfo(DB);
    let finished = finish(&pgapace(verb).args(["--subscriber", &subscriber]).args(args));
    (finished.code, finished.stdout + &finished.log)
}

/// Asks until the exit code and all texts are as expected.
fn ask_until(
    site: &Site,
    (verb, args): (&str, &[&str]),
    code: i32,
    texts: &[&str],
) -> Result<String> {
    let mut last = (None, String::new());
    let waited = wait_until(PATIENCE, format!("pgapace {verb} to answer"), || {
        last = ask(site, verb, args);
        Ok(last.0 == Some(code) && texts.iter().all(|text| last.1.contains(text)))
    });
    let missing: Vec<_> = texts.iter().filter(|text| !last.1.contains(**text)).collect();
    waited.map_err(|e| Error::other(format!("{e}: {:?} {missing:?}\n{}", last.0, last.1)))?;
    Ok(last.1)
}

/// Rows of a query, as psql shows them without alignment.
fn query(site: &Site, sql: &str) -> Result<String> {
    let rows = site.subscriber.query_texts(DB, sql)?;
    let rows = rows.iter().map(|row| {
        let cells: Vec<_> = row.iter().map(|cell| cell.as_deref().unwrap_or_default()).collect();
        cells.join(" | ")
    });
    Ok(rows.collect::<Vec<_>>().join("\n"))
}

fn query_until(site: &Site, sql: &str, texts: &[&str]) -> Result<String> {
    let mut last = String::new();
    let waited = wait_until(PATIENCE, sql, || {
        last = query(site, sql)?;
        Ok(texts.iter().all(|text| last.contains(text)))
    });
    waited.map_err(|e| Error::other(format!("{e}: {texts:?}\n{last}")))?;
    Ok(last)
}

fn shop(publisher: &[(&str, &str)], args: &[&str]) -> Result<(Site, Process)> {
    let site = Site::start(publisher, &[])?;
    site.publish_tables("CREATE TABLE orders (id int PRIMARY KEY, state text); CREATE TABLE items (id int PRIMARY KEY)")?;
    site.publisher.sql(DB, "INSERT INTO orders VALUES (1, 'new')")?;
    let run = site.spawn_streaming(&site.program().args(args.iter().copied()))?;
    Ok((site, run))
}

/// A user holds the row that the next transaction changes.
fn block(site: &Site) -> Result<Client> {
    let mut user = site.subscriber.connect(DB)?;
    user.batch_execute("BEGIN; UPDATE orders SET state = 'checked' WHERE id = 1")?;
    site.publisher.sql(DB, "UPDATE orders SET state = 'paid' WHERE id = 1")?;
    Ok(user)
}

#[test]
fn is_it_alive() -> Result<()> {
    let (site, mut run) = shop(&[], &[])?;
    site.publisher.sql(DB, "INSERT INTO orders SELECT i, 'new' FROM generate_series(2, 500) i")?;
    site.wait_until_applied(&mut run)?;
    let ask = ("status", &["--max-lag", "30s"][..]);
    let answer = ask_until(&site, ask, 0, &["streaming, running", "limited by     publisher"])?;
    sample("is_it_alive", &answer);
    run.kill9()?;
    let answer = ask_until(&site, ask, 16, &["not running", "does not run"])?;
    sample("is_it_alive_no", &answer);
    Ok(())
}

#[test]
fn how_far_behind_and_when_done() -> Result<()> {
    let (site, mut run) = shop(&[], &["--group-transactions", "1", "--workers", "2"])?;
    // A subscriber whose reads are slow.
    site.subscriber.sql(
        DB,
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN PERFORM pg_sleep(0.005); RETURN new; END $$; \
         CREATE TRIGGER slow BEFORE INSERT ON items FOR EACH ROW EXECUTE FUNCTION slow(); \
         ALTER TABLE items ENABLE ALWAYS TRIGGER slow",
    )?;
    site.publisher.sql(
        DB,
        "DO $$ BEGIN FOR i IN 1..6000 LOOP INSERT INTO items VALUES (i); COMMIT; END LOOP; END $$",
    )?;
    let said = ["caught up in", "limited by     subscriber"];
    let answer = ask_until(&site, ("status", &["--max-lag", "1s"]), 14, &said)?;
    sample("how_far_behind", &answer);
    let sql = "SELECT stage, lag_bytes, round(lag_seconds), round(transactions_per_second_10s) \
               FROM pgapace.stat_stage";
    sample("stages", &query(&site, sql)?);
    let sql = "SELECT thread, reason, percent_10s FROM pgapace.stat_wait ORDER BY thread, percent_10s DESC";
    sample("waits", &query_until(&site, sql, &["apply 0 | subscriber", "leader"])?);
    site.subscriber.sql(DB, "ALTER TABLE items DISABLE TRIGGER slow")?;
    site.wait_until_applied(&mut run)
}

#[test]
fn who_blocks_it() -> Result<()> {
    let (site, mut run) = shop(&[], &[])?;
    let mut user = block(&site)?;
    let blocked =
        ["blocked by", "UPDATE orders SET state = 'checked'", "limited by     subscriber lock"];
    let answer = ask_until(&site, ("status", &["--max-lag", "1s"]), 14, &blocked)?;
    sample("who_blocks_it", &answer);
    let texts = ["blocked by", "limited by subscriber lock", "public.orders"];
    sample("who_blocks_it_top", &ask_until(&site, ("top", &["--once"]), 0, &texts)?);
    let sql = "SELECT pid, \"user\", state, query FROM pgapace.stat_blocker";
    let answer = query_until(&site, sql, &["idle in transaction", "checked"])?;
    sample("blocker", &answer);
    // The advice of the document.
    let end = "SELECT pg_terminate_backend(pid) FROM pgapace.stat_blocker";
    assert_eq!(query(&site, end)?, "t");
    site.wait_until_applied(&mut run)?;
    assert!(user.batch_execute("COMMIT").is_err(), "the blocking session was ended");
    Ok(())
}

#[test]
fn which_table_is_it() -> Result<()> {
    let (site, mut run) = shop(&[], &[])?;
    site.publisher.sql(DB, "INSERT INTO items SELECT generate_series(1, 5000)")?;
    site.publisher.sql(DB, "UPDATE orders SET state = 'sent'")?;
    site.wait_until_applied(&mut run)?;
    let sql = "SELECT table_name, inserts, updates, deletes FROM pgapace.stat_table \
               ORDER BY inserts + updates + deletes DESC";
    let answer = query_until(&site, sql, &["items | 5000 | 0 | 0\norders | 0 | 1 | 0"])?;
    sample("which_table", &answer);
    ask_until(&site, ("top", &["--once"]), 0, &["public.items"]).map(drop)
}

#[test]
fn when_does_the_publishers_disk_fill() -> Result<()> {
    let settings = [("max_slot_wal_keep_size", "400MB"), ("max_wal_size", "1GB")];
    let (site, mut run) = shop(&settings, &[])?;
    let mut user = block(&site)?;
    let mut writer = site.publisher.connect(DB)?;
    let write = "SELECT pg_logical_emit_message(false, 'wal', repeat('x', 300000))";
    let mut answer = String::new();
    let seen = wait_until(PATIENCE, "the slot to be nearly lost", || {
        writer.batch_execute(write)?;
        answer = ask(&site, "status", &[]).1;
        Ok(answer.contains("slot lost in"))
    });
    seen.map_err(|e| Error::other(format!("{e}\n{answer}")))?;
    sample("disk", &answer);
    let sql = "SELECT pg_size_pretty(retained_bytes), pg_size_pretty(safe_wal_size), \
                 pg_size_pretty(retained_bytes_per_second::numeric) || '/s', \
                 lost_in_seconds * interval '1 second' FROM pgapace.stat_slot";
    sample("disk_sql", &query_until(&site, sql, &["/s", ":"])?);
    user.batch_execute("ROLLBACK")?;
    site.wait_until_applied(&mut run)
}

#[test]
fn what_failed() -> Result<()> {
    let (site, mut run) = shop(&[], &[])?;
    let data = site.subscriber.query_one_text(DB, "SHOW data_directory")?;
    let Some(disk) = SmallDisk::mount(&data, 1) else { return Ok(()) };
    let place = format!("CREATE TABLESPACE tight LOCATION '{}'", disk.path().display());
    site.subscriber.sql(DB, &place)?;
    site.subscriber.sql(DB, "ALTER TABLE items SET TABLESPACE tight")?;
    site.publisher.sql(DB, "INSERT INTO items SELECT generate_series(1, 50000)")?;
    let said =
        ["retrying after an error (next try", "53100", "No space left on device", "run_failed"];
    let answer = ask_until(&site, ("status", &["--check"]), 15, &said)?;
    sample("what_failed", &answer);
    let sql = "SELECT sqlstate, retries > 0, last_retry_at IS NOT NULL FROM pgapace.stat_retry";
    query_until(&site, sql, &["53100 | t | t"])?;
    let sql = "SELECT level, event, message FROM pgapace.event ORDER BY at DESC LIMIT 1";
    sample("what_failed_events", &query_until(&site, sql, &["warn | run_failed"])?);
    // The hint asks for more room.
    disk.grow();
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("items")])?;
    ask_until(&site, ("status", &["--check"]), 0, &[])?;
    run.terminate()?;
    run.wait(PATIENCE)?;
    // Drop these before the file system is unmounted.
    site.subscriber.sql(DB, "DROP TABLE items")?;
    site.subscriber.sql(DB, "DROP TABLESPACE tight")
}

#[test]
fn was_anything_skipped() -> Result<()> {
    let (site, mut run) = shop(&[], &[])?;
    // A row that is missing is skipped by itself.
    site.subscriber.sql(DB, "DELETE FROM orders")?;
    site.publisher.sql(DB, "UPDATE orders SET state = 'paid' WHERE id = 1")?;
    site.wait_until_applied(&mut run)?;
    run.terminate()?;
    run.wait(PATIENCE)?;
    // A transaction that cannot be applied is skipped by hand.
    site.subscriber.sql(DB, "INSERT INTO items VALUES (7)")?;
    site.publisher.sql(DB, "INSERT INTO items VALUES (7)")?;
    let mut stops = site.spawn(&site.program())?;
    stops.wait(PATIENCE)?;
    let lsn = query_until(&site, "SELECT max(commit_lsn) FROM pgapace.conflict", &["/"])?;
    let skipped = ask(&site, "skip", &["--name", NAME, "--lsn", &lsn]);
    assert_eq!(skipped.0, Some(0), "{}", skipped.1);
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    let said = ["1 insert_exists, 1 update_missing", "1 transaction, by pgapace skip"];
    let answer = ask_until(&site, ("status", &[]), 0, &said)?;
    sample("skipped", &answer);
    let sql = "SELECT table_name, conflict, conflicts FROM pgapace.stat_conflict ORDER BY 1";
    let answer =
        query_until(&site, sql, &["items | insert_exists | 1\norders | update_missing | 1"])?;
    sample("skipped_sql", &answer);
    let sql = "SELECT event FROM pgapace.event WHERE event IN ('transaction_skipped', 'conflict') \
               ORDER BY event";
    query_until(&site, sql, &["conflict\ntransaction_skipped"])?;
    let sql = "SELECT table_name, conflict, operation, key FROM pgapace.conflict ORDER BY id";
    sample("skipped_rows", &query(&site, sql)?);
    Ok(())
}
