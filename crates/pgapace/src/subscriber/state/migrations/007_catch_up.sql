-- of a table that joins while others stream: under which number (below zero) its own progress is
-- in pgapace.progress, once it is copied; null if it is no longer, or never was, behind the others
ALTER TABLE pgapace.relation ADD catch_up integer;
CREATE SEQUENCE pgapace.catch_up AS integer
