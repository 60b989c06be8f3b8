//! The page of `run --http` in a real browser. With PGAPACE_SCREENSHOTS=directory pictures are written there.

use std::net::TcpListener;
use std::process::Command;

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must, skipped};

/// The first browser that is there.
fn browser() -> Option<&'static str> {
    let known = ["chromium", "chromium-browser", "google-chrome"];
    known.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())
}

/// Opens the page in a window of this size. Returns the document after some seconds, and the console.
fn open(browser: &str, port: u16, size: &str, more: &[&str]) -> (String, String) {
    let profile = must(tempfile::tempdir());
    let output = Command::new(browser)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args([&format!("--window-size={size}"), "--virtual-time-budget=5000"])
        .args(more)
        .arg(format!("http://127.0.0.1:{port}/"))
        .output();
    let output = must(output);
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (text(output.stdout), text(output.stderr))
}

/// Writes pictures, light and dark, wide and narrow.
fn pictures(browser: &str, port: u16, name: &str) {
    let Some(directory) = std::env::var_os("PGAPACE_SCREENSHOTS") else { return };
    let directory = directory.to_string_lossy();
    for (kind, size, more) in [
        ("light", "1200,1150", &[][..]),
        ("dark-phone", "500,1400", &["--blink-settings=preferredColorScheme=0"][..]),
    ] {
        let file = format!("--screenshot={directory}/page-{name}-{kind}.png");
        open(browser, port, size, &[&[file.as_str()], more].concat());
    }
}

#[test]
fn the_page_shows_load_and_who_blocks() {
    let Some(browser) = browser() else {
        return skipped("see::page::the_page_shows_load_and_who_blocks", "there is no browser");
    };
    let mut case = Case::new(18, 18);
    case.both(
        "CREATE TABLE orders (id int PRIMARY KEY, v int); CREATE TABLE items (id int PRIMARY KEY)",
    );
    case.publisher.sql("INSERT INTO orders VALUES (1, 0)");
    case.publish("FOR ALL TABLES");
    let port = must(must(TcpListener::bind("127.0.0.1:0")).local_addr()).port();
    case.tool.args = vec!["--http".to_owned(), format!("127.0.0.1:{port}")];
    let mut process = case.start();
    let is_picture = std::env::var_os("PGAPACE_SCREENSHOTS").is_some();
    // Under load: enough for the curves of a picture, or for the figures.
    let mut rows = 0;
    let points = if is_picture { 6 } else { 1 };
    let history = "SELECT count(*) FROM pgapace.stat_history";
    let waited = wait_until(PATIENCE * 2, "points of the curves", || {
        let (first, last) = (rows + 1, rows + 200);
        case.publisher.sql(&format!("INSERT INTO items SELECT generate_series({first}, {last})"));
        rows = last;
        Ok(case.subscriber.value(history).parse::<u32>().unwrap_or(0) >= points)
    });
    must(waited);
    case.wait_until_applied(&mut process);
    let total = format!("SELECT inserts = {rows} FROM pgapace.stat_subscription");
    must(wait_until(PATIENCE, "the counters", || Ok(case.subscriber.value(&total) == "t")));
    // As the page writes numbers.
    let shown =
        if rows >= 10_000 { format!("{:.1} k", f64::from(rows) / 1e3) } else { rows.to_string() };
    let number = format!("<td class=\"n\">{shown}</td>");
    let (mut document, mut console) = Default::default();
    let waited = wait_until(PATIENCE, "the page to show the load", || {
        (document, console) = open(browser, port, "1200,900", &["--dump-dom"]);
        let texts = [&case.tool.name, "streaming", "public.items", &number];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}\n{console}"));
    pictures(browser, port, "load");
    for not in ["Refused to", "Content Security Policy", "Uncaught"] {
        assert!(!console.contains(not), "{console}");
    }

    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; UPDATE orders SET v = 77 WHERE id = 1"));
    let pid = must(user.query_one("SELECT pg_backend_pid()::text", &[])).get::<_, String>(0);
    must(user.batch_execute("UPDATE orders SET v = 78 WHERE id = 1"));
    case.publisher.sql("UPDATE orders SET v = 1 WHERE id = 1");
    let mut document = String::new();
    let waited = wait_until(PATIENCE, "the page to name the blocker", || {
        document = open(browser, port, "390,844", &["--dump-dom"]).0;
        let texts = ["subscriber lock", "UPDATE orders SET v = 78", &format!("<td>{pid}</td>")];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}"));
    pictures(browser, port, "blocked");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn the_page_shows_table_sync() {
    let Some(browser) = browser() else {
        return skipped("see::page::the_page_shows_table_sync", "there is no browser");
    };
    let mut case = Case::new(18, 18);
    case.both(
        "CREATE TABLE orders (id int PRIMARY KEY, v text); CREATE TABLE items (id int PRIMARY KEY)",
    );
    case.publisher
        .sql("INSERT INTO orders SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i");
    case.publisher.sql("INSERT INTO items VALUES (1)");
    case.publish("FOR ALL TABLES");
    let port = must(must(TcpListener::bind("127.0.0.1:0")).local_addr()).port();
    case.tool.args = vec!["--http".to_owned(), format!("127.0.0.1:{port}")];
    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; LOCK TABLE orders IN SHARE MODE"));
    let mut process = case.tool.start(case.log_file("copying"));
    let mut document = String::new();
    let waited = wait_until(PATIENCE, "the page to show the copy", || {
        document = open(browser, port, "1200,500", &["--dump-dom"]).0;
        let texts = ["copying", "Table sync: 1 of 2 tables", "public.orders", "of 2768 kB"];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}\n{}", process.log()));
    pictures(browser, port, "copying");
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}
