//! `pgapace report` writes one file that needs nothing else, with figures that SQL knows; and what all ways to look show.

use std::os::unix::fs::PermissionsExt;

use testbed::wait_until;

use super::http_client::{free_port, get, parse};
use crate::support::{Case, PATIENCE, must};

#[test]
fn a_report_has_curves_and_tables() {
    let case = Case::new(18, 18);
    case.tool.finish("report", &["-"]).expect(17, &["there is no subscription"]);
    case.both(
        "CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE \"<b>\" (id int PRIMARY KEY)",
    );
    case.publish("FOR ALL TABLES");
    let mut process = case.start();
    case.publisher.sql("INSERT INTO \"<b>\" VALUES (1)");
    let mut rows = 0;
    let points = "SELECT count(*) FROM pgapace.stat_history";
    let waited = wait_until(PATIENCE, "two points of the curves", || {
        rows += 1;
        case.publisher.sql(&format!("INSERT INTO t VALUES ({rows}, 0)"));
        Ok(case.subscriber.value(points).parse::<u32>().unwrap_or(0) >= 2)
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{}", process.log()));
    case.wait_until_applied(&mut process);
    case.subscriber.sql("DELETE FROM t WHERE id = 1");
    case.publisher.sql("UPDATE t SET v = 1 WHERE id = 1");
    case.wait_until_applied(&mut process);
    case.stop(process);
    let file = case.log_file("report").with_extension("html");
    let path = file.to_string_lossy().into_owned();
    // The file of an earlier report, which others may read.
    must(std::fs::write(&file, "older"));
    must(std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)));
    case.tool.finish("report", &[&path]).expect(0, &[]);
    let mode = must(std::fs::metadata(&file)).permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it quotes rows");
    let report = must(std::fs::read_to_string(&file));
    for part in ["Lag in bytes", "Slowest groups", "Warnings and errors", "1 update_missing"] {
        assert!(report.contains(part), "{part}");
    }
    assert!(report.contains(&format!("<td>public.t</td><td>{rows}</td><td>1</td><td>0</td>")));
    assert!(report.contains("<td>public.t</td><td>update_missing</td><td>1</td>"), "{report}");
    assert!(report.contains("public.&lt;b&gt;") && !report.contains("<b>"), "names are escaped");
    assert!(report.matches("<svg").count() >= 5, "curves: {}", report.matches("<svg").count());
    assert!(report.matches("<polygon").count() >= 8, "shares of time");
    let slow = report.split("Slowest groups").nth(1).unwrap_or_default();
    let slow = slow.split("<h2>").next().unwrap_or_default();
    assert!(slow.contains("public.t") && slow.contains("<td>1</td>"), "{slow}");
    for not in ["<script", "http:", "https:", "src=", "onload"] {
        assert!(!report.contains(not), "{not}");
    }
}

/// With --on-missed-changes ignore, the state says nothing about them.
#[test]
fn tables_that_may_lack_changes_are_shown_although_they_are_ready() {
    let mut case = Case::new(18, 18);
    case.both("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)");
    case.publish("FOR ALL TABLES");
    case.run_until_current();
    case.subscriber.sql(
        "UPDATE pgapace.relation SET stale_lsn = '0/1', stale_through = '0/1', stale_reason = 'a gap' \
         WHERE table_name = 't'",
    );
    let port = free_port();
    let http = format!("127.0.0.1:{port}");
    let args = ["--on-missed-changes", "ignore", "--http", &http];
    case.tool.args.extend(args.map(str::to_owned));
    let mut process = case.start();
    let mut text = String::new();
    let waited = wait_until(PATIENCE, "the stale table", || {
        assert!(process.is_running(), "{}", process.log());
        text = get(port, "/metrics").body;
        let samples = parse(&text);
        let has = |name: &str, number: f64| {
            samples.iter().any(|((of, _), value)| of == name && *value == number)
        };
        Ok(has("pgapace_stale_tables", 1.0) && has("pgapace_tables", 2.0))
    });
    waited.unwrap_or_else(|error| panic!("{error}\n{text}"));
    let status: serde_json::Value = must(serde_json::from_str(&get(port, "/api/v1/status").body));
    let one = &status["subscriptions"][0];
    assert_eq!((&one["stale_tables"], &one["tables"]["ready"]), (&1.into(), &2.into()), "{one:#}");
    case.tool.args.clear();
    let top = case.tool.finish("top", &["--once"]);
    top.expect(0, &[]);
    let shown = |line: &str| line.contains("public.t ") && line.contains("stale");
    assert!(top.stdout.lines().any(shown), "{}", top.stdout);
    let report = case.tool.finish("report", &["-"]);
    report.expect(0, &[]);
    let row = "<td>public.t</td><td>ready</td><td>may lack changes since 0/1: a gap</td>";
    assert!(report.stdout.contains(row), "{}", report.stdout);
    case.stop(process);
}
