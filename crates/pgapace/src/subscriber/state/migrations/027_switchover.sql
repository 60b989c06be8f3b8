-- switchovers, by their step (switchover/mod.rs), which is recorded before it is done. resume: what undoes
-- the stop of writes, a command or the former default_transaction_read_only of the publisher's database
CREATE TABLE pgapace.switchover (
  subscription integer PRIMARY KEY,
  step         text NOT NULL CHECK (step IN ('stopping', 'slot', 'ended')),
  by_command   boolean NOT NULL,
  resume       text,
  slot_name    text,
  fence_lsn    pg_lsn,
  begun_at     timestamptz NOT NULL DEFAULT pg_catalog.now(),
  ended_at     timestamptz
);
COMMENT ON TABLE pgapace.switchover IS 'switchovers that were begun, or done: pgapace switchover'
