//! A table with user code on the subscriber, beside plain tables in the same transactions.

use super::{Backlog, Scale, TRANSACTIONS};

const ACCOUNTS: u64 = 100_000;

pub(super) fn trigger_row(scale: Scale) -> Backlog {
    let (rows, transactions) = (scale.of(ACCOUNTS, 500), scale.of(150_000, 300));
    Backlog {
        schema: "CREATE TABLE account (id int PRIMARY KEY, mail text, visits int);
                 CREATE TABLE stock (id int PRIMARY KEY, n int, note text);
                 CREATE TABLE entry (id int PRIMARY KEY, account int, note text)"
            .into(),
        // The sequence shows whether the trigger has run for every change. The publisher sends
        // addresses in the form that the trigger makes of them, so that the tables stay equal.
        subscriber_schema: "CREATE SEQUENCE triggered;
             CREATE FUNCTION normalise() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
               NEW.mail := lower(trim(NEW.mail));
               PERFORM nextval('public.triggered');
               RETURN NEW;
             END $$;
             CREATE TRIGGER normalise BEFORE INSERT OR UPDATE ON account
               FOR EACH ROW EXECUTE FUNCTION normalise();
             ALTER TABLE account ENABLE ALWAYS TRIGGER normalise"
            .into(),
        load: format!(
            "INSERT INTO account SELECT i, 'user' || i || '@example.com', 0
               FROM generate_series(1, {rows}) i;
             INSERT INTO stock SELECT i, 0, 'note ' || i FROM generate_series(1, {rows}) i"
        ),
        write: format!(
            "DECLARE a int; s int;
             BEGIN
               FOR i IN 1..{transactions} LOOP
                 a := 1 + floor(random() * {rows}); s := 1 + floor(random() * {rows});
                 UPDATE account SET mail = 'user' || i || '@example.org', visits = visits + 1
                   WHERE id = a;
                 UPDATE stock SET n = n + 1, note = 'change ' || i WHERE id = s;
                 INSERT INTO entry VALUES (i, a, 'entry ' || i);
                 COMMIT;
               END LOOP;
             END"
        )
        .into(),
        units: transactions,
        unit: TRANSACTIONS,
        changes: transactions * 3,
        check: Some(format!("SELECT last_value >= {transactions} FROM triggered")),
        ..Backlog::default()
    }
}
