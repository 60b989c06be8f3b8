-- pgapace verify. verification: a number, the same for all tables of one; scope: which rows; lsn: of the
-- last pair of snapshots; position: the key up to which all rows are compared; result and finished_at
-- are null until all are
CREATE SEQUENCE pgapace.verification_number;
CREATE TABLE pgapace.verification (
  subscription integer NOT NULL,
  schema_name  text NOT NULL,
  table_name   text NOT NULL,
  verification bigint NOT NULL,
  scope        text NOT NULL,
  started_at   timestamptz,
  finished_at  timestamptz,
  lsn          pg_lsn,
  rows         bigint NOT NULL DEFAULT 0,
  bytes        bigint NOT NULL DEFAULT 0,
  chunks       bigint NOT NULL DEFAULT 0,
  missing      bigint NOT NULL DEFAULT 0,
  extra        bigint NOT NULL DEFAULT 0,
  different    bigint NOT NULL DEFAULT 0,
  result       text CHECK (result IN ('equal', 'different')),
  columns_left text[] NOT NULL,
  position     text[],
  PRIMARY KEY (subscription, schema_name, table_name)
);
COMMENT ON TABLE pgapace.verification IS 'the last verification of each table (pgapace verify)';
GRANT SELECT ON pgapace.verification TO pg_monitor;

-- key and row_values: column and text; row_values of tables without a key. chunk: in which it was
-- found; an interrupted one is compared again
CREATE TABLE pgapace.difference (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  subscription integer NOT NULL,
  schema_name  text NOT NULL,
  table_name   text NOT NULL,
  kind         text NOT NULL CHECK (kind IN ('missing', 'extra', 'different')),
  key          jsonb,
  row_values   jsonb,
  columns      text[],
  copies       bigint NOT NULL DEFAULT 1,
  lsn          pg_lsn NOT NULL,
  chunk        bigint NOT NULL,
  found_at     timestamptz NOT NULL DEFAULT pg_catalog.now(),
  CHECK (num_nonnulls(key, row_values) = 1)
);
CREATE INDEX ON pgapace.difference (subscription, schema_name, table_name);
COMMENT ON TABLE pgapace.difference IS 'rows that the last verification of each table found to be missing on
the subscriber, extra on it, or different; lsn says at which state of the publisher. --max-differences
limits the rows of each table; pgapace.verification counts all of them'
