//! Servers and tables of Citus that pgapace refuses, before anything is created.

use testbed::{Result, Stop};

use super::{CitusCluster, DB, binaries, server};
use crate::support::{Case, Tool};

#[test]
fn tables_that_cannot_be_applied_are_refused() -> Result<()> {
    let Some(binaries) = binaries("tables of Citus that are refused")? else { return Ok(()) };
    let mut cluster = CitusCluster::start(&binaries, &[])?;
    let case = Case::new(18, 18);
    let ddl = "CREATE TABLE dist (id int PRIMARY KEY, v text); \
               CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id); \
               CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (1000)";
    case.publisher.sql(ddl);
    case.publisher.sql("INSERT INTO dist VALUES (1, 'new'); INSERT INTO parts VALUES (1)");
    case.publisher.sql(
        "CREATE PUBLICATION pub FOR TABLE dist; \
         CREATE PUBLICATION parts FOR TABLE parts WITH (publish_via_partition_root = true)",
    );
    cluster.coordinator.sql(DB, ddl)?;
    cluster.coordinator.sql(
        DB,
        "SELECT create_distributed_table('dist', 'id'); \
         SELECT create_distributed_table('parts', 'id'); INSERT INTO dist VALUES (7, 'kept')",
    )?;
    let tool = Tool { subscriber: cluster.coordinator.conninfo(DB), ..case.tool.clone() };

    // Rows in shards count, although the table itself has no file.
    tool.run().expect(6, &["subscriber tables are not empty: public.dist"]);
    let emptied = ["--until", "current", "--truncate", "public.dist@1:1:"];
    tool.finish("run", &emptied).expect(6, &["--truncate cannot empty public.dist"]);
    let rows = "SELECT string_agg(v, ',') FROM dist";
    assert_eq!(cluster.coordinator.query_one_text(DB, rows)?, "kept");

    let parts = Tool { publications: "parts".to_owned(), ..tool.clone() };
    parts.run().expect(6, &["public.parts, which Citus manages: it is partitioned"]);
    let checked = parts.finish("check", &[]);
    checked.expect(6, &[]);
    assert!(checked.stdout.contains("which Citus manages"), "{}", checked.stdout);
    assert!(checked.stdout.contains("coordinator of Citus 14."), "{}", checked.stdout);
    let slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()";
    assert_eq!(case.publisher.value(slots), "0");

    // The tables are on the workers too, but commits there are not those of the coordinator.
    let worker = Tool { subscriber: cluster.workers[0].conninfo(DB), ..tool.clone() };
    worker.run().expect(5, &["a worker of a Citus cluster", "Connect to the coordinator"]);
    cluster.coordinator.stop(Stop::Fast)?;

    let alone = server(&binaries, "alone", &[])?;
    alone.sql(DB, "CREATE TABLE dist (id int PRIMARY KEY, v text)")?;
    let alone = Tool { subscriber: alone.conninfo(DB), ..tool };
    alone.run().expect(5, &["not a node of its own cluster", "citus_set_coordinator_host"]);
    Ok(())
}
