//! What `status` prints: names that do not exist, the fields of `--json`, and `--watch`.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use testbed::wait_until;

use super::health::{look, wait_for_code};
use crate::support::{Case, PATIENCE, finish, must, pgapace};
use crate::verbs::json;

#[test]
fn a_configured_subscription_that_does_not_exist_is_unknown() {
    let case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let process = case.start();
    wait_for_code(&case, &["--check"], 0);
    let name = &case.tool.name;
    let config = case.log_file("both.toml");
    let text = format!(
        "subscriber = \"{}\"\n[[subscription]]\nname = \"{name}\"\n\
         [[subscription]]\nname = \"{name}b\"\n",
        case.subscriber.conninfo()
    );
    must(std::fs::write(&config, text));
    let status = |args: &[&str]| finish(&pgapace("status").arg("--config").arg(&config).args(args));
    let said = format!("there is no subscription \"{name}b\"");
    for args in [&["--check"][..], &["--check", "--brief"], &["--check", "--json"]] {
        let finished = status(args);
        finished.expect(17, &[&said]);
        let line = format!("{name}b: no subscription on the subscriber");
        assert_eq!(finished.stdout.contains(&line), !args.contains(&"--json"), "{finished:?}");
    }
    status(&[]).expect(0, &[]);
    // A subscription that does not run is worse.
    case.stop(process);
    status(&["--check"]).expect(16, &["does not run"]);
}

#[test]
fn a_name_that_the_subscriber_does_not_have_is_told_with_those_that_it_has() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let subscriber = case.subscriber.conninfo();
    let status = |args: &[&str]| {
        finish(&pgapace("status").args(["--subscriber", &subscriber, "--name", "wrong"]).args(args))
    };
    let other = format!("It has: {}.", case.tool.name);
    let said = ["no subscription \"wrong\"", &other];
    status(&[]).expect(3, &said);
    status(&["--brief"]).expect(3, &said);
    let none = status(&["--json"]);
    none.expect(3, &said);
    assert_eq!(json(&none), serde_json::json!([]));
    for checks in [&["--check"][..], &["--max-lag", "1s"]] {
        let checked = status(checks);
        checked.expect(17, &said);
        assert_eq!(checked.stdout, "");
    }
    for (verb, arg) in [("top", "--once"), ("report", "-")] {
        let args = ["--subscriber", &subscriber, "--name", "wrong", arg];
        finish(&pgapace(verb).args(args)).expect(17, &said);
    }
}

/// The fields that the first column of the section's table names.
fn documented_fields() -> BTreeSet<String> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operation.md");
    let text = must(std::fs::read_to_string(file));
    let section = text.split("### Status as JSON").nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let names = cells.flat_map(|cell| cell.split(", "));
    names.map(|name| name.trim_matches('`').to_owned()).collect()
}

#[test]
fn fields_of_status_as_json_are_documented() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let status = json(&look(&case, &["--json"]));
    let printed = status[0].as_object().expect("an object").keys().cloned();
    // `workers` and others name their reasons beside them.
    let documented = documented_fields();
    let reasons = ["format_reason", "streaming_reason", "workers_reason"].map(str::to_owned);
    let documented: BTreeSet<String> = documented.into_iter().chain(reasons).collect();
    assert_eq!(printed.collect::<BTreeSet<_>>(), documented);
}

#[test]
fn watch_ends_with_its_reader() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let mut watch = must(
        Command::new(env!("CARGO_BIN_EXE_pgapace"))
            .args(["status", "--subscriber", &case.tool.subscriber, "--watch", "1"])
            .stdout(Stdio::piped())
            .spawn(),
    );
    let reader = watch.stdout.take().expect("a pipe");
    let mut first = String::new();
    must(BufReader::new(reader).read_line(&mut first));
    // No escape codes where no terminal is.
    assert!(first.starts_with(&case.tool.name) && !first.contains('\x1b'), "{first:?}");
    let ended =
        wait_until(PATIENCE, "the end without a reader", || Ok(watch.try_wait()?.is_some()));
    ended.unwrap_or_else(|error| {
        let _ = watch.kill();
        panic!("{error}")
    });
    assert!(must(watch.wait()).success());
}

#[test]
fn watch_prints_it_again() {
    let case = Case::new(15, 15);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let log = case.log_file("watch");
    let mut watch =
        must(case.tool.program("status").args(["--watch", "1"]).spawn_logged(log.clone()));
    let printed = || std::fs::read_to_string(&log).unwrap_or_default();
    let seen =
        wait_until(PATIENCE, "two prints", || Ok(printed().matches("not running").count() >= 2));
    seen.unwrap_or_else(|error| panic!("{error}: {}", printed()));
    must(watch.terminate());
    assert!(must(watch.wait(PATIENCE)).success());
}
