//! Copies from a publisher whose commits wait for the subscription (`synchronous_standby_names`).

use std::thread::JoinHandle;

use testbed::program::Process;
use testbed::{Result, TableName, postgres};

use crate::support::{
    DB, NAME, PATIENCE, Site, expect_exit, one_or_all, wait_for_event, wait_while_running,
};

type Writing = JoinHandle<std::result::Result<(), postgres::Error>>;

/// Commits in a session of its own. Returns when the commit waits for the subscription.
fn commit_that_waits(site: &Site, run: Option<&mut Process>, sql: &'static str) -> Result<Writing> {
    let mut client = site.publisher.connect(DB)?;
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[])?.get(0);
    let writing = std::thread::spawn(move || client.batch_execute(sql));
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'SyncRep'"
    );
    let waits = || Ok(site.publisher.query_one_text(DB, &waits)? == "1");
    match run {
        Some(run) => wait_while_running(run, "the commit to wait", PATIENCE, waits)?,
        None => testbed::wait_until(PATIENCE, "the commit to wait", waits)?,
    }
    Ok(writing)
}

fn has_ended(writing: Writing, run: &Process) {
    let ended = writing.join().expect("a client panicked");
    assert!(ended.is_ok(), "{ended:?}:\n{}", run.log());
}

/// The log and `status` name the wait before anything streams. Takes the subscription out of the setting, as they advise.
fn follow_the_hint(site: &mut Site, run: &mut Process) -> Result<()> {
    wait_for_event(run, "commits_wait_for_copy", PATIENCE)?;
    let tool = site.tool();
    let shown = || Ok(tool.finish("status", &[]).stdout.contains("commits_wait_for_copy"));
    wait_while_running(run, "status to show the wait", PATIENCE, shown)?;
    let named = ["commits of the publisher wait", "HINT", "ALTER SYSTEM"];
    tool.finish("status", &["--max-lag", "1s"]).expect(17, &named);
    assert_eq!(run.events("streaming"), 0, "{}", run.log());
    site.publisher.set("synchronous_standby_names", "")
}

/// Checks that `check` warns of commits that wait, for this reason.
#[track_caller]
fn check_warns(site: &Site, reason: &str) {
    let checked = site.tool().finish("check", &[]);
    let said = format!("commits wait for {NAME}, which synchronous_standby_names names");
    assert!(
        checked.stdout.contains(&said) && checked.stdout.contains(reason),
        "{}",
        checked.stdout
    );
}

#[test]
fn drop_warns_of_commits_that_wait_for_the_subscription() -> Result<()> {
    let mut site = Site::start(&[], &[])?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    for name in ["", NAME] {
        let mut run = site.spawn(&site.program().args(["--until", "current"]))?;
        expect_exit(&mut run, 0, &[])?;
        site.publisher.set("synchronous_standby_names", name)?;
        let dropped = site.tool().finish("drop", &[]);
        dropped.expect(0, &[]);
        let warns = dropped.log.contains("ALTER SYSTEM SET synchronous_standby_names");
        assert_eq!(warns, !name.is_empty(), "{}", dropped.log);
        site.subscriber.sql(DB, "TRUNCATE t")?;
    }
    Ok(())
}

/// The commit waits for the subscription, and the new slot for the commit.
#[test]
fn a_first_start_whose_slot_waits_for_a_synchronous_commit_says_so() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        check_warns(&site, "before its first copy is complete");
        let writing = commit_that_waits(&site, None, "INSERT INTO t VALUES (1)")?;
        let mut run = site.spawn(&site.program())?;
        wait_for_event(&mut run, "slot_waits", PATIENCE)?;
        assert_eq!(run.events("commits_will_wait_for_copy"), 1, "{}", run.log());
        assert!(run.log().contains("waits for a synchronous standby"), "{}", run.log());
        follow_the_hint(&mut site, &mut run)?;
        has_ended(writing, &run);
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
        site.publisher.sql(DB, "SET statement_timeout = '60s'; INSERT INTO t VALUES (2)")?;
        let checked = site.tool().finish("check", &[]).stdout;
        assert!(!checked.contains("commits wait"), "{checked}");
        site.wait_until_applied(&mut run)?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// The slot exists, and a lock keeps the first copy from ending.
#[test]
fn a_first_copy_and_a_rebase_that_commits_wait_for_say_so() -> Result<()> {
    for &major in one_or_all(&[15, 18]) {
        let mut site = Site::new(major, major)?;
        site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
        site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
        site.publisher.set("synchronous_standby_names", NAME)?;
        let mut holder = site.subscriber.connect(DB)?;
        holder.batch_execute("BEGIN; LOCK TABLE t IN SHARE MODE")?;
        let mut run = site.spawn(&site.program())?;
        wait_for_event(&mut run, "slot_created", PATIENCE)?;
        let writing = commit_that_waits(&site, Some(&mut run), "INSERT INTO t VALUES (2)")?;
        wait_for_event(&mut run, "commits_wait_for_copy", PATIENCE)?;
        holder.batch_execute("COMMIT")?;
        has_ended(writing, &run);
        wait_for_event(&mut run, "streaming", PATIENCE)?;
        assert_eq!(run.events("commits_wait_for_copy"), 1, "{}", run.log());
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        check_warns(&site, "which no process runs");
        let writing = commit_that_waits(&site, None, "INSERT INTO t VALUES (3)")?;
        site.subscriber.sql(DB, "INSERT INTO t VALUES (4)")?;
        let mut rebase = site.spawn(&site.tool().program("rebase"))?;
        follow_the_hint(&mut site, &mut rebase)?;
        has_ended(writing, &rebase);
        expect_exit(&mut rebase, 0, &[])?;
        site.expect_equal(&[TableName::from("t")])?;
    }
    Ok(())
}

/// Another subscription streams. It answers commits for which one standby suffices, and not those that wait for both.
#[test]
fn a_first_copy_is_named_only_if_too_few_others_answer_commits() -> Result<()> {
    let mut site = Site::start(&[], &[])?;
    let ddl = "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)";
    site.publisher.sql(DB, ddl)?;
    site.subscriber.sql(DB, ddl)?;
    site.publisher.sql(DB, "CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION two FOR TABLE u; INSERT INTO u VALUES (1)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.publisher.set("synchronous_standby_names", "ANY 1 (sub, other)")?;
    wait_for_event(&mut run, "synchronous_changed", PATIENCE)?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.batch_execute("BEGIN; LOCK TABLE u IN SHARE MODE")?;
    let mut other = site.tool();
    (other.name, other.publications) = ("other".to_owned(), "two".to_owned());
    let mut first = site.spawn(&other.program("run"))?;
    wait_for_event(&mut first, "slot_created", PATIENCE)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    assert_eq!(first.events("commits_wait_for_copy"), 0, "{}", first.log());
    assert_eq!(first.events("commits_will_wait_for_copy"), 0, "{}", first.log());
    site.publisher.set("synchronous_standby_names", "ANY 2 (sub, other)")?;
    let writing = commit_that_waits(&site, Some(&mut first), "INSERT INTO t VALUES (2)")?;
    wait_for_event(&mut first, "commits_wait_for_copy", PATIENCE)?;
    holder.batch_execute("COMMIT")?;
    has_ended(writing, &first);
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t"), TableName::from("u")])
}
