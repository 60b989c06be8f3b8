-- walsender: process id of the walsender that sent the last stream of an owner to this database, while server was the
-- same. server: the oid of the database, and when the server started: a copy of the database has another one
ALTER TABLE pgapace.owner ADD walsender integer, ADD server text
