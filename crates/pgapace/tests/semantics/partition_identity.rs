//! A partitioned table that is published as a whole, and has no replica identity.

use crate::support::{VERSIONS, on_versions};

/// The publisher looks at the identity of the partition, and sends that of the table.
#[test]
fn partitions_have_a_replica_identity_and_their_root_has_none() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE m (id int, v int) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100)",
        );
        case.publisher.sql("ALTER TABLE m1 REPLICA IDENTITY FULL; INSERT INTO m VALUES (1, 1)");
        case.publish("FOR TABLE m WITH (publish_via_partition_root = true)");
        let checked = case.tool.finish("check", &[]);
        checked.expect(0, &[]);
        let alter = "ALTER TABLE public.m REPLICA IDENTITY FULL";
        for text in ["of a partition that has one stops the subscription", alter] {
            assert!(checked.stdout.contains(text), "{text}: {}", checked.stdout);
        }
        case.run_until_current();
        case.publisher.sql("UPDATE m SET v = 2");
        let refused = case.run();
        refused.expect(
            6,
            &["public.m REPLICA IDENTITY FULL on the publisher", "pgapace resync public.m"],
        );
        assert!(!refused.log.contains("ADD PRIMARY KEY"), "{}", refused.log);
        case.publisher.sql(alter);
        case.tool.finish("resync", &["public.m"]).expect(0, &[]);
        case.publisher.sql("UPDATE m SET v = 3");
        case.run_until_current();
        case.expect_equal(&["m"]);
    });
}

/// Such a partition sends a row's key alone, or nothing where the key does not change. The walsender says that it is the whole row.
#[test]
fn a_root_is_full_and_its_partitions_are_not() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE m (id int, v int) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (100); \
             ALTER TABLE m REPLICA IDENTITY FULL",
        );
        case.publisher.sql("INSERT INTO m SELECT g, g FROM generate_series(1, 4) g");
        case.publish("FOR TABLE m WITH (publish_via_partition_root = true)");
        let reason = "not all of its partitions have";
        let checked = case.tool.finish("check", &[]);
        checked.expect(6, &[]);
        assert!(checked.stdout.contains(reason), "{}", checked.stdout);
        // Inserts need no old row.
        case.publisher.sql("INSERT INTO m VALUES (5, 5)");
        case.run_until_current();
        case.expect_equal(&["m"]);
        for change in ["DELETE FROM m WHERE id = 1", "UPDATE m SET v = 7 WHERE id = 2"] {
            case.publisher.sql("ALTER TABLE m1 REPLICA IDENTITY DEFAULT");
            case.publisher.sql(change);
            case.run().expect(6, &[reason, "pgapace resync public.m"]);
            case.publisher.sql("ALTER TABLE m1 REPLICA IDENTITY FULL");
            case.tool.finish("resync", &["public.m"]).expect(0, &[]);
            case.publisher.sql("UPDATE m SET v = v + 1; DELETE FROM m WHERE id > 4");
            case.run_until_current();
            case.expect_equal(&["m"]);
        }
        // Altered while pgapace runs: the first such update tells.
        let mut process = case.start();
        case.publisher.sql("ALTER TABLE m1 REPLICA IDENTITY DEFAULT; UPDATE m SET v = 9");
        testbed::wait_until(crate::support::PATIENCE, "the end", || Ok(!process.is_running()))
            .unwrap_or_else(|error| panic!("{error}: {}", process.log()));
        assert!(process.log().contains(reason), "{}", process.log());
    });
}

/// The subscriber's table has a key, and no key column is sent.
#[test]
fn a_root_with_a_key_has_replica_identity_nothing() {
    on_versions(&VERSIONS, |case| {
        case.both(
            "CREATE TABLE m (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100)",
        );
        case.publisher.sql("ALTER TABLE m REPLICA IDENTITY NOTHING; INSERT INTO m VALUES (1, 1)");
        case.publish("FOR TABLE m WITH (publish_via_partition_root = true)");
        case.run_until_current();
        case.publisher.sql("UPDATE m SET v = 2");
        let refused = case.run();
        let alter = "ALTER TABLE public.m REPLICA IDENTITY DEFAULT";
        refused.expect(6, &["public.m has no replica identity", alter, "pgapace resync public.m"]);
        assert!(!refused.log.contains("USING INDEX"), "{}", refused.log);
        case.publisher.sql(alter);
        case.tool.finish("resync", &["public.m"]).expect(0, &[]);
        case.publisher.sql("UPDATE m SET v = 3");
        case.run_until_current();
        case.expect_equal(&["m"]);
    });
}
