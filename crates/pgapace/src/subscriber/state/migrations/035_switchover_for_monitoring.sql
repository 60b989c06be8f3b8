-- pgapace status by a monitoring role says that a subscription was switched over. resume may be a command of
-- the user, which stays with the owner
GRANT SELECT (subscription, step, slot_name, fence_lsn, begun_at, ended_at, generation, back_publications,
  back_origin_none) ON pgapace.switchover TO pg_monitor
