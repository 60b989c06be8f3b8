//! A native subscription must not notice that its stream was recorded.

use std::time::Duration;

use testbed::compare::compare_tables;
use testbed::replay::{Recording, ReplayServer, parse_lsn};
use testbed::{Pair, TableName, wait_until};

const TIMEOUT: Duration = Duration::from_secs(60);
const TABLE: &str = "CREATE TABLE t (id int PRIMARY KEY, value text)";
/// Inserts a row in each transaction, from one id to another.
const INSERT: &str = "CREATE PROCEDURE fill(first int, last int) LANGUAGE plpgsql AS $$
    BEGIN FOR i IN first..last LOOP INSERT INTO t VALUES (i, 'row ' || i); COMMIT; END LOOP; END $$";

#[test]
fn a_native_subscription_follows_a_recorded_stream() {
    for major in [15, 18] {
        let pair = Pair::start_with(
            major,
            major,
            |publisher| publisher,
            |subscriber| subscriber.setting("wal_retrieve_retry_interval", "100ms"),
        )
        .unwrap();
        let publisher = |sql: &str| pair.publisher.query_one_text("postgres", sql).unwrap();
        pair.publisher.sql("postgres", TABLE).unwrap();
        pair.publisher.sql("postgres", INSERT).unwrap();
        pair.publisher.sql("postgres", "CREATE PUBLICATION p FOR ALL TABLES").unwrap();
        for slot in ["recorded", "whole", "half"] {
            let create = "SELECT pg_create_logical_replication_slot";
            publisher(&format!("{create}('{slot}', 'pgoutput')"));
        }
        pair.publisher.sql("postgres", "CALL fill(1, 200)").unwrap();
        let middle = publisher("SELECT pg_current_wal_insert_lsn()");
        pair.publisher.sql("postgres", "CALL fill(201, 500)").unwrap();
        pair.publisher.sql("postgres", "UPDATE t SET value = 'last' WHERE id = 500").unwrap();
        let end = parse_lsn(&publisher("SELECT pg_current_wal_insert_lsn()")).unwrap();
        let slots = "SELECT string_agg(format('%s %s %s', slot_name, confirmed_flush_lsn, active), \
                                       ', ' ORDER BY slot_name) FROM pg_replication_slots";
        let before = publisher(slots);

        // Without a recording, the request is refused and tells what to record.
        let server = ReplayServer::in_front_of(&pair.publisher).unwrap();
        subscribe(&pair, &server, "whole", None);
        let mut refused = Vec::new();
        wait_until(TIMEOUT, "the subscription to ask for its stream", || {
            refused.extend(server.refused());
            Ok(!refused.is_empty())
        })
        .unwrap();
        let request = &refused[0];
        assert_eq!(request.options["publication_names"], "\"p\"");
        assert_eq!(request.session["database"], "postgres");
        let recording = Recording::record(&pair.publisher, "recorded", request, end).unwrap();
        assert!(recording.bytes() > 10_000);
        server.add(recording);

        // The worker tries again, and gets all of it.
        let rows = |database: &str| {
            let sql = "SELECT count(*) || max(value) FROM t";
            pair.subscriber.query_one_text(database, sql)
        };
        wait_until(TIMEOUT, "the whole stream", || Ok(rows("whole")? == "500row 99")).unwrap();
        wait_until(TIMEOUT, "the last change", || {
            let sql = "SELECT value FROM t WHERE id = 500";
            Ok(pair.subscriber.query_one_text("whole", sql)? == "last")
        })
        .unwrap();
        let mut clients = (
            pair.publisher.connect("postgres").unwrap(),
            pair.subscriber.connect("whole").unwrap(),
        );
        let tables = [TableName::from("t")];
        let differences = compare_tables(&mut clients.0, &mut clients.1, &tables).unwrap();
        assert!(differences.is_empty(), "{differences:?}");

        // A subscription that has applied the first transactions gets only the others.
        subscribe(&pair, &server, "half", Some(&middle));
        wait_until(TIMEOUT, "the second half", || {
            let sql = "SELECT count(*) FROM t WHERE value = 'last'";
            Ok(pair.subscriber.query_one_text("half", sql)? == "1")
        })
        .unwrap();
        let ids = "SELECT min(id) || '-' || max(id) || ' ' || count(*) FROM t";
        assert_eq!(pair.subscriber.query_one_text("half", ids).unwrap(), "201-500 300");

        // The publisher has sent nothing itself.
        assert_eq!(publisher(slots), before);
        assert!(server.refused().iter().all(|again| again == request));
    }
}

/// Creates a database with the table and a subscription, which asks for the stream from a position
/// on.
fn subscribe(pair: &Pair, server: &ReplayServer, name: &str, from: Option<&str>) {
    pair.subscriber.create_database(name).unwrap();
    let mut client = pair.subscriber.connect(name).unwrap();
    client.batch_execute(TABLE).unwrap();
    client
        .batch_execute(&format!(
            "CREATE SUBSCRIPTION {name} CONNECTION '{}' PUBLICATION p WITH \
             (create_slot = false, slot_name = {name}, copy_data = false, enabled = false)",
            server.conninfo("postgres").replace('\'', "''")
        ))
        .unwrap();
    if let Some(from) = from {
        let sql = format!(
            "SELECT pg_replication_origin_advance('pg_' || oid, '{from}') FROM pg_subscription \
             WHERE subname = '{name}'"
        );
        client.batch_execute(&sql).unwrap();
    }
    client.batch_execute(&format!("ALTER SUBSCRIPTION {name} ENABLE")).unwrap();
}
