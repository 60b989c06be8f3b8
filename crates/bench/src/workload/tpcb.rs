//! pgbench's transactions, here written by a procedure in the server.

use super::{Backlog, Scale, TRANSACTIONS};

/// pgbench's tables.
pub(crate) const SCHEMA: &str = "
CREATE TABLE pgbench_history
    (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
CREATE TABLE pgbench_tellers
    (tid int PRIMARY KEY, bid int, tbalance int, filler char(84)) WITH (fillfactor=100);
CREATE TABLE pgbench_accounts
    (aid int PRIMARY KEY, bid int, abalance int, filler char(84)) WITH (fillfactor=100);
CREATE TABLE pgbench_branches
    (bid int PRIMARY KEY, bbalance int, filler char(88)) WITH (fillfactor=100);";

/// Number of rows at pgbench's scale 10: accounts, tellers, branches.
const ACCOUNTS: u64 = 1_000_000;
const TELLERS: u64 = 100;
const BRANCHES: u64 = 10;

const TELLER_AND_BRANCH: &str = "UPDATE pgbench_tellers SET tbalance = tbalance + d WHERE tid = t;
     UPDATE pgbench_branches SET bbalance = bbalance + d WHERE bid = b;";

/// SQL that fills the tables; each branch has ten tellers.
pub(crate) fn load(accounts: u64, branches: u64) -> String {
    format!(
        "INSERT INTO pgbench_branches SELECT i, 0 FROM generate_series(1, {branches}) i;
         INSERT INTO pgbench_tellers
           SELECT i, 1 + i % {branches}, 0 FROM generate_series(1, {branches} * 10) i;
         INSERT INTO pgbench_accounts
           SELECT i, 1 + i % {branches}, 0, '' FROM generate_series(1, {accounts}) i"
    )
}

pub(super) fn tpcb(scale: Scale) -> Backlog {
    pgbench(scale, TELLER_AND_BRANCH, 4)
}

pub(super) fn simple_update(scale: Scale) -> Backlog {
    pgbench(scale, "", 2)
}

/// `tpcb` with single-row statements.
pub(super) fn row_mode(scale: Scale) -> Backlog {
    Backlog { pgapace: &["--apply-mode=row"], ..tpcb(scale) }
}

fn pgbench(scale: Scale, more: &str, changes: u64) -> Backlog {
    let accounts = scale.of(ACCOUNTS, 1000);
    let transactions = scale.of(200_000, 200);
    Backlog {
        schema: SCHEMA.into(),
        load: load(accounts, BRANCHES),
        write: format!(
            "DECLARE a int; t int; b int; d int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 a := 1 + floor(random() * {accounts}); t := 1 + floor(random() * {TELLERS});
                 b := 1 + floor(random() * {BRANCHES}); d := floor(random() * 10000) - 5000;
                 UPDATE pgbench_accounts SET abalance = abalance + d WHERE aid = a;
                 {more}
                 INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
                   VALUES (t, b, a, d, now());
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions * changes,
        ..Backlog::default()
    }
}
