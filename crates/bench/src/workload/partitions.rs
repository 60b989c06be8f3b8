//! Changes spread evenly over the partitions of one table.

use super::{Backlog, Scale, TRANSACTIONS};

/// The changes are published as those of the partitions.
pub(super) fn leaves(scale: Scale, partitions: u64) -> Backlog {
    let (rows, transactions) = (scale.of(500_000, 1000), scale.of(200_000, 300));
    Backlog {
        schema: format!(
            "CREATE TABLE t (id int PRIMARY KEY, n int, note text) PARTITION BY HASH (id);
             DO $$ BEGIN
               FOR i IN 0..{partitions} - 1 LOOP
                 EXECUTE format('CREATE TABLE t_%s PARTITION OF t
                                   FOR VALUES WITH (MODULUS {partitions}, REMAINDER %s)', i, i);
               END LOOP;
             END $$"
        ),
        load: format!("INSERT INTO t SELECT i, 0, 'note ' || i FROM generate_series(1, {rows}) i"),
        write: format!(
            "DECLARE k int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 k := 1 + floor(random() * {rows});
                 UPDATE t SET n = n + i, note = 'change ' || i WHERE id = k;
                 INSERT INTO t VALUES ({rows} + i, i, 'new ' || i);
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions * 2,
        ..Backlog::default()
    }
}

/// The changes are published as those of the partitioned table.
pub(super) fn root(scale: Scale, partitions: u64) -> Backlog {
    Backlog { publication: Some("publish_via_partition_root = true"), ..leaves(scale, partitions) }
}
