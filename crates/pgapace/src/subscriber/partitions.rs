//! Partitions in catalogue queries.

/// The partitions directly below the tables of a recursive CTE, which `$parent` names: `i.inhrelid`, and `p.oid` with
/// `p.relkind`. OFFSET 0 makes the server look each of them up by an index. Without it, the planner compares each table of
/// a level with all partitions of the database.
macro_rules! partitions_below {
    ($parent:literal) => {
        concat!(
            "CROSS JOIN LATERAL (
    SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = ",
            $parent,
            " OFFSET 0
  ) i
  CROSS JOIN LATERAL (
    SELECT p.oid, p.relkind FROM pg_catalog.pg_class p
    WHERE p.oid = i.inhrelid AND p.relispartition
    OFFSET 0
  ) p"
        )
    };
}
pub(crate) use partitions_below;
