-- how changes are applied (set, append, row) and why; null until the first one
ALTER TABLE pgapace.relation ADD apply_mode text, ADD apply_reason text;

-- in which form the publisher sent values in the last run (binary, text) and why
ALTER TABLE pgapace.subscription ADD format text, ADD format_reason text;

ALTER TABLE pgapace.stat_subscription
  ADD groups bigint NOT NULL DEFAULT 0,
  ADD fallbacks bigint NOT NULL DEFAULT 0
