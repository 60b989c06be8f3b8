//! Everything that `check` finds at once, and the SQL with which it mends it.

use std::process::Command;

use serde_json::Value;
use testbed::{Cluster, Pair, Stop};

use crate::support::{Tool, must};
use crate::verbs::json;

const PUBLISHED: &str = "
    CREATE TABLE good (id int PRIMARY KEY, v text);
    CREATE TABLE no_identity (id int, v text);
    CREATE TABLE missing (id int PRIMARY KEY, v text);
    CREATE TYPE feeling AS ENUM ('fine', 'so ''so');
    CREATE DOMAIN \"Amount\" AS numeric(10, 2) NOT NULL CHECK (VALUE > 0);
    CREATE TABLE lacking (id int PRIMARY KEY, a text, \"B b\" numeric(10, 2), f feeling[], g feeling,
        h \"Amount\");
    CREATE TABLE generated (id int PRIMARY KEY, g int);
    CREATE TABLE no_key (id int PRIMARY KEY, v text);
    CREATE TABLE other_key (id int PRIMARY KEY, k int);
    CREATE TABLE filled (id int PRIMARY KEY);
    CREATE TABLE filled_too (id int PRIMARY KEY);
    CREATE TABLE required (id int PRIMARY KEY);
    CREATE TABLE secured (id int PRIMARY KEY);
    ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
    CREATE TYPE mood AS ENUM ('sad', 'it''s ok');
    CREATE TABLE types (id int PRIMARY KEY, v int, m mood);
    CREATE TABLE ruled (id int PRIMARY KEY);
    CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
    CREATE SCHEMA \"odd schema\";
    CREATE TABLE \"odd schema\".\"odd table\" (id int PRIMARY KEY);
    INSERT INTO good VALUES (1, 'one');
    INSERT INTO missing VALUES (1, 'one');
    INSERT INTO \"odd schema\".\"odd table\" VALUES (1);
    INSERT INTO no_identity VALUES (1, 'one'), (1, 'one');
    INSERT INTO required VALUES (1);
    CREATE PUBLICATION pub FOR ALL TABLES;
    CREATE ROLE repl LOGIN;
    SELECT pg_create_physical_replication_slot('broken');";

const TARGETED: &str = "
    CREATE TABLE good (id int PRIMARY KEY, v text);
    CREATE TABLE no_identity (id int, v text);
    CREATE TABLE lacking (id int PRIMARY KEY);
    CREATE TABLE generated (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id * 2) STORED);
    CREATE TABLE no_key (id int, v text);
    CREATE TABLE other_key (id int, k int PRIMARY KEY);
    CREATE TABLE filled (id int PRIMARY KEY);
    CREATE TABLE filled_too (id int PRIMARY KEY REFERENCES filled);
    INSERT INTO filled VALUES (1);
    INSERT INTO filled_too VALUES (1);
    CREATE TABLE required (id int PRIMARY KEY, r int NOT NULL, d int NOT NULL DEFAULT 1);
    CREATE TABLE secured (id int PRIMARY KEY);
    ALTER TABLE secured ENABLE ROW LEVEL SECURITY;
    CREATE TYPE mood AS ENUM ('sad');
    CREATE TABLE types (id int PRIMARY KEY, v text, m mood);
    CREATE TABLE ruled (id int PRIMARY KEY);
    CREATE RULE swallow AS ON DELETE TO ruled DO INSTEAD NOTHING;
    ALTER TABLE ruled ENABLE ALWAYS RULE swallow;
    CREATE FUNCTION same() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
    CREATE TRIGGER watch BEFORE INSERT ON ruled FOR EACH ROW EXECUTE FUNCTION same();
    ALTER TABLE ruled ENABLE REPLICA TRIGGER watch;
    CREATE ROLE app LOGIN;
    GRANT SELECT ON filled, filled_too TO app;";

/// The findings: severity, side, topic, object (`*` for any).
const FOUND: &[(&str, &str, &str, &str)] = &[
    ("blocker", "publisher", "wal_level", "*"),
    ("blocker", "publisher", "max_replication_slots", "*"),
    ("blocker", "publisher", "max_wal_senders", "*"),
    ("blocker", "publisher", "replication", "*"),
    ("blocker", "publisher", "slot", "broken"),
    ("blocker", "publisher", "publication", "other"),
    ("blocker", "publisher", "privileges", "odd schema"),
    ("blocker", "publisher", "privileges", "public.good"),
    ("blocker", "publisher", "row_security", "public.secured"),
    ("warning", "publisher", "replica_identity", "public.no_identity"),
    ("warning", "publisher", "wal_sender_timeout", "*"),
    ("note", "publisher", "logical_decoding_work_mem", "*"),
    ("note", "publisher", "unlogged", "public.unlogged"),
    ("blocker", "subscriber", "session_replication_role", "*"),
    ("blocker", "subscriber", "state", "*"),
    ("note", "subscriber", "origin", "*"),
    ("blocker", "subscriber", "schema", "odd schema"),
    ("blocker", "subscriber", "table", "odd schema.odd table"),
    ("blocker", "subscriber", "table", "public.missing"),
    ("blocker", "subscriber", "columns", "public.lacking"),
    ("blocker", "subscriber", "columns", "public.generated"),
    ("blocker", "subscriber", "columns", "public.required"),
    ("blocker", "subscriber", "search", "public.no_key"),
    ("blocker", "subscriber", "search", "public.other_key"),
    ("blocker", "subscriber", "rows", "public.filled"),
    ("blocker", "subscriber", "rows", "public.filled_too"),
    ("blocker", "subscriber", "row_security", "public.secured"),
    ("blocker", "subscriber", "privileges", "public.good"),
    ("blocker", "subscriber", "types", "public.feeling"),
    ("blocker", "subscriber", "types", "public.\"Amount\""),
    ("warning", "subscriber", "types", "public.types"),
    ("warning", "subscriber", "types", "public.mood"),
    ("warning", "subscriber", "rules", "public.ruled"),
    ("note", "subscriber", "replica_triggers", "public.ruled"),
    ("note", "subscriber", "apply_mode", "public.ruled"),
];

#[test]
fn names_everything_at_once_and_mends_it_15() {
    names_everything_at_once_and_mends_it(15);
}

#[test]
fn names_everything_at_once_and_mends_it_18() {
    names_everything_at_once_and_mends_it(18);
}

fn names_everything_at_once_and_mends_it(major: u16) {
    let mut pair = must(Pair::start_with(
        major,
        major,
        |publisher| {
            publisher
                .wal_level_logical(false)
                .setting("max_replication_slots", "1")
                .setting("max_wal_senders", "1")
                .setting("logical_decoding_work_mem", "1MB")
                .setting("wal_sender_timeout", "0")
        },
        |subscriber| subscriber,
    ));
    must(pair.publisher.create_database("shop"));
    must(pair.subscriber.create_database("shop"));
    must(pair.publisher.sql("shop", PUBLISHED));
    must(pair.subscriber.sql("shop", TARGETED));
    let as_user = |cluster: &Cluster, user| {
        cluster.conninfo("shop").replace("user=postgres", &format!("user={user}"))
    };
    let mut tool =
        Tool::new(as_user(&pair.publisher, "repl"), as_user(&pair.subscriber, "app"), "broken");
    tool.publications = "pub,other".to_owned();

    let human = tool.finish("check", &[]);
    human.expect(6, &["blockers were found"]);
    assert!(human.stdout.contains("BLOCKER"), "{}", human.stdout);
    let first = tool.finish("check", &["--json"]);
    first.expect(6, &["blockers were found"]);
    let mut found = json(&first).as_array().cloned().unwrap_or_default();
    for (severity, side, topic, object) in FOUND {
        let is = |line: &Value| {
            line["subscription"] == "broken"
                && line["severity"] == *severity
                && line["side"] == *side
                && line["topic"] == *topic
                && (*object == "*" || line["object"] == *object)
        };
        assert!(found.iter().any(is), "no {severity} {side} {topic} {object}:\n{}", first.stdout);
    }

    // A table that is created opens the view on what else it needs, so there are two rounds.
    for _ in 0..2 {
        let mut restart = false;
        for line in &found {
            let Some(fix) = line["fix"].as_str() else { continue };
            let cluster =
                if line["side"] == "publisher" { &pair.publisher } else { &pair.subscriber };
            mend(cluster, "shop", fix);
            restart |= fix.contains("restart");
        }
        if restart {
            must(pair.publisher.restart(Stop::Fast));
        }
        let next = tool.finish("check", &["--json"]);
        let left = json(&next).as_array().cloned().unwrap_or_default();
        for line in found.iter().filter(|line| !line["fix"].is_null()) {
            let still = left.iter().any(|other| other["message"] == line["message"]);
            assert!(!still, "not mended: {line:#}");
        }
        found = left;
    }
    let mended = tool.finish("check", &[]);
    assert_eq!(mended.code, Some(0), "{}{}", mended.stdout, mended.log);
    tool.run_until_current();
    let rows = must(pair.subscriber.query_one_text(
        "shop",
        "SELECT (SELECT count(*) FROM good) + (SELECT count(*) FROM missing) \
           + (SELECT count(*) FROM \"odd schema\".\"odd table\") \
           + (SELECT count(*) FROM no_identity) + (SELECT count(*) FROM required)",
    ));
    assert_eq!(rows, "6");
    let domain = "SELECT typnotnull, pg_get_constraintdef(c.oid) FROM pg_type t \
                  JOIN pg_constraint c ON c.contypid = t.oid AND c.contype = 'c' WHERE typname = 'Amount'";
    let [theirs, ours] = [&pair.publisher, &pair.subscriber]
        .map(|one| must(one.query_one_text("shop", &format!("SELECT d::text FROM ({domain}) d"))));
    assert_eq!(ours, theirs);
    let after = tool.finish("check", &[]);
    assert_eq!(after.code, Some(0), "{}{}", after.stdout, after.log);
    assert!(after.stdout.contains("can continue from"), "{}", after.stdout);
    tool.finish("drop", &[]).expect(0, &[]);
}

/// Does what a fix says, as the administrator.
#[track_caller]
pub(super) fn mend(cluster: &Cluster, database: &str, fix: &str) {
    if !fix.starts_with("pg_dump ") {
        must(cluster.sql(database, fix));
        return;
    }
    if !cluster.binaries().has("pg_dump") {
        // Some builds are servers only.
        must(cluster.sql(
            database,
            "CREATE TABLE IF NOT EXISTS missing (id int PRIMARY KEY, v text); \
             CREATE TABLE IF NOT EXISTS \"odd schema\".\"odd table\" (id int PRIMARY KEY)",
        ));
        return;
    }
    let bin = cluster.binaries().directory();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("sh");
    command.args(["-c", &fix.replace("user=app", "user=postgres")]);
    command.env("PATH", format!("{}:{path}", bin.display()));
    command.envs(cluster.binaries().environment());
    let output = must(command.output());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("error:"), "{fix}\n{errors}");
}
