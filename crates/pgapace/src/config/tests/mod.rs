use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches};

use super::declarations::{GroupTransactions, IfNotEmpty, SETTINGS, Streaming};
use super::given::{Given, list_of_names};
use super::live::LiveSettings;
use super::setting::{Group, Setting};
use super::{ApplyWorkers, Subscription, TagCommits, subscriptions};
use crate::switchover::way_back::WayBack;

fn flags(flags: &[&str]) -> Given {
    let command = Given::augment_args(Command::new("test"));
    let given = ["test"].iter().chain(flags).map(OsString::from);
    let matches = command.try_get_matches_from(given).expect("known flags");
    Given::from_arg_matches(&matches).expect("flags")
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("written");
    file
}

const NEEDED: &str = "publisher='host=p user=u dbname=d'\nsubscriber='host=s user=u dbname=d'\n";

/// Of a file with what is needed, and these flags.
fn both(text: &str, given: &[&str]) -> Result<Subscription, String> {
    let file = file(&format!("{NEEDED}{text}"));
    let mut found =
        subscriptions(Some(file.path()), &flags(given)).map_err(|failure| failure.to_string())?;
    found.pop().ok_or_else(|| "none".to_owned())
}

const ONE: &str = "name='a'\npublication='p'\n";

fn one(text: &str) -> Subscription {
    both(&format!("{ONE}{text}"), &[]).expect("valid")
}

const TWO: &str = r#"
    memory-limit = 64
    [[subscription]]
    name = "a"
    publication = ["p1", "p2"]
    [[subscription]]
    name = "b"
    publication = "p3"
    slot = "other"
    memory-limit = 128
"#;

#[test]
fn common_settings_reach_every_subscription() {
    let file = file(&format!("{NEEDED}{TWO}"));
    let all = subscriptions(Some(file.path()), &flags(&[])).expect("valid");
    assert_eq!(all.len(), 2);
    assert_eq!((all[0].slot.as_str(), all[0].memory_limit), ("a", 64 << 20));
    assert_eq!((all[1].slot.as_str(), all[1].memory_limit), ("other", 128 << 20));
    assert_eq!(all[0].publications, ["p1", "p2"]);
    assert_eq!(all[1].publications, ["p3"]);
}

#[test]
fn two_subscriptions_of_one_name_are_refused() {
    let other = "[[subscription]]\nname='a'\npublication='p4'\nsubscriber='host=other user=u'\n";
    let file = file(&format!("{NEEDED}{TWO}{other}"));
    for given in [&[][..], &["--name=a"]] {
        let failure = subscriptions(Some(file.path()), &flags(given)).expect_err("two of a name");
        assert_eq!(failure.class.exit_code(), 3);
        assert!(failure.message.contains("two subscriptions of name \"a\""), "{failure}");
    }
    let b = subscriptions(Some(file.path()), &flags(&["--name=b"])).expect("one of that name");
    assert_eq!(b.len(), 1);
}

#[test]
fn a_missing_connection_string_may_be_a_credential() {
    let file = file("name = 'a'\npublication = 'p'\n");
    let unit = file.path().file_stem().expect("a name").to_string_lossy().into_owned();
    let failure = subscriptions(Some(file.path()), &flags(&[])).expect_err("incomplete");
    let hint = failure.hint.expect("a hint");
    let credential = format!("-p LoadCredential=publisher:pgapace.{unit}.publisher");
    assert!(hint.contains("systemd-run --pipe --wait -p User=pgapace"), "{hint}");
    assert!(hint.contains(&credential), "{hint}");
    let failure = subscriptions(None, &flags(&["--name=a"])).expect_err("incomplete");
    assert!(!failure.hint.expect("a hint").contains("systemd-run"));
}

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
fn a_name_picks_one_and_flags_win() {
    let found = both(TWO, &["--name=b", "--memory-limit=32"]).expect("valid");
    assert_eq!((found.name.as_str(), found.memory_limit), ("b", 32 << 20));
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
fn mistakes_are_named() {
    let message = |text: &str, given: &[&str]| both(text, given).expect_err("invalid");
    assert!(message("publishr = 'x'", &[]).contains("there is no setting publishr"));
    assert!(message(TWO, &["--name=c"]).contains("no subscription \"c\""));
    assert!(message("name = 'Bad Name'", &[]).contains("not a valid name"));
    assert!(message("name = 'a'", &[]).contains("--publication is not given"));
    assert!(message("workers = [1]", &[]).contains("workers: a value cannot be array"));
    let one = |text: &str| message(&format!("{ONE}{text}"), &[]);
    assert!(one("create-slot=false\ncopy-data=true").contains("needs --create-slot"));
    let rule = one("on-conflict=['public.t:update_exists=apply']");
    assert!(rule.contains("not an action for update_exists; use one of: error, skip"), "{rule}");
    assert!(one("apply-mode = 'sets'").contains("--apply-mode: \"sets\" is not one of auto, row"));
    assert!(one("workers = 'many'").contains("--workers: \"many\" is not a number"));
    assert!(one("analyze = 'maybe'").contains("--analyze: \"maybe\" is neither true nor false"));
    assert!(one("target = 'host=x'").contains("subscriber is given twice"));
    for text in ["truncate = true", "if-not-empty = 'truncate'"] {
        assert!(one(text).contains("a decision for one start"), "{text}");
    }
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
        assert_eq!(both(&format!("{ONE}{text}"), &[]).expect_err(text), said);
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

/// A file and flags with names of earlier versions, with underscores as well.
#[test]
fn old_names_are_known() {
    let old =
        "name='a'\npublications=['p', 'q']\nlock_probe=70\nkeep=true\nschema=true\ncopy_workers=3";
    for found in [
        both(old, &[]),
        both(
            "",
            &[
                "--name=a",
                "--publications=p,q",
                "--lock-probe",
                "70",
                "--keep",
                "--schema",
                "--copy-workers=3",
                "--target=host=s user=u dbname=d",
            ],
        ),
    ] {
        let found = found.expect("valid");
        assert_eq!(found.publications, ["p", "q"]);
        assert_eq!(found.deadlock_timeout, Duration::from_millis(70));
        assert_eq!(found.if_not_empty, IfNotEmpty::Keep);
        assert!(found.copy_schema);
        assert_eq!(found.copy_workers, 3);
    }
    assert_eq!(one("keep = false").if_not_empty, IfNotEmpty::Refuse);
}

/// All keys of a file for the last version before the settings were declared here.
#[test]
fn a_file_of_an_earlier_version_is_read() {
    let text = r#"
        publication = ["p"]
        slot = "s"
        create_slot = true
        copy-data = true
        copy-workers = 2
        copy_split_size = 16
        keep = true
        schema = false
        refresh-interval = 5
        on-missed-changes = "resync"
        analyze = false
        indexes_after = false
        failover = false
        two-phase = true
        two_phase_hold = 1
        origin = "none"
        tag-commits = true
        binary = "off"
        status_interval = 3
        receive-timeout = 30
        busy-timeout = 0
        connect_timeout = 20
        streaming = "on"
        spool-directory = "/tmp"
        spool-limit = 100
        memory_limit = 32
        workers = 2
        preserve-commit-order = false
        lock-probe = 40
        prefetch = "auto"
        apply-mode = "row"
        on-conflict = ["insert_exists=skip", "s.t:update_missing=error"]
        on_table_error = "block"
        conflict-retention = 0
        disable-on-error = true
        [[subscription]]
        name = "a"
        group-transactions = 8
        [[subscription]]
        name = "b"
        group_transactions = "auto"
    "#;
    let a = both(text, &["--name=a"]).expect("valid");
    assert_eq!(a.group_transactions.0.map(usize::from), Some(8));
    assert_eq!((a.copy().split_size, a.spool_limit), (16 << 20, Some(100 << 20)));
    assert_eq!((a.two_phase, a.two_phase_hold), (Some(true), Duration::from_secs(1)));
    assert_eq!(a.connect_timeout, Some(Duration::from_secs(20)));
    assert!(a.origin_none() && a.on_conflict.has_rules() && a.disable_on_error);
    assert_eq!(both(text, &["--name=b"]).expect("valid").group_transactions.0, None);
}

#[test]
fn defaults_are_as_documented() {
    let found = one("");
    assert_eq!(
        (found.workers, found.copy_workers, found.slot.as_str()),
        (ApplyWorkers::Auto, 4, "a")
    );
    assert_eq!(found.streaming, Streaming::Parallel);
    assert_eq!(found.group_transactions, GroupTransactions(None));
    assert_eq!(found.copy().split_size, 32 << 20);
    assert_eq!((found.two_phase, found.connect_timeout, found.spool_limit), (None, None, None));
    assert!(found.copies_data() && found.copies_added_tables());
    let adopted = one("create-slot = false");
    assert!(!adopted.copies_data() && adopted.copies_added_tables());
    assert_eq!(adopted.publisher.get("keepalives_idle"), Some("30"));
}

#[test]
fn every_declaration_is_complete() {
    for setting in SETTINGS {
        let Setting { name, help, default, .. } = setting;
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
        assert!(!help.is_empty() && !help.ends_with('.'), "{name}: {help}");
        assert!(default.is_empty() || (setting.check)(default, setting).is_ok(), "{name}");
        assert!(!setting.verbs.is_empty() && Group::ALL.contains(&setting.group), "{name}");
        let sentences = setting.more;
        assert!(sentences.is_empty() || sentences.ends_with('.'), "{name}: {sentences}");
    }
}

#[test]
fn settings_that_are_replaced_reach_the_way_back() {
    let live = LiveSettings::new(one(""));
    let back = |name: &str| WayBack {
        name: name.to_owned(),
        publications: vec!["q".to_owned()],
        origin_none: true,
        generation: 1,
    };
    let reversed = live.reversed(back("a_back"));
    let (_, watch) = reversed.take();
    let again = reversed.reversed(back("a"));
    assert!(!watch.are_newer());
    live.replace(one("workers=7\n"));
    assert!(watch.are_newer());
    let (ahead, reversed, again) = (live.newest(), reversed.newest(), again.newest());
    assert_eq!(reversed.workers, ahead.workers);
    assert_eq!(
        (reversed.name.as_str(), reversed.publications.as_slice()),
        ("a_back", &["q".to_owned()][..])
    );
    assert_eq!(reversed.publisher.redacted(), ahead.subscriber.redacted());
    assert_eq!(again.publisher.redacted(), ahead.publisher.redacted());
    assert!(reversed.copy_data == Some(false) && ahead.copy_data.is_none());
}
