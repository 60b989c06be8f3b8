//! Wide rows for the scenario `resume`: much WAL in few changes.

use super::Scale;

pub(crate) const SCHEMA: &str = "CREATE TABLE t (id bigserial PRIMARY KEY, body text);
     ALTER TABLE t ALTER body SET STORAGE PLAIN";

/// Bytes of WAL to acknowledge before the crash.
pub(crate) fn bytes(scale: Scale) -> u64 {
    scale.of(1 << 30, 1 << 20)
}

/// A procedure that inserts rows until `bytes` of WAL are written.
pub(crate) fn write(bytes: u64) -> String {
    format!(
        "CREATE PROCEDURE write_wal() LANGUAGE plpgsql AS $$
         DECLARE start pg_lsn := pg_current_wal_insert_lsn();
         BEGIN
           WHILE pg_wal_lsn_diff(pg_current_wal_insert_lsn(), start) < {bytes} LOOP
             INSERT INTO t (body) SELECT repeat(md5(i::text), 50) FROM generate_series(1, 100) i;
             COMMIT;
           END LOOP;
         END $$"
    )
}
