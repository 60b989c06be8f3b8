//! `pgapace report` writes one file that needs nothing else, with figures that SQL knows.

use testbed::wait_until;

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
    case.tool.finish("report", &[&path]).expect(0, &[]);
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
