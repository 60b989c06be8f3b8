-- skip_found: a run has found the transaction of skip_lsn. Earlier versions do not tell; then nobody warns of a request
-- that the position has passed. error_commit_lsn: of the transaction of last_error, if it is of one that is known
ALTER TABLE pgapace.subscription ADD skip_found boolean NOT NULL DEFAULT false;
UPDATE pgapace.subscription SET skip_found = true WHERE skip_lsn IS NOT NULL;
ALTER TABLE pgapace.stat_subscription ADD error_commit_lsn pg_lsn
