-- two_phase: whether the last run received prepared transactions at their PREPARE. After a rebase another slot does so,
-- whose predecessor is gone
ALTER TABLE pgapace.subscription ADD two_phase boolean
