-- exit_code: of the failure of a barrier that cannot be made. Earlier versions do not tell
ALTER TABLE pgapace.barrier ADD exit_code smallint
