//! Tests of connection strings, with libpq's own test cases.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use super::*;

fn parse(text: &str) -> Result<ConnInfo, ConnInfoError> {
    ConnInfo::parse_with_env(text, &|_| None, None)
}

fn parse_env(text: &str, env: &[(&str, &str)], home: Option<&Path>) -> Result<ConnInfo, String> {
    let env: HashMap<String, String> =
        env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    ConnInfo::parse_with_env(text, &|name| env.get(name).cloned(), home)
        .map_err(|error| error.to_string())
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

/// The parameters from the string itself, without defaults, passwords included.
fn given(text: &str) -> String {
    let mut given = Given::default();
    match parse_uri::strip_scheme(text) {
        Some(rest) => parse_uri::parse(text, rest, &mut given).unwrap(),
        None => parse_keywords::parse(text, &mut given).unwrap(),
    }
    let pairs: Vec<String> = ["user", "password", "dbname", "host", "hostaddr", "port", "sslmode"]
        .iter()
        .filter_map(|name| given.get(name).map(|value| format!("{name}='{value}'")))
        .collect();
    pairs.join(" ")
}

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

#[test]
fn checks_values() {
    let cases = [
        (
            "sslmode=maybe",
            "invalid sslmode value (use one of disable, allow, prefer, require, verify-ca, \
             verify-full)",
        ),
        ("port=99999", "invalid port number (entry 1 of port): must be between 1 and 65535"),
        ("host=a,b port=1,0", "invalid port number (entry 2 of port): must be between 1 and 65535"),
        ("port=5x", "invalid integer value for connection option \"port\" (entry 1 of the list)"),
        ("connect_timeout=soon", "invalid integer value for connection option \"connect_timeout\""),
        (
            "channel_binding=yes",
            "invalid channel_binding value (use one of disable, prefer, require)",
        ),
        (
            "target_session_attrs=none",
            "invalid target_session_attrs value (use one of any, read-write, read-only, primary, \
             standby, prefer-standby)",
        ),
        ("load_balance_hosts=yes", "invalid load_balance_hosts value (use one of disable, random)"),
        (
            "gssencmode=require",
            "connection option \"gssencmode\" value \"require\" is not supported: encrypt with TLS \
             (gssencmode=disable sslmode=verify-full)",
        ),
        ("gssencmode=x", "invalid gssencmode value (use one of disable, prefer, require)"),
        (
            "sslcrl=/x",
            "connection option \"sslcrl\" is not supported: revoked certificates would be accepted; without it, \
             distrust an issuer with another sslrootcert",
        ),
        (
            "replication=database",
            "connection option \"replication\" is not supported: leave it out",
        ),
        ("hostaddr=db", "could not parse network address (entry 1 of hostaddr)"),
        ("host=a,b port=1,2,3", "could not match 3 port numbers to 2 hosts"),
        ("host=a,b hostaddr=127.0.0.1", "could not match 2 host names to 1 hostaddr values"),
        (
            "sslrootcert=system sslmode=require",
            "weak sslmode \"require\" may not be used with sslrootcert=system (use \
             \"verify-full\")",
        ),
        (
            "sslnegotiation=direct",
            "weak sslmode \"prefer\" may not be used with sslnegotiation=direct (use \"require\", \
             \"verify-ca\", or \"verify-full\")",
        ),
        (
            "ssl_min_protocol_version=TLSv1.3 ssl_max_protocol_version=TLSv1.2",
            "invalid SSL protocol version range",
        ),
        (
            "require_auth=scram-sha-256,basic",
            "invalid require_auth value (use one of password, md5, gss, sspi, scram-sha-256, \
             oauth, none)",
        ),
        (
            "require_auth=md5,!password",
            "negative require_auth method (entry 2) cannot be mixed with non-negative methods",
        ),
        ("require_auth=md5,md5", "require_auth method \"md5\" is specified more than once"),
    ];
    for (text, expected) in cases {
        assert_eq!(error(text), expected, "{text}");
    }
    for text in [
        "gssencmode=prefer krbsrvname=x sslcompression=0",
        "sslrootcert=system",
        "sslmode=require sslnegotiation=direct",
        "require_auth=!password,!md5",
        "ssl_min_protocol_version=TLSv1",
        "connect_timeout=' 5 ' keepalives=0",
        "requiressl=1",
    ] {
        parse(text).unwrap();
    }
    assert_eq!(parse("sslrootcert=system").unwrap().settings().sslmode, SslMode::VerifyFull);
    assert!(parse("require_auth=!password").unwrap().settings().require_auth.allows("md5"));
    assert!(!parse("require_auth=!password").unwrap().settings().require_auth.allows("password"));
}

#[test]
fn hosts_and_ports() {
    let hosts = |text: &str| -> Vec<String> {
        parse(text).unwrap().hosts().iter().map(ToString::to_string).collect()
    };
    assert_eq!(hosts("host=a,b port=1"), ["at \"a\", port 1", "at \"b\", port 1"]);
    assert_eq!(hosts("host=a,b port=1,"), ["at \"a\", port 1", "at \"b\", port 5432"]);
    assert_eq!(hosts("host=/s port=7"), ["on socket \"/s/.s.PGSQL.7\""]);
    assert_eq!(hosts("host=n hostaddr=10.0.0.1"), ["at \"n\" (10.0.0.1), port 5432"]);
    assert_eq!(hosts("hostaddr=::1"), ["at \"::1\", port 5432"]);
    let info = parse("host=@abstract,/var/run/postgresql").unwrap();
    assert_eq!(info.hosts()[0].socket_path(), Path::new("\0abstract/.s.PGSQL.5432"));
    assert_eq!(info.hosts()[1].passfile_host(), "localhost");
    assert_eq!(parse("").unwrap().hosts().len(), 1);
}

#[test]
fn environment_fills_what_is_unset() {
    let env = [
        ("PGHOST", "h"),
        ("PGPORT", "7"),
        ("PGUSER", "u"),
        ("PGDATABASE", "d"),
        ("PGSSLMODE", "require"),
        ("PGAPPNAME", "app"),
        ("PGTARGETSESSIONATTRS", "primary"),
        ("PGPASSFILE", "/p"),
    ];
    let info = parse_env("user=me host=''", &env, None).unwrap();
    assert_eq!(info.user(), "me");
    // Given but empty: the default applies, not the environment.
    assert_eq!(info.get("host"), None);
    assert_eq!(info.get("port"), Some("7"));
    assert_eq!(info.dbname(), "d");
    assert_eq!(info.settings().sslmode, SslMode::Require);
    assert_eq!(info.settings().session_attrs, SessionAttrs::Primary);
    assert_eq!(info.get("application_name"), Some("app"));
    assert_eq!(info.get("passfile"), Some("/p"));
    assert_eq!(parse_env("", &[("PGPORT", "x")], None).unwrap_err().lines().count(), 1);
}

#[test]
fn defaults_come_from_user_and_home() {
    let info = parse_env("user=me", &[], Some(Path::new("/home/me"))).unwrap();
    assert_eq!(info.dbname(), "me");
    assert_eq!(info.get("passfile"), Some("/home/me/.pgpass"));
    assert_eq!(info.user_file("root.crt").unwrap(), Path::new("/home/me/.postgresql/root.crt"));
    assert!(!parse("").unwrap().user().is_empty());
}

#[test]
fn service_files() {
    let home = tempfile::tempdir().unwrap();
    let text = "# comment\n[other]\nhost=no\n[mine]\n host=h\nport=7\nuser=svc\ndbname=a b \n\n[mine]\nport=8\n";
    // Of the comment, in Latin-1.
    let bytes = [&b"# caf\xe9\n"[..], text.as_bytes()].concat();
    fs::write(home.path().join(".pg_service.conf"), bytes).unwrap();
    let system = tempfile::tempdir().unwrap();
    fs::write(
        system.path().join("pg_service.conf"),
        "[sys]\nhost=s\n[bad]\nhost\n[odd]\nxyz=1\n[nest]\nservice=mine\n[ldap]\nldap://x\n\
         [old]\nrequiressl=0\n",
    )
    .unwrap();
    let system_dir = system.path().to_str().unwrap();
    let read = |text: &str, env: &[(&str, &str)]| {
        let mut env = env.to_vec();
        env.push(("PGSYSCONFDIR", system_dir));
        parse_env(text, &env, Some(home.path()))
    };
    let info = read("service=mine user=me", &[("PGHOST", "env"), ("PGAPPNAME", "a")]).unwrap();
    let found = ["host", "port", "user", "dbname", "application_name"].map(|name| info.get(name));
    assert_eq!(found, [Some("h"), Some("7"), Some("me"), Some("a b"), Some("a")]);
    assert_eq!(read("", &[("PGSERVICE", "sys")]).unwrap().get("host"), Some("s"));
    assert_eq!(
        read("service=none", &[]).unwrap_err(),
        "definition of the service not found in any service file"
    );
    let file = format!("{system_dir}/pg_service.conf");
    for (service, expected) in [
        ("bad", format!("syntax error in service file \"{file}\", line 4")),
        ("odd", format!("syntax error in service file \"{file}\", line 6")),
        (
            "nest",
            format!(
                "nested \"service\" specifications not supported in service file \"{file}\", line 8"
            ),
        ),
        ("ldap", format!("LDAP lookup in service file \"{file}\", line 10, is not supported")),
        // Otherwise it would replace the sslmode of the connection string.
        ("old", format!("syntax error in service file \"{file}\", line 12")),
    ] {
        let text = format!("service={service} sslmode=verify-full");
        assert_eq!(read(&text, &[]).unwrap_err(), expected);
    }
    let own = [("PGSERVICEFILE", "/no/such/file")];
    assert_eq!(read("service=mine", &own).unwrap_err(), "service file \"/no/such/file\" not found");
}

#[test]
fn a_variable_that_is_not_utf8_is_named() {
    use std::os::unix::ffi::OsStringExt;
    let env = |name: &str| {
        let value = OsString::from_vec(b"caf\xe9".to_vec());
        matches!(name, "PGHOST" | "PGPASSWORD").then_some(value)
    };
    let read = |text: &str| ConnInfo::parse_with_os_env(text, &env);
    let error = read("host=h").unwrap_err().to_string();
    assert_eq!(error, "environment variable PGPASSWORD is not valid UTF-8");
    assert!(read("password=p").is_err());
    // A variable that is not needed does not matter.
    assert_eq!(read("host=h password=p").unwrap().get("host"), Some("h"));
}

#[test]
fn passwords_stay_secret() {
    let info = parse("host=h user=u password=sup3r").unwrap();
    for shown in [info.redacted(), info.to_string(), format!("{info:?}")] {
        assert!(!shown.contains("sup3r"), "{shown}");
        assert!(shown.contains("password=****"), "{shown}");
    }
    assert!(parse("postgres://u:sup3r@h?uzer=1").unwrap_err().to_string().find("sup3r").is_none());
    // The redacted form can be parsed again.
    assert_eq!(parse(&info.redacted()).unwrap().get("host"), Some("h"));
}

/// A password without the necessary quotes or encoding is cut into pieces that look like other
/// parameters. No message may show any of them.
#[test]
fn malformed_strings_show_no_piece_of_a_password() {
    const SECRET: &str = "hunter2";
    let cases = [
        // Blanks and quotes.
        "password=my hunter2 host=h",
        "password=my hunter2",
        "password=my hunter2=x host=h",
        "password=my hunter2 =x host=h",
        "password=hunter2 's host=h",
        "password='hunter2 host=h",
        "password='it's hunter2' host=h",
        "password='my'hunter2 host=h",
        "password=hunter2\\ host=h x",
        "password = hunter2 xyz=1",
        "password=my port=hunter2",
        "password=my hostaddr=hunter2",
        "password=my sslmode=hunter2",
        "password=my connect_timeout=hunter2",
        "password=my require_auth=hunter2",
        "password=my require_auth=md5,!hunter2",
        "password=my ssl_min_protocol_version=hunter2",
        "password=my service=hunter2",
        "sslpassword=hunter2",
        "hunter2",
        "postgre://u:hunter2@h/db",
        // A `?`, `/`, `@`, `:`, `[`, `,` or `&` in the password of a URI.
        "postgres://u:pa/?hunter2@h/db",
        "postgres://u:1/?hunter2@h/db",
        "postgres://u:hunter2?x@h/db?a",
        "postgres://u:1/?hunter2=x@h/db",
        "postgres://u:1/?x=hunter2@h/db",
        "postgres://u:1/?user=x=hunter2@h/db",
        "postgres://u:1/?port=hunter2@h/db",
        "postgres://u:1/?sslmode=hunter2@h/db",
        "postgres://u:1/?a&hunter2@h/db",
        "postgres://u:hunter2/x@h/db",
        "postgres://u:pa/hunter2@h/db",
        "postgres://u:/hunter2 @h x",
        "postgres://u:x@hunter2@h/db",
        "postgres://u:hunter2@x@h/db",
        "postgres://u:x@@hunter2@h/db",
        "postgres://u:x@y:hunter2@h/db",
        "postgres://u:x@h:hunter2",
        "postgres://u:a:hunter2:b/@h",
        "postgres://u:hunter2,x/@h",
        "postgres://u:x@[hunter2@h/db",
        "postgres://u:x@[]hunter2@h/db",
        "postgres://u:x@[y]hunter2@h/db",
        "postgres://u:hunter2@[::1",
        // Percent signs and blanks.
        "postgres://u:%hunter2@h",
        "postgres://u:hunter2%@h",
        "postgres://u:hunter2%zz@h",
        "postgres://u:hunter2%00@h",
        "postgres://u:hunter2%ff@h",
        "postgres://u:hunter2 x@h",
        "postgres://hunter2%zz:x@h",
        "postgres://u:x@hunter2%zz",
        "postgres://u:x@h/hunter2%zz",
        "postgres://u:x@h?hunter2%zz=1",
        "postgres://u@h?password=hunter2%zz",
        "postgres://u@h?password=my hunter2",
        "postgres://u@h?password=my&hunter2",
        "postgres://u@h?password=my=hunter2",
    ];
    for text in cases {
        let error = parse(text).unwrap_err();
        for shown in [error.to_string(), format!("{error:?}"), format!("{error:#?}")] {
            for piece in SECRET.as_bytes().windows(4) {
                let piece = std::str::from_utf8(piece).unwrap();
                assert!(!shown.contains(piece), "{text}: {shown}");
            }
        }
    }
}

#[test]
fn one_parameter_can_be_replaced() {
    let info = parse("host=h dbname=a").unwrap().with("dbname", "b c").unwrap();
    assert_eq!(info.dbname(), "b c");
    assert!(info.clone().with("xyz", "1").is_err());
    assert!(info.with("port", "x").is_err());
}
