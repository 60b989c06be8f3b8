//! Settings from flags, environment and files.

mod old_names;
mod values;

use std::ffi::OsString;
use std::io::Write;

use clap::{Args, Command, FromArgMatches};

use super::declarations::{GroupTransactions, SETTINGS, Streaming};
use super::given::Given;
use super::live::LiveSettings;
use super::setting::{Group, Setting};
use super::{ApplyWorkers, Subscription, subscriptions};
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
fn a_name_picks_one_and_flags_win() {
    let found = both(TWO, &["--name=b", "--memory-limit=32"]).expect("valid");
    assert_eq!((found.name.as_str(), found.memory_limit), ("b", 32 << 20));
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
fn a_mistake_in_the_file_is_named_with_file_and_line() {
    let said = |text: &str, given: &[&str]| {
        let file = file(&format!("{NEEDED}{text}"));
        let shown = format!("configuration file {}: ", file.path().display());
        let failed = subscriptions(Some(file.path()), &flags(given)).expect_err("a mistake");
        let text = failed.to_string();
        text.strip_prefix(&shown).map(str::to_owned).unwrap_or(text)
    };
    for (text, given, expected) in [
        ("name='a'\n\nworkers=70\npublication='p'", &[][..], "line 5: --workers must be between"),
        ("name='a'\npublication='p'\nnothing=1", &[], "line 5: there is no setting nothing"),
        (
            "[[subscription]]\nname='a'\npublication='p'\n[[subscription]]\nname='B'\n",
            &[],
            "line 7: --name \"B\" is not",
        ),
        ("[subscription]\nname='a'\nmemory_limit='much'\n", &[], "line 5: --memory-limit"),
        ("[subscription]\nname='a'\ntwo-phase=[]\n", &[], "line 5: "),
        // This one is of the flag.
        ("name='a'\nworkers=2\npublication='p'", &["--workers", "70"], "--workers must be between"),
    ] {
        let found = said(text, given);
        assert!(found.starts_with(expected), "{text}: {found}");
    }
    let missing = said("publication='p'", &[]);
    assert!(missing.contains("--name is not given, and configuration file /"), "{missing}");
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
    for turned in [&reversed, &again] {
        assert!(!turned.copies_data() && turned.copies_added_tables());
    }
    let without = LiveSettings::new(one("copy-data=false\n")).reversed(back("a_back")).newest();
    assert!(!without.copies_added_tables());
}
