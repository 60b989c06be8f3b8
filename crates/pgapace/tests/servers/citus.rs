//! A Citus coordinator as subscriber. In a replica session, TRUNCATE of a distributed table does
//! not reach its shards. A distributed table appears empty although its shards contain rows. A
//! distributed commit is not atomic with the commit of pgapace's progress. Distributed tables are
//! therefore refused.

use std::path::Path;

use testbed::{Cluster, Result, ServerBinaries, Stop};

use crate::support::{Case, Finished, Tool, skipped};

/// Directory of the server programs with Citus.
const VARIABLE: &str = "PGAPACE_CITUS_BIN";
/// Database names on the coordinator are its own; this database has the extension.
const DB: &str = "postgres";

fn coordinator() -> Result<Option<Cluster>> {
    let Some(directory) = std::env::var_os(VARIABLE) else {
        skipped("a Citus coordinator as subscriber", "PGAPACE_CITUS_BIN is not set");
        return Ok(None);
    };
    let binaries = ServerBinaries::in_directory(Path::new(&directory))?;
    let cluster = Cluster::builder(&binaries)
        .name("coordinator")
        .setting("shared_preload_libraries", "citus")
        .setting("citus.node_conninfo", "sslmode=prefer")
        .start()?;
    cluster.sql(DB, "CREATE EXTENSION citus")?;
    let itself = format!(
        "SELECT citus_set_coordinator_host('127.0.0.1', {port}); \
         SELECT citus_set_node_property('127.0.0.1', {port}, 'shouldhaveshards', true)",
        port = cluster.port()
    );
    cluster.sql(DB, &itself)?;
    Ok(Some(cluster))
}

#[test]
fn distributed_tables_are_refused() -> Result<()> {
    let Some(mut coordinator) = coordinator()? else { return Ok(()) };
    let case = Case::new(18, 18);
    let ddl = "CREATE TABLE dist (id int PRIMARY KEY, v text); CREATE TABLE ref (id int PRIMARY KEY); \
               CREATE TABLE plain (id int PRIMARY KEY)";
    case.publisher.sql(ddl);
    case.publisher.sql("INSERT INTO dist VALUES (1, 'new'); INSERT INTO ref VALUES (1); INSERT INTO plain VALUES (1)");
    case.publish("FOR TABLE dist, ref, plain");
    case.publisher.sql("CREATE PUBLICATION plain FOR TABLE plain");
    coordinator.sql(DB, ddl)?;
    coordinator.sql(
        DB,
        "SELECT create_distributed_table('dist', 'id'); SELECT create_reference_table('ref'); \
         INSERT INTO dist VALUES (7, 'kept')",
    )?;
    let tool = Tool { subscriber: coordinator.conninfo(DB), ..case.tool.clone() };
    let refused = |finished: &Finished| {
        finished.expect(6, &["public.dist is managed by Citus", "public.ref is managed by Citus"]);
    };
    refused(&tool.run());
    let checked = tool.finish("check", &[]);
    checked.expect(6, &[]);
    assert!(checked.stdout.contains("managed by Citus"), "{}", checked.stdout);
    let rows = "SELECT string_agg(v, ',') FROM dist";
    assert_eq!(coordinator.query_one_text(DB, rows)?, "kept");
    assert_eq!(
        case.publisher
            .value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"),
        "0"
    );

    // Citus does not affect its local tables.
    let plain = Tool { publications: "plain".to_owned(), ..tool.clone() };
    plain.run().expect(0, &[]);
    assert_eq!(coordinator.query_one_text(DB, "SELECT count(*) FROM plain")?, "1");
    // They are refused when they become distributed.
    coordinator.sql(DB, "SELECT create_distributed_table('plain', 'id')")?;
    case.publisher.sql("INSERT INTO plain VALUES (2)");
    plain.run().expect(6, &["public.plain is managed by Citus"]);
    coordinator.stop(Stop::Fast)?;
    Ok(())
}
