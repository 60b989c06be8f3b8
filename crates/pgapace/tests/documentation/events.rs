//! `docs/events.md` names the events that the sources log, with their levels and fields.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::support::must;

/// The sources that log: the last two are of the demo.
const SOURCES: [&str; 5] = ["pgapace", "wire", "engine", "demo", "testbed"];

/// Level, and names of the fields of all calls, sorted.
type Events = BTreeMap<String, (String, Vec<String>)>;

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in must(std::fs::read_dir(folder)) {
        let path = must(entry).path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The arguments of the macro call that begins here, as far as its closing parenthesis.
fn arguments(call: &str) -> Vec<String> {
    let (mut arguments, mut depth, mut quoted) = (vec![String::new()], 0, false);
    let mut characters = call.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' if quoted => {
                characters.next();
                continue;
            }
            '"' => quoted = !quoted,
            '(' | '[' | '{' if !quoted => depth += 1,
            ')' | ']' | '}' if !quoted && depth == 0 => break,
            ')' | ']' | '}' if !quoted => depth -= 1,
            ',' if !quoted && depth == 0 => {
                arguments.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = arguments.last_mut() {
            last.push(character);
        }
    }
    arguments
}

fn logged() -> Events {
    let mut events = Events::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    SOURCES.iter().for_each(|name| sources(&crates.join(name).join("src"), &mut files));
    for file in files {
        let source = must(std::fs::read_to_string(&file));
        // Calls are found by their full name; an import would hide them.
        assert!(!source.contains("use tracing::"), "{}", file.display());
        for level in ["info", "warn", "error"] {
            for call in source.split(&format!("tracing::{level}!(")).skip(1) {
                let mut event = None;
                let mut fields = Vec::new();
                let arguments = arguments(call);
                let given = arguments.iter().map(|argument| argument.trim());
                for argument in given.take_while(|argument| !argument.starts_with('"')) {
                    let (name, value) = argument.split_once('=').unwrap_or((argument, argument));
                    match name.trim().trim_start_matches(['%', '?']) {
                        "event" => event = Some(value.trim().trim_matches('"').to_owned()),
                        name => fields.push(name.to_owned()),
                    }
                }
                let event = event.unwrap_or_else(|| {
                    panic!("{}: no event = \"…\" in {arguments:?}", file.display())
                });
                let legal = |c: char| c.is_ascii_lowercase() || c == '_';
                assert!(event.chars().all(legal), "{}: {event}", file.display());
                let known =
                    events.entry(event.clone()).or_insert_with(|| (level.to_owned(), Vec::new()));
                assert_eq!(known.0, level, "{event} has two levels");
                known.1.append(&mut fields);
            }
        }
    }
    for (_, fields) in events.values_mut() {
        fields.sort();
        fields.dedup();
    }
    events
}

#[test]
fn every_event_is_documented() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/events.md");
    let document = must(std::fs::read_to_string(document));
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    let (mut documented, mut last) = (Events::new(), String::new());
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let [event, level, fields, meaning, action] = cells[..] else {
            panic!("five columns: {row}")
        };
        assert!(!meaning.is_empty() && !action.is_empty(), "nothing is left open: {row}");
        let name = |cell: &str| cell.trim_matches('`').to_owned();
        let event = name(event);
        assert!(last < event, "{last} and {event} are not in order, or {event} is there twice");
        let mut fields: Vec<_> =
            fields.split(", ").filter(|field| *field != "–").map(name).collect();
        fields.sort();
        documented.insert(event.clone(), (level.to_owned(), fields));
        last = event;
    }
    let logged = logged();
    for (event, found) in &logged {
        assert_eq!(documented.get(event), Some(found), "{event} in docs/events.md and the sources");
    }
    for event in documented.keys() {
        assert!(logged.contains_key(event), "docs/events.md has {event}, and nothing logs it");
    }
}
