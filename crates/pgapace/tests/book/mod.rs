//! The commands of the book, run in order against real servers as they are printed.
//!
//! A block of a page with the info string `console` has commands after `$ ` and what they print. A test runs
//! all blocks of a page in one shell, and compares the output with the page. `PGAPACE_BLESS=1 cargo test -p
//! pgapace --test main book::` writes the output into the pages instead.
//!
//! - Numbers, LSNs, times and sizes may differ. A line `…` stands for any lines, and `…` within a line for any
//!   text.
//! - `console wait` repeats a command until it prints what the page shows.
//! - A comment `<!-- run … -->` has commands that a reader does not need, such as the load.
//!
//! The shell has `$PGAPACE_PUBLISHER` and `$PGAPACE_SUBSCRIBER`, as the first page tells the reader to set them:
//! database `shop` of PostgreSQL 15, and of PostgreSQL 18.
//!
//! `package::` runs some pages a second time, in a fresh Debian root with the package.

mod page;
mod shell;

use std::collections::BTreeSet;
use std::path::PathBuf;

use testbed::Pair;

use crate::package::Root;
use crate::support::{must, skipped};
use page::{Page, Step};
use shell::Shell;

/// Below docs/. Each has a test of the same name: here, or in `package` what needs a root.
const PAGES: [&str; 7] = [
    "adopt.md",
    "first-hour.md",
    "install.md",
    "runbooks/lost-slot.md",
    "runbooks/monitoring.md",
    "runbooks/upgrade.md",
    "switchover.md",
];

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn run(name: &str) {
    assert!(PAGES.contains(&name));
    let pair = servers();
    let binaries = pair.publisher.binaries();
    let Some(clients) = shell::clients(binaries) else {
        skipped(&format!("book::{name}"), "psql, pg_dump, pgbench and curl are not all installed");
        return;
    };
    run_in(Shell::start(&clients, binaries, &pair), name);
}

/// The servers that the pages expect: database `shop` on both.
pub(crate) fn servers() -> Pair {
    let pair = must(Pair::start(15, 18));
    for cluster in [&pair.publisher, &pair.subscriber] {
        must(cluster.create_database("shop"));
    }
    pair
}

/// Runs a page with what is installed in a root, for a user or for root, who has a home.
pub(crate) fn run_within(root: &Root, user: Option<&str>, home: &str, pair: &Pair, name: &str) {
    assert!(PAGES.contains(&name));
    run_in(Shell::within(root, user, home, pair), name);
}

fn run_in(mut shell: Shell, name: &str) {
    let file = docs().join(name);
    let text = must(std::fs::read_to_string(&file));
    let page = Page::parse(&text);
    let bless = std::env::var_os("PGAPACE_BLESS").is_some();
    let mut written = Vec::new();
    for step in &page.steps {
        let Step { line, command, expected, retry } = step;
        let Some(expected) = expected else {
            let (code, output) = shell.run(command);
            assert_eq!(code, 0, "{name}:{line}: {command}\n{}", output.join("\n"));
            continue;
        };
        let output = shell.run_until(command, *retry, |output| page::alike(expected, output));
        if page::alike(expected, &output) {
            continue;
        }
        if bless {
            written.push((step, shell.readable(output)));
        } else {
            panic!(
                "{name}:{line}: {command}\n--- the page\n{}\n--- printed\n{}",
                expected.join("\n"),
                output.join("\n")
            );
        }
    }
    if bless {
        must(std::fs::write(&file, page.with(&text, &written)));
    }
}

#[test]
fn first_hour() {
    run("first-hour.md");
}

#[test]
fn adopt() {
    run("adopt.md");
}

#[test]
fn switchover() {
    run("switchover.md");
}

#[test]
fn lost_slot() {
    run("runbooks/lost-slot.md");
}

#[test]
fn monitoring() {
    run("runbooks/monitoring.md");
}

#[test]
fn upgrade() {
    run("runbooks/upgrade.md");
}

/// No page has commands with output that no test runs.
#[test]
fn every_page_with_commands_is_run() {
    fn find(folder: &std::path::Path, found: &mut BTreeSet<String>) {
        for entry in must(std::fs::read_dir(folder)) {
            let path = must(entry).path();
            if path.is_dir() {
                find(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md")
                && must(std::fs::read_to_string(&path)).contains("```console")
            {
                let name = path.strip_prefix(docs()).unwrap_or(&path);
                found.insert(name.display().to_string());
            }
        }
    }
    let mut found = BTreeSet::new();
    find(&docs(), &mut found);
    assert_eq!(found, PAGES.iter().map(|name| (*name).to_owned()).collect());
}
