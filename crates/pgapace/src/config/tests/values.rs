//! How the value of a setting is read.

use std::time::Duration;

use clap::{Args, Command};

use super::{ONE, both, flags, one};
use crate::config::given::{Given, list_of_names};
use crate::config::{ApplyWorkers, TagCommits};

#[test]
fn a_single_table_is_a_list_of_one() {
    let found = both("[subscription]\nname = 'a'\npublication = 'p'\nworkers = 3", &[]);
    let found = found.expect("valid");
    assert_eq!((found.name.as_str(), found.workers), ("a", ApplyWorkers::Fixed(3)));
    for text in ["'host=a password=sekret'", "['host=a password=sekret']", "7"] {
        let message = both(&format!("subscription = {text}"), &[]).expect_err("no table");
        assert!(message.contains("Write [[subscription]]"), "{message}");
        assert!(!message.contains("sekret"), "{message}");
    }
}

#[test]
fn a_name_that_is_quoted_as_a_whole_loses_its_quotes() {
    let publications = |given: &[&str]| {
        let given = flags(given);
        given.get("publication").expect("a setting").map(<[String]>::to_vec).unwrap_or_default()
    };
    assert_eq!(publications(&[r#"--publication="a,b",c"#]), ["a,b", "c"]);
    assert_eq!(publications(&[r#"--publication="a""b""#, "--publication=c"]), [r#"a"b"#, "c"]);
    assert_eq!(publications(&[r#"--publication=a"b,"c"d""#]), [r#"a"b,"c"d""#]);
    assert_eq!(publications(&["--publication=\"\"\"\""]), ["\""]);
    let names = ["a,b", "\"c\"", "d\"", "e", " f"].map(str::to_owned);
    assert_eq!(publications(&[&format!("--publication={}", list_of_names(&names))]), names);
    // The file has no need of quotes.
    let of_file = both("name='a'\npublication=['\"a\"', 'b,c']\n", &[]).expect("valid");
    assert_eq!(of_file.publications, ["\"a\"", "b,c"]);
}

#[test]
fn a_comma_in_double_quotes_separates_nothing() {
    let found = one("").on_conflict;
    assert!(!found.has_rules());
    let rules = "--on-conflict=\"S,x\".\"a,\"\"b\":update_missing=error,s.t:insert_exists=skip";
    let found = both(ONE, &[rules, "--publication=p,q", "--publication=r"]).expect("valid");
    assert_eq!(found.on_conflict.unpublished(&[]), ["S,x.a,\"b", "s.t"]);
    assert_eq!(found.publications, ["p", "q", "r"]);
    let command = Given::augment_args(Command::new("test"));
    let wrong = command.try_get_matches_from(["test", "--on-conflict=insert_exists=skip,nothing"]);
    assert!(wrong.expect_err("not a rule").to_string().contains("nothing"));
}

#[test]
fn a_word_stands_in_place_of_a_number_or_a_boolean() {
    let read = |text: &str| {
        let found = both(&format!("{ONE}{text}"), &[]).expect("valid");
        (found.workers, found.tag_commits)
    };
    let default = (ApplyWorkers::Auto, TagCommits::Auto);
    assert_eq!(read(""), default);
    assert_eq!(read("workers = 'auto'\ntag-commits = 'auto'"), default);
    let given = (ApplyWorkers::Fixed(3), TagCommits::Never);
    assert_eq!(read("workers = 3\ntag-commits = false"), given);
    assert_eq!(read("workers = '3'\ntag-commits = 'off'"), given);
    assert_eq!(read("tag-commits = true").1, TagCommits::Always);
}

#[test]
fn ranges_have_one_message() {
    for (text, said) in [
        ("workers = 0", "--workers must be between 1 and 64"),
        ("copy-workers = 65", "--copy-workers must be between 1 and 64"),
        ("memory-limit = 15", "--memory-limit must be between 16MB and 1048576MB"),
        ("memory-limit = '15MB'", "--memory-limit must be between 16MB and 1048576MB"),
        ("status-interval = '999ms'", "--status-interval must be between 1s and 2147483647"),
        ("receive-timeout = 0", "--receive-timeout must be between 1s and 2147483647"),
        ("deadlock-timeout = 0", "--deadlock-timeout must be between 1ms and 2147483647"),
        ("conflict-retention = 36501", "--conflict-retention must be between 0d and 36500d"),
        ("event-retention = '2147483647d'", "--event-retention must be between 0d and 36500d"),
    ] {
        let in_file = both(&format!("{ONE}{text}"), &[]).expect_err(text);
        assert_eq!(in_file.split_once(": line 5: ").map(|(_, said)| said), Some(said), "{in_file}");
        let flag = format!("--{}", text.replace([' ', '\''], ""));
        assert_eq!(both(ONE, &[&flag]).expect_err(text), said);
    }
}

#[test]
fn numbers_may_have_units() {
    for (text, bytes) in [("64", 64 << 20), ("'64MB'", 64 << 20), ("'1 GB'", 1 << 30)] {
        assert_eq!(one(&format!("memory-limit = {text}")).memory_limit, bytes, "{text}");
    }
    for (text, seconds) in [("7", 7), ("'7s'", 7), ("'2min'", 120), ("'1h'", 3600)] {
        let found = one(&format!("status-interval = {text}")).status_interval;
        assert_eq!(found, Duration::from_secs(seconds), "{text}");
    }
    assert_eq!(one("deadlock-timeout = '1s'").deadlock_timeout, Duration::from_secs(1));
    assert_eq!(
        one("conflict-retention = 1").conflict_retention(),
        Some(Duration::from_secs(86400))
    );
    assert_eq!(one("conflict-retention = 0").conflict_retention(), None);
    assert_eq!(one("copy-split-size = 0").copy().split_size, u64::MAX);
    for wrong in ["7 weeks", "s", "-1", "7MB", "99999999999999999999"] {
        let message = both(&format!("{ONE}status-interval = '{wrong}'"), &[]).expect_err(wrong);
        assert!(message.contains("ms, s, min, h, d"), "{wrong}: {message}");
    }
}
