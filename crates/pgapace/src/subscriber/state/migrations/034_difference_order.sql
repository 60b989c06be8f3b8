-- repair takes the differences of a table in batches, in the order of their numbers
CREATE INDEX ON pgapace.difference (subscription, schema_name, table_name, id);
DROP INDEX pgapace.difference_subscription_schema_name_table_name_idx
