COMMENT ON TABLE pgapace.subscription IS 'subscriptions whose changes are applied to this database';
COMMENT ON TABLE pgapace.relation IS 'tables of each subscription, with the state of their synchronization;
sync_lsn corresponds to srsublsn of pg_subscription_rel';
COMMENT ON TABLE pgapace.progress IS 'progress of each subscription, one row per subscriber transaction;
pgapace.applied shows the result';
COMMENT ON VIEW pgapace.applied IS 'the transactions of the publisher that a reader in the same snapshot sees:
all that end at or before lowest_lsn; if preserve-commit-order is false, also those that end in the ranges
of beyond (after-through). The data is consistent if lowest_lsn = highest_lsn';
COMMENT ON TABLE pgapace.stat_subscription IS 'cumulative statistics of each subscription, written about
once per second';
COMMENT ON TABLE pgapace.conflict IS 'conflicts that a rule of --on-conflict resolved or that stopped the
subscription, and missing rows that were logged. pgapace.stat_subscription counts all conflicts.
Rows older than --conflict-retention are removed';
COMMENT ON TABLE pgapace.prepared IS 'transactions that are prepared on the subscriber; see pgapace prepared.
A prepared transaction keeps a lock on this table, so no migration may alter it'
