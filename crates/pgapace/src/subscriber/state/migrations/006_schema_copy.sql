-- of a schema that is copied: before (nothing is made), after (tables are), begun (some indexes and
-- constraints are); null if it is not ours to make, or made
ALTER TABLE pgapace.subscription ADD schema_copy text
