//! The page of `run --http` in a real browser.

use testbed::wait_until;

use super::browser::Browser;
use super::http_client::free_port;
use super::pictures::{self, OfPage};
use crate::support::{Case, PATIENCE, must, skipped};

/// Pictures of each situation.
const LOAD: [OfPage; 1] = [("page-load", "1200,1180", false)];
const BLOCKED: [OfPage; 1] = [("page-blocked-phone", "390,844", true)];
const COPYING: [OfPage; 1] = [("page-copying", "1200,380", false)];

/// The address of the page.
fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}/")
}

#[test]
fn the_page_shows_load_and_who_blocks() {
    let Some(browser) = Browser::find() else {
        return skipped("see::page::the_page_shows_load_and_who_blocks", "there is no browser");
    };
    let mut case = Case::new(18, 18);
    case.both(
        "CREATE TABLE orders (id int PRIMARY KEY, v int); CREATE TABLE items (id int PRIMARY KEY)",
    );
    case.publisher.sql("INSERT INTO orders SELECT i, 0 FROM generate_series(1, 5000) i");
    case.publish("FOR ALL TABLES");
    if pictures::are_wanted() {
        pictures::slow_down(&case);
    }
    let port = free_port();
    case.tool.name = "shop".to_owned();
    case.tool.args =
        ["--http", &format!("127.0.0.1:{port}"), "--workers=4", "--group-transactions=20"]
            .map(str::to_owned)
            .to_vec();
    let mut process = case.start();
    let mut rows = 0;
    let history = "SELECT count(*) FROM pgapace.stat_history";
    let points = || case.subscriber.value(history).parse::<u32>().unwrap_or(0);
    let waited = wait_until(PATIENCE, "a point of the curves", || {
        let (first, last) = (rows + 1, rows + 200);
        case.publisher.sql(&format!("INSERT INTO items SELECT generate_series({first}, {last})"));
        rows = last;
        Ok(points() >= 1)
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
        (document, console) = browser.document(&url(port), "1200,900");
        let texts = [&case.tool.name, "streaming", "public.items", &number];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}\n{console}"));
    for not in ["Refused to", "Content Security Policy", "Uncaught"] {
        assert!(!console.contains(not), "{console}");
    }
    if pictures::are_wanted() {
        pictures::under_load(&case, || {
            must(wait_until(PATIENCE * 2, "the curves", || Ok(points() >= 8)));
            let texts = ["public.orders", "subscriber", "tx/s"];
            pictures::top(browser, &case, "top-load", (110, 26), &texts);
            pictures::page(browser, port, &LOAD);
        });
    }

    let mut user = case.subscriber.connect();
    must(user.batch_execute("BEGIN; UPDATE orders SET v = 77 WHERE id = 1"));
    let pid = must(user.query_one("SELECT pg_backend_pid()::text", &[])).get::<_, String>(0);
    must(user.batch_execute("UPDATE orders SET v = 78 WHERE id = 1"));
    case.publisher.sql("UPDATE orders SET v = 1 WHERE id = 1");
    let mut document = String::new();
    let waited = wait_until(PATIENCE, "the page to name the blocker", || {
        document = browser.document(&url(port), "390,844").0;
        let texts = ["subscriber lock", "UPDATE orders SET v = 78", &format!("<td>{pid}</td>")];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}"));
    pictures::page(browser, port, &BLOCKED);
    pictures::top(browser, &case, "top-blocked", (80, 24), &["blocked by", "subscriber lock"]);
    must(user.batch_execute("ROLLBACK"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}

#[test]
fn the_page_shows_table_sync() {
    let Some(browser) = Browser::find() else {
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
    let port = free_port();
    case.tool.name = "archive".to_owned();
    case.tool.args = vec!["--http".to_owned(), format!("127.0.0.1:{port}")];
    // The copy stops in the middle of a table, and slowly before, if it is to be photographed.
    let pause = if pictures::are_wanted() { 0.02 } else { 0.0 };
    case.subscriber.sql(&format!(
        "CREATE FUNCTION slow(int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN \
           IF $1 % 20 = 0 AND $1 < 14000 THEN PERFORM pg_sleep({pause}); END IF; \
           IF $1 = 14000 THEN PERFORM pg_advisory_xact_lock_shared(1); END IF; RETURN true; END $$; \
         ALTER TABLE orders ADD CONSTRAINT slow CHECK (slow(id))"
    ));
    let mut user = case.subscriber.connect();
    must(user.batch_execute("SELECT pg_advisory_lock(1)"));
    let mut process = case.tool.start(case.log_file("copying"));
    let mut document = String::new();
    let waited = wait_until(PATIENCE, "the page to show the copy", || {
        document = browser.document(&url(port), "1200,500").0;
        let texts = ["copying", "Table sync: 1 of 2 tables", "public.orders", "of 2768 kB"];
        Ok(texts.iter().all(|text| document.contains(text)))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{document}\n{}", process.log()));
    pictures::page(browser, port, &COPYING);
    pictures::top(browser, &case, "top-copying", (80, 24), &["copying, running", "public.orders"]);
    must(user.batch_execute("SELECT pg_advisory_unlock(1)"));
    case.wait_until_applied(&mut process);
    case.stop(process);
}
