//! Authentication methods, and the parameters that restrict them.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::{MAJORS, connect, info, is_encrypted, refused, server, value};

const SCRAM_PASSWORD: &str = "password='sécret \\'x'";

#[test]
fn every_password_method() {
    for major in MAJORS {
        let server = server(major);
        for (user, password) in [
            ("u_scram", SCRAM_PASSWORD),
            ("u_md5", "password=md5pw"),
            ("u_clear", "password=clear"),
        ] {
            for sslmode in ["disable", "require"] {
                let info = server.tcp(user, &format!("{password} sslmode={sslmode}"));
                let mut session = connect(&info).unwrap();
                assert_eq!(value(&mut session, "SELECT current_user::text"), user);
                assert_eq!(is_encrypted(&mut session), sslmode == "require");
            }
        }
    }
}

#[test]
fn wrong_or_missing_passwords_say_so() {
    for major in MAJORS {
        let server = server(major);
        for user in ["u_scram", "u_md5", "u_clear"] {
            let error = connect(&server.tcp(user, "password=wrong")).unwrap_err();
            assert_eq!(error.sqlstate(), Some("28P01"), "{error}");
            assert!(!error.is_connection_loss());
            let expected = format!("password authentication failed for user \"{user}\"");
            let text = error.to_string();
            assert!(text.contains(&expected), "{text}");
            // sslmode=prefer must not try a second time, because that could lock the user out.
            assert_eq!(text.matches(&expected).count(), 1, "{text}");
            assert!(refused(&server.tcp(user, "")).contains("no password supplied"));
        }
    }
}

#[test]
fn require_auth_is_honoured() {
    let server = server(18);
    let with = |user: &str, rule: &str| {
        let password = match user {
            "u_scram" => SCRAM_PASSWORD,
            "u_md5" => "password=md5pw",
            _ => "password=clear",
        };
        server.tcp(user, &format!("{password} require_auth={rule}"))
    };
    connect(&with("u_scram", "scram-sha-256")).unwrap();
    connect(&with("u_scram", "!password,!md5")).unwrap();
    connect(&with("u_md5", "md5,scram-sha-256")).unwrap();
    let text = refused(&with("u_clear", "scram-sha-256"));
    assert!(
        text.contains("\"scram-sha-256\" failed: server requested a cleartext password"),
        "{text}"
    );
    assert!(refused(&with("u_md5", "!md5")).contains("server requested a hashed password"));
    assert!(refused(&with("u_scram", "none")).contains("server requested SASL authentication"));
    let trusting = format!("{} require_auth=md5", server.cluster.conninfo("postgres"));
    assert!(refused(&info(&trusting)).contains("server did not request authentication"));
    connect(&info(&format!("{} require_auth=none", server.cluster.conninfo("postgres")))).unwrap();
}

#[test]
fn channel_binding() {
    for major in MAJORS {
        let server = server(major);
        let scram = |extra: &str| server.tcp("u_scram", &format!("{SCRAM_PASSWORD} {extra}"));
        connect(&scram("channel_binding=require sslmode=require")).unwrap();
        connect(&scram("channel_binding=disable sslmode=require")).unwrap();
        connect(&scram("channel_binding=prefer sslmode=disable")).unwrap();
        let text = refused(&scram("channel_binding=require sslmode=disable"));
        assert!(text.contains("channel binding required, but SSL not in use"), "{text}");
        for (user, password) in [("u_md5", "md5pw"), ("u_clear", "clear")] {
            let extra = format!("password={password} channel_binding=require sslmode=require");
            let text = refused(&server.tcp(user, &extra));
            assert!(text.contains("channel binding required but not supported"), "{text}");
        }
        let text = refused(&server.tcp("u_tls", "channel_binding=require sslmode=require"));
        assert!(text.contains("authenticated client without channel binding"), "{text}");
    }
}

#[test]
fn password_file() {
    let server = server(18);
    let port = server.cluster.port();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pass");
    let lines = format!(
        "127.0.0.1:{port}:postgres:u_md5:md5pw\n*:*:*:u_scram:sécret 'x\n*:*:*:u_clear:nope\n"
    );
    fs::write(&file, lines).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let with = |user: &str| server.tcp(user, &format!("passfile={}", file.display()));
    connect(&with("u_md5")).unwrap();
    connect(&with("u_scram")).unwrap();
    let text = refused(&with("u_clear"));
    assert!(
        text.contains(&format!("password retrieved from file \"{}\"", file.display())),
        "{text}"
    );
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    assert!(refused(&with("u_md5")).contains("no password supplied"));
}

#[test]
fn require_peer() {
    let server = server(15);
    let local = server.cluster.conninfo("postgres");
    let text = refused(&info(&format!("{local} requirepeer=nobody_else")));
    assert!(text.contains("requirepeer specifies \"nobody_else\", but actual peer"), "{text}");
    let owner = text.rsplit('"').nth(1).unwrap();
    connect(&info(&format!("{local} requirepeer={owner}"))).unwrap();
}
