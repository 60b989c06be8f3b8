-- publisher_database: OID of the publisher's database. One that is created again under its name, or copied from a
-- template with the OIDs of its tables, has another one. Earlier versions do not tell, until the next start
ALTER TABLE pgapace.subscription ADD publisher_database oid
