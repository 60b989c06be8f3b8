-- native subscriptions that were adopted, or are being adopted: disabled (it has its slot), adopted (the
-- slot is pgapace's). enabled: whether it was, before
CREATE TABLE pgapace.adoption (
  native      oid PRIMARY KEY,
  native_name text NOT NULL,
  name        text NOT NULL UNIQUE,
  slot_name   text NOT NULL,
  origin_none boolean NOT NULL,
  enabled     boolean NOT NULL,
  step        text NOT NULL CHECK (step IN ('disabled', 'adopted')),
  begun_at    timestamptz NOT NULL DEFAULT pg_catalog.now(),
  adopted_at  timestamptz,
  start_lsn   pg_lsn
);
COMMENT ON TABLE pgapace.adoption IS 'native subscriptions that pgapace adopted: see pgapace release';
GRANT SELECT ON pgapace.adoption TO pg_monitor
