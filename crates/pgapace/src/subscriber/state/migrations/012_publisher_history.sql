-- what identifies the publisher's history: the last transaction with changes up to this row, by its
-- commit LSN, xid and commit time, and the LSN from which on there was none: its end, or the start
-- of the slot. Null where it is not known
ALTER TABLE pgapace.progress
  ADD quiet_from pg_lsn,
  ADD last_lsn pg_lsn,
  ADD last_xid bigint,
  ADD last_time timestamptz;

-- what the publisher was asked for when that was written: other publications have other transactions
ALTER TABLE pgapace.subscription ADD sent_as text
