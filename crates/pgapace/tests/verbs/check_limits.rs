//! `pgapace check`: limits of the servers, the databases and the roles.

use serde_json::Value;
use testbed::{Cluster, Pair, Stop};

use super::command_line::file;
use crate::support::{Finished, Tool, finish, must, on_versions, one_or_all, pgapace};
use crate::verbs::json;

/// Whether the subscriber can prepare as much as the publisher: asked only where transactions are sent
/// at their PREPARE, which the command line says, or else the slot.
#[test]
fn prepared_transactions_need_room_on_the_subscriber() {
    const NAME: &str = "max_prepared_transactions";
    for &major in one_or_all(&[15, 18]) {
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
        let off = Tool { args: vec!["--two-phase=false".to_owned()], ..tool.clone() };
        let said = if major < 18 { "slot held keeps two_phase" } else { "slot held has two_phase" };
        let (_, human) = asked(&off);
        assert!(human.contains(said), "{human}");
        restart_with(&format!("ALTER SYSTEM SET {NAME} = 6"));
        let (found, human) = asked(&tool);
        assert_eq!(found.map(|line| line["severity"].clone()), Some("warning".into()), "{human}");
        tool.finish("drop", &[]).expect(0, &[]);
    }
}

/// Each subscription has room enough alone.
#[test]
fn subscriptions_of_a_file_are_added_up() {
    const NAME: &str = "max_replication_slots";
    for &major in one_or_all(&[15, 18]) {
        let mut pair = must(Pair::start_with(
            major,
            major,
            |publisher| publisher.setting(NAME, "2"),
            |subscriber| subscriber,
        ));
        let mut config = format!(
            "publisher = \"{}\"\nsubscriber = \"{}\"\n",
            pair.publisher.conninfo("postgres"),
            pair.subscriber.conninfo("postgres")
        );
        for table in ["one", "two", "three"] {
            let create = format!("CREATE TABLE {table} (id int PRIMARY KEY)");
            must(pair.publisher.sql("postgres", &create));
            must(pair.subscriber.sql("postgres", &create));
            let publish = format!("CREATE PUBLICATION {table} FOR TABLE {table}");
            must(pair.publisher.sql("postgres", &publish));
            config.push_str(&format!(
                "[[subscription]]\nname = \"{table}\"\npublication = [\"{table}\"]\n"
            ));
        }
        let file = file(&config);
        let checked = |code: i32, args: &[&str]| {
            let file = file.path().display().to_string();
            let checked = finish(&pgapace("check").args(["--config", &file]).args(args));
            checked.expect(code, &[]);
            checked
        };
        let of_limit = |checked: &Finished| {
            let lines = json(checked).as_array().cloned().expect("an array");
            let is = |line: &Value| line["topic"] == NAME && line["side"] == "publisher";
            lines.into_iter().filter(is).collect::<Vec<_>>()
        };
        // One of a file is checked alone.
        assert!(of_limit(&checked(0, &["--name", "two", "--json"])).is_empty());
        let found = of_limit(&checked(6, &["--json"]));
        let [line] = &found[..] else { panic!("{found:#?}") };
        let said =
            "0 of 2 are in use; the subscriptions of this configuration need 3 more together";
        assert!(line["message"].as_str().is_some_and(|text| text.contains(said)), "{line:#}");
        assert_eq!((&line["severity"], &line["subscription"]), (&"blocker".into(), &"one".into()));
        let fix = line["fix"].as_str().expect("a fix").to_owned();
        must(pair.publisher.sql("postgres", &fix));
        must(pair.publisher.restart(Stop::Fast));
        assert!(of_limit(&checked(0, &["--json"])).is_empty());
    }
}

/// A role without pg_read_all_stats does not see what kind of session those of other roles are.
#[test]
fn connections_of_other_roles_and_limits_of_the_role_count() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        let role = format!("{}_limited", case.tool.name);
        for side in [&case.publisher, &case.subscriber] {
            let limits = format!(
                "CREATE ROLE {role} LOGIN REPLICATION CONNECTION LIMIT 2; \
                 ALTER DATABASE {} CONNECTION LIMIT 50",
                side.name
            );
            side.sql(&limits);
        }
        let limited = |conninfo: &str| conninfo.replace("user=postgres", &format!("user={role}"));
        let mut tool = case.tool.clone();
        tool.publisher = limited(&tool.publisher);
        tool.subscriber = limited(&tool.subscriber);
        let others: Vec<_> =
            (0..5).flat_map(|_| [case.publisher.connect(), case.subscriber.connect()]).collect();
        let checked = tool.finish("check", &[]).stdout;
        for (side, of) in [
            ("publisher  max_connections: ", " of "),
            ("subscriber ", " connections are in use"),
            ("publisher  datconnlimit: ", " of 50 "),
            ("subscriber ", " of 50 connections of database"),
        ] {
            let line = checked.lines().find(|line| line.contains(side) && line.contains(of));
            let used =
                line.and_then(|line| line.split(side).nth(1)?.split(' ').next()?.parse().ok());
            assert!(used.is_some_and(|used: usize| used >= 5), "{side}{of}: {line:?}\n{checked}");
        }
        for said in [
            "BLOCKER  publisher  rolconnlimit: 0 of 2 are in use",
            "BLOCKER  subscriber 0 of 2 connections of role",
        ] {
            assert!(checked.contains(said), "{said}:\n{checked}");
        }
        let fix = format!("ALTER ROLE \"{role}\" CONNECTION LIMIT ");
        assert_eq!(checked.matches(&fix).count(), 2, "{checked}");
        drop(others);
        for side in [&case.publisher, &case.subscriber] {
            side.sql(&format!("DROP ROLE {role}"));
        }
    });
}

#[test]
fn a_password_that_ends_soon_is_a_warning() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        let role = format!("{}_expires", case.tool.name);
        let conninfo = |of: &str| format!("{of} user={role}");
        let create =
            |until: &str| format!("CREATE ROLE {role} SUPERUSER LOGIN VALID UNTIL {until}");
        case.publisher.sql(&create("'2000-01-01'"));
        case.subscriber.sql(&create("'infinity'"));
        let (publisher, subscriber) =
            (conninfo(&case.tool.publisher), conninfo(&case.tool.subscriber));
        let tool = Tool { publisher, subscriber, ..case.tool.clone() };
        let warnings = || {
            let checked = tool.finish("check", &[]);
            checked.expect(0, &[]);
            let lines = checked.stdout.lines().filter(|line| line.contains("the password of role"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let found = warnings();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("warning  publisher") && found[0].contains("was valid until"));
        let alter = |days: i32| {
            format!(
                "DO $$ BEGIN EXECUTE format('ALTER ROLE {role} VALID UNTIL %L', now() + interval '{days} days'); END $$"
            )
        };
        case.publisher.sql(&alter(31));
        case.subscriber.sql(&alter(29));
        let found = warnings();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("warning  subscriber") && found[0].contains("is valid until"));
        case.publisher.sql(&format!("DROP ROLE {role}"));
        case.subscriber.sql(&format!("DROP ROLE {role}"));
    });
}
