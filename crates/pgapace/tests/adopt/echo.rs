//! `check` warns of a subscription in the opposite direction that would send changes back.

use serde_json::Value;

use crate::support::{Case, must, on_versions};

/// Severity and message of the findings about opposite subscriptions.
fn findings(case: &Case, args: &[&str]) -> Vec<(String, String)> {
    let all: Vec<_> = ["--json"].iter().chain(args).copied().collect();
    let checked = case.tool.finish("check", &all);
    let json: Value = must(serde_json::from_str(&checked.stdout).map_err(|e| format!("{e}")));
    let findings = json.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    findings
        .iter()
        .filter(|finding| finding["topic"] == "opposite")
        .map(|finding| (text(&finding["severity"]), text(&finding["message"])))
        .collect()
}

#[test]
fn an_opposite_subscription_that_would_echo_is_named() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR ALL TABLES");
        assert_eq!(findings(&case, &[]), []);
        case.subscriber.sql("CREATE PUBLICATION back FOR TABLE t");
        let back = format!("{}_back", case.tool.name);
        // CREATE SUBSCRIPTION with a slot waits for all transactions of the other server, and such commands
        // of other tests wait for transactions of this one.
        case.subscriber
            .sql(&format!("SELECT pg_create_logical_replication_slot('{back}', 'pgoutput')"));
        case.publisher.sql(&format!(
            "CREATE SUBSCRIPTION {back} CONNECTION '{}' PUBLICATION back \
             WITH (copy_data = false, create_slot = false)",
            case.subscriber.conninfo().replace('\'', "''")
        ));
        let (severity, message) = findings(&case, &[]).remove(0);
        assert_eq!(severity, "warning");
        assert!(message.contains(&back) && message.contains("without end"), "{message}");
        if case.publisher.major() >= 16 {
            let (severity, message) = findings(&case, &["--origin", "none"]).remove(0);
            assert!(severity == "warning" && message.contains("goes back"), "{message}");
            case.publisher.sql(&format!("ALTER SUBSCRIPTION {back} SET (origin = none)"));
            assert_eq!(findings(&case, &["--origin", "none"]), []);
        }
        case.publisher.sql(&format!("DROP SUBSCRIPTION {back}"));
    });
}
