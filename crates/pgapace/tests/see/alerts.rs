//! The alert rules in contrib/, as Prometheus evaluates them.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::support::{must, skipped};

/// Asks the tool of Prometheus, if it is there.
#[track_caller]
pub(super) fn promtool(args: &[&str], input: &str) {
    let program = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut program) = program else {
        return skipped(&format!("promtool {}", args.join(" ")), "there is no promtool");
    };
    must(program.stdin.take().expect("a pipe").write_all(input.as_bytes()));
    let output = must(program.wait_with_output());
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn rules_fire_when_they_should_and_not_otherwise() {
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/prometheus-alerts.yml");
    promtool(&["check", "rules", rules], "");
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/see/alerts.yml");
    promtool(&["test", "rules", tests], "");
}
