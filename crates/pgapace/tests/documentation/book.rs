//! The book: every page is in docs/SUMMARY.md, links and anchors lead somewhere, and the pages that the
//! program writes are current.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::support::{Case, must};

fn root() -> PathBuf {
    must(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize())
}

/// All Markdown files of a folder.
fn pages(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in must(std::fs::read_dir(folder)) {
        let path = must(entry).path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.insert(path);
        }
    }
}

/// The links of a page, and the anchors of its headings as mdBook and GitHub make them.
fn read(page: &Path) -> (Vec<String>, BTreeSet<String>) {
    let text = must(std::fs::read_to_string(page));
    let (mut links, mut anchors) = (Vec::new(), BTreeSet::new());
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(&text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let mut anchor = String::new();
                for c in heading.take().unwrap_or_default().to_lowercase().chars() {
                    match c {
                        ' ' => anchor.push('-'),
                        c if c.is_alphanumeric() || c == '-' || c == '_' => anchor.push(c),
                        _ => {}
                    }
                }
                let time = times.entry(anchor.clone()).or_default();
                anchors.insert(if *time == 0 { anchor } else { format!("{anchor}-{time}") });
                *time += 1;
            }
            _ => {}
        }
    }
    (links, anchors)
}

#[test]
fn every_page_is_in_the_summary_once() {
    let docs = root().join("docs");
    let mut all = BTreeSet::new();
    pages(&docs, &mut all);
    let summary = docs.join("SUMMARY.md");
    all.remove(&summary);
    let mut listed = BTreeSet::new();
    for link in read(&summary).0 {
        let page = docs.join(&link);
        assert!(page.exists(), "docs/SUMMARY.md names {link}, which does not exist");
        assert!(listed.insert(page), "docs/SUMMARY.md names {link} twice");
    }
    let missing: Vec<_> = all.difference(&listed).collect();
    assert!(missing.is_empty(), "not in docs/SUMMARY.md: {missing:?}");
}

/// A page of the book links to pages of the book only, because the others are not on its site.
#[test]
fn links_lead_somewhere() {
    let root = root();
    let docs = root.join("docs");
    let mut all = BTreeSet::new();
    pages(&docs, &mut all);
    for name in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        all.insert(root.join(name));
    }
    let mut seen = 0;
    for page in &all {
        for link in read(page).0 {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let name = page.strip_prefix(&root).unwrap_or(page).display();
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match path {
                "" => page.clone(),
                path => page.parent().unwrap_or(&root).join(path),
            };
            let target = target.canonicalize();
            let target = target.unwrap_or_else(|_| panic!("{name} links to {link}"));
            let inside = !page.starts_with(&docs) || target.starts_with(&docs);
            assert!(inside, "{name} is in the book and links to {link}, which is not");
            if !anchor.is_empty() {
                assert!(
                    read(&target).1.contains(anchor),
                    "{name} links to {link}: no such heading"
                );
            }
            seen += 1;
        }
    }
    assert!(seen > 60, "{seen}");
}

/// A page that is made by a program. `PGAPACE_BLESS=1 cargo test -p pgapace --test main documentation::`
/// writes all of them.
#[track_caller]
fn expect_page(name: &str, made: &str) {
    let file = root().join("docs").join(name);
    if std::env::var_os("PGAPACE_BLESS").is_some() {
        must(std::fs::write(&file, made));
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        found == made,
        "docs/{name} is not current: PGAPACE_BLESS=1 cargo test -p pgapace --test main documentation::"
    );
}

#[test]
fn the_reference_of_verbs_is_current() {
    let made = must(Command::new(env!("CARGO_BIN_EXE_pgapace")).arg("verbs").output());
    assert!(made.status.success());
    expect_page("verbs.md", &String::from_utf8_lossy(&made.stdout));
}

/// docs/metrics.md has what a running process serves.
#[test]
fn the_reference_of_metrics_is_current() {
    const HEAD: &str = "\
# Metrics

`pgapace run --http ADDRESS` serves them at `/metrics` in the text format of Prometheus. A test reads them there, and
compares. Each has the label `subscription`, unless it is about the process. [Monitoring](runbooks/monitoring.md) says
what to watch.

| metric | type | meaning |
|---|---|---|
";
    let mut case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let free = must(TcpListener::bind("127.0.0.1:0"));
    let address = must(free.local_addr()).to_string();
    drop(free);
    case.tool.args.extend(["--http".to_owned(), address.clone()]);
    let process = case.start();
    let mut stream = must(TcpStream::connect(&address));
    must(write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n"));
    let mut text = String::new();
    must(stream.read_to_string(&mut text));
    case.stop(process);
    let (mut document, mut help) = (HEAD.to_owned(), "");
    for line in text.lines() {
        if let Some(line) = line.strip_prefix("# HELP ") {
            help = line.split_once(' ').map_or("", |(_, help)| help);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' '))
        {
            document.push_str(&format!("| `{name}` | {kind} | {} |\n", help.replace('|', "\\|")));
        }
    }
    expect_page("metrics.md", &document);
}

/// docs/schema.md has what the catalogue says.
#[test]
fn the_reference_of_the_schema_is_current() {
    const HEAD: &str = "\
# Schema pgapace

Made from the catalogue of a subscriber by a test, which compares.

pgapace creates schema `pgapace` in the subscriber's database, and keeps all its state there. Read the tables, and do not
write to them. Columns are only added, except in a release that says otherwise. Relations of this schema are never
replicated.
";
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let mut document = HEAD.to_owned();
    let relations = case.subscriber.rows(
        "SELECT c.oid, c.relname, CASE c.relkind WHEN 'v' THEN 'View' ELSE 'Table' END, \
           regexp_replace(coalesce(obj_description(c.oid, 'pg_class'), ''), '\\s+', ' ', 'g') \
         FROM pg_class c WHERE c.relnamespace = 'pgapace'::regnamespace AND c.relkind IN ('r', 'v', 'p') \
         ORDER BY c.relname",
    );
    for relation in &relations {
        let cells: Vec<_> = relation.splitn(4, '|').collect();
        let [oid, name, kind, comment] = cells[..] else { panic!("{relation}") };
        document.push_str(&format!("\n## {name}\n\n{kind}"));
        document.push_str(if comment.is_empty() { "." } else { ": " });
        document.push_str(comment);
        document.push_str("\n\n| column | type | |\n|---|---|---|\n");
        let columns = case.subscriber.rows(&format!(
            "SELECT attname, format_type(atttypid, atttypmod), \
               coalesce(col_description(attrelid, attnum), '') \
             FROM pg_attribute WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        ));
        for column in columns {
            let cells: Vec<_> = column.splitn(3, '|').collect();
            document.push_str(&format!("| `{}` | {} | {} |\n", cells[0], cells[1], cells[2]));
        }
    }
    expect_page("schema.md", &document);
}
