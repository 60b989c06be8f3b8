-- held: where the prepared transactions begin of which the subscriber may have nothing yet when the row is written.
-- Until each has a row in pgapace.prepared, or has ended, the slot must not pass it
ALTER TABLE pgapace.progress ADD held pg_lsn[]
