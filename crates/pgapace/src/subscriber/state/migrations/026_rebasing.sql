-- until all tables are ready: those that hold rows are compared with the publisher's and made equal
ALTER TABLE pgapace.subscription ADD rebasing boolean NOT NULL DEFAULT false
