-- copied_into: of a copy in several parts, the oid of the table on the subscriber into which they go, until the
-- copy is complete or another one is requested. Another table of that name has no rows of the copy, and is not emptied
ALTER TABLE pgapace.relation ADD copied_into oid
