//! `check` says what to do in the words of the managed service. The services are imitated: their
//! settings are placeholders of the database, and their roles have no privileges.

use serde_json::Value;
use testbed::{Cluster, Pair};

use crate::support::{Tool, must};
use crate::verbs::json;

/// The mark by which a service is recognized, and the texts about these topics.
struct Imitated {
    marks: &'static str,
    unmark: &'static str,
    name: &'static str,
    wal_level: &'static str,
    replication: &'static str,
    replica_role: &'static str,
    slots: &'static str,
}

const SERVICES: [Imitated; 6] = [
    Imitated {
        marks: "ALTER DATABASE shop SET rds.extensions = 'x'",
        unmark: "ALTER DATABASE shop RESET rds.extensions",
        name: "Amazon RDS",
        wal_level: "set rds.logical_replication to 1 in the DB parameter group",
        replication: "GRANT rds_replication TO repl;",
        replica_role: "GRANT rds_superuser TO app;",
        slots: "set max_replication_slots to ",
    },
    Imitated {
        marks: "ALTER DATABASE shop SET cloudsql.logical_decoding = 'off'",
        unmark: "ALTER DATABASE shop RESET cloudsql.logical_decoding",
        name: "Google Cloud SQL",
        wal_level: "database flag cloudsql.logical_decoding to on",
        replication: "ALTER ROLE repl REPLICATION; -- as cloudsqlsuperuser",
        replica_role: "connect as a member of cloudsqlsuperuser",
        slots: "database flag max_replication_slots to ",
    },
    Imitated {
        marks: "ALTER DATABASE shop SET alloydb.logical_decoding = 'off'",
        unmark: "ALTER DATABASE shop RESET alloydb.logical_decoding",
        name: "Google AlloyDB",
        wal_level: "database flag alloydb.logical_decoding to on",
        replication: "ALTER ROLE repl REPLICATION; -- as alloydbsuperuser",
        replica_role: "connect as a member of alloydbsuperuser",
        slots: "database flag max_replication_slots to ",
    },
    Imitated {
        marks: "ALTER DATABASE shop SET azure.extensions = ''",
        unmark: "ALTER DATABASE shop RESET azure.extensions",
        name: "Azure Database for PostgreSQL",
        wal_level: "set the server parameter wal_level to logical",
        replication: "ALTER ROLE repl REPLICATION; -- as azure_pg_admin",
        replica_role: "connect as a member of azure_pg_admin",
        slots: "--name max_replication_slots",
    },
    Imitated {
        marks: "CREATE ROLE supabase_admin",
        unmark: "DROP ROLE supabase_admin",
        name: "Supabase",
        wal_level: "wal_level is logical in every project",
        replication: "ALTER ROLE repl REPLICATION; -- as postgres",
        replica_role: "connect as role postgres",
        slots: "postgres-config update --config max_replication_slots=",
    },
    Imitated {
        marks: "CREATE ROLE neon_superuser",
        unmark: "DROP ROLE neon_superuser",
        name: "Neon",
        wal_level: "enable Logical Replication in the settings of the project",
        replication: "created in the console",
        replica_role: "session_replication_role",
        slots: "max_replication_slots is fixed",
    },
];

#[test]
fn a_managed_service_is_told_in_its_own_words_15() {
    a_managed_service_is_told_in_its_own_words(15);
}

#[test]
fn a_managed_service_is_told_in_its_own_words_18() {
    a_managed_service_is_told_in_its_own_words(18);
}

fn a_managed_service_is_told_in_its_own_words(major: u16) {
    let pair = must(Pair::start_with(
        major,
        major,
        |publisher| publisher.wal_level_logical(false).setting("max_replication_slots", "1"),
        |subscriber| subscriber,
    ));
    for cluster in [&pair.publisher, &pair.subscriber] {
        must(cluster.create_database("shop"));
        must(cluster.sql("shop", "CREATE TABLE t (id int PRIMARY KEY)"));
    }
    must(pair.publisher.sql(
        "shop",
        "CREATE PUBLICATION pub FOR TABLE t; CREATE ROLE repl LOGIN; \
         SELECT pg_create_physical_replication_slot('other')",
    ));
    must(pair.subscriber.sql("shop", "CREATE ROLE app LOGIN"));
    let login = |cluster: &Cluster, user: &str| {
        cluster.conninfo("shop").replace("user=postgres", &format!("user={user}"))
    };
    let tool = Tool::new(login(&pair.publisher, "repl"), login(&pair.subscriber, "app"), "shop");
    for service in &SERVICES {
        for cluster in [&pair.publisher, &pair.subscriber] {
            must(cluster.sql("shop", service.marks));
        }
        let human = tool.finish("check", &[]).stdout;
        let page = format!("the server is {}; docs/services/", service.name);
        assert_eq!(human.matches(&page).count(), 2, "{human}");
        assert!(!human.contains("ALTER SYSTEM"), "{human}");
        let found = json(&tool.finish("check", &["--json"])).as_array().cloned().expect("lines");
        for (topic, said) in [
            ("wal_level", service.wal_level),
            ("replication", service.replication),
            ("session_replication_role", service.replica_role),
            ("max_replication_slots", service.slots),
        ] {
            let line = found.iter().find(|line| line["topic"] == topic);
            let line = line.unwrap_or_else(|| panic!("{topic}: {human}"));
            let fix = line["fix"].as_str().unwrap_or_default();
            assert!(fix.contains(said), "{}, {topic}: {fix}", service.name);
            assert!(human.contains(fix), "{human}");
            let sql = fix.starts_with("GRANT ") || fix.starts_with("ALTER ROLE ");
            let kind: Value = if sql { "sql" } else { "service" }.into();
            assert_eq!(line["fix_kind"], kind, "{line:#}");
        }
        for cluster in [&pair.publisher, &pair.subscriber] {
            must(cluster.sql("shop", service.unmark));
        }
    }
    let human = tool.finish("check", &[]).stdout;
    assert!(human.contains("ALTER SYSTEM SET wal_level"), "{human}");
}
