//! Writes were moved to the new side and back, and one process has applied all that. The subscription is what it was.

use testbed::Cluster;
use testbed::program::Process;

use super::turning::write;
use super::{Slots, expect_equal_soon, switchover, two_way_case, value};
use crate::support::{Case, PATIENCE, must, one_or_all, wait_while_running};

/// Waits until a query has the same result on both sides, and returns that.
fn same(case: &Case, process: &mut Process, sql: &str) -> String {
    let database = case.publisher.name.as_str();
    let of = |cluster: &Cluster| value(cluster, database, sql);
    let wanted = of(case.publisher.cluster);
    must(wait_while_running(process, sql, PATIENCE, || Ok(of(case.subscriber.cluster) == wanted)));
    wanted
}

#[test]
fn tables_that_are_added_after_the_way_back_are_copied() {
    for &(publisher, subscriber) in one_or_all(&[(15, 15), (18, 18)]) {
        let case = two_way_case(publisher, subscriber);
        let _slots = Slots(&case);
        let database = case.publisher.name.as_str();
        let mut process = case.start();
        for direction in ["--go", "--back"] {
            switchover(&case.tool, &[direction]).expect(0, &[]);
            expect_equal_soon(&case, &mut process);
        }
        // Of the process that turned round, and of a later one with the old settings.
        for table in ["later", "last"] {
            let create = format!("CREATE TABLE {table} (id int PRIMARY KEY)");
            write(case.subscriber.cluster, database, &create);
            let fill = format!(
                "{create}; INSERT INTO {table} SELECT generate_series(1, 100); \
                 ALTER PUBLICATION pub ADD TABLE {table}"
            );
            must(case.publisher.cluster.sql(database, &fill));
            must(case.publisher.cluster.sql(database, &format!("INSERT INTO {table} VALUES (0)")));
            let count = format!("SELECT count(*) FROM {table}");
            assert_eq!(same(&case, &mut process, &count), "101");
            let left = "SELECT count(*) FROM pgapace.relation WHERE state <> 'ready'";
            must(wait_while_running(&mut process, left, PATIENCE, || {
                Ok(value(case.subscriber.cluster, database, left) == "0")
            }));
            case.stop(process);
            // Nobody has given another origin.
            case.tool.finish("verify", &[]).expect(0, &[]);
            process = case.start();
        }
        case.stop(process);
    }
}

/// What the publisher gets from elsewhere has an origin.
#[test]
fn rows_with_an_origin_are_applied_after_the_way_back() {
    let case = two_way_case(18, 18);
    let _slots = Slots(&case);
    let mut process = case.start();
    for direction in ["--go", "--back"] {
        switchover(&case.tool, &[direction]).expect(0, &[]);
        expect_equal_soon(&case, &mut process);
    }
    let origin = format!("elsewhere_{}", case.tool.name);
    let mut client = must(case.publisher.cluster.connect(&case.publisher.name));
    must(client.batch_execute(&format!(
        "SELECT pg_replication_origin_create('{origin}'); \
         SELECT pg_replication_origin_session_setup('{origin}')"
    )));
    must(client.batch_execute("INSERT INTO orders (client, n) VALUES (77, 1)"));
    must(client.batch_execute(&format!(
        "SELECT pg_replication_origin_session_reset(); SELECT pg_replication_origin_drop('{origin}')"
    )));
    let count = "SELECT count(*) FROM orders WHERE client = 77";
    assert_eq!(same(&case, &mut process, count), "1");
    case.stop(process);
}
