-- lacks_prepared: a transaction was prepared on the subscriber without its changes of this table, which is being copied.
-- Only the run that has prepared it has them. So another one copies the table again, unless it has caught up
ALTER TABLE pgapace.relation ADD lacks_prepared boolean NOT NULL DEFAULT false
