-- a request to the process that runs a subscription (hand_over/mod.rs)
CREATE TABLE pgapace.hand_over (
  subscription integer PRIMARY KEY,
  -- of the process that is asked
  epoch        bigint NOT NULL,
  -- whether the process waits until the session that asks is gone, instead of ending
  stands_aside boolean NOT NULL,
  -- the backend of the verb
  requester    integer NOT NULL DEFAULT pg_catalog.pg_backend_pid(),
  requested_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  -- what is durable; NULL if a transaction in hand was rolled back
  lsn          pg_lsn,
  done_at      timestamptz
);
COMMENT ON TABLE pgapace.hand_over IS 'requests to give a subscription up: pgapace hand-over, switchover'
