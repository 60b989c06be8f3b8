//! Publications of the subscriber carry schema pgapace to native subscriptions, which fail at its tables.

use testbed::wait_until;

use crate::adopt::NativeSubscription;
use crate::support::{Case, Database, PATIENCE, on_versions};

/// Whether `check` warns of it.
fn is_named(case: &Case) -> bool {
    case.tool.finish("check", &[]).stdout.contains("schema pgapace is part of publication")
}

/// A native subscription, in another database of the publisher's server, to all tables of the subscriber.
struct Reader<'c> {
    case: &'c Case,
    database: Database<'static>,
}

impl<'c> Reader<'c> {
    fn start(case: &'c Case) -> Self {
        let name = format!("{}_reader", case.tool.name);
        let database = Database::create(case.publisher.cluster, &name, "");
        database.sql("CREATE TABLE t (id int PRIMARY KEY)");
        let reader = Self { case, database };
        reader.database.sql(&format!(
            "CREATE SUBSCRIPTION {name} CONNECTION '{}' PUBLICATION everything",
            case.subscriber.conninfo().replace('\'', "''")
        ));
        reader
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        let (cluster, name) = (self.database.cluster, &self.database.name);
        for sql in [
            format!("ALTER SUBSCRIPTION {name} DISABLE"),
            format!("ALTER SUBSCRIPTION {name} SET (slot_name = NONE)"),
            format!("DROP SUBSCRIPTION {name}"),
        ] {
            let _ = cluster.sql(name, &sql);
        }
        let _ = cluster.sql("postgres", &format!("DROP DATABASE {name} WITH (FORCE)"));
        let slot = format!("SELECT pg_drop_replication_slot('{name}')");
        let _ = wait_until(PATIENCE, "the reader's slot", || {
            Ok(self.case.subscriber.cluster.sql("postgres", &slot).is_ok())
        });
    }
}

#[test]
fn readers_of_schema_pgapace_are_named() {
    on_versions(&[(15, 15), (18, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        case.subscriber.sql("CREATE PUBLICATION everything FOR ALL TABLES");
        // Nobody reads it.
        assert!(!is_named(&case));
        let reader = Reader::start(&case);
        assert!(is_named(&case));
        case.run()
            .expect(0, &["event=\"own_schema_published\"", "everything", &reader.database.name]);
        assert!(!case.run_until_current().contains("own_schema_published"));
        assert!(is_named(&case));
        // A list of tables is sound.
        case.subscriber
            .sql("DROP PUBLICATION everything; CREATE PUBLICATION everything FOR TABLE t");
        assert!(!is_named(&case));
    });
}

#[test]
fn an_adoption_names_readers_of_schema_pgapace() {
    on_versions(&[(15, 18)], |case| {
        case.both("CREATE TABLE t (id int PRIMARY KEY)");
        case.publish("FOR TABLE t");
        let native = NativeSubscription::ready(&case, "");
        case.subscriber.sql("CREATE PUBLICATION everything FOR ALL TABLES");
        case.subscriber.sql(&format!(
            "SELECT pg_create_logical_replication_slot('{}_reader', 'pgoutput')",
            native.name
        ));
        native.adopt(&["--dry-run"]).expect(0, &["event=\"own_schema_published\""]);
        native.adopt(&[]).expect(0, &["event=\"own_schema_published\""]);
    });
}
