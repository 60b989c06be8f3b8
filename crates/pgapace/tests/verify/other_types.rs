//! Columns whose type on the subscriber is another one.

use super::{BOTH_WAYS, differences, expect_equal, verify};
use crate::support::on_versions;

/// An explicit cast cuts such values, and replication refuses them.
#[test]
fn values_that_were_cut_are_different() {
    let sides = [
        ("text", "varchar(3)", "abcde", "abc", "ab   "),
        ("bit(5)", "varbit(3)", "10101", "101", ""),
        ("text", "bit(8)", "10101", "10101000", "x1F"),
        ("text[]", "varchar(3)[]", "{a,abcde}", "{a,abc}", "{\"ab   \",NULL}"),
        ("varchar(5)[]", "varchar(3)[]", "{{abcde},{b}}", "{{abc},{b}}", "[0:1]={a,b}"),
        ("text[]", "char(3)[]", "{abcde}", "{abc}", "{a,\"ab   \"}"),
        ("varbit[]", "bit(3)[]", "{111,10101}", "{111,101}", "{101}"),
        ("bit(5)[]", "varbit(3)[]", "{10101}", "{101}", "{}"),
        ("varbit[]", "bit(5)[]", "{101}", "{10100}", "{11111,NULL}"),
    ];
    on_versions(&BOTH_WAYS, |mut case| {
        case.tool.args = vec!["--copy-data=false".to_owned()];
        for (number, (theirs, ours, long, cut, _)) in sides.iter().enumerate() {
            let table = |column, value| {
                format!(
                    "CREATE TABLE t{number} (id int PRIMARY KEY, v {column}); \
                     INSERT INTO t{number} VALUES (1, '{value}')"
                )
            };
            case.publisher.sql(&table(theirs, long));
            case.subscriber.sql(&table(ours, cut));
        }
        case.publish("FOR ALL TABLES");
        case.run_until_current();
        for (number, (theirs, _, _, _, fits)) in sides.iter().enumerate() {
            // A bit(5) does not fit a varbit(3).
            let value = if theirs.starts_with("bit") { "NULL" } else { &format!("'{fits}'") };
            case.publisher.sql(&format!("INSERT INTO t{number} VALUES (2, {value})"));
        }
        case.run_until_current();
        let result = verify(&case, 18, &[]);
        let found = |number| format!("t{number}|different|{{\"id\": \"1\"}}|{{v}}|1");
        assert_eq!(differences(&case), Vec::from_iter((0..sides.len()).map(found)), "{result:#}");
    });
}

/// The publisher may lack such an object, and its oid is another one there.
#[test]
fn names_of_objects_are_left_out() {
    on_versions(&BOTH_WAYS, |case| {
        case.publisher.sql(
            "CREATE TABLE a (id int PRIMARY KEY, v oid, w text, x oid[]); INSERT INTO a VALUES (1, 1259, 'public.mine', '{1259}')",
        );
        case.subscriber.sql(
            "CREATE TABLE mine (); CREATE TABLE a (id int PRIMARY KEY, v regclass, w regtype, x regclass[])",
        );
        case.both("CREATE TABLE z (id int PRIMARY KEY)");
        case.publisher.sql("INSERT INTO z VALUES (1)");
        case.publish("FOR TABLE a, z");
        case.run_until_current();
        case.tool.finish("verify", &[]).expect(6, &["public.a.v", "public.a.w", "public.a.x"]);
        let except = ["--except-column", "a.v", "--except-column", "a.w", "--except-column", "a.x"];
        expect_equal(&case, &["a", "z"], &except);
        case.subscriber.sql("DELETE FROM z");
        verify(&case, 18, &[]);
        assert_eq!(differences(&case), ["z|missing|{\"id\": \"1\"}|∅|1"]);
    });
}
