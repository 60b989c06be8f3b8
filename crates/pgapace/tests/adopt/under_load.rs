//! Adoption while the publisher writes and the native subscription has a backlog.

use testbed::workload::tpcb;

use super::NativeSubscription;
use crate::support::{Case, VERSIONS, must, on_versions, one_or_all};

pub(super) const LOAD_TABLES: [&str; 4] =
    ["pgbench_accounts", "pgbench_branches", "pgbench_history", "pgbench_tellers"];

/// A case with the tables of pgbench, of which history has no key.
pub(super) fn load_case(publisher: u16, subscriber: u16) -> Case {
    let case = Case::new(publisher, subscriber);
    must(tpcb::create_tables(&mut case.publisher.connect(), 1));
    must(tpcb::create_schema(&mut case.subscriber.connect()));
    case.publish("FOR ALL TABLES");
    case
}

pub(super) fn load(case: &Case) -> tpcb::Load {
    let options = tpcb::TpcbOptions { rate: Some(200.0), ..Default::default() };
    must(tpcb::Load::start(&case.publisher.conninfo(), 2, options))
}

#[test]
fn a_subscription_with_a_backlog_goes_on_where_it_stood() {
    for &(publisher, subscriber) in one_or_all(&VERSIONS) {
        let case = load_case(publisher, subscriber);
        let native = NativeSubscription::ready(&case, "");
        let load = load(&case);
        let applied = || case.subscriber.value("SELECT count(*) > 200 FROM pgbench_history") == "t";
        must(testbed::wait_until(crate::support::PATIENCE, "changes", || Ok(applied())));
        // A backlog builds up behind this lock.
        let mut blocker = case.subscriber.connect();
        let mut blocked = must(blocker.transaction());
        must(blocked.batch_execute("LOCK TABLE pgbench_branches"));
        let behind = || {
            let sql = "SELECT count(*) FROM pgbench_history";
            let rows = |text: String| text.parse::<u64>().unwrap_or(0);
            rows(case.publisher.value(sql)) > rows(case.subscriber.value(sql)) + 200
        };
        must(testbed::wait_until(crate::support::PATIENCE, "a backlog", || Ok(behind())));
        must(blocked.rollback());
        let adopted = native.adopt(&[]);
        adopted.expect(0, &["event=\"native_adopted\""]);
        let next = adopted.stdout.lines().find_map(|line| line.strip_prefix("next: "));
        let next = next.unwrap_or_else(|| panic!("{}", adopted.stdout)).to_owned();
        assert!(next.starts_with("pgapace run ") && next.contains("--publication"), "{next}");
        assert_eq!(native.state(), "f|∅");
        let mut process = case.start();
        must(load.stop());
        case.wait_until_applied(&mut process);
        case.stop(process);
        case.expect_equal(&LOAD_TABLES);
        native.adopt(&[]).expect(3, &["is adopted already", &next]);
    }
}

#[test]
fn a_dry_run_changes_nothing() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both(super::TABLES);
        case.publish("FOR ALL TABLES");
        let native = NativeSubscription::ready(&case, "");
        let planned = native.adopt(&["--dry-run"]);
        planned.expect(0, &[]);
        for part in ["can be adopted", "tables: 2, all ready", "SET (slot_name = NONE)", "next: "] {
            assert!(planned.stdout.contains(part), "{part}: {}", planned.stdout);
        }
        assert_eq!(native.state(), native.running());
        let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgapace'";
        assert_eq!(case.subscriber.value(schemas), "0");
    });
}
