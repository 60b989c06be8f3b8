//! Large transactions in which savepoints are rolled back.

use super::{Backlog, ROWS, Scale};

const TRANSACTIONS: u64 = 10;
const ROWS_EACH: u64 = 1000;

pub(super) fn rollback(scale: Scale) -> Backlog {
    // Two savepoints each, of which one is rolled back.
    let pairs = scale.of(60, 1);
    Backlog {
        schema: "CREATE TABLE t (id int PRIMARY KEY, a int, b text)".into(),
        load: String::new(),
        write: format!(
            "BEGIN
               FOR i IN 0..{TRANSACTIONS} - 1 LOOP
                 FOR j IN 0..{pairs} * 2 - 1 LOOP
                   BEGIN
                     INSERT INTO t SELECT ((i * {pairs} * 2) + j) * {ROWS_EACH} + k, j,
                       md5(k::text) FROM generate_series(1, {ROWS_EACH}) k;
                     IF j % 2 = 1 THEN
                       RAISE EXCEPTION 'rolled back';
                     END IF;
                   EXCEPTION WHEN raise_exception THEN NULL;
                   END;
                 END LOOP;
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: TRANSACTIONS * pairs * ROWS_EACH,
        unit: ROWS,
        changes: TRANSACTIONS * pairs * ROWS_EACH,
        streamed_from: Some("64kB"),
        ..Backlog::default()
    }
}
