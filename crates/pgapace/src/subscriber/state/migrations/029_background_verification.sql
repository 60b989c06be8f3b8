-- --verify-interval. kind: see subscriber/state/verification/mod.rs; first_lsn: the lowest LSN at which a
-- chunk was compared. stale_through: a table that may lack changes has all that commit from there on.
-- attempts: how often a barrier is tried, with a delay that doubles
ALTER TABLE pgapace.verification ADD kind text NOT NULL DEFAULT 'verb'
  CHECK (kind IN ('verb', 'begun', 'background'));
ALTER TABLE pgapace.verification ADD first_lsn pg_lsn;
ALTER TABLE pgapace.verification DROP CONSTRAINT verification_pkey,
  ADD PRIMARY KEY (subscription, schema_name, table_name, kind);
COMMENT ON TABLE pgapace.verification IS 'the last verification of each table by pgapace verify (kind verb), and
those in the background: the last complete one, and the one that goes on (begun)';
ALTER TABLE pgapace.difference ADD verification bigint;
UPDATE pgapace.difference d SET verification = v.verification FROM pgapace.verification v
  WHERE v.subscription = d.subscription AND v.schema_name = d.schema_name AND v.table_name = d.table_name;
ALTER TABLE pgapace.relation ADD stale_through pg_lsn;
UPDATE pgapace.relation r SET stale_through = s.published_lsn FROM pgapace.subscription s
  WHERE s.id = r.subscription AND r.stale_lsn IS NOT NULL;
ALTER TABLE pgapace.barrier ADD attempts integer NOT NULL DEFAULT 12
