//! `--plan` names everything that keeps writes from moving.

use super::{switchover, two_way_case};
use crate::support::{PATIENCE, Tool, must, one_or_all, wait_for_event};

#[test]
fn a_plan_names_what_is_missing() {
    let case = two_way_case(15, 18);
    case.both(
        "CREATE SEQUENCE ring MAXVALUE 1000 CYCLE; CREATE TABLE other (v int DEFAULT nextval('ring')); \
         CREATE TABLE third (v int)",
    );
    case.publisher
        .sql("ALTER PUBLICATION pub ADD TABLE other; CREATE PUBLICATION more FOR TABLE third");
    let role = format!("clerk_{}", case.tool.name);
    case.publisher.sql(&format!(
        "CREATE ROLE {role} LOGIN; GRANT INSERT ON orders TO {role}; \
         ALTER ROLE {role} IN DATABASE {} SET default_transaction_read_only = off",
        case.publisher.name
    ));
    case.run_until_current();
    let more = Tool {
        name: format!("{}_more", case.tool.name),
        publications: "more".to_owned(),
        ..case.tool.clone()
    };
    more.run_until_current();
    case.subscriber.sql("SELECT setval('ring', 900)");
    let wrong = Tool { publisher: case.tool.subscriber.clone(), ..case.tool.clone() };
    for action in ["--plan", "--go", "--abort"] {
        switchover(&wrong, &[action]).expect(10, &["is another database system"]);
    }
    let planned = switchover(&case.tool, &["--plan", "--verified-within", "1h"]);
    planned.expect(
        3,
        &[
            "no process applies",
            "does not publish public.other",
            &format!("no role {role}"),
            "not found equal within --verified-within: public.orders, public.other",
            &format!("ALTER ROLE {role} IN DATABASE {} RESET default_", case.publisher.name),
            &format!("have not ended: {}.", more.name),
            "SELECT pg_catalog.setval('\"public\".\"ring\"', 1, false);",
        ],
    );
    case.tool.finish("verify", &[]).expect(0, &[]);
    case.subscriber.sql(&format!("DROP PUBLICATION pgapace_back; CREATE ROLE {role}"));
    let planned = switchover(&case.tool, &["--plan", "--with-others", "--verified-within", "1h"]);
    let grant = format!("GRANT INSERT ON \"public\".\"orders\" TO \"{role}\";");
    planned.expect(3, &["no process applies", "no publication \"pgapace_back\"", &grant]);
    for text in ["--verified-within", "have not ended"] {
        assert!(!planned.log.contains(text), "{}", planned.log);
    }
    more.finish("drop", &[]).expect(0, &[]);
    // The last verification counts, and it has left a column out.
    case.tool.finish("verify", &["--except-column", "orders.n"]).expect(0, &[]);
    let planned = switchover(&case.tool, &["--plan", "--verified-within", "1h"]);
    planned.expect(3, &["not found equal within --verified-within: public.orders: pgapace verify"]);
    switchover(&case.tool, &[]).expect(2, &[]);
    // A variable that is not set: nothing would stop writes.
    for (flag, command) in [("--stop-writes", ""), ("--resume-writes", " "), ("--open", "")] {
        switchover(&case.tool, &["--go", flag, command]).expect(2, &[flag, "the command is empty"]);
    }
    for database in [&case.publisher, &case.subscriber] {
        database.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    }
}

/// The servers keep a backslash in a literal only if standard_conforming_strings is on.
#[test]
fn a_plan_does_not_depend_on_the_syntax_of_literals() {
    let case = two_way_case(15, 18);
    case.run_until_current();
    let role = format!("pgclerk_{}", case.tool.name);
    for database in [&case.publisher, &case.subscriber] {
        database.sql(&format!(
            "CREATE ROLE {role}; GRANT INSERT ON orders TO {role}; \
             ALTER DATABASE {} SET standard_conforming_strings = off",
            database.name
        ));
    }
    let planned = switchover(&case.tool, &["--plan"]);
    planned.expect(3, &["no process applies"]);
    assert!(!planned.log.contains(&role), "{}", planned.log);
    for database in [&case.publisher, &case.subscriber] {
        database.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    }
}

/// The way back has its state on the publisher, whose readers get that schema.
#[test]
fn a_plan_names_readers_of_schema_pgapace() {
    let case = two_way_case(15, 18);
    case.publisher.sql("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES");
    case.run_until_current();
    let is_named = || {
        let planned = switchover(&case.tool, &["--plan"]);
        planned.stdout.contains("on the publisher, schema pgapace is part of publication pub")
    };
    // The slot of the subscription itself does not count.
    assert!(!is_named());
    case.publisher.sql(&format!(
        "SELECT pg_create_logical_replication_slot('{}_reader', 'pgoutput')",
        case.tool.name
    ));
    assert!(is_named());
}

/// A table that cannot be compared is named before writes are stopped.
#[test]
fn a_table_to_verify_that_is_not_published_ends_no_session() {
    let case = two_way_case(15, 18);
    let process = case.start();
    let mut client = case.publisher.connect();
    for action in ["--plan", "--go"] {
        switchover(&case.tool, &[action, "--verify", "order"])
            .expect(3, &["cannot be switched over", "have no table public.order"]);
    }
    switchover(&case.tool, &["--plan", "--verify", "orders"]).expect(0, &[]);
    must(client.batch_execute("INSERT INTO orders (client, n) VALUES (1, 1)"));
    case.stop(process);
}

/// What the way back does not carry would be lost when writes move back.
#[test]
fn a_plan_names_what_the_way_back_leaves_out() {
    for &(publisher, subscriber) in one_or_all(&[(15, 18), (18, 15)]) {
        let case = two_way_case(publisher, subscriber);
        case.both("CREATE TABLE notes (id int PRIMARY KEY, v text, w int)");
        case.publisher.sql("ALTER PUBLICATION pub ADD TABLE notes WHERE (id < 50)");
        let process = case.start();
        let plan = |publication: &str| {
            case.subscriber.sql(&format!(
                "DROP PUBLICATION pgapace_back; CREATE PUBLICATION pgapace_back {publication}"
            ));
            switchover(&case.tool, &["--plan"])
        };
        let leave_out = [
            (
                "FOR TABLE orders, notes WITH (publish = 'insert, update')",
                "does not publish delete, truncate of public.notes, public.orders: ALTER PUBLICATION \
                 \"pgapace_back\" SET (publish = 'insert, update, delete, truncate');",
            ),
            (
                "FOR TABLE orders, notes (id, v)",
                "does not publish w of public.notes: ALTER PUBLICATION \"pgapace_back\" DROP TABLE \
                 \"public\".\"notes\";",
            ),
            ("FOR TABLE notes, orders WHERE (id < 50)", "has a row filter for public.orders"),
            ("FOR TABLE orders, notes WHERE (id < 40)", "has a row filter for public.notes"),
        ];
        for (publication, named) in leave_out {
            plan(publication).expect(3, &[named]);
        }
        let carry = ["TABLE orders, notes", "TABLE orders, notes WHERE (id < 50)", "ALL TABLES"];
        for publication in carry {
            plan(&format!("FOR {publication}")).expect(0, &[]);
        }
        case.stop(process);
    }
}

/// With the way back, its changes would be applied twice on the publisher.
#[test]
fn a_plan_names_a_subscription_in_the_opposite_direction() {
    let mut case = two_way_case(18, 18);
    case.subscriber.sql("CREATE PUBLICATION reverse FOR TABLE orders");
    case.tool.args = vec!["--origin".to_owned(), "none".to_owned()];
    let process = case.start();
    let mut reverse = Tool {
        publisher: case.tool.subscriber.clone(),
        subscriber: case.tool.publisher.clone(),
        name: format!("{}_reverse", case.tool.name),
        publications: "reverse".to_owned(),
        args: [&case.tool.args[..], &["--copy-data=false".to_owned()]].concat(),
    };
    let mut opposite = reverse.start(case.log_file("reverse"));
    must(wait_for_event(&mut opposite, "streaming", PATIENCE));
    case.tool.args.clear();
    reverse.args.clear();
    let named = format!(
        "subscription {0} of the publisher applies changes of 1 of these tables in the opposite direction: stop its \
         pgapace run, and pgapace drop --name {0} with the servers swapped",
        reverse.name
    );
    for args in [&["--plan"][..], &["--go"], &["--plan", "--no-back"]] {
        switchover(&case.tool, args).expect(3, &[&named]);
    }
    case.stop(opposite);
    reverse.finish("drop", &[]).expect(0, &[]);
    switchover(&case.tool, &["--plan"]).expect(0, &[]);
    case.stop(process);
}

/// What helps an ordinary subscription deletes on the publisher what only that has.
#[test]
fn a_plan_advises_no_rebase_of_an_earlier_way_back() {
    let mut case = two_way_case(18, 18);
    case.tool.args = vec!["--origin".to_owned(), "none".to_owned()];
    case.run_until_current();
    let back = Tool {
        publisher: case.tool.subscriber.clone(),
        subscriber: case.tool.publisher.clone(),
        name: format!("{}_back", case.tool.name),
        publications: "pgapace_back".to_owned(),
        args: [&case.tool.args[..], &["--copy-data=false".to_owned()]].concat(),
    };
    back.run_until_current();
    case.subscriber.sql(&format!("SELECT pg_drop_replication_slot('{}')", back.name));
    let named = format!("the publisher has a subscription {0} already", back.name);
    let drop = format!("pgapace drop --keep-slot --name {0} with the servers swapped", back.name);
    case.tool.args.clear();
    let planned = switchover(&case.tool, &["--plan"]);
    planned.expect(3, &[&named, &drop, "--back-name"]);
    assert!(!planned.log.contains("rebase"), "{}", planned.log);
    back.finish("drop", &["--keep-slot"]).expect(0, &[]);
    let planned = switchover(&case.tool, &["--plan"]);
    assert!(!planned.log.contains(&named), "{}", planned.log);
}
