-- the process that runs each subscription, if pgapace.subscription has the same epoch. Its leader raises
-- beat about once a second in the stages copying and streaming, while a process of pgapace.member waits
-- for the subscription. stalls: see engine/heartbeat.rs
CREATE TABLE pgapace.owner (
  subscription integer PRIMARY KEY,
  epoch        bigint NOT NULL,
  -- of pgapace.member; null without --standby
  member       text,
  host         text NOT NULL,
  process      integer NOT NULL,
  -- of its control session on this server: others may hold the owner's lock too, such as pgapace drop
  backend      integer NOT NULL,
  stage        text NOT NULL CHECK (stage IN ('setup', 'starting', 'copying', 'streaming')),
  beat         bigint NOT NULL DEFAULT 0,
  stalls       integer NOT NULL DEFAULT 0,
  since        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  beat_at      timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON TABLE pgapace.owner IS 'the process that runs each subscription, or ran it last';

-- processes with --standby that wait for subscriptions. Each raises its beat about once a second
CREATE TABLE pgapace.member (
  id            text PRIMARY KEY,
  host          text NOT NULL,
  process       integer NOT NULL,
  -- those that it waits for, by name
  waits_for     text[] NOT NULL,
  beat          bigint NOT NULL DEFAULT 0,
  since         timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  beat_at       timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON TABLE pgapace.member IS 'processes that wait for subscriptions: pgapace run --standby';
GRANT SELECT ON pgapace.owner, pgapace.member TO pg_monitor
