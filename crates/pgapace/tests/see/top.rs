//! `pgapace top` shows figures that SQL knows, as text and in a real terminal.

use testbed::wait_until;

use super::terminal::Terminal;
use crate::support::{Case, PATIENCE, must, skipped};

/// One frame, 80 columns wide and 24 rows high.
#[track_caller]
fn frame(case: &Case) -> String {
    let finished = case.tool.finish("top", &["--once"]);
    finished.expect(0, &[]);
    assert_eq!(finished.stdout.lines().count(), 24, "{}", finished.stdout);
    assert!(finished.stdout.lines().all(|line| line.chars().count() <= 80), "{}", finished.stdout);
    finished.stdout
}

/// Waits for a frame with all of these texts.
#[track_caller]
fn wait_for_frame(look: impl Fn() -> String, texts: &[&str]) -> String {
    let mut last = String::new();
    let waited = wait_until(PATIENCE, "the frame", || {
        last = look();
        Ok(texts.iter().all(|text| last.contains(text)))
    });
    if let Err(error) = waited {
        let missing: Vec<_> = texts.iter().filter(|text| !last.contains(**text)).collect();
        panic!("{error}: {missing:?}\n{last}");
    }
    last
}

/// A subscription whose only transaction waits for a lock of a user. Returns who that is.
fn blocked(case: &Case) -> (testbed::program::Process, testbed::postgres::Client, String) {
    case.both("CREATE TABLE t (id int PRIMARY KEY, v int)");
    case.publisher.sql("INSERT INTO t VALUES (1, 0)");
    case.publish("FOR ALL TABLES");
    let process = case.start();
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; UPDATE t SET v = 77 WHERE id = 1"));
    let pid = must(user.query_one("SELECT pg_backend_pid()::text", &[])).get::<_, String>(0);
    must(user.batch_execute("UPDATE t SET v = 78 WHERE id = 1"));
    case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
    (process, user, pid)
}

#[test]
fn a_frame_names_the_blocked_worker_and_who_blocks_it() {
    let case = Case::new(18, 18);
    let nothing = case.tool.finish("top", &["--once"]);
    nothing.expect(17, &["there is no subscription"]);
    let (mut process, mut user, pid) = blocked(&case);
    let blocker = format!("blocked by {pid} (postgres): UPDATE t SET v = 78");
    let name = format!("pgapace {}: streaming, running", case.tool.name);
    let seen = wait_for_frame(
        || frame(&case),
        &[&name, &blocker, "limited by subscriber lock", "public.t", "not shrinking", "slot keeps"],
    );
    let xid = case.subscriber.value("SELECT xid FROM pgapace.stat_worker WHERE xid IS NOT NULL");
    assert!(seen.contains(&xid), "{xid}:\n{seen}");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.subscriber.sql("DELETE FROM t");
    case.publisher.sql("UPDATE t SET v = 2 WHERE id = 1");
    case.wait_until_applied(&mut process);
    let seen = wait_for_frame(|| frame(&case), &["lag ", "conflicts 1 update_missing"]);
    assert!(!seen.contains("blocked by"), "{seen}");
    case.stop(process);
    wait_for_frame(|| frame(&case), &["streaming, stopped", "no process has written figures"]);
}

#[test]
fn a_narrow_frame_leaves_columns_out() {
    let case = Case::new(18, 18);
    let (mut process, mut user, pid) = blocked(&case);
    let look = || {
        let narrow = case.tool.finish("top", &["--once", "--size", "40x16"]);
        narrow.expect(0, &[]);
        assert!(narrow.stdout.lines().all(|line| line.chars().count() <= 40), "{}", narrow.stdout);
        narrow.stdout
    };
    let blocker = format!("blocked by {pid} (postgres)");
    let seen = wait_for_frame(look, &[&blocker, "public.t", "not shrinking"]);
    let line = |first: &str| {
        let line = seen.lines().find(|line| line.starts_with(first)).unwrap_or_default();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("stage"), "stage behind age WAL", "{seen}");
    assert_eq!(line("worker"), "worker does table", "{seen}");
    assert!(line("committed").ends_with("B/s"), "{seen}");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn a_frame_shows_table_sync() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)");
    case.publisher.sql("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i");
    case.publisher.sql("INSERT INTO u VALUES (1)");
    case.publish("FOR ALL TABLES");
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE"));
    let mut process = case.tool.start(case.log_file("copying"));
    wait_for_frame(
        || {
            let finished = case.tool.finish("top", &["--once"]);
            if finished.code == Some(0) { finished.stdout } else { finished.log }
        },
        &[
            "copying, running",
            "slot keeps",
            "copied 1 of 2 tables",
            "░",
            "of 2768 kB",
            "public.t  ",
        ],
    );
    // The process looks at the slot, so no verb needs the publisher.
    let mut alone = case.tool.clone();
    alone.publisher = "host=/nonexistent user=x dbname=x".to_owned();
    let status = alone.finish("status", &[]).stdout;
    assert!(status.contains(": WAL reserved, keeps "), "{status}");
    assert!(!status.contains("estimate"), "{status}");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn it_is_driven_in_a_terminal() {
    if !Terminal::is_there() {
        skipped("see::top::it_is_driven_in_a_terminal", "there is no tmux");
        return;
    }
    let case = Case::new(18, 18);
    let (mut process, mut user, pid) = blocked(&case);
    let terminal = Terminal::top(&case, (80, 24));
    let screen = || terminal.screen();
    wait_for_frame(
        screen,
        &[&format!("blocked by {pid} (postgres)"), "limited by subscriber lock"],
    );
    terminal.press("h");
    wait_for_frame(screen, &["busy: pgapace itself"]);
    terminal.press("Escape");
    wait_for_frame(screen, &["q quit", "conflicts none"]);
    terminal.press("+");
    wait_for_frame(screen, &["+/- 2 s"]);
    terminal.press("-");
    // It goes on by itself.
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    let gone =
        wait_until(PATIENCE, "the blocker to be gone", || Ok(!screen().contains("blocked by")));
    must(gone);
    terminal.press("q");
    must(wait_until(PATIENCE, "top to end", || Ok(terminal.has_ended())));
    case.stop(process);
}
