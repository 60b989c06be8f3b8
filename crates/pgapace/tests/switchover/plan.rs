//! `--plan` names everything that keeps writes from moving.

use super::{switchover, two_way_case};
use crate::support::{Tool, must};

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
