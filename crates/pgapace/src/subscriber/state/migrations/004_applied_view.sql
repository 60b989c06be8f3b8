CREATE VIEW pgapace.applied AS
WITH listed AS (
  SELECT subscription, lsn, predecessor,
    lag(lsn) OVER (PARTITION BY subscription ORDER BY lsn) AS before
  FROM pgapace.progress
), numbered AS (
  SELECT subscription, lsn, predecessor, count(*) FILTER (WHERE before <> predecessor)
    OVER (PARTITION BY subscription ORDER BY lsn) AS gaps
  FROM listed
), range AS (
  SELECT subscription, gaps, min(predecessor) AS after, max(lsn) AS through
  FROM numbered GROUP BY subscription, gaps
)
SELECT s.name AS subscription,
  max(r.through) FILTER (WHERE r.gaps = 0) AS lowest_lsn,
  max(r.through) AS highest_lsn,
  coalesce(array_agg(r.after || '-' || r.through ORDER BY r.gaps) FILTER (WHERE r.gaps > 0),
    '{}') AS beyond
FROM range r JOIN pgapace.subscription s ON s.id = r.subscription
GROUP BY s.name;
COMMENT ON VIEW pgapace.applied IS 'what a reader in the same snapshot sees of the publisher: every
transaction that ends at or before lowest_lsn, and where commits are not kept in order also those
that end in the ranges of beyond (after-through); consistent when lowest_lsn = highest_lsn'
