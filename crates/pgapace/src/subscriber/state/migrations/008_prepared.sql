-- Transactions that are prepared on the target, see target/state/prepared.rs: a row before, and one
-- (committed) by the prepared transaction itself. That holds a lock on the table for as long as it
-- is prepared, so no later version may alter it
CREATE TABLE pgapace.prepared (
  subscription integer NOT NULL,
  xid          bigint NOT NULL,
  prepare_lsn  pg_lsn NOT NULL,
  committed    boolean NOT NULL,
  -- on the target, and on the publisher
  name         text NOT NULL,
  gid          text,
  -- on the publisher
  prepared_at  timestamptz,
  epoch        bigint NOT NULL,
  given_up_at  timestamptz,
  PRIMARY KEY (subscription, xid, prepare_lsn, committed)
);
COMMENT ON TABLE pgapace.prepared IS 'transactions that are prepared on the target: pgapace prepared'
