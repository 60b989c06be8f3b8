//! The test cases of libpq.

use super::{error, given};
use crate::conninfo::*;

/// Cases of `src/interfaces/libpq/t/001_uri.pl`.
#[test]
fn uris_of_libpq() {
    let cases = [
        (
            "postgresql://uri-user:secret@host:12345/db",
            "user='uri-user' password='secret' dbname='db' host='host' port='12345'",
        ),
        (
            "postgresql://uri-user@host:12345/db",
            "user='uri-user' dbname='db' host='host' port='12345'",
        ),
        ("postgresql://uri-user@host/db", "user='uri-user' dbname='db' host='host'"),
        ("postgresql://host:12345/db", "dbname='db' host='host' port='12345'"),
        ("postgresql://host/db", "dbname='db' host='host'"),
        ("postgresql://uri-user@host:12345/", "user='uri-user' host='host' port='12345'"),
        ("postgresql://uri-user@host/", "user='uri-user' host='host'"),
        ("postgresql://uri-user@", "user='uri-user'"),
        ("postgresql://host:12345/", "host='host' port='12345'"),
        ("postgresql://host:12345", "host='host' port='12345'"),
        ("postgresql://host/", "host='host'"),
        ("postgresql://host", "host='host'"),
        ("postgresql://", ""),
        ("postgresql://?hostaddr=127.0.0.1", "hostaddr='127.0.0.1'"),
        ("postgresql://example.com?hostaddr=63.1.2.4", "host='example.com' hostaddr='63.1.2.4'"),
        ("postgresql://%68ost/", "host='host'"),
        ("postgresql://host/db?user=uri-user", "user='uri-user' dbname='db' host='host'"),
        (
            "postgresql://host/db?user=uri-user&port=12345",
            "user='uri-user' dbname='db' host='host' port='12345'",
        ),
        (
            "postgresql://host/db?u%73er=someotheruser&port=12345",
            "user='someotheruser' dbname='db' host='host' port='12345'",
        ),
        ("postgresql://host:12345?user=uri-user", "user='uri-user' host='host' port='12345'"),
        ("postgresql://host?user=uri-user", "user='uri-user' host='host'"),
        ("postgresql://host?", "host='host'"),
        ("postgresql://[::1]:12345/db", "dbname='db' host='::1' port='12345'"),
        ("postgresql://[::1]/db", "dbname='db' host='::1'"),
        ("postgresql://[2001:db8::1234]/", "host='2001:db8::1234'"),
        ("postgresql://[200z:db8::1234]/", "host='200z:db8::1234'"),
        ("postgresql://[::1]", "host='::1'"),
        ("postgres://", ""),
        ("postgres:///", ""),
        ("postgres:///db", "dbname='db'"),
        ("postgres://uri-user@/db", "user='uri-user' dbname='db'"),
        ("postgres://?host=/path/to/socket/dir", "host='/path/to/socket/dir'"),
        ("postgres://@host", "host='host'"),
        ("postgres://host:/", "host='host'"),
        ("postgres://:12345/", "port='12345'"),
        (
            "postgres://otheruser@?host=/no/such/directory",
            "user='otheruser' host='/no/such/directory'",
        ),
        (
            "postgres://otheruser@/?host=/no/such/directory",
            "user='otheruser' host='/no/such/directory'",
        ),
        (
            "postgres://otheruser@:12345?host=/no/such/socket/path",
            "user='otheruser' host='/no/such/socket/path' port='12345'",
        ),
        (
            "postgres://otheruser@:12345/db?host=/path/to/socket",
            "user='otheruser' dbname='db' host='/path/to/socket' port='12345'",
        ),
        (
            "postgres://:12345/db?host=/path/to/socket",
            "dbname='db' host='/path/to/socket' port='12345'",
        ),
        ("postgres://:12345?host=/path/to/socket", "host='/path/to/socket' port='12345'"),
        (
            "postgres://%2Fvar%2Flib%2Fpostgresql/dbname",
            "dbname='dbname' host='/var/lib/postgresql'",
        ),
        ("postgresql://host?sslmode=verify-full", "host='host' sslmode='verify-full'"),
        // Cases that 001_uri.pl does not have.
        ("postgresql://host?ssl=true", "host='host' sslmode='require'"),
        ("postgresql://u:p%40%3A@h/d%2Fe", "user='u' password='p@:' dbname='d/e' host='h'"),
        ("postgresql://u:a:b@h", "user='u' password='a:b' host='h'"),
        ("postgresql://u:a?b@h", "user='u' password='a?b' host='h'"),
        ("postgresql://u@@socket", "user='u' host='@socket'"),
        ("postgresql://h1,h2:2,[::1]:3/d", "dbname='d' host='h1,h2,::1' port=',2,3'"),
        ("postgresql://h1:1,h2/d?", "dbname='d' host='h1,h2' port='1,'"),
        ("postgresql://host/db?port=1&", "dbname='db' host='host' port='1'"),
        ("postgresql://host/user@domain", "dbname='user@domain' host='host'"),
    ];
    for (uri, expected) in cases {
        assert_eq!(given(uri), expected, "{uri}");
    }
}

#[test]
fn uri_errors_of_libpq() {
    let cases = [
        (
            "postgresql://host/db?u%7aer=someotheruser&port=12345",
            "invalid query parameter at character 22 of the URI",
        ),
        ("postgresql://host?uzer=", "invalid query parameter at character 19 of the URI"),
        ("postgre://", "missing \"=\" after the word at character 1 of the connection string"),
        (
            "postgres://[::1",
            "missing \"]\" after the \"[\" of the IPv6 host address at character 12 of the URI",
        ),
        ("postgres://[]", "IPv6 host address may not be empty (character 12 of the URI)"),
        (
            "postgres://[::1]z",
            "unexpected character at character 17 of the URI (expected \":\" or \"/\")",
        ),
        (
            "postgresql://host?zzz",
            "missing key/value separator \"=\" in the query parameter at character 19 of the URI",
        ),
        (
            "postgresql://host?value1&value2",
            "missing key/value separator \"=\" in the query parameter at character 19 of the URI",
        ),
        (
            "postgresql://host?user=1&value2",
            "missing key/value separator \"=\" in the query parameter at character 26 of the URI",
        ),
        (
            "postgresql://host?key=key=value",
            "extra key/value separator \"=\" in the query parameter at character 19 of the URI",
        ),
        (
            "postgres://host?dbname=%XXfoo",
            "invalid percent-encoded token in the query parameter's value at character 24 of the \
             URI",
        ),
        ("postgresql://a%00b", "forbidden value %00 in the host at character 14 of the URI"),
        (
            "postgresql://%zz",
            "invalid percent-encoded token in the host at character 14 of the URI",
        ),
        ("postgresql://%1", "invalid percent-encoded token in the host at character 14 of the URI"),
        ("postgresql://%", "invalid percent-encoded token in the host at character 14 of the URI"),
        (
            "postgresql://u@h/a b",
            "unexpected spaces (they are written %20) in the database name at character 18 of the \
             URI",
        ),
        // Cases that 001_uri.pl does not have.
        (
            "postgresql://h1,h2:%zz",
            "invalid percent-encoded token in the port at character 20 of the URI",
        ),
        (
            "postgresql://\u{fc}:%ff@h",
            "percent-encoded bytes that are not valid UTF-8 in the password at character 16 of the URI",
        ),
        (
            "postgresql://u:p@q@h",
            "unexpected \"@\" at character 19 of the URI (in a user name or password it is written \
             %40)",
        ),
    ];
    for (uri, expected) in cases {
        assert_eq!(error(uri), expected, "{uri}");
    }
}

#[test]
fn keyword_quoting() {
    assert_eq!(given("host = a\tport=1"), "host='a' port='1'");
    assert_eq!(
        given("  host='a b' user='it\\'s' dbname=x\\ y "),
        "user='it's' dbname='x y' host='a b'"
    );
    assert_eq!(given("user=a\\\\b password='' dbname=d"), "user='a\\b' dbname='d'");
    assert_eq!(given("user='a'dbname=b"), "user='a' dbname='b'");
    assert_eq!(given("host=a host=b"), "host='b'");
    assert_eq!(given(""), "");
    assert_eq!(given("host=a\\"), "host='a'");
    let missing = "missing \"=\" after \"host\" at character 1 of the connection string";
    assert_eq!(error("host"), missing);
    assert_eq!(error("host a=b"), missing);
    assert_eq!(
        error("user=\u{fc} xyz a=b"),
        "missing \"=\" after the word at character 8 of the connection string"
    );
    assert_eq!(
        error("host='a"),
        "missing end quote of the value at character 6 of the connection string"
    );
    assert_eq!(error("xyz=1"), "invalid connection option \"xyz\"");
    for text in ["user=u xyz =1", "user=u xy2=1", "user=u =1"] {
        let expected = "invalid connection option at character 8 of the connection string";
        assert_eq!(error(text), expected, "{text}");
    }
    for value in ["", "plain", "it's", "a b", "a\\b", "\t"] {
        let text = format!("dbname={}", parse_keywords::quote(value));
        let mut given = Given::default();
        parse_keywords::parse(&text, &mut given).unwrap();
        assert_eq!(given.0.get("dbname").unwrap(), value);
    }
}
