-- about: a table as schema.name; disabled; or nothing for the last error of the subscription. error: as in
-- pgapace.relation, subscription and stat_subscription, which members of pg_monitor read
CREATE TABLE pgapace.error_detail (
  subscription integer NOT NULL,
  about        text NOT NULL,
  error        text NOT NULL,
  full_text    text NOT NULL,
  PRIMARY KEY (subscription, about)
);
COMMENT ON TABLE pgapace.error_detail IS 'the last errors with what they quote of rows (key, DETAIL), which stays
with the owner'
