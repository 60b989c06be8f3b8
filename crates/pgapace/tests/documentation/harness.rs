//! Rules for tests that a program can check.

use std::path::{Path, PathBuf};

use crate::support::must;

/// The Rust files of a folder and its folders.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = must(std::fs::read_dir(folder)).map(|entry| must(entry).path());
    let mut files = Vec::new();
    for path in entries {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// A condition is waited for. The few sleeps that are right have a comment in the line above.
#[test]
fn a_sleep_has_its_reason() {
    let files = rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"));
    assert!(files.len() > 150, "{}", files.len());
    let call = concat!("sleep", "(");
    for file in files {
        let text = must(std::fs::read_to_string(&file));
        let mut above = "";
        for line in text.lines() {
            let sleeps = line.replace("pg_sleep", "").contains(call);
            let reason = above.trim_start().starts_with("//");
            assert!(!sleeps || reason, "{}: no reason above {}", file.display(), line.trim());
            above = line;
        }
    }
}
