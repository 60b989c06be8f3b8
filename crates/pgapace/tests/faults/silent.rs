//! Servers that accept a connection and stay silent, as behind a proxy whose own server hangs.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use testbed::{Proxy, Result, wait_until};

use crate::support::{
    DB, NAME, PATIENCE, Site, Tool, expect_exit, pgapace, wait_for_event, wait_while_running,
};

/// A server that accepts connections and stays silent.
struct Silent(TcpListener);

impl Silent {
    fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    fn port(&self) -> Result<u16> {
        Ok(self.0.local_addr()?.port())
    }

    fn conninfo(&self) -> Result<String> {
        Ok(format!("host=127.0.0.1 port={} user=postgres dbname={DB}", self.port()?))
    }

    /// Waits for a client. Its connection stays open until it is dropped.
    fn client(&self) -> Result<TcpStream> {
        let mut client = None;
        wait_until(PATIENCE, "a connection", || {
            client = self.0.accept().ok();
            Ok(client.is_some())
        })?;
        Ok(client.expect("accepted").0)
    }
}

/// The default of `connect_timeout` is 30 s. A request to stop does not wait for it.
#[test]
fn a_request_to_stop_ends_the_wait_for_a_silent_server() -> Result<()> {
    let site = Site::new(18, 18)?;
    let silent = Silent::start()?;
    let (publisher, subscriber) = (site.publisher.conninfo(DB), site.subscriber.conninfo(DB));
    for between in [(&silent.conninfo()?, &subscriber), (&publisher, &silent.conninfo()?)] {
        let mut run = site.spawn(&site.program_between(between.0, between.1))?;
        let _client = silent.client()?;
        let started = Instant::now();
        run.terminate()?;
        expect_exit(&mut run, 0, &[])?;
        assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    }
    Ok(())
}

/// The same for verbs that a user waits for.
#[test]
fn a_signal_ends_verbs_that_connect_to_a_silent_server() -> Result<()> {
    let site = Site::new(18, 18)?;
    let (silent, directory) = (Silent::start()?, tempfile::tempdir()?);
    let nowhere = format!("{} connect_timeout=600", silent.conninfo()?);
    let record = |publisher: &str| {
        let file = directory.path().join("recording");
        pgapace("record").arg(file).args(["--publication", "pub", "--publisher", publisher])
    };
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    for program in [
        record(&nowhere),
        record(&site.publisher.conninfo(DB)).args(["--subscriber", &nowhere]),
        pgapace("adopt").args(["--subscription", "native", "--subscriber", &nowhere]),
    ] {
        let mut verb = site.spawn(&program)?;
        let _client = silent.client()?;
        verb.interrupt()?;
        expect_exit(&mut verb, 11, &["stopped during connecting"])?;
    }
    Ok(())
}

#[test]
fn the_host_after_a_silent_one_is_tried() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let silent = Silent::start()?;
    let after_silent = |port: u16| -> Result<String> {
        let ports = format!("{},{port}", silent.port()?);
        Ok(format!("host=127.0.0.1,127.0.0.1 port={ports} user=postgres dbname={DB}"))
    };
    let publisher = after_silent(site.publisher.port())?;
    let subscriber = after_silent(site.subscriber.port())?;
    let program = Tool::new(publisher, subscriber, NAME).program("run");
    let program = program.args(["--until", "current"]).env("PGCONNECT_TIMEOUT", "2");
    expect_exit(&mut site.spawn(&program)?, 0, &[])
}

/// The attempt after an error waits for a server that accepts its connection.
#[test]
fn status_shows_an_attempt_that_is_under_way() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let proxy = Proxy::in_front_of(&site.publisher)?;
    let program = site.program_between(&proxy.conninfo(DB), &site.subscriber.conninfo(DB));
    let mut run = site.spawn_streaming(&program)?;
    proxy.freeze();
    proxy.cut_all();
    let tool = site.tool();
    wait_while_running(&mut run, "an attempt that lasts", PATIENCE, || {
        Ok(tool.finish("status", &[]).stdout.contains("retrying after an error (trying since 2"))
    })?;
    proxy.unfreeze();
    site.wait_until_applied(&mut run)
}

/// A user learns of it before the connections are given up.
#[test]
fn a_server_that_has_become_silent_is_named() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let publisher = Proxy::in_front_of(&site.publisher)?;
    let subscriber = Proxy::in_front_of(&site.subscriber)?;
    let program = site
        .program_between(&publisher.conninfo(DB), &subscriber.conninfo(DB))
        .args(["--receive-timeout", "20"])
        .env("PGCONNECT_TIMEOUT", "5");
    let mut run = site.spawn_streaming(&program)?;
    for (proxy, event) in [(&publisher, "publisher_silent"), (&subscriber, "subscriber_silent")] {
        assert_eq!(run.events(event), 0, "{}", run.log());
        proxy.freeze();
        wait_for_event(&mut run, event, PATIENCE)?;
        assert_eq!(run.events("run_failed"), 0, "{}", run.log());
        proxy.unfreeze();
        site.publisher.sql(DB, "INSERT INTO t SELECT count(*) FROM t")?;
        site.wait_until_applied(&mut run)?;
        assert_eq!(run.events(event), 1, "{}", run.log());
    }
    Ok(())
}

/// The connection is not lost, so TCP notices nothing, and a statement may take as long as it wants.
#[test]
fn a_start_whose_answer_was_lost_is_tried_again() -> Result<()> {
    let site = Site::new(18, 18)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let proxy = Proxy::in_front_of(&site.subscriber)?;
    let program = site.program_between(&site.publisher.conninfo(DB), &proxy.conninfo(DB));
    expect_exit(&mut site.spawn(&program.clone().args(["--until", "current"]))?, 0, &[])?;
    let mut holder = site.subscriber.connect(DB)?;
    holder.simple_query("BEGIN; LOCK TABLE pgapace.subscription")?;
    let mut run = site.spawn(&program)?;
    let blocked = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'pgapace.subscription'::regclass AND NOT granted";
    wait_while_running(&mut run, "the start to wait for the lock", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, blocked)? == "t")
    })?;
    proxy.silence_connections();
    holder.simple_query("COMMIT")?;
    wait_for_event(&mut run, "answer_lost", PATIENCE)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    assert_eq!(run.events("answer_lost"), 1, "{}", run.log());
    run.terminate()?;
    expect_exit(&mut run, 0, &[])
}

/// A statement that is canceled ends with an answer, too.
#[test]
fn a_signal_ends_a_verb_whose_answer_was_lost() -> Result<()> {
    let site = Site::new(15, 15)?;
    site.publish_tables("CREATE TABLE t (id int PRIMARY KEY)")?;
    let proxy = Proxy::in_front_of(&site.publisher)?;
    let (publisher, subscriber) = (proxy.conninfo(DB), site.subscriber.conninfo(DB));
    let program = site.program_between(&publisher, &subscriber).args(["--until", "current"]);
    expect_exit(&mut site.spawn(&program)?, 0, &[])?;
    let mut writer = site.publisher.connect(DB)?;
    writer.simple_query("BEGIN; INSERT INTO t VALUES (1)")?;
    let mut verify = site.spawn(&Tool::new(publisher, subscriber, NAME).program("verify"))?;
    wait_for_event(&mut verify, "slot_waits", PATIENCE)?;
    proxy.silence_connections();
    writer.simple_query("COMMIT")?;
    verify.interrupt()?;
    wait_for_event(&mut verify, "answer_lost", PATIENCE)?;
    expect_exit(&mut verify, 11, &["error: stopped"])
}
