-- generation: one more than that of the switchover before it, in the other direction, whose record is on the
-- other server. back_*: what the subscription of the way back, of the slot's name, is made of
ALTER TABLE pgapace.switchover DROP CONSTRAINT switchover_step_check,
  ADD CHECK (step IN ('stopping', 'draining', 'aside', 'verifying', 'sequences', 'slot', 'ended', 'opened')),
  ADD generation bigint NOT NULL DEFAULT 1,
  ADD back_publications text[],
  ADD back_origin_none boolean NOT NULL DEFAULT false
