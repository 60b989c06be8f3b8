-- apply workers in use, and why
ALTER TABLE pgapace.stat_subscription ADD workers integer, ADD workers_reason text
