//! `check` names everything at once, and what it says to do is enough.

use std::process::Command;

use serde_json::Value;
use testbed::{Cluster, Pair, Stop};

use crate::support::{Case, Tool, must, on_versions};
use crate::verbs::json;

const PUBLISHED: &str = "
    CREATE TABLE good (id int PRIMARY KEY, v text);
    CREATE TABLE no_identity (id int, v text);
    CREATE TABLE missing (id int PRIMARY KEY, v text);
    CREATE TABLE lacking (id int PRIMARY KEY, a text, \"B b\" numeric(10, 2));
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

/// What must be found: severity, side, topic, object (`*` for any).
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

#[test]
fn a_good_set_up_has_no_blocker() {
    let case = Case::new(15, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
    case.publish("FOR TABLE t");
    let human = case.tool.finish("check", &[]);
    human.expect(0, &[]);
    for said in ["ok", "tables that fit the published ones: 1", "is available", "0 blockers"] {
        assert!(human.stdout.contains(said), "{said}:\n{}", human.stdout);
    }
    let machine = case.tool.finish("check", &["--json"]);
    machine.expect(0, &[]);
    let lines = json(&machine);
    let lines = lines.as_array().expect("an array");
    assert!(lines.iter().all(|line| line["severity"] == "note"), "{}", machine.stdout);
    assert_eq!(case.subscriber.value("SELECT to_regnamespace('pgapace') IS NULL"), "t");

    let process = case.start();
    let running = case.tool.finish("check", &[]);
    running.expect(0, &[]);
    assert!(running.stdout.contains("run by another process"), "{}", running.stdout);
    case.stop(process);
}

/// Everything that replicates well must pass without a word.
#[test]
fn unusual_tables_are_fine() {
    on_versions(&[(15, 15), (18, 18), (15, 18), (18, 15)], |case| {
        case.both(
            "CREATE SCHEMA \"S p\"; CREATE TYPE mood AS ENUM ('sad', 'ok');
             CREATE DOMAIN short AS varchar(10) CHECK (VALUE <> '');
             CREATE TYPE pair AS (a int, b text);
             CREATE TABLE \"S p\".\"T \"\"q\" (\"I d\" int PRIMARY KEY, m mood, s short, p pair[],
               r int4range, n numeric(10, 2), g int GENERATED ALWAYS AS (1) STORED,
               i int GENERATED ALWAYS AS IDENTITY);
             CREATE TABLE whole (a int, j json);
             ALTER TABLE whole REPLICA IDENTITY FULL;
             CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c int);
             CREATE UNIQUE INDEX by_index_key ON by_index (a, b) INCLUDE (c);
             ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
             CREATE TABLE empty (); ALTER TABLE empty REPLICA IDENTITY FULL;
             CREATE TABLE parent (id int PRIMARY KEY);
             CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
             CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
             CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10);
             CREATE TABLE parted_2 PARTITION OF parted DEFAULT;",
        );
        case.subscriber.sql(
            "ALTER TABLE whole ADD COLUMN extra int NOT NULL DEFAULT 1;
             ALTER TABLE parted ADD COLUMN extra int;
             CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
             CREATE TRIGGER ordinary BEFORE INSERT ON parted FOR EACH ROW EXECUTE FUNCTION f();",
        );
        for root in [true, false] {
            case.publish(&format!("FOR ALL TABLES WITH (publish_via_partition_root = {root})"));
            let finished = case.tool.finish("check", &[]);
            finished.expect(0, &[]);
            let quiet = finished.stdout.contains("0 blockers, 0 warnings");
            assert!(quiet, "{}", finished.stdout);
            case.publisher.sql("DROP PUBLICATION pub");
        }
    });
}

#[test]
fn a_slot_that_is_gone_blocks() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    case.publisher.sql(&format!("SELECT pg_drop_replication_slot('{}')", case.tool.name));
    let finished = case.tool.finish("check", &[]);
    finished.expect(6, &["1 blocker was found"]);
    assert!(finished.stdout.contains("does not exist on the publisher"), "{}", finished.stdout);
}

#[test]
fn a_database_is_not_its_own_subscriber() {
    let case = Case::new(15, 15);
    case.publisher.sql("CREATE TABLE t (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    let tool = Tool { subscriber: case.publisher.conninfo(), ..case.tool.clone() };
    let finished = tool.finish("check", &[]);
    finished.expect(6, &[]);
    assert!(finished.stdout.contains("are the same database"), "{}", finished.stdout);
}

/// Whatever holds a lock on a table, `check` ends and says so.
#[test]
fn a_locked_table_does_not_hold_it_up() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let mut holder = case.subscriber.connect();
        must(holder.batch_execute("BEGIN; LOCK TABLE t"));
        let finished = case.tool.finish("check", &[]);
        assert_eq!(finished.code, Some(6), "{}", finished.stdout);
        let said = ["lock timeout", "public.t", "Try again"];
        for text in said {
            assert!(finished.stdout.contains(text), "{text}: {}", finished.stdout);
        }
        must(holder.batch_execute("COMMIT"));
        case.tool.finish("check", &[]).expect(0, &[]);
    });
}

#[test]
fn a_side_that_is_away_does_not_hide_the_other() {
    let case = Case::new(15, 15);
    let away = "host=/nonexistent user=postgres dbname=x";
    let tool = Tool { publisher: away.to_owned(), ..case.tool.clone() };
    let finished = tool.finish("check", &[]);
    finished.expect(4, &["publisher"]);
    assert!(finished.stdout.contains("schema pgapace can be created"), "{}", finished.stdout);
    let tool = Tool { subscriber: away.to_owned(), ..case.tool.clone() };
    let finished = tool.finish("check", &[]);
    finished.expect(5, &["subscriber"]);
    assert!(finished.stdout.contains("publication pub does not exist"), "{}", finished.stdout);
}

#[test]
fn the_spool_is_looked_at() {
    let mut case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
    let spools = |tool: &Tool| {
        let lines = json(&tool.finish("check", &["--json"]));
        let lines = lines.as_array().cloned().unwrap_or_default();
        lines.into_iter().filter(|line| line["topic"] == "spool").collect::<Vec<_>>()
    };
    assert_eq!(spools(&case.tool), Vec::<Value>::new());
    case.tool.args.extend(["--spool-directory", "/nonexistent"].map(str::to_owned));
    let found = spools(&case.tool);
    assert_eq!((&found[0]["severity"], &found[0]["side"]), (&"blocker".into(), &"program".into()));
}

/// Whether the subscriber can prepare as much as the publisher: asked only where transactions are sent
/// at their PREPARE, which the command line says, or else the slot.
#[test]
fn prepared_transactions_need_room_on_the_subscriber() {
    const NAME: &str = "max_prepared_transactions";
    for major in [15, 18] {
        let mut pair = must(Pair::start_with(
            major,
            major,
            |publisher| publisher.setting(NAME, "7"),
            |subscriber| subscriber.setting(NAME, "0"),
        ));
        must(pair.publisher.sql("postgres", "CREATE TABLE t (id int PRIMARY KEY)"));
        must(pair.publisher.sql("postgres", "CREATE PUBLICATION pub FOR TABLE t"));
        must(pair.subscriber.sql("postgres", "CREATE TABLE t (id int PRIMARY KEY)"));
        let conninfo = |cluster: &Cluster| cluster.conninfo("postgres");
        let asked = |tool: &Tool| {
            let checked = tool.finish("check", &["--json"]);
            checked.expect(0, &[]);
            let lines = json(&checked).as_array().cloned().expect("an array");
            let is = |line: &Value| line["topic"] == NAME && line["side"] == "subscriber";
            let human = tool.finish("check", &[]).stdout;
            (lines.into_iter().find(is), human)
        };
        let tool = Tool::new(conninfo(&pair.publisher), conninfo(&pair.subscriber), "held");
        let (none, human) = asked(&tool);
        assert!(none.is_none() && !human.contains(NAME), "{human}");

        let two_phase = Tool { args: vec!["--two-phase".to_owned()], ..tool.clone() };
        let mut restart_with = |sql: &str| {
            must(pair.subscriber.sql("postgres", sql));
            must(pair.subscriber.restart(Stop::Fast));
        };
        for (there, said) in [(0, "is 0: a transaction that stays prepared"), (6, "is 6, and 7 on")]
        {
            restart_with(&format!("ALTER SYSTEM SET {NAME} = {there}"));
            let (found, human) = asked(&two_phase);
            let found = found.unwrap_or_else(|| panic!("{human}"));
            assert_eq!(found["severity"], "warning", "{found:#}");
            assert!(found["message"].as_str().is_some_and(|text| text.contains(said)), "{found:#}");
            assert!(human.contains(&format!("{NAME} {said}")), "{human}");
            restart_with(found["fix"].as_str().expect("a fix"));
            let (mended, human) = asked(&two_phase);
            assert!(mended.is_none(), "{mended:#?}");
            assert!(human.contains(&format!("{NAME} is 7, and 7 on the publisher")), "{human}");
        }

        // From now on the slot says so.
        two_phase.run_until_current();
        let (_, human) = asked(&tool);
        assert!(human.contains(&format!("{NAME} is 7, and 7 on the publisher")), "{human}");
        restart_with(&format!("ALTER SYSTEM SET {NAME} = 6"));
        let (found, human) = asked(&tool);
        assert_eq!(found.map(|line| line["severity"].clone()), Some("warning".into()), "{human}");
        tool.finish("drop", &[]).expect(0, &[]);
    }
}
