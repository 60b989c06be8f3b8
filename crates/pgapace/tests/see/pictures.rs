//! Pictures of `top` and of the page. With `PGAPACE_PICTURES=docs` the tests that look at them take them, too:
//! of a terminal in tmux, with its colours, and of the page in a browser.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anstyle_svg::{Term, WIN10_CONSOLE};
use testbed::wait_until;

use super::browser::Browser;
use super::terminal::Terminal;
use crate::support::{Case, PATIENCE, must};

/// A picture of the page: its name, the size of the window, and whether the colours are dark.
pub(super) type OfPage = (&'static str, &'static str, bool);

/// Most bytes of a picture in docs.
const MOST: u64 = 200_000;

/// Where pictures go, if they are to be taken: a directory of the repository.
fn directory() -> Option<PathBuf> {
    let directory = std::env::var_os("PGAPACE_PICTURES")?;
    Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(directory))
}

/// Whether pictures are to be taken.
pub(super) fn are_wanted() -> bool {
    directory().is_some()
}

/// Takes pictures of the page.
pub(super) fn page(browser: Browser, port: u16, pictures: &[OfPage]) {
    let Some(directory) = directory() else { return };
    for (name, size, is_dark) in pictures {
        let url = format!("http://127.0.0.1:{port}/");
        browser.photograph(&url, size, *is_dark, &directory.join(format!("{name}.png")));
    }
}

/// Takes a picture of `top` in a terminal of this size, when all of these texts are on its screen.
pub(super) fn top(browser: Browser, case: &Case, name: &str, size: (u16, u16), texts: &[&str]) {
    let Some(directory) = directory() else { return };
    let terminal = Terminal::top(case, size);
    let mut screen = String::new();
    let seen = wait_until(PATIENCE, "top to show it", || {
        screen = terminal.coloured();
        let text = terminal.screen();
        Ok(texts.iter().all(|one| text.contains(one)))
    });
    seen.unwrap_or_else(|error| panic!("{error}\n{}", terminal.screen()));
    let svg = must(tempfile::Builder::new().suffix(".svg").tempfile());
    // A cell is 8.4 × 18 pixels, and the margin 10.
    let (width, height) = (u32::from(size.0) * 84 / 10, u32::from(size.1) * 18);
    let term = Term::new().palette(WIN10_CONSOLE).min_width_px(width as usize);
    let drawn = term.render_svg(screen.trim_end());
    // One font that has the blocks of curves and bars; and what is dim stays readable.
    let drawn = drawn
        .replace("SFMono-Regular, Consolas, Liberation Mono, Menlo, monospace", "DejaVu Sans Mono")
        .replace(".dimmed { opacity: 0.4; }", ".dimmed { opacity: 0.7; }");
    must(std::fs::write(svg.path(), drawn));
    let window = format!("{},{}", width + 20, height + 20);
    let url = format!("file://{}", svg.path().display());
    let file = directory.join(format!("{name}.png"));
    browser.photograph(&url, &window, true, &file);
}

/// Makes rows of `orders` and `items` take a while on the subscriber, so that its workers have something to do.
pub(super) fn slow_down(case: &Case) {
    case.subscriber.sql(
        "CREATE FUNCTION slow(int) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS \
           $$ BEGIN IF $1 % 4 = 0 THEN PERFORM pg_sleep(0.002); END IF; RETURN true; END $$; \
         ALTER TABLE orders ADD CONSTRAINT slow CHECK (slow(id)) NOT VALID; \
         ALTER TABLE items ADD CONSTRAINT slow CHECK (slow(id)) NOT VALID",
    );
}

/// Runs `body` while four sessions write to `orders` and `items`.
pub(super) fn under_load(case: &Case, body: impl FnOnce()) {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 1..=4 {
            let (mut session, ends) = (case.publisher.connect(), &ends);
            scope.spawn(move || {
                let mut id = number * 10_000_000;
                while !ends.load(Ordering::Relaxed) {
                    id += 2;
                    must(session.batch_execute(&format!(
                        "BEGIN; UPDATE orders SET v = v + 1 WHERE id IN ({}, {}); \
                         INSERT INTO items VALUES ({id}), ({id} + 1); COMMIT",
                        fastrand::u32(1..=5000),
                        fastrand::u32(1..=5000)
                    )));
                    // The pace of the load.
                    std::thread::sleep(Duration::from_millis(fastrand::u64(4..10)));
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        ends.store(true, Ordering::Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn docs_have_them_and_they_are_small() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let text = must(std::fs::read_to_string(docs.join("operation.md")));
    for name in [
        "top-load",
        "top-blocked",
        "top-copying",
        "page-load",
        "page-blocked-phone",
        "page-copying",
    ] {
        let file = format!("{name}.png");
        let bytes = must(std::fs::metadata(docs.join(&file))).len();
        assert!(bytes <= MOST, "{file} has {bytes} bytes");
        assert!(text.contains(&format!("({file})")), "{file} is not shown");
    }
}
