-- processes that share subscriptions (membership/assignment.rs). backend: the session that writes the row. runs:
-- which subscriptions of this database the process can run, with the weight of each; failed: those that it
-- failed to run lately; claims: those of other processes that it is to have
ALTER TABLE pgapace.member ADD backend integer, ADD runs text[] NOT NULL DEFAULT '{}',
  ADD weights integer[] NOT NULL DEFAULT '{}', ADD failed text[] NOT NULL DEFAULT '{}',
  ADD claims text[] NOT NULL DEFAULT '{}';
COMMENT ON TABLE pgapace.member IS 'processes that wait for subscriptions, or share them: pgapace run --standby'
