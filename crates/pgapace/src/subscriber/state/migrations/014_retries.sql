-- why nothing runs, until something does and has gone beyond it: since when, how often in a row, the
-- transaction that it is of, and when the next try is
ALTER TABLE pgapace.stat_subscription
  ADD error_since timestamptz,
  ADD error_count bigint NOT NULL DEFAULT 0,
  ADD error_lsn pg_lsn,
  ADD next_try_at timestamptz;

CREATE INDEX ON pgapace.conflict (subscription, recorded_at);
COMMENT ON TABLE pgapace.conflict IS 'conflicts: those that a rule of --on-conflict decided, in the
transaction that they are of; those that stopped the subscription; and of missing rows without a
rule those that the log names. All are counted in pgapace.stat_subscription. Rows older than
--conflict-retention are removed'
