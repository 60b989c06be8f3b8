-- when large transactions were applied in the last run (parallel, on, off) and why
ALTER TABLE pgapace.subscription ADD streaming text, ADD streaming_reason text;

-- what is in the spool
ALTER TABLE pgapace.stat_subscription
  ADD spool_files bigint NOT NULL DEFAULT 0,
  ADD spool_bytes bigint NOT NULL DEFAULT 0
