COMMENT ON TABLE pgapace.conflict IS 'conflicts: those that a rule of --on-conflict decided, in the
transaction that they are of; those that stopped the subscription; and of missing rows without a
rule those that the log names. All are counted in pgapace.stat_subscription'
