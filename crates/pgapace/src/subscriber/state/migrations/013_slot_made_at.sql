-- where the slot begins that is about to be made: one of this name that stands there is ours
ALTER TABLE pgapace.subscription ADD slot_made_at pg_lsn
