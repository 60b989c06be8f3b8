//! The lag of a subscription that has nothing to apply.

use testbed::wait_until;

use crate::support::{Case, PATIENCE, must};

/// WAL of others is no lag in seconds, and nothing has told the run so yet.
#[test]
fn a_run_that_has_just_begun_is_not_behind_because_of_the_time_when_none_ran() {
    let case = Case::new(18, 18);
    case.replicate("CREATE TABLE t (id int PRIMARY KEY, at timestamptz DEFAULT now())");
    case.publisher.sql("INSERT INTO t VALUES (1)");
    case.run_until_current();
    case.publisher.sql("SELECT pg_logical_emit_message(false, 'others', 'WAL')");
    must(wait_until(PATIENCE, "the last transaction to be 3 s old", || {
        Ok(case.publisher.value("SELECT now() - max(at) > '3 s' FROM t") == "t")
    }));
    let process = case.start();
    case.tool.finish("status", &["--max-lag", "3s"]).expect(0, &[]);
    case.stop(process);
}
