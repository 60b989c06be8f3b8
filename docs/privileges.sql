-- What the two roles of pgapace need, and nothing more; a switchover needs more (docs/switchover.md).
-- Database shop, schema public: put yours in their place. Run the statements for a subscriber when its
-- tables exist; for tables that come later, repeat them or use ALTER DEFAULT PRIVILEGES. The tests run this file as it is (crates/pgapace/tests/faults/privileges.rs).

-- publisher: run in database shop by an administrator
CREATE ROLE pgapace_publisher LOGIN REPLICATION;
GRANT USAGE ON SCHEMA public TO pgapace_publisher;
-- Read for the first copy and pgapace verify only; changes come from the replication slot.
GRANT SELECT ON ALL TABLES IN SCHEMA public TO pgapace_publisher;
-- The values of sequences, for the first copy and for pgapace sequences.
GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO pgapace_publisher;

-- subscriber: run in database shop by an administrator
CREATE ROLE pgapace_subscriber LOGIN;
-- To create schema pgapace, which holds all state. Instead, you may create it:
-- CREATE SCHEMA pgapace AUTHORIZATION pgapace_subscriber;
GRANT CREATE ON DATABASE shop TO pgapace_subscriber;
-- To apply as a replica does: only triggers meant for replication fire, and foreign keys are the
-- publisher's. Before PostgreSQL 15 this cannot be granted: the role must be a superuser.
GRANT SET ON PARAMETER session_replication_role TO pgapace_subscriber;
GRANT USAGE ON SCHEMA public TO pgapace_subscriber;
GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA public TO pgapace_subscriber;
GRANT SELECT, UPDATE ON ALL SEQUENCES IN SCHEMA public TO pgapace_subscriber;
-- TRUNCATE ... RESTART IDENTITY on the publisher can only be applied by the owner of the sequences,
-- and a table with row-level security only by a role with BYPASSRLS.

-- subscriber, for monitoring: to name user and query of sessions that block. The same lets a monitoring role
-- read the state and the statistics (pgapace status, pgapace top, pgapace.stat_*), but no rows.
GRANT pg_monitor TO pgapace_subscriber;

-- subscriber, optional, for run --copy-schema: to create the tables, which it then owns
GRANT CREATE ON SCHEMA public TO pgapace_subscriber;

-- subscriber, optional, for tables of other owners: ANALYZE after their copy (PostgreSQL 17 and later)
-- GRANT MAINTAIN ON ALL TABLES IN SCHEMA public TO pgapace_subscriber;
-- To build indexes after the rows, or to ANALYZE before 17, the role must be a member of the owner:
-- GRANT owner_of_the_tables TO pgapace_subscriber;

-- subscriber, optional: to tag commits with a replication origin (needed for --origin none elsewhere)
GRANT EXECUTE ON FUNCTION
  pg_replication_origin_create(text),
  pg_replication_origin_drop(text),
  pg_replication_origin_oid(text),
  pg_replication_origin_session_setup(text),
  pg_replication_origin_session_reset(),
  pg_replication_origin_xact_setup(pg_lsn, timestamptz),
  pg_replication_origin_xact_reset()
  TO pgapace_subscriber;
