-- what disable_on_error was told, until pgapace enable; the transaction that pgapace skip leaves out
ALTER TABLE pgapace.subscription
  ADD disabled_reason text,
  ADD disabled_at timestamptz,
  ADD skip_lsn pg_lsn;

-- the transaction that ended the copy, or found that none is wanted: rows that are not younger are
-- no one else's
ALTER TABLE pgapace.relation ADD copied_xid xid8;

-- conflicts that a rule of --on-conflict decided, written in the transaction that they are of; no
-- rows are ever removed but by users
CREATE TABLE pgapace.conflict (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  subscription integer NOT NULL,
  recorded_at  timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  schema_name  text NOT NULL,
  table_name   text NOT NULL,
  conflict     text NOT NULL,
  -- what the rule says, and whether the change was applied
  action       text NOT NULL,
  applied      boolean NOT NULL,
  operation    text NOT NULL,
  key          text,
  remote_xid   bigint NOT NULL,
  commit_lsn   pg_lsn NOT NULL,
  commit_time  timestamptz NOT NULL,
  sqlstate     text,
  message      text,
  detail       text
);
COMMENT ON TABLE pgapace.conflict IS 'conflicts that a rule of --on-conflict decided';

-- waits are in seconds
ALTER TABLE pgapace.stat_subscription
  ADD groups_parallel bigint NOT NULL DEFAULT 0,
  ADD groups_dependent bigint NOT NULL DEFAULT 0,
  ADD retries bigint NOT NULL DEFAULT 0,
  ADD victims bigint NOT NULL DEFAULT 0,
  ADD insert_exists bigint NOT NULL DEFAULT 0,
  ADD update_exists bigint NOT NULL DEFAULT 0,
  ADD multiple_unique_conflicts bigint NOT NULL DEFAULT 0,
  ADD update_origin_differs bigint NOT NULL DEFAULT 0,
  ADD delete_origin_differs bigint NOT NULL DEFAULT 0,
  ADD foreign_key_violation bigint NOT NULL DEFAULT 0,
  ADD exclusion_violation bigint NOT NULL DEFAULT 0,
  ADD transactions_skipped bigint NOT NULL DEFAULT 0,
  ADD wait_dependency double precision NOT NULL DEFAULT 0,
  ADD wait_commit_order double precision NOT NULL DEFAULT 0,
  ADD wait_target_lock double precision NOT NULL DEFAULT 0,
  ADD wait_worker double precision NOT NULL DEFAULT 0,
  ADD wait_memory double precision NOT NULL DEFAULT 0,
  ADD wait_source double precision NOT NULL DEFAULT 0
