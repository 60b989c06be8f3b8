-- table sync: under which snapshot a table is or was copied, its size on the publisher, in how many
-- parts, and how many of them are in. Until all are, gate_lsn is null and the rows are of no use
ALTER TABLE pgapace.relation
  ADD sync_lsn pg_lsn,
  ADD source_bytes bigint,
  ADD parts integer NOT NULL DEFAULT 1,
  ADD parts_done integer NOT NULL DEFAULT 0
