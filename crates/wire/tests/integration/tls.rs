//! Certificates of server and client under each `sslmode`.

use wire::{ConnInfo, Protection, Session, Startup, Verified};

use super::certificates::SERVER_NAME;
use super::{MAJORS, Server, connect, is_encrypted, refused, server, value, wait_until_it_sleeps};

/// TLS to the server under a host name. `hostaddr` prevents a lookup of the name.
pub(super) fn tls(server: &Server, host: &str, root: &str, sslmode: &str) -> ConnInfo {
    let root = server.certificates.path(root);
    let extra = format!("host={host} hostaddr=127.0.0.1 sslrootcert={root} sslmode={sslmode}");
    server.tcp("u_tls", &extra)
}

/// What was verified, if the session is encrypted.
fn verified(session: &Session) -> Option<Verified> {
    match session.protection() {
        Protection::Tls { verified, .. } => Some(verified),
        _ => None,
    }
}

#[test]
fn verifies_chain_and_name() {
    for major in MAJORS {
        let server = server(major);
        for host in ["localhost", SERVER_NAME] {
            let mut session = connect(&tls(server, host, "root.crt", "verify-full")).unwrap();
            assert!(is_encrypted(&mut session));
            assert_eq!(verified(&session), Some(Verified::Name));
        }
        let wrong_host = tls(server, "other.pgapace.test", "root.crt", "verify-full");
        let text = refused(&wrong_host);
        assert!(text.contains("other.pgapace.test") && text.contains("not for host"), "{text}");
        assert!(
            refused(&tls(server, "127.0.0.1", "root.crt", "verify-full")).contains("not for host")
        );
        for sslmode in ["verify-ca", "require"] {
            let session = connect(&tls(server, "other.pgapace.test", "root.crt", sslmode)).unwrap();
            assert_eq!(verified(&session), Some(Verified::Chain));
        }
        connect(&tls(server, "odd_name!", "root.crt", "verify-ca")).unwrap();
        // A root file is always used. Only "prefer" continues without TLS when verification fails.
        for sslmode in ["require", "verify-ca", "verify-full"] {
            let text = refused(&tls(server, "localhost", "other.crt", sslmode));
            assert!(text.contains("no trusted certificate"), "{text}");
        }
        let text = refused(&tls(server, "localhost", "missing.crt", "verify-ca"));
        assert!(
            text.contains("root certificate file") && text.contains("does not exist"),
            "{text}"
        );
        let session = connect(&tls(server, "localhost", "missing.crt", "require")).unwrap();
        assert_eq!(verified(&session), Some(Verified::Nothing));
    }
}

#[test]
fn falls_back_as_sslmode_says() {
    for major in MAJORS {
        let server = server(major);
        let encrypted = |user: &str, sslmode: &str| {
            let info = server.tcp(user, &format!("sslmode={sslmode}"));
            connect(&info).map(|mut session| is_encrypted(&mut session))
        };
        assert!(encrypted("postgres", "prefer").unwrap());
        assert!(!encrypted("postgres", "allow").unwrap());
        assert!(encrypted("u_tls", "allow").unwrap());
        assert!(!encrypted("u_plain", "prefer").unwrap());
        assert_eq!(encrypted("u_plain", "require").unwrap_err().sqlstate(), Some("28000"));
        assert_eq!(encrypted("u_tls", "disable").unwrap_err().sqlstate(), Some("28000"));
        // Connections over a Unix socket are never encrypted.
        let local =
            super::info(&format!("{} sslmode=require", server.cluster.conninfo("postgres")));
        let mut session = connect(&local).unwrap();
        assert!(!is_encrypted(&mut session));
        assert_eq!(session.protection(), Protection::Socket);
        let session = connect(&server.tcp("u_plain", "sslmode=disable")).unwrap();
        assert_eq!(session.protection(), Protection::Loopback);
    }
}

#[test]
fn direct_negotiation() {
    let extra = "sslmode=require sslnegotiation=direct";
    let mut session = connect(&server(18).tcp("u_tls", extra)).unwrap();
    assert!(is_encrypted(&mut session));
    connect(&server(15).tcp("u_tls", extra)).unwrap_err();
}

#[test]
fn protocol_versions() {
    let server = server(18);
    for version in ["TLSv1.2", "TLSv1.3"] {
        let extra = format!(
            "sslmode=require ssl_min_protocol_version={version} ssl_max_protocol_version={version}"
        );
        let mut session = connect(&server.tcp("u_tls", &extra)).unwrap();
        let used =
            value(&mut session, "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()");
        assert_eq!(used, version);
        assert!(matches!(session.protection(), Protection::Tls { version, .. } if version == used));
    }
}

#[test]
fn client_certificates() {
    for major in MAJORS {
        let server = server(major);
        let with = |certificate: &str, key: &str, more: &str| {
            let (certificate, key) =
                (server.certificates.path(certificate), server.certificates.path(key));
            server.tcp(
                "u_cert",
                &format!("sslmode=require sslcert={certificate} sslkey={key} {more}"),
            )
        };
        let mut session = connect(&with("client.crt", "client.key", "")).unwrap();
        assert_eq!(value(&mut session, "SELECT current_user::text"), "u_cert");
        connect(&with("client.crt", "client.key", "sslcertmode=require")).unwrap();
        let text = refused(&with("client.crt", "client.key", "sslcertmode=disable"));
        assert!(text.contains("connection requires a valid client certificate"), "{text}");
        let error = connect(&with("foreign.crt", "foreign.key", "")).unwrap_err();
        assert!(error.to_string().contains("alert"), "{error}");
        assert!(!error.is_connection_loss(), "{error:?}");
        let text = refused(&with("client.crt", "missing.key", ""));
        assert!(text.contains("certificate present, but not private key file"), "{text}");
        let text = refused(&with("client.crt", "open.key", ""));
        assert!(text.contains("has group or world access"), "{text}");
        let text = refused(&with("client.crt", "foreign.key", ""));
        assert!(text.contains("certificate does not match private key file"), "{text}");
        let text = refused(&with("missing.crt", "missing.key", "sslcertmode=require"));
        assert!(text.contains("no client certificate"), "{text}");
    }
}

#[test]
fn certificates_of_the_home_directory() {
    let server = server(18);
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join(".postgresql");
    std::fs::create_dir(&dir).unwrap();
    for (from, to) in [
        ("root.crt", "root.crt"),
        ("client.crt", "postgresql.crt"),
        ("client.key", "postgresql.key"),
    ] {
        std::fs::copy(server.certificates.dir().join(from), dir.join(to)).unwrap();
    }
    let text = format!(
        "host=localhost hostaddr=127.0.0.1 port={} user=u_cert dbname=postgres sslmode=verify-full",
        server.cluster.port()
    );
    connect(&ConnInfo::parse_with_env(&text, &|_| None, Some(home.path())).unwrap()).unwrap();
}

#[test]
fn cancel_and_replication_are_encrypted_too() {
    let server = server(18);
    let info = server.tcp("postgres", "sslmode=require");
    let startup = Startup { replication: true, ..Startup::default() };
    let mut session = Session::connect(&info, &startup).unwrap();
    assert!(is_encrypted_simple(&mut session));
    let (handle, pid) = (session.cancel_handle(), session.backend_pid());
    let canceller = std::thread::spawn(move || {
        wait_until_it_sleeps(&server.local(), pid);
        handle.cancel().unwrap();
    });
    let error = session.simple("SELECT pg_sleep(60)").unwrap_err();
    assert_eq!(error.sqlstate(), Some("57014"));
    canceller.join().unwrap();
}

fn is_encrypted_simple(session: &mut Session) -> bool {
    let sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    session.simple(sql).unwrap()[0].one().unwrap().bool(0).unwrap()
}
