//! Transactions that depend on each other, each pair for another reason.

/// A table and the transactions on it; the first one is blocked.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) tables: &'static [&'static str],
    pub(super) ddl: &'static str,
    pub(super) rows: &'static str,
    pub(super) transactions: &'static [&'static str],
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "one row, updated again and again",
        tables: &["same"],
        ddl: "CREATE TABLE same (id int PRIMARY KEY, v int)",
        rows: "INSERT INTO same VALUES (1, 0), (2, 0)",
        transactions: &[
            "UPDATE same SET v = 1 WHERE id = 1",
            "UPDATE same SET v = 2 WHERE id = 1",
            "UPDATE same SET v = 3 WHERE id = 1; UPDATE same SET v = 1 WHERE id = 2",
            "UPDATE same SET v = 4 WHERE id = 2",
        ],
    },
    Scenario {
        name: "inserted, then updated",
        tables: &["fresh"],
        ddl: "CREATE TABLE fresh (id int PRIMARY KEY, v int)",
        rows: "",
        transactions: &[
            "INSERT INTO fresh VALUES (1, 0)",
            "UPDATE fresh SET v = 1 WHERE id = 1",
            "UPDATE fresh SET v = 2 WHERE id = 1",
        ],
    },
    Scenario {
        name: "deleted, then inserted",
        tables: &["again"],
        ddl: "CREATE TABLE again (id int PRIMARY KEY, v int)",
        rows: "INSERT INTO again VALUES (1, 0)",
        transactions: &[
            "DELETE FROM again WHERE id = 1",
            "INSERT INTO again VALUES (1, 1)",
            "DELETE FROM again WHERE id = 1",
            "INSERT INTO again VALUES (1, 2)",
        ],
    },
    Scenario {
        name: "a unique value that becomes free, and is used again",
        tables: &["freed"],
        ddl: "CREATE TABLE freed (id int PRIMARY KEY, u text UNIQUE)",
        rows: "INSERT INTO freed VALUES (1, 'a'), (2, 'b')",
        transactions: &[
            "UPDATE freed SET u = 'c' WHERE id = 1",
            "INSERT INTO freed VALUES (3, 'a')",
            "UPDATE freed SET u = NULL WHERE id = 2",
            "UPDATE freed SET u = 'b' WHERE id = 3",
            "INSERT INTO freed VALUES (4, 'a'), (5, NULL)",
        ],
    },
    Scenario {
        name: "the unique value is in the old row",
        tables: &["full_freed"],
        ddl: "CREATE TABLE full_freed (id int PRIMARY KEY, u text UNIQUE); \
              ALTER TABLE full_freed REPLICA IDENTITY FULL",
        rows: "INSERT INTO full_freed VALUES (1, 'a'), (2, 'b')",
        transactions: &[
            "DELETE FROM full_freed WHERE id = 1",
            "UPDATE full_freed SET u = 'a' WHERE id = 2",
            "INSERT INTO full_freed VALUES (1, 'b')",
        ],
    },
    Scenario {
        name: "keys that move on",
        tables: &["moved"],
        ddl: "CREATE TABLE moved (id int PRIMARY KEY, v int)",
        rows: "INSERT INTO moved VALUES (2, 2), (5, 5), (3, 3)",
        transactions: &[
            "DELETE FROM moved WHERE id = 3; UPDATE moved SET v = 50 WHERE id = 5",
            "UPDATE moved SET id = 3 WHERE id = 2; UPDATE moved SET id = 2 WHERE id = 5; \
             UPDATE moved SET v = 22 WHERE id = 2",
            "UPDATE moved SET v = v + 1",
        ],
    },
    Scenario {
        name: "parent and child",
        tables: &["parent", "child"],
        ddl: "CREATE TABLE parent (id int PRIMARY KEY); \
              CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent)",
        rows: "INSERT INTO parent VALUES (1); INSERT INTO child VALUES (1, 1)",
        transactions: &[
            "INSERT INTO parent VALUES (2)",
            "INSERT INTO child VALUES (2, 2)",
            "DELETE FROM child WHERE id = 1",
            "DELETE FROM parent WHERE id = 1",
        ],
    },
    Scenario {
        name: "parent and child, checked on the subscriber too",
        tables: &["checked_parent", "checked_child"],
        ddl: "CREATE TABLE checked_parent (id int PRIMARY KEY); \
              CREATE TABLE checked_child (id int PRIMARY KEY, p int REFERENCES checked_parent); \
              DO $$ DECLARE t record; BEGIN \
                FOR t IN SELECT tgrelid::regclass AS r, tgname FROM pg_trigger \
                         WHERE tgrelid IN ('checked_parent'::regclass, 'checked_child'::regclass) \
                LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', t.r, t.tgname); \
                END LOOP; END $$",
        rows: "INSERT INTO checked_parent VALUES (1); INSERT INTO checked_child VALUES (1, 1)",
        transactions: &[
            "INSERT INTO checked_parent VALUES (2)",
            "INSERT INTO checked_child VALUES (2, 2)",
            "DELETE FROM checked_child WHERE id = 1",
            "DELETE FROM checked_parent WHERE id = 1",
        ],
    },
    Scenario {
        name: "keys of bytes, some of them zero",
        tables: &["bytes"],
        ddl: r"CREATE TABLE bytes (id bytea PRIMARY KEY, v int)",
        rows: r"INSERT INTO bytes VALUES ('\x00', 0), ('\x0000', 0), ('\x000001', 0)",
        transactions: &[
            r"UPDATE bytes SET v = 1 WHERE id = '\x00'",
            r"UPDATE bytes SET v = 2 WHERE id = '\x00'",
            r"DELETE FROM bytes WHERE id = '\x0000'",
            r"UPDATE bytes SET id = '\x0000' WHERE id = '\x000001'",
            r"UPDATE bytes SET v = 3 WHERE id = '\x0000'",
        ],
    },
    Scenario {
        name: "keys that are toasted",
        tables: &["toasted"],
        ddl: "CREATE TABLE toasted (id text, big text, v int); \
              ALTER TABLE toasted ALTER id SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL; \
              ALTER TABLE toasted REPLICA IDENTITY FULL; \
              CREATE INDEX ON toasted USING hash (id)",
        rows: "INSERT INTO toasted SELECT repeat(g::text, 5000), repeat('x', 9000), 0 \
               FROM generate_series(1, 3) g",
        transactions: &[
            "UPDATE toasted SET v = 1 WHERE id LIKE '1%'",
            "UPDATE toasted SET v = v + 1 WHERE id LIKE '1%'",
            "DELETE FROM toasted WHERE id LIKE '2%'",
            "UPDATE toasted SET id = repeat('2', 5000) WHERE id LIKE '3%'",
            "UPDATE toasted SET v = 7 WHERE id LIKE '2%'",
        ],
    },
    Scenario {
        name: "NULLs in rows that are found by all columns",
        tables: &["nulls"],
        ddl: "CREATE TABLE nulls (a int, b int); ALTER TABLE nulls REPLICA IDENTITY FULL",
        rows: "INSERT INTO nulls VALUES (NULL, 1), (NULL, 1), (2, NULL)",
        transactions: &[
            "UPDATE nulls SET b = 2 WHERE ctid = (SELECT min(ctid) FROM nulls WHERE b = 1)",
            "UPDATE nulls SET b = 3 WHERE b = 2",
            "DELETE FROM nulls WHERE b = 1",
            "INSERT INTO nulls VALUES (NULL, 1), (NULL, NULL)",
            "UPDATE nulls SET a = 1 WHERE a IS NULL AND b IS NULL",
        ],
    },
    Scenario {
        name: "TRUNCATE between them",
        tables: &["emptied", "beside"],
        ddl: "CREATE TABLE emptied (id int PRIMARY KEY, v int); \
              CREATE TABLE beside (id int PRIMARY KEY, v int)",
        rows: "INSERT INTO emptied VALUES (1, 0); INSERT INTO beside VALUES (1, 0)",
        transactions: &[
            "INSERT INTO emptied VALUES (2, 0)",
            "TRUNCATE emptied",
            "INSERT INTO emptied VALUES (1, 1), (2, 1)",
            "INSERT INTO beside VALUES (2, 0)",
            "TRUNCATE emptied, beside",
            "INSERT INTO emptied VALUES (1, 2); INSERT INTO beside VALUES (1, 2)",
        ],
    },
    Scenario {
        name: "keys that are equal and look different",
        tables: &["looks"],
        ddl: "CREATE TABLE looks (n numeric, c char(8), v int, PRIMARY KEY (n, c))",
        rows: "INSERT INTO looks VALUES (1.0, 'a', 0), (2, 'b', 0)",
        transactions: &[
            "DELETE FROM looks WHERE n = 1",
            "INSERT INTO looks VALUES (1.000, 'a  ', 1)",
            "UPDATE looks SET n = 1.0, v = 2 WHERE n = 1",
            "UPDATE looks SET v = v + 1",
        ],
    },
    Scenario {
        name: "keys under a collation that takes different bytes for equal",
        tables: &["folded"],
        ddl: "CREATE COLLATION IF NOT EXISTS ignore_case \
                (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
              CREATE TABLE folded (id text COLLATE ignore_case PRIMARY KEY, v int)",
        rows: "INSERT INTO folded VALUES ('a', 0)",
        transactions: &[
            "DELETE FROM folded WHERE id = 'a'",
            "INSERT INTO folded VALUES ('A', 1)",
            "UPDATE folded SET v = 2",
            "UPDATE folded SET id = 'a', v = 3",
        ],
    },
    Scenario {
        name: "partitions with keys of their own",
        tables: &["leaves"],
        ddl: "CREATE TABLE leaves (id int, u int, v int) PARTITION BY RANGE (id); \
              CREATE TABLE leaves_low PARTITION OF leaves FOR VALUES FROM (0) TO (10); \
              CREATE TABLE leaves_high PARTITION OF leaves FOR VALUES FROM (10) TO (20); \
              ALTER TABLE leaves_low ADD PRIMARY KEY (id); \
              ALTER TABLE leaves_high ADD PRIMARY KEY (id); \
              CREATE UNIQUE INDEX ON leaves_low (u)",
        rows: "INSERT INTO leaves VALUES (1, 1, 0), (11, 1, 0)",
        transactions: &[
            "UPDATE leaves SET v = 1 WHERE id = 1",
            "UPDATE leaves SET v = 2 WHERE id = 1",
            "DELETE FROM leaves WHERE id = 1",
            "INSERT INTO leaves VALUES (2, 1, 5)",
            "UPDATE leaves SET id = 12 WHERE id = 2",
            "UPDATE leaves SET v = 9 WHERE id = 12",
        ],
    },
    Scenario {
        name: "a partitioned table that others refer to",
        tables: &["orders", "lines"],
        ddl: "CREATE TABLE orders (id int PRIMARY KEY, v int) PARTITION BY HASH (id); \
              CREATE TABLE orders_0 PARTITION OF orders FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
              CREATE TABLE orders_1 PARTITION OF orders FOR VALUES WITH (MODULUS 2, REMAINDER 1); \
              CREATE TABLE lines (id int PRIMARY KEY, o int REFERENCES orders)",
        rows: "INSERT INTO orders VALUES (1, 0); INSERT INTO lines VALUES (1, 1)",
        transactions: &[
            "INSERT INTO orders VALUES (2, 0), (3, 0)",
            "INSERT INTO lines VALUES (2, 2), (3, 3)",
            "DELETE FROM lines WHERE o = 3",
            "DELETE FROM orders WHERE id = 3",
            "UPDATE orders SET v = 1",
        ],
    },
];
