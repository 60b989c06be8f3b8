//! ARCHITECTURE.md is a map of what exists.

use std::path::{Path, PathBuf};

use crate::support::must;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn map() -> String {
    must(std::fs::read_to_string(root().join("ARCHITECTURE.md")))
}

/// The rows of the table in this section, without its head, as cells.
fn table<'a>(map: &'a str, section: &str) -> Vec<Vec<&'a str>> {
    let section = map.split(&format!("## {section}\n")).nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    rows.skip(1).map(|row| row.trim_matches('|').split(" | ").map(str::trim).collect()).collect()
}

/// The texts in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn it_names_paths_that_exist() {
    let map = map();
    assert!(map.lines().count() <= 250, "a map, not a book");
    let mut seen = 0;
    for path in quoted(&map).filter(|text| text.starts_with("crates/")) {
        assert!(root().join(path).exists(), "ARCHITECTURE.md names {path}, which does not exist");
        seen += 1;
    }
    assert!(seen > 150, "{seen}");
    // A file beside one that is named with its whole path.
    let short = quoted(&map).filter(|text| text.ends_with(".rs") && !text.starts_with("crates/"));
    for path in short {
        let file = root().join("crates/pgapace/src").join(path);
        assert!(file.exists(), "ARCHITECTURE.md names {path}, which does not exist");
    }
}

#[test]
fn it_names_each_table_of_the_state() {
    let map = map();
    let state = map.split("State on the subscriber:").nth(1).expect("the paragraph");
    let state = state.split("\n\n").next().unwrap_or_default();
    let folder = root().join("crates/pgapace/src/subscriber/state/migrations");
    let files = must(std::fs::read_dir(folder)).map(|entry| must(entry).path());
    let migrations = files.filter(|path| path.extension().is_some_and(|kind| kind == "sql"));
    let schema: String = migrations.map(|path| must(std::fs::read_to_string(path))).collect();
    let tables: Vec<_> = schema
        .split("CREATE TABLE pgapace.")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
        .collect();
    assert!(tables.len() > 15, "{tables:?}");
    for table in tables {
        let named = if table.starts_with("stat_") { "`stat_*`" } else { &format!("`{table}`") };
        assert!(state.contains(named), "ARCHITECTURE.md does not name {table}");
    }
}

/// The file that a row names defines the type or function that it names.
#[test]
fn each_question_is_answered_in_one_step() {
    let map = map();
    let rows = table(&map, "Where is …?");
    assert!(rows.len() >= 14, "{rows:?}");
    for row in rows {
        let [question, place] = row[..] else { panic!("two columns: {row:?}") };
        let mut names = quoted(place);
        let Some(path) = names.next() else {
            assert!(place.starts_with("[docs/"), "{question} {place}");
            continue;
        };
        let text = must(std::fs::read_to_string(root().join(path)));
        for name in names {
            let (kind, function) = match name.split_once("::") {
                Some((kind, function)) => (Some(kind), Some(function)),
                None if name.starts_with(char::is_uppercase) => (Some(name), None),
                None => (None, Some(name)),
            };
            let has = |keyword: &str, name: &str| {
                let definition = format!("{keyword} {name}");
                text.match_indices(&definition).any(|(at, _)| {
                    !text[at + definition.len()..].starts_with(|c: char| c.is_alphanumeric())
                })
            };
            let kind_is_there = kind.is_none_or(|kind| {
                ["struct", "enum", "impl"].iter().any(|keyword| has(keyword, kind))
            });
            let function_is_there = function.is_none_or(|function| has("fn", function));
            assert!(kind_is_there && function_is_there, "{question} {path} does not have {name}");
        }
    }
}

/// Whether a file, or a file of a folder, has a test.
fn has_test(path: &Path) -> bool {
    if path.is_dir() {
        let mut entries = must(std::fs::read_dir(path)).map(|entry| must(entry).path());
        return entries.any(|entry| has_test(&entry));
    }
    std::fs::read_to_string(path).is_ok_and(|text| text.contains("#[test]"))
}

/// Each promise is enforced somewhere, and real servers show it.
#[test]
fn each_promise_is_tested_against_servers() {
    let map = map();
    let rows = table(&map, "Promises");
    for (number, row) in rows.iter().enumerate() {
        let [promise, enforced, tested] = row[..] else { panic!("three columns: {row:?}") };
        let name = format!("P{} ", number + 1);
        assert!(promise.starts_with(&name), "{promise} is not {name}");
        assert!(quoted(enforced).any(|text| text.starts_with("crates/")), "{promise}: {enforced}");
        // The same as in the row above.
        let tested = if tested == "the same" { rows[number - 1][2] } else { tested };
        let tests: Vec<&str> =
            quoted(tested).filter(|text| text.starts_with("crates/pgapace/tests/")).collect();
        assert!(!tests.is_empty(), "{promise}: {tested}");
        for path in quoted(tested).filter(|text| text.starts_with("crates/")) {
            let tested = has_test(&root().join(path));
            assert!(tested, "{promise}: {path} has no test");
        }
    }
    assert_eq!(rows.len(), 11);
}
