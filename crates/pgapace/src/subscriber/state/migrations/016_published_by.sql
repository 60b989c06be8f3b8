-- by which rows of the publisher's catalogue a table is published (engine/src/published.rs), and
-- where that was looked at last
ALTER TABLE pgapace.relation ADD published_by text;
ALTER TABLE pgapace.subscription ADD published_lsn pg_lsn
