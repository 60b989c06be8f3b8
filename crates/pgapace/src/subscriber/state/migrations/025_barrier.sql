CREATE TABLE pgapace.barrier (
  id                  bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  subscription        integer NOT NULL,
  requested_at        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  -- the backend of the verb
  requester           integer NOT NULL DEFAULT pg_catalog.pg_backend_pid(),
  -- whether the stream waits until the row is deleted
  holds               boolean NOT NULL,
  state               text NOT NULL DEFAULT 'requested'
    CHECK (state IN ('requested', 'creating', 'ready', 'failed')),
  -- the backend of the publisher that creates the slot
  walsender           integer,
  lsn                 pg_lsn,
  publisher_snapshot  text,
  subscriber_snapshot text,
  -- the backend of the subscriber that writes while the stream is held
  writer              integer,
  message             text,
  hint                text
);
COMMENT ON TABLE pgapace.barrier IS 'requests of pgapace verify and repair for snapshots of both servers that
show the same state of the publisher'
