-- an interrupted verification by pgapace verify stands beside the last complete one
ALTER TABLE pgapace.verification DROP CONSTRAINT verification_kind_check,
  ADD CHECK (kind IN ('verb', 'verb_begun', 'begun', 'background'));
UPDATE pgapace.verification SET kind = 'verb_begun' WHERE kind = 'verb' AND result IS NULL;
COMMENT ON TABLE pgapace.verification IS 'verifications of each table: the last complete one by pgapace verify (verb),
one of it that goes on or was interrupted (verb_begun), the last complete one in the background, and one there that
goes on (begun)'
