//! A publication that is dropped while a run goes on.

use testbed::wait_until;

use crate::support::{PATIENCE, must, on_versions};
use crate::verbs::json;

/// Before 18 the walsender ends with an error. The run waits, says so, and goes on when the publication
/// is there again: nothing was written without it.
#[test]
fn it_is_waited_for() {
    on_versions(&[(15, 15), (16, 18)], |case| {
        case.replicate("CREATE TABLE t (id int PRIMARY KEY)");
        let mut process = case.start();
        case.publisher.sql("DROP PUBLICATION pub");
        case.publisher.sql("CREATE TABLE unpublished (id int); INSERT INTO unpublished VALUES (1)");
        case.publisher.sql("INSERT INTO t VALUES (1)");
        let says = |text: &str| {
            let status = &json(&case.tool.finish("status", &["--json"]))[0];
            status["last_error"].to_string().contains(text)
        };
        must(wait_until(PATIENCE, "status to say what is missing", || Ok(says("publication"))));
        assert!(process.is_running(), "{}", process.log());
        let shown = json(&case.tool.finish("status", &["--json"]));
        assert_eq!(shown[0]["state"], "retrying", "{shown:#}");
        case.publisher.sql("CREATE PUBLICATION pub FOR ALL TABLES");
        // What was written meanwhile cannot be sent by this server, ever.
        must(wait_until(PATIENCE, "status to say how to go on", || Ok(says("pgapace drop"))));
        assert!(process.is_running(), "{}", process.log());
        must(process.kill9());
    });
}
