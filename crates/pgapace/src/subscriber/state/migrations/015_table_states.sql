-- how far the copy of a table has come (engine/src/table_sync.rs), which only the process changes
-- that runs the subscription. generation: of the copy; a part counts only under the one that it was
-- begun with. requested: what resync leaves for that process. empty_first: the rows that are there
-- are of an earlier copy. reason: why the table is blocked. stale_lsn: it may lack changes of
-- transactions that commit from there on, until it is copied again
ALTER TABLE pgapace.relation
  ADD state text NOT NULL DEFAULT 'init'
    CHECK (state IN ('init', 'datasync', 'catchup', 'ready', 'blocked')),
  ADD generation integer NOT NULL DEFAULT 0,
  ADD requested timestamptz,
  ADD empty_first boolean NOT NULL DEFAULT false,
  ADD reason text,
  ADD blocked_since timestamptz,
  ADD stale_lsn pg_lsn,
  ADD stale_reason text;
UPDATE pgapace.relation SET
  state = CASE WHEN gate_lsn IS NULL AND sync_lsn IS NULL THEN 'init'
    WHEN gate_lsn IS NULL THEN 'datasync' WHEN catch_up IS NULL THEN 'ready' ELSE 'catchup' END,
  empty_first = gate_lsn IS NULL AND parts_done > 0;
ALTER TABLE pgapace.relation
  ADD CHECK ((state IN ('catchup', 'ready')) = (gate_lsn IS NOT NULL)),
  ADD CHECK (state <> 'catchup' OR catch_up IS NOT NULL),
  ADD CHECK (state <> 'ready' OR catch_up IS NULL),
  ADD CHECK ((state = 'blocked') = (reason IS NOT NULL));
COMMENT ON TABLE pgapace.relation IS 'tables of a subscription, and how far the copy of each has come';

-- how often a table was blocked
ALTER TABLE pgapace.stat_subscription ADD tables_blocked bigint NOT NULL DEFAULT 0
