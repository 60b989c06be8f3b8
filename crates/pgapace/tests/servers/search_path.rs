//! Users may create objects in schemas that are in the search path of the role: up to PostgreSQL 14 everybody in `public`.

use crate::support::{Case, Tool, on_versions};

/// An operator that fits better than that of PostgreSQL, or is in a schema before `pg_catalog`, would run as the role
/// of pgapace, often a superuser.
#[test]
fn operators_of_other_users_are_not_used() {
    on_versions(&[(14, 14), (15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY, v text)");
        case.publisher.sql("INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 100) g");
        case.publish("FOR TABLE t");
        case.publisher.shadow_operators();
        case.subscriber.shadow_operators();
        expect_applied(&case, &case.tool);
        // The connection string has a search path too.
        let with_options =
            |conninfo: &str| format!("{conninfo} options='-c search_path=shadow,pg_catalog'");
        let tool = Tool {
            publisher: with_options(&case.tool.publisher),
            subscriber: with_options(&case.tool.subscriber),
            ..case.tool.clone()
        };
        expect_applied(&case, &tool);
        tool.finish("drop", &[]).expect(0, &[]);
    });
}

/// Several verbs succeed, and a change is applied.
fn expect_applied(case: &Case, tool: &Tool) {
    for verb in ["check", "run"] {
        let args: &[&str] = if verb == "run" { &["--until", "current"] } else { &[] };
        tool.finish(verb, args).expect(0, &[]);
    }
    case.publisher.sql("UPDATE t SET v = v || 'x'; DELETE FROM t WHERE id % 10 = 0");
    tool.run_until_current();
    case.subscriber.sql("DELETE FROM t WHERE id = 1");
    tool.finish("verify", &[]).expect(18, &[]);
    tool.finish("repair", &[]).expect(0, &[]);
    for verb in ["status", "sequences"] {
        tool.finish(verb, &[]).expect(0, &[]);
    }
    case.expect_equal(&["t"]);
}
