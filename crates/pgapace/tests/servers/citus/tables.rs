//! Every kind of change on every kind of table: distributed, reference, in one shard, local, and unknown to Citus.

use testbed::{Pair, Result};

use super::{CitusCluster, DB, binaries, server};
use crate::support::{Case, PATIENCE, Site, Tool, wait_while_running};

/// Tables, each with the query that shows its rows in order.
const TABLES: [(&str, &str); 7] = [
    ("dist", "SELECT * FROM dist ORDER BY id"),
    ("pair", "SELECT * FROM pair ORDER BY tenant, id"),
    ("keyless", "SELECT * FROM keyless ORDER BY id, v"),
    ("reference", "SELECT * FROM reference ORDER BY id"),
    ("one_shard", "SELECT * FROM one_shard ORDER BY id"),
    ("local", "SELECT * FROM local ORDER BY id"),
    ("plain", "SELECT * FROM plain ORDER BY id"),
];

const DDL: &str = "\
    CREATE TABLE dist (id int PRIMARY KEY, v text, n numeric); \
    CREATE TABLE parent (tenant int, id int, PRIMARY KEY (tenant, id)); \
    CREATE TABLE pair (tenant int, id int, parent int, v text, PRIMARY KEY (tenant, id)); \
    CREATE TABLE keyless (id int NOT NULL, v text); \
    CREATE TABLE reference (id int PRIMARY KEY, v text UNIQUE); \
    CREATE TABLE one_shard (id int PRIMARY KEY, v text); \
    CREATE TABLE local (id int PRIMARY KEY, v text); \
    CREATE TABLE plain (id int PRIMARY KEY, v text)";

const DISTRIBUTE: &str = "\
    SELECT create_distributed_table('dist', 'id', shard_count := 6); \
    SELECT create_distributed_table('parent', 'tenant', shard_count := 4, colocate_with := 'none'); \
    SELECT create_distributed_table('pair', 'tenant', colocate_with := 'parent'); \
    ALTER TABLE pair ADD FOREIGN KEY (tenant, parent) REFERENCES parent; \
    SELECT create_distributed_table('keyless', 'id', shard_count := 4, colocate_with := 'none'); \
    SELECT create_reference_table('reference'); \
    SELECT create_distributed_table('one_shard', NULL); \
    SELECT citus_add_local_table_to_metadata('local')";

/// Changes of every kind; the parent of `pair` is not published, so its foreign key must not be checked.
const CHANGES: &str = "\
    INSERT INTO dist SELECT i, 'v' || i, i FROM generate_series(100, 160) i; \
    UPDATE dist SET v = v || '!' WHERE id % 3 = 0; \
    UPDATE dist SET n = n + 1 WHERE id = 5; UPDATE dist SET n = n + 1 WHERE id = 5; \
    UPDATE dist SET id = id + 1000 WHERE id BETWEEN 10 AND 14; \
    DELETE FROM dist WHERE id % 7 = 0; \
    BEGIN; UPDATE dist SET id = 3001 WHERE id = 1; UPDATE dist SET id = 1 WHERE id = 2; \
      UPDATE dist SET id = 2 WHERE id = 3001; COMMIT; \
    INSERT INTO pair VALUES (1, 1, 77, 'a'), (2, 1, 77, 'b'), (3, 1, NULL, 'c'); \
    UPDATE pair SET v = 'x' WHERE tenant = 2; UPDATE pair SET tenant = 9 WHERE tenant = 3; \
    INSERT INTO keyless VALUES (1, 'a'), (1, 'a'), (2, NULL), (3, 'c'), (4, 'd'); \
    DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless WHERE id = 1); \
    UPDATE keyless SET v = 'z' WHERE id = 3; UPDATE keyless SET id = 40 WHERE id = 4; \
    INSERT INTO reference SELECT i, 'r' || i FROM generate_series(100, 110) i; \
    UPDATE reference SET v = 's' || id WHERE id > 105; UPDATE reference SET id = 500 WHERE id = 100; \
    DELETE FROM reference WHERE id = 101; \
    INSERT INTO one_shard VALUES (100, 'a'), (101, 'b'); UPDATE one_shard SET id = 300, v = 'm' WHERE id = 100; \
    INSERT INTO local VALUES (100, 'a'), (101, 'b'); UPDATE local SET v = 'l' WHERE id = 100; \
    INSERT INTO plain VALUES (100, 'a'); UPDATE plain SET v = 'p' WHERE id = 100";

#[test]
fn changes_of_every_kind_reach_every_kind_of_table() -> Result<()> {
    let Some(binaries) = binaries("tables of a Citus coordinator")? else { return Ok(()) };
    let cluster = CitusCluster::start(&binaries, &[])?;
    let case = Case::new(18, 18);
    case.publisher.sql(DDL);
    case.publisher.sql("ALTER TABLE keyless REPLICA IDENTITY FULL");
    for (table, _) in TABLES.iter().filter(|(table, _)| !matches!(*table, "keyless" | "pair")) {
        case.publisher.sql(&format!(
            "INSERT INTO {table} SELECT i, 'copied' || i FROM generate_series(1, 30) i"
        ));
    }
    case.publisher.sql(
        "CREATE PUBLICATION pub FOR TABLE dist, pair, keyless, reference, one_shard, local, plain",
    );
    cluster.coordinator.sql(DB, DDL)?;
    for statement in DISTRIBUTE.split("; ") {
        cluster.coordinator.sql(DB, statement)?;
    }
    let tool = Tool { subscriber: cluster.coordinator.conninfo(DB), ..case.tool.clone() };
    let expect_equal = |when: &str| -> Result<()> {
        let mut client = cluster.coordinator.connect(DB)?;
        for (table, sql) in TABLES {
            let rows = |messages: Vec<testbed::postgres::SimpleQueryMessage>| {
                let row = |message: &testbed::postgres::SimpleQueryMessage| match message {
                    testbed::postgres::SimpleQueryMessage::Row(row) => Some(
                        (0..row.len())
                            .map(|i| row.get(i).unwrap_or("∅"))
                            .collect::<Vec<_>>()
                            .join("|"),
                    ),
                    _ => None,
                };
                messages.iter().filter_map(row).collect::<Vec<_>>()
            };
            let found = rows(client.simple_query(sql)?);
            assert_eq!(found, case.publisher.rows(sql), "{table} {when}");
        }
        Ok(())
    };
    tool.run_until_current();
    expect_equal("after the copy")?;

    // As sets, and then each change by itself.
    case.publisher.sql(CHANGES);
    tool.run_until_current();
    expect_equal("after changes")?;
    // Its tables cannot be compared. The slot stays.
    tool.finish("rebase", &[])
        .expect(6, &["public.dist is managed by Citus", "TRUNCATE the table"]);
    case.publisher.sql(
        "TRUNCATE dist, reference, keyless, plain; TRUNCATE one_shard; TRUNCATE local, pair; \
         INSERT INTO dist SELECT i, 'again', 0 FROM generate_series(1, 30) i",
    );
    tool.run_until_current();
    expect_equal("after TRUNCATE")?;
    case.publisher.sql(CHANGES);
    let args = [tool.args.clone(), vec!["--apply-mode".to_owned(), "row".to_owned()]].concat();
    Tool { args, ..tool }.run_until_current();
    expect_equal("by rows")
}

/// Somebody creates the extension and distributes a table while pgapace streams: its sessions lack what Citus needs.
#[test]
fn citus_that_is_created_during_a_run_begins_another_run() -> Result<()> {
    let Some(binaries) = binaries("Citus that comes later")? else { return Ok(()) };
    let subscriber = server(&binaries, "later", &[])?;
    subscriber.sql(DB, "DROP EXTENSION citus")?;
    let site = Site::of(Pair { publisher: Pair::start(18, 18)?.publisher, subscriber })?;
    site.publish_tables("CREATE TABLE dist (id int PRIMARY KEY, v text)")?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.subscriber.sql(DB, "CREATE EXTENSION citus")?;
    let port = site.subscriber.port();
    let node = format!(
        "SELECT citus_set_coordinator_host('127.0.0.1', {port}); \
         SELECT citus_set_node_property('127.0.0.1', {port}, 'shouldhaveshards', true)"
    );
    site.subscriber.sql(DB, &node)?;
    site.subscriber.sql(DB, "SELECT create_distributed_table('dist', 'id')")?;
    site.publisher.sql(DB, "INSERT INTO dist SELECT i, 'v' FROM generate_series(1, 100) i")?;
    wait_while_running(&mut run, "rows in shards", PATIENCE, || {
        Ok(site.subscriber.query_one_text(DB, "SELECT count(*) FROM dist")? == "100")
    })?;
    assert!(run.log().contains("was not there when the run began"), "{}", run.log());
    assert_eq!(run.events("streaming"), 2, "{}", run.log());
    Ok(())
}
