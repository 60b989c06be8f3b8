-- error_exit_code: of last_error, as pgapace run ends with it
ALTER TABLE pgapace.stat_subscription ADD error_exit_code smallint
