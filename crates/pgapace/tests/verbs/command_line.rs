//! Help, completions, manual pages, exit codes.

use std::io::Write;

use testbed::Program;

use crate::support::{self, Case, Finished, executable, must};

pub(super) const VERBS: [&str; 8] =
    ["run", "check", "status", "drop", "demo", "completions", "man", "settings"];

/// Exit code, standard output, and standard error.
pub(super) fn finish(program: &Program) -> (Option<i32>, String, String) {
    let Finished { code, stdout, log } = support::finish(program);
    (code, stdout, log)
}

pub(super) fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = must(tempfile::NamedTempFile::new());
    must(file.write_all(text.as_bytes()));
    file
}

#[test]
fn every_verb_has_help_with_an_example() {
    let (code, help, _) = finish(&executable().arg("--help"));
    assert_eq!(code, Some(0));
    assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    for verb in VERBS {
        assert!(help.contains(verb), "{verb} is not in {help}");
        let (code, help, _) = finish(&executable().args([verb, "--help"]));
        assert_eq!(code, Some(0), "{verb}");
        let example = help.split_once("Example:").map_or("", |(_, example)| example);
        assert!(example.contains(&format!("pgapace {verb} ")), "{verb}: {help}");
    }
}

#[test]
fn mistakes_have_their_exit_codes() {
    for verb in VERBS {
        assert_eq!(finish(&executable().args([verb, "--no-such-flag"])).0, Some(2), "{verb}");
    }
    assert_eq!(finish(&executable()).0, Some(2));
    for verb in ["run", "check", "status", "drop"] {
        let (code, _, errors) = finish(&executable().arg(verb));
        assert_eq!(code, Some(3), "{verb}: {errors}");
        assert!(errors.contains("is not given"), "{errors}");
        let bad = file("publishr = 'x'");
        let config = bad.path().display().to_string();
        let (code, _, errors) = finish(&executable().args([verb, "--config", &config]));
        assert_eq!(code, Some(3), "{verb}: {errors}");
        assert!(errors.contains("publishr"), "{errors}");
        let (code, ..) = finish(&executable().args([verb, "--config", "/nonexistent.toml"]));
        assert_eq!(code, Some(3), "{verb}");
    }
    let (code, _, errors) =
        finish(&executable().args(["status", "--subscriber", "host=h no_such_option=1"]));
    assert_eq!(code, Some(3), "{errors}");
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_a_reader_that_has_ended_is_none() {
    let into = |verb: &str, target: &str| {
        let program = env!("CARGO_BIN_EXE_pgapace");
        let mut shell = std::process::Command::new("bash");
        shell.args(["-o", "pipefail", "-c", &format!("'{program}' {verb} {target}")]);
        let output = must(shell.output());
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for verb in ["settings", "man run", "completions bash", "--help", "run --help", "--version"] {
        let (code, errors) = into(verb, "> /dev/full");
        assert_eq!(code, Some(1), "{verb}: {errors}");
        assert!(errors.contains("cannot write to standard output: No space left"), "{errors}");
        let (code, errors) = into(verb, "| head -n 1");
        assert_eq!((code, errors.as_str()), (Some(0), ""), "{verb}");
    }
}

/// A run that reaches the connection, and finds no server.
fn run_without_servers() -> Program {
    executable().args(["run", "--publication", "p", "--name", "x", "--connect-timeout", "0"]).args(
        [
            "--publisher",
            "host=127.0.0.1 port=1 dbname=a user=b",
            "--subscriber",
            "host=127.0.0.1 port=1 dbname=a user=b",
        ],
    )
}

#[test]
fn the_error_that_ends_the_program_is_json_where_the_log_is() {
    for level in ["info", "off"] {
        let args = ["--log-format", "json", "--log-level", level];
        let (code, _, log) = finish(&run_without_servers().args(args));
        assert_eq!(code, Some(5), "{log}");
        let lines: Vec<serde_json::Value> =
            log.lines().map(|line| must(serde_json::from_str(line))).collect();
        let last = lines.last().expect("the error");
        assert_eq!(last["event"], "failed", "{log}");
        assert_eq!((&last["level"], &last["exit_code"]), (&"ERROR".into(), &5.into()), "{log}");
        assert!(last["error"].as_str().is_some_and(|it| it.contains("refused")), "{log}");
        assert!(last["hint"].as_str().is_some_and(|it| it.contains("--connect-timeout")), "{log}");
        assert!(last["timestamp"].is_string() && last.get("sqlstate").is_none(), "{log}");
    }
    let (_, _, log) = finish(&executable().args(["run", "--log-format", "json"]));
    assert!(must(serde_json::from_str::<serde_json::Value>(&log))["error"].is_string(), "{log}");
}

#[test]
fn variables_of_flags_are_read_as_those_of_settings() {
    let until = |program: Program| program.args(["--until", "current"]);
    for given in [
        "STANDBY=false",
        "STANDBY=0",
        "STANDBY=",
        "FAIL_TOGETHER=1",
        "FAIL_TOGETHER=on",
        "FAIL_TOGETHER=off",
        "FAIL_TOGETHER=",
        "HTTP=",
        "HTTP_TOKEN_FILE=",
        "LOG_FORMAT=",
        "LOG=",
        "CONFIG=",
        "COPY_DATA=on",
        "COPY_DATA=",
    ] {
        let (name, value) = given.split_once('=').expect("a name");
        let program = until(run_without_servers()).env(format!("PGAPACE_{name}"), value);
        let (code, _, errors) = finish(&program);
        assert_eq!(code, Some(5), "{given}: {errors}");
    }
    for value in ["true", "on", "1"] {
        let program = until(run_without_servers()).env("PGAPACE_STANDBY", value);
        let (code, _, errors) = finish(&program);
        assert_eq!(code, Some(2), "{value}: {errors}");
        assert!(errors.contains("cannot be used with '--standby'"), "{errors}");
    }
    let (code, _, errors) = finish(&run_without_servers().env("PGAPACE_STANDBY", "maybe"));
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("neither true nor false"), "{errors}");
}

#[test]
fn a_publication_with_a_comma_in_its_name() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql("CREATE PUBLICATION \"a,b\" FOR TABLE t");
    case.publisher.sql("CREATE PUBLICATION \"c\"\"d\"");
    let check = executable()
        .args(["check", "--name", &case.tool.name, "--publisher", &case.tool.publisher])
        .args(["--subscriber", &case.tool.subscriber]);
    let names = r#""a,b","c""d""#;
    for program in [
        check.clone().args(["--publication", names]),
        check.clone().env("PGAPACE_PUBLICATION", names),
        check.clone().args(["--publication", r#""a,b""#, "--publication", r#"c"d"#]),
    ] {
        let (code, said, errors) = finish(&program);
        assert_eq!(code, Some(0), "{said}{errors}");
    }
    let (code, said, _) = finish(&check.args(["--publication", "a,b"]));
    assert_eq!(code, Some(6), "{said}");
}

#[test]
fn a_publisher_that_cannot_filter_origins_is_refused() {
    let case = Case::new(15, 15);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR TABLE t");
    for verb in ["check", "run"] {
        let finished = case.tool.finish(verb, &["--origin", "none"]);
        let code = if verb == "check" { 6 } else { 4 };
        finished.expect(code, &[]);
        let said = finished.stdout + &finished.log;
        assert!(said.contains("--origin none needs PostgreSQL 16"), "{said}");
    }
}

#[test]
fn completions_of_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script, _) = finish(&executable().args(["completions", shell]));
        assert_eq!(code, Some(0));
        assert!(script.contains("--take-over") || script.contains("take-over"), "{shell}");
    }
}

#[test]
fn manual_pages() {
    let (code, page, _) = finish(&executable().arg("man"));
    assert!(code == Some(0) && page.contains(".TH pgapace 1"), "{page}");
    let (code, page, _) = finish(&executable().args(["man", "run"]));
    assert!(code == Some(0) && page.contains("\\-\\-copy\\-workers"), "{page}");
    assert_eq!(finish(&executable().args(["man", "nosuch"])).0, Some(2));
}

#[test]
fn a_verb_shows_the_flags_that_it_uses() {
    let help = |verb: &str, flag: &str| finish(&executable().args([verb, flag])).1;
    for (verb, uses, not) in [
        (
            "run",
            "--workers --on-conflict --deadlock-timeout",
            "--target --lock-probe --keep --schema",
        ),
        (
            "status",
            "--subscriber --publisher --name --config",
            "--workers --publication --busy-timeout",
        ),
        ("skip", "--subscriber --name", "--publisher --workers --publication"),
        ("drop", "--busy-timeout", "--workers --publication"),
        ("refresh", "--publication --if-not-empty", "--workers --slot"),
        // They run the subscription themselves.
        ("verify", "--on-missed-changes --on-conflict --origin", "--two-phase --deadlock-timeout"),
        (
            "rebase",
            "--on-missed-changes --on-conflict --two-phase --failover",
            "--deadlock-timeout",
        ),
    ] {
        let shown = help(verb, "--help");
        let has = |flag: &str| {
            shown.lines().any(|line| line.trim_start().starts_with(&format!("{flag} ")))
        };
        for flag in uses.split(' ') {
            assert!(has(flag), "{verb} {flag}: {shown}");
        }
        for flag in not.split(' ') {
            assert!(!has(flag), "{verb} {flag}: {shown}");
        }
    }
    assert!(help("run", "--help").contains("Advanced:"));
    assert!(!help("run", "-h").contains("--deadlock-timeout"));
}
