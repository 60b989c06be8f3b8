-- plan: differs if the table is compared otherwise, so that the position means nothing
ALTER TABLE pgapace.verification ADD plan bigint
