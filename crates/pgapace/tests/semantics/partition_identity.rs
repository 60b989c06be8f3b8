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
