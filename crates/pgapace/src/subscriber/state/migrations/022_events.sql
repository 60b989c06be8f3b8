CREATE TABLE pgapace.event (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  -- by name; null if it concerns the whole process
  subscription text,
  at           timestamptz NOT NULL,
  level        text NOT NULL,
  event        text NOT NULL,
  message      text NOT NULL,
  fields       text NOT NULL
);
CREATE INDEX ON pgapace.event (at);
COMMENT ON TABLE pgapace.event IS 'warnings and errors of the log, for --event-retention';
GRANT SELECT ON pgapace.event TO pg_monitor
