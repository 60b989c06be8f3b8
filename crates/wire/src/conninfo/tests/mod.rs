//! Tests of connection strings.

mod libpq;
mod passwords;
mod sources;

use std::collections::HashMap;
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
fn one_parameter_can_be_replaced() {
    let info = parse("host=h dbname=a").unwrap().with("dbname", "b c").unwrap();
    assert_eq!(info.dbname(), "b c");
    assert!(info.clone().with("xyz", "1").is_err());
    assert!(info.with("port", "x").is_err());
}
