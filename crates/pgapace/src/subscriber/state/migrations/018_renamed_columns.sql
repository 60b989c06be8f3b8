-- one word for one thing: sync_lsn is what native calls srsublsn, snapshot_lsn what a copy was begun with
ALTER TABLE pgapace.relation RENAME sync_lsn TO snapshot_lsn;
ALTER TABLE pgapace.relation RENAME gate_lsn TO sync_lsn;
ALTER TABLE pgapace.relation RENAME source_bytes TO publisher_bytes;
ALTER TABLE pgapace.stat_subscription RENAME wait_target_lock TO wait_subscriber_lock;
ALTER TABLE pgapace.stat_subscription RENAME wait_source TO wait_publisher;
ALTER TABLE pgapace.stat_subscription RENAME demotions TO tables_serialized
