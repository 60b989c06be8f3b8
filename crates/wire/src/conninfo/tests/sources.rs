//! Parameters from the environment, service files and defaults.

use std::fs;
use std::path::Path;

use super::{parse, parse_env};
use crate::conninfo::*;

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
