-- waits of apply workers, so that those of a session add up to its time
ALTER TABLE pgapace.stat_subscription
  ADD wait_subscriber double precision NOT NULL DEFAULT 0,
  ADD wait_idle double precision NOT NULL DEFAULT 0;

-- the figures of observe/figures/mod.rs; the views below show them as rows
CREATE TABLE pgapace.stat_figures (
  subscription integer PRIMARY KEY,
  updated_at   timestamptz NOT NULL,
  figures      jsonb NOT NULL
) WITH (fillfactor = 50);
COMMENT ON TABLE pgapace.stat_figures IS 'rates, lags and waits of each subscription as JSON, written
about once per second while something happens';

CREATE TABLE pgapace.stat_history (
  subscription integer NOT NULL,
  at           timestamptz NOT NULL,
  point        jsonb NOT NULL,
  PRIMARY KEY (subscription, at)
);
COMMENT ON TABLE pgapace.stat_history IS 'points of the curves of the last day: pgapace report';

CREATE TABLE pgapace.stat_table (
  subscription   integer NOT NULL,
  schema_name    text NOT NULL,
  table_name     text NOT NULL,
  inserts        bigint NOT NULL DEFAULT 0,
  updates        bigint NOT NULL DEFAULT 0,
  deletes        bigint NOT NULL DEFAULT 0,
  truncates      bigint NOT NULL DEFAULT 0,
  last_change_at timestamptz,
  PRIMARY KEY (subscription, schema_name, table_name)
) WITH (fillfactor = 70);
COMMENT ON TABLE pgapace.stat_table IS 'applied changes of the publisher by table; a commit whose answer was
lost with its session is missing';

CREATE TABLE pgapace.stat_conflict (
  subscription     integer NOT NULL,
  schema_name      text NOT NULL,
  table_name       text NOT NULL,
  conflict         text NOT NULL,
  conflicts        bigint NOT NULL DEFAULT 0,
  last_conflict_at timestamptz,
  PRIMARY KEY (subscription, schema_name, table_name, conflict)
);
COMMENT ON TABLE pgapace.stat_conflict IS 'conflicts by table and type';

CREATE TABLE pgapace.stat_retry (
  subscription  integer NOT NULL,
  sqlstate      text NOT NULL,
  retries       bigint NOT NULL DEFAULT 0,
  last_retry_at timestamptz,
  PRIMARY KEY (subscription, sqlstate)
);
COMMENT ON TABLE pgapace.stat_retry IS 'groups and runs that were tried again after an error, by SQLSTATE';

CREATE VIEW pgapace.stat_stage AS
SELECT s.name AS subscription, f.updated_at, r.*
FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription
CROSS JOIN LATERAL jsonb_to_recordset(f.figures -> 'stages') AS r (stage text, lsn pg_lsn,
  lag_bytes bigint, lag_seconds float8, transactions bigint, changes bigint, bytes bigint,
  wal_bytes_per_second_10s float8, wal_bytes_per_second_1min float8,
  transactions_per_second_10s float8, transactions_per_second_1min float8,
  changes_per_second_10s float8, changes_per_second_1min float8);
COMMENT ON VIEW pgapace.stat_stage IS 'position, lag and rates of each stage: received, decoded,
committed, durable';

CREATE VIEW pgapace.stat_wait AS
SELECT s.name AS subscription, f.updated_at, t.thread ->> 'thread' AS thread,
  l.share ->> 0 AS reason,
  (SELECT (c.share ->> 1)::float8 FROM jsonb_array_elements(t.thread -> 'shares_10s') c (share)
   WHERE c.share ->> 0 = l.share ->> 0) AS percent_10s,
  (l.share ->> 1)::float8 AS percent_1min
FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription
CROSS JOIN LATERAL jsonb_array_elements(f.figures -> 'threads') t (thread)
CROSS JOIN LATERAL jsonb_array_elements(t.thread -> 'shares_1min') l (share);
COMMENT ON VIEW pgapace.stat_wait IS 'what each thread spends its time on; percent adds up to 100 by thread';

CREATE VIEW pgapace.stat_worker AS
SELECT s.name AS subscription, f.updated_at, r.*
FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription
CROSS JOIN LATERAL jsonb_to_recordset(f.figures -> 'workers') AS r (worker integer, pid integer,
  waits_for text, xid bigint, commit_lsn pg_lsn, "table" text, transactions bigint, changes bigint,
  age_seconds float8);
COMMENT ON VIEW pgapace.stat_worker IS 'apply workers, and the group that each was handed last';

CREATE VIEW pgapace.stat_blocker AS
SELECT s.name AS subscription, f.updated_at, r.*
FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription
CROSS JOIN LATERAL jsonb_to_recordset(f.figures -> 'blockers') AS r (waiting text, pid integer,
  "user" text, application_name text, state text, query text);
COMMENT ON VIEW pgapace.stat_blocker IS 'sessions of others that the oldest transaction waits for';

CREATE VIEW pgapace.stat_slot AS
SELECT s.name AS subscription, f.updated_at, (f.figures ->> 'publisher_lsn')::pg_lsn AS publisher_lsn,
  (f.figures ->> 'seconds_to_zero')::float8 AS seconds_to_zero,
  f.figures ->> 'limited_by' AS limited_by, r.*,
  (f.figures ->> 'spool_bytes')::bigint AS spool_bytes,
  (f.figures ->> 'memory_bytes')::bigint AS memory_bytes,
  (f.figures ->> 'memory_limit')::bigint AS memory_limit
FROM pgapace.stat_figures f JOIN pgapace.subscription s ON s.id = f.subscription
LEFT JOIN LATERAL jsonb_to_record(nullif(f.figures -> 'slot', 'null')) AS r (wal_status text,
  retained_bytes bigint, retained_bytes_per_second float8, safe_wal_size bigint,
  lost_in_seconds float8) ON true;
COMMENT ON VIEW pgapace.stat_slot IS 'the slot on the publisher, and what is kept for it';

-- monitoring roles read state and statistics; rows of pgapace.conflict stay with the owner
GRANT USAGE ON SCHEMA pgapace TO pg_monitor;
GRANT SELECT ON pgapace.schema_version, pgapace.subscription, pgapace.relation, pgapace.progress,
  pgapace.applied, pgapace.prepared, pgapace.stat_subscription, pgapace.stat_figures,
  pgapace.stat_history, pgapace.stat_table, pgapace.stat_conflict, pgapace.stat_retry,
  pgapace.stat_stage, pgapace.stat_wait, pgapace.stat_worker, pgapace.stat_blocker,
  pgapace.stat_slot TO pg_monitor
