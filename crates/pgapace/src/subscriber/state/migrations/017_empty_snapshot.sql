-- with empty_first, where a user has decided that (--truncate): no row may be younger than this
-- snapshot of the subscriber
ALTER TABLE pgapace.relation ADD empty_snapshot text
