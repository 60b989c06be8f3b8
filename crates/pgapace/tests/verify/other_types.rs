//! Columns whose type on the subscriber is another one.

use super::{BOTH_WAYS, differences, verify};
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
