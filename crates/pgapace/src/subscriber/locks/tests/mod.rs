//! Lock rules from the catalogues of an old and a new server.

mod bed;

use engine::writeset::LockRules;
use pgoutput::ReplicaIdentity;

use bed::{Mapped, names, on_servers, row, unique};

const MAJORS: [u16; 2] = [15, 18];

#[test]
fn rows_are_identified_by_the_columns_that_find_them() {
    let sql = "CREATE TABLE plain (id int PRIMARY KEY, v text); \
        CREATE TABLE wide (b text, a numeric, v text, PRIMARY KEY (a, b)); \
        CREATE TABLE rounded (a numeric(10, 2) PRIMARY KEY); \
        CREATE TABLE no_key (a int, b numeric, c json, d interval); \
        CREATE TABLE span (k interval, id int, PRIMARY KEY (id, k)); \
        CREATE TABLE by_code (id int PRIMARY KEY, at timestamptz DEFAULT clock_timestamp()); \
        CREATE TABLE code (id int PRIMARY KEY); \
        CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; \
        CREATE TRIGGER t BEFORE INSERT ON code FOR EACH ROW EXECUTE FUNCTION f(); \
        ALTER TABLE code ENABLE ALWAYS TRIGGER t";
    on_servers("rows", sql, |bed| {
        let map = bed.map("plain", "v:text id*:int4");
        assert_eq!(row(&map), "key id* Integer");
        let LockRules { root, whole_table, user_code, .. } = map.locks;
        assert_eq!((root, whole_table, user_code), (bed.oid("plain"), false, false));
        let map = bed.map("wide", "a*:numeric b*:text v:text");
        assert_eq!(row(&map), "key a* Numeric, b* Bytes");
        assert_eq!(row(&bed.map("rounded", "a*:numeric")), "table");
        assert_eq!(row(&bed.map("span", "k*:text id*:int4")), "key id* Integer, k* Bytes");
        bed.ordered = false;
        assert_eq!(row(&bed.map("span", "k*:text id*:int4")), "table");
        bed.ordered = true;
        let columns = "a:int4 b:numeric c:text d:text";
        let map = bed.map_with("no_key", ReplicaIdentity::Full, columns);
        assert_eq!(row(&map), "row a Integer, b Numeric");
        assert_eq!(row(&bed.map("no_key", columns)), "table");
        let map = bed.map("by_code", "id*:int4");
        assert_eq!((map.locks.whole_table, map.locks.user_code), (true, false));
        let map = bed.map("by_code", "id*:int4 at:text");
        assert_eq!((map.locks.whole_table, map.locks.user_code), (false, false));
        let map = bed.map("code", "id*:int4");
        assert_eq!((map.locks.whole_table, map.locks.user_code), (false, true));
    });
}

#[test]
fn unique_indexes() {
    let sql = "CREATE EXTENSION citext; CREATE EXTENSION btree_gist; \
        CREATE COLLATION loose (provider = icu, locale = 'und', deterministic = false); \
        CREATE TABLE t (id int PRIMARY KEY, a int, b text, c citext, d text, \
          g text GENERATED ALWAYS AS (lower(b)) STORED, own int); \
        CREATE UNIQUE INDEX ON t (id, a); \
        CREATE UNIQUE INDEX ON t (b, a) WHERE a > 0; \
        CREATE UNIQUE INDEX ON t (a) INCLUDE (b) NULLS NOT DISTINCT; \
        CREATE UNIQUE INDEX ON t (c); \
        CREATE UNIQUE INDEX ON t (d COLLATE loose); \
        CREATE UNIQUE INDEX ON t (lower(b)); \
        CREATE UNIQUE INDEX ON t (g); \
        CREATE UNIQUE INDEX ON t (own); \
        CREATE UNIQUE INDEX ON t (d, own); \
        CREATE INDEX ON t (a, d); \
        ALTER TABLE t ADD CONSTRAINT x EXCLUDE USING gist (a WITH =)";
    on_servers("uniques", sql, |bed| {
        let map = bed.map("t", "id*:int4 a:int4 b:text c:text d:text");
        assert_eq!(row(&map), "key id* Integer");
        assert_eq!(
            unique(&map),
            [
                " uncertain",
                " uncertain",
                "a Integer nulls",
                "a Integer, b Bytes",
                "c Bytes uncertain",
                "d Bytes",
                "d Bytes uncertain",
            ]
        );
        let map = bed.map("t", "id*:int4 a*:int4 b:text c:text");
        assert!(unique(&map).contains(&"a* Integer nulls".to_owned()));
        // Partitions of the published table may have another replica identity.
        let map = bed.map_with("t", ReplicaIdentity::Full, "id:int4 a:int4 b:text c:text");
        assert_eq!(row(&map), "key id* Integer");
        assert!(unique(&map).contains(&"a Integer nulls".to_owned()));
        // Any freed value locks the table.
        assert_eq!(unique(&bed.map_with("t", ReplicaIdentity::Nothing, "a:int4")).len(), 0);
    });
}

#[test]
fn partitions_share_the_locks_of_their_root() {
    let sql = "CREATE TABLE r (id int, region text, code text, n int, PRIMARY KEY (id, region)) \
          PARTITION BY LIST (region); \
        CREATE TABLE r_a PARTITION OF r FOR VALUES IN ('a'); \
        CREATE TABLE r_b PARTITION OF r DEFAULT PARTITION BY RANGE (id); \
        CREATE TABLE r_b1 PARTITION OF r_b DEFAULT; \
                CREATE UNIQUE INDEX ON r_b (n, id); \
        CREATE UNIQUE INDEX ON r_a (code); \
        CREATE UNIQUE INDEX ON r_b1 (code); \
        CREATE TABLE k (id int, region text) PARTITION BY LIST (region); \
        CREATE TABLE k_a PARTITION OF k (PRIMARY KEY (id)) FOR VALUES IN ('a'); \
        CREATE TABLE k_b PARTITION OF k (PRIMARY KEY (id, region)) DEFAULT";
    on_servers("partitions", sql, |bed| {
        let columns = "id*:int4 region*:text code:text n:int4";
        let root = bed.map("r", columns);
        let expected = ["code Bytes", "id* Integer, n Integer"];
        assert_eq!(unique(&root), expected);
        for leaf in ["r_a", "r_b", "r_b1"] {
            let leaf = bed.map(leaf, columns);
            assert_eq!(leaf.locks, root.locks);
        }
        let columns = "id*:int4 region*:text";
        let (root, a, b) =
            (bed.map("k", columns), bed.map("k_a", columns), bed.map("k_b", columns));
        assert_eq!(row(&root), "table");
        assert_eq!(
            (row(&a), row(&b)),
            ("key id* Integer".into(), "key id* Integer, region* Bytes".into())
        );
        assert!(a.locks.root == root.locks.root && b.locks.root == root.locks.root);
        let identities = [&root, &a, &b].map(|map| map.locks.identity);
        assert!(identities[0] != identities[1] && identities[1] != identities[2]);
    });
}

#[test]
fn foreign_keys_if_commit_order_is_not_kept() {
    let sql = "CREATE TABLE p (id int8 PRIMARY KEY, a int, b text, UNIQUE (a, b)) ; \
        CREATE TABLE c (id int PRIMARY KEY, p int REFERENCES p, b text, a int, \
          up int REFERENCES c, n numeric, FOREIGN KEY (a, b) REFERENCES p (a, b)); \
        CREATE TABLE other (n numeric PRIMARY KEY); \
        ALTER TABLE c ADD FOREIGN KEY (n) REFERENCES other; \
        CREATE TABLE leaves (id int, p int8 REFERENCES p, PRIMARY KEY (id)) PARTITION BY HASH (id); \
        CREATE TABLE leaf PARTITION OF leaves FOR VALUES WITH (MODULUS 1, REMAINDER 0)";
    on_servers("foreign_keys", sql, |bed| {
        let (p, c) = ("id*:int8 a:int4 b:text", "id*:int4 p:int4 b:text a:int4 up:int4 n:numeric");
        assert_eq!(bed.map("c", c).locks.foreign, []);
        assert_eq!(bed.map("p", p).locks.referenced, []);
        bed.ordered = false;
        let (parent, child) = (bed.map("p", p), bed.map("c", c));
        let foreign = |map: &Mapped| {
            let mut all: Vec<_> = map
                .locks
                .foreign
                .iter()
                .map(|f| (f.parent, names(map, &f.columns), f.certain, f.id))
                .collect();
            all.sort();
            all
        };
        let referenced = |map: &Mapped| {
            let keys = &map.locks.referenced;
            let mut all: Vec<_> =
                keys.iter().map(|r| (names(map, &r.columns), r.certain, r.id)).collect();
            all.sort();
            all
        };
        let of_child = foreign(&child);
        let (p_oid, c_oid, other_oid) = (bed.oid("p"), bed.oid("c"), bed.oid("other"));
        let columns: Vec<_> = of_child.iter().map(|f| (f.0, f.1.as_str(), f.2)).collect();
        assert_eq!(
            columns,
            [
                (p_oid, "a Integer, b Bytes", true),
                (p_oid, "p Integer", true),
                (c_oid, "up Integer", true),
                (other_oid, "n Numeric", true),
            ]
        );
        // The referenced side of each.
        let of_parent = referenced(&parent);
        let leaf = foreign(&bed.map("leaf", "id*:int4 p:int8"));
        assert_eq!(leaf.len(), 1);
        assert_eq!(
            of_parent,
            [
                ("a Integer, b Bytes".to_owned(), true, of_child[0].3),
                ("id* Integer".to_owned(), true, of_child[1].3.min(leaf[0].3)),
                ("id* Integer".to_owned(), true, of_child[1].3.max(leaf[0].3)),
            ]
        );
        assert_eq!(referenced(&child), [("id* Integer".to_owned(), true, of_child[2].3)]);
        assert_eq!((leaf[0].0, leaf[0].1.as_str(), leaf[0].2), (p_oid, "p Integer", true));
        assert_eq!(
            bed.map("leaves", "id*:int4 p:int8").locks,
            bed.map("leaf", "id*:int4 p:int8").locks
        );
        // Columns that are not published, or are published with another type.
        let map = bed.map("c", "id*:int4 p:numeric a:int4");
        let columns: Vec<_> = foreign(&map).into_iter().map(|f| (f.1, f.2)).collect();
        assert_eq!(columns, [(String::new(), false), ("p Bytes".to_owned(), false)]);
    });
}
