-- copy_wanted: a copy was requested or begun, or changes were skipped because one was to follow. Until one is
-- complete, the table is not applied without it, whatever --copy-data says. Of earlier versions: requested tables
-- whose copy was not complete, and blocked ones that lack no changes
ALTER TABLE pgapace.relation ADD copy_wanted boolean NOT NULL DEFAULT false;
UPDATE pgapace.relation SET copy_wanted = true
WHERE state IN ('init', 'datasync') AND (state = 'datasync' OR empty_first OR catch_up IS NOT NULL)
  OR state = 'blocked' AND stale_lsn IS NULL
