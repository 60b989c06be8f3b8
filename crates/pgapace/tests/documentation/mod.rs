//! Documents say what tests show.

mod book;
mod events;
mod harness;
mod map;
mod settings;

use std::collections::HashSet;
use std::process::Command;

use crate::support::must;

/// Names of all tests of this program.
fn tests() -> HashSet<String> {
    let program = must(std::env::current_exe());
    let listed = must(Command::new(program).arg("--list").output());
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    listed.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

#[test]
fn every_incident_has_its_test() {
    let document = must(std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/incidents.md"
    )));
    let tests = tests();
    let lines = document.lines().filter(|line| line.starts_with("| "));
    let incidents = lines.filter(|line| !line.starts_with("| what happens"));
    let mut seen = HashSet::new();
    for line in incidents {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        assert_eq!(cells.len(), 4, "four columns: {line}");
        assert!(cells.iter().all(|cell| !cell.is_empty()), "nothing is left open: {line}");
        let test = cells[3].trim_matches(|c| c == '`' || c == '|' || c == ' ');
        assert!(tests.contains(test), "there is no test {test}");
        assert!(seen.insert(cells[0].to_owned()), "twice: {line}");
    }
    assert!(seen.len() > 40, "{}", seen.len());
}

#[test]
fn every_question_of_an_operator_has_its_test() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/questions.md");
    let document = must(std::fs::read_to_string(file));
    let tests = tests();
    let mut questions = 0;
    for section in document.split("\n## ").skip(1) {
        let question = section.lines().next().unwrap_or_default();
        let test = section.split("Test: `").nth(1).and_then(|rest| rest.split('`').next());
        assert!(test.is_some_and(|test| tests.contains(test)), "{question}: {test:?}");
        assert!(section.contains("```"), "{question}: no answer");
        questions += 1;
    }
    assert_eq!(questions, 8);
}
