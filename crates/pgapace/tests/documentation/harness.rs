//! Rules for tests that a program can check.

use std::path::{Path, PathBuf};

use crate::support::{Case, must};

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

/// Else each later test that creates a slot on the shared server would wait for what a failed one has left.
#[test]
fn a_case_leaves_nothing_on_the_shared_servers() {
    let case = Case::new(18, 18);
    let (cluster, name) = (case.publisher.cluster, case.publisher.name.clone());
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR TABLE t");
    let mut process = case.start();
    case.publisher.sql(&format!("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION '{name}'"));
    // Its walsender does not end by itself.
    must(process.freeze());
    drop(case);
    let left = format!(
        "SELECT (SELECT count(*) FROM pg_database WHERE datname = '{name}') \
           + (SELECT count(*) FROM pg_replication_slots WHERE database = '{name}')"
    );
    assert_eq!(must(cluster.query_one_text("postgres", &left)), "0");
}
