//! Changed publications and tables that lose no changes.

use super::gaps::{ALL, OUT_AND_BACK, one_by_one, replicate, state};
use crate::support::on_versions;

/// DDL that loses no changes is not a gap, and neither is a partition that is empty when attached.
#[test]
fn ddl_that_loses_no_changes_is_not_a_gap() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.both(
            "CREATE TABLE r (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); \
             CREATE TABLE low PARTITION OF r FOR VALUES FROM (0) TO (100)",
        );
        let published = "CREATE PUBLICATION roots FOR TABLE r WITH (publish_via_partition_root)";
        case.publisher.sql(published);
        case.tool.publications = "pub,others,roots".to_owned();
        case.run_until_current();
        let added = "CREATE TABLE high PARTITION OF r FOR VALUES FROM (100) TO (200); \
                     CREATE TABLE higher (id int PRIMARY KEY, v int); \
                     ALTER TABLE r ATTACH PARTITION higher FOR VALUES FROM (200) TO (300)";
        one_by_one(&case, added);
        case.subscriber.sql(added);
        one_by_one(
            &case,
            "VACUUM FULL pg_publication; VACUUM FULL pg_publication_rel; VACUUM FULL pg_type; \
             VACUUM FULL pg_inherits; VACUUM FULL pg_attribute; VACUUM FULL pg_class; ANALYZE; \
             ALTER TABLE t ADD w int; ALTER TABLE t DROP w; CREATE INDEX ON t (v); \
             GRANT SELECT ON t TO public; ALTER TABLE t SET (fillfactor = 50); CLUSTER t USING t_pkey; \
             ALTER TABLE t RENAME v TO w; ALTER TABLE t RENAME w TO v; TRUNCATE t; \
             ALTER TABLE t OWNER TO pg_monitor; INSERT INTO t VALUES (1, 1); INSERT INTO r VALUES (110, 1)",
        );
        case.run_until_current();
        case.publisher.sql("INSERT INTO r VALUES (210, 1)");
        case.run_until_current();
        for table in ["t", "other", "r"] {
            assert_eq!(state(&case, table), "ready false");
        }
        case.expect_equal(&["t", "other", "r"]);
    });
}

/// A table that one publication always publishes completely has no gap. Changes of a publication
/// that do not concern the table's rows are not a gap either.
#[test]
fn publication_changes_that_lose_no_changes_are_not_a_gap() {
    on_versions(&ALL, |mut case| {
        replicate(&mut case);
        case.publisher.sql("CREATE ROLE keeper_of_publications");
        case.publisher.sql(
            "ALTER PUBLICATION others OWNER TO keeper_of_publications; \
             ALTER PUBLICATION others ADD TABLE t; ALTER PUBLICATION pub ADD TABLE other",
        );
        case.run_until_current();
        one_by_one(&case, OUT_AND_BACK);
        case.run_until_current();
        case.expect_equal(&["t", "other"]);
        assert_eq!(
            (state(&case, "t"), state(&case, "other")),
            ("ready false".into(), "ready false".into())
        );
        case.publisher.sql(
            "DROP PUBLICATION others; ALTER PUBLICATION pub OWNER TO CURRENT_USER; \
             DROP ROLE keeper_of_publications",
        );
        case.tool.publications = "pub".to_owned();
        case.run_until_current();
        assert_eq!(state(&case, "t"), "ready false");
    });
}
