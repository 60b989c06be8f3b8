//! Files and clones that `replay` refuses, before anything is applied.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;

use super::{Recording, drop_replayed, prepare, replay};
use crate::support::{Case, finish, must, pgapace};

#[test]
fn damaged_files_are_refused_before_anything_is_written() {
    let case = Case::new(18, 18);
    prepare(&case);
    let recording = Recording::start(&case, "short", &[]);
    case.publisher.sql("UPDATE a SET v = 1");
    let file = recording.end(&case);
    let whole = std::fs::read(&file).expect("the recording");
    let other = case.log_file("other");
    let mut changed = whole.clone();
    let middle = changed.len() - 100;
    changed[middle] ^= 4;
    let cases: [(&[u8], &str); 4] = [
        (&whole[..whole.len() - 1], "is truncated"),
        (&whole[..whole.len() / 2], "is truncated"),
        (&changed, "is damaged at block"),
        (b"PGDMP", "is not a recording"),
    ];
    for (bytes, named) in cases {
        std::fs::write(&other, bytes).expect("a file");
        replay(&case, &other, &[]).expect(20, &[named, "HINT"]);
    }
    replay(&case, &case.log_file("missing"), &[]).expect(20, &["cannot read recording"]);
    assert_eq!(case.subscriber.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");
    // A recording is never written over.
    let again = pgapace("record")
        .arg(&file)
        .args(["--publisher", &case.tool.publisher, "--publication", "pub"])
        .args(["--until", "current"]);
    finish(&again).expect(20, &[]);
    assert_eq!(std::fs::read(&file).expect("the recording"), whole);
    // It ends before the LSN is reached.
    let early = case.log_file("early.recording");
    let program = pgapace("record")
        .arg(&early)
        .args(["--publisher", &case.tool.publisher, "--publication", "pub"])
        .args(["--until", "FFFFFFFF/0", "--minutes", "0.001"]);
    finish(&program).expect(11, &["before FFFFFFFF/0 of --until", "can be replayed"]);
    assert!(early.exists());
}

#[test]
fn a_subscriber_in_use_and_a_recording_that_begins_later_are_refused() {
    let case = Case::new(18, 18);
    prepare(&case);
    let first = Recording::start(&case, "one", &[]).end(&case);
    case.publisher.sql("UPDATE a SET v = 5 WHERE id = 5");
    let recording = Recording::start(&case, "two", &[]);
    case.publisher.sql("UPDATE a SET v = 6 WHERE id = 6");
    let second = recording.end(&case);
    replay(&case, &first, &[]).expect(0, &[]);
    replay(&case, &second, &[]).expect(20, &["changes in between are missing"]);
    assert_eq!(case.subscriber.value("SELECT sum(v) FROM a"), "0");

    // A subscription of pgapace, under any name.
    replay(&case, &second, &["--name", "another"]).expect(20, &["subscription replay of pgapace"]);
    drop_replayed(&case, "replay");
    create_native_subscription(&case);
    replay(&case, &second, &[]).expect(20, &["native subscription native", "public.b"]);
    drop_native_subscription(&case);
    // Now it is a clone without its first change, which the recording does not have.
    let finished = replay(&case, &second, &["--json"]);
    finished.expect(0, &[]);
    assert_eq!(case.subscriber.value("SELECT sum(v) FROM a"), "6");
}

#[test]
fn a_table_that_is_published_later_stops_the_replay() {
    let case = Case::new(15, 15);
    prepare(&case);
    case.both("CREATE TABLE c (id int PRIMARY KEY)");
    let recording = Recording::start(&case, "added", &[]);
    case.publisher.sql("UPDATE a SET v = 1 WHERE id = 1");
    case.publisher.sql("ALTER PUBLICATION pub ADD TABLE c");
    case.publisher.sql("INSERT INTO c VALUES (1)");
    let file = recording.end(&case);
    replay(&case, &file, &[])
        .expect(20, &["table public.c was published after the recording had begun", "HINT"]);
}

#[test]
fn a_replay_that_is_refused_leaves_no_subscription_behind() {
    let case = Case::new(18, 18);
    prepare(&case);
    // In binary.
    let reader = ["--subscriber", &case.tool.subscriber];
    let recording = Recording::start(&case, "first", &reader);
    case.publisher.sql("UPDATE a SET v = 1 WHERE id = 1");
    let file = recording.end(&case);
    create_native_subscription(&case);
    replay(&case, &file, &[]).expect(20, &["native subscription native"]);
    drop_native_subscription(&case);
    case.subscriber.sql("ALTER TABLE b RENAME TO c");
    replay(&case, &file, &[]).expect(6, &["public.b"]);
    case.subscriber.sql("ALTER TABLE c RENAME TO b; ALTER TABLE b ALTER d TYPE text");
    replay(&case, &file, &[]).expect(20, &["cannot read the recording's binary values"]);
    case.subscriber.sql("ALTER TABLE b ALTER d TYPE numeric USING d::numeric");
    assert_eq!(case.subscriber.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");

    case.tool.finish("run", &["--until", "current", "--copy-data=false"]).expect(0, &[]);
    replay(&case, &file, &[]).expect(20, &["of pgapace applies changes to"]);
    let names = "SELECT string_agg(name, ' ') FROM pgapace.subscription";
    assert_eq!(case.subscriber.value(names), case.tool.name);
}

/// It has rows of the publisher, whatever was there before.
#[test]
fn a_recording_is_readable_by_its_owner_only() {
    let case = Case::new(18, 18);
    prepare(&case);
    let file = case.log_file("first.recording");
    let partial = PathBuf::from(format!("{}.partial", file.display()));
    let record = pgapace("record")
        .arg(&file)
        .args(["--publisher", &case.tool.publisher, "--publication", "pub"])
        .args(["--until", "current"]);
    must(fs::write(&partial, "left behind"));
    // Only root can give a file away.
    if chown(&partial, Some(1), None).is_ok() {
        finish(&record).expect(20, &["belongs to another user", "name another file"]);
        assert_eq!(must(fs::read_to_string(&partial)), "left behind");
        must(chown(&partial, Some(0), None));
    }
    must(fs::set_permissions(&partial, Permissions::from_mode(0o666)));
    finish(&record).expect(0, &[]);
    assert_eq!(must(fs::metadata(&file)).permissions().mode() & 0o7777, 0o600);
}

/// A native subscription that has table b, and reads from no server.
fn create_native_subscription(case: &Case) {
    case.subscriber.sql(
        "CREATE SUBSCRIPTION native CONNECTION 'host=recording.invalid' PUBLICATION pub \
         WITH (connect = false)",
    );
    must(case.subscriber.cluster.sql(
        &case.subscriber.name,
        "INSERT INTO pg_subscription_rel SELECT oid, 'public.b'::regclass, 'r', NULL \
         FROM pg_subscription WHERE subname = 'native'",
    ));
}

fn drop_native_subscription(case: &Case) {
    case.subscriber.sql("ALTER SUBSCRIPTION native SET (slot_name = NONE)");
    case.subscriber.sql("DROP SUBSCRIPTION native");
}
