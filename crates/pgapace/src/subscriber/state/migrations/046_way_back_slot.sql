-- slot_made_at: where the slot of the way back was created. It stays there until the way back has begun. Earlier
-- versions do not tell
ALTER TABLE pgapace.switchover ADD slot_made_at pg_lsn
