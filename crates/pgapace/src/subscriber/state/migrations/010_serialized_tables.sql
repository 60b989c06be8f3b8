-- tables that were applied in stream order for a while
ALTER TABLE pgapace.stat_subscription ADD demotions bigint NOT NULL DEFAULT 0
