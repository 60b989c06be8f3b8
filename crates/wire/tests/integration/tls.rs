//! Certificates of server and client under each `sslmode`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use wire::{ConnInfo, Protection, Session, Startup, Verified};

use super::certificates::SERVER_NAME;
use super::{
    MAJORS, Server, connect, is_encrypted, refused, server, start, value, wait_until_it_sleeps,
};

/// TLS to the server under a host name. `hostaddr` prevents a lookup of the name.
fn tls(server: &Server, host: &str, root: &str, sslmode: &str) -> ConnInfo {
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

/// Replaces the server's certificate several times.
#[test]
fn kinds_of_server_certificates() {
    let mut server = start(18);
    let use_certificate = |server: &mut Server, file: &str| {
        server.cluster.set("ssl_key_file", &format!("{file}.key")).unwrap();
        server.cluster.set("ssl_cert_file", &format!("{file}.crt")).unwrap();
    };
    let scram = |server: &Server, root: &str, extra: &str| {
        let root = server.certificates.path(root);
        server.tcp(
            "u_scram",
            &format!(
                "host=localhost hostaddr=127.0.0.1 sslmode=verify-full sslrootcert={root} \
                 password='sécret \\'x' {extra}"
            ),
        )
    };

    use_certificate(&mut server, "p384");
    connect(&scram(&server, "p384-root.crt", "channel_binding=require")).unwrap();

    // Channel binding is not defined for Ed25519.
    use_certificate(&mut server, "ed25519");
    for binding in ["disable", "prefer"] {
        let extra = format!("channel_binding={binding}");
        connect(&scram(&server, "ed25519-root.crt", &extra)).unwrap();
    }
    let text = refused(&scram(&server, "ed25519-root.crt", "channel_binding=require"));
    assert!(text.contains("channel binding"), "{text}");

    // The common name counts when there are no alternative names.
    use_certificate(&mut server, "common");
    connect(&tls(&server, SERVER_NAME, "root.crt", "verify-full")).unwrap();
    refused(&tls(&server, "localhost", "root.crt", "verify-full"));

    use_certificate(&mut server, "address");
    connect(&tls(&server, "127.0.0.1", "root.crt", "verify-full")).unwrap();
    refused(&tls(&server, "127.0.0.2", "root.crt", "verify-full"));

    // The root file contains the certificate itself, so it is trusted although it is an authority.
    use_certificate(&mut server, "own");
    connect(&tls(&server, SERVER_NAME, "own.crt", "verify-full")).unwrap();
    let text = refused(&tls(&server, SERVER_NAME, "root.crt", "verify-ca"));
    assert!(text.contains("it is not one of them"), "{text}");
    connect(&tls(&server, SERVER_NAME, "missing.crt", "require")).unwrap();
}

/// Gives the server `file.crt` and `file.key` of a directory that it cannot read.
fn install(server: &mut Server, directory: &Path, file: &str) {
    for suffix in ["crt", "key"] {
        let text = std::fs::read_to_string(directory.join(format!("{file}.{suffix}"))).unwrap();
        let sql = format!(
            "COPY (SELECT {}) TO PROGRAM 'umask 077; base64 -d > {file}.{suffix}'",
            wire::quote_literal(&base64(&text))
        );
        server.cluster.sql("postgres", &sql).unwrap();
    }
    server.cluster.set("ssl_key_file", &format!("{file}.key")).unwrap();
    server.cluster.set("ssl_cert_file", &format!("{file}.crt")).unwrap();
}

/// RSA and X.509 version 1 certificates, made with the commands of PostgreSQL's documentation.
#[test]
fn certificates_of_openssl() {
    let mut server = start(18);
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &str| {
        let output =
            Command::new("openssl").args(arguments.split(' ')).current_dir(dir.path()).output();
        match output {
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                true
            }
            Err(_) => false,
        }
    };
    let subject = format!("/CN={SERVER_NAME}");
    if !run(&format!(
        "req -new -x509 -newkey rsa:2048 -nodes -subj {subject} -keyout v3.key -out v3.crt"
    )) {
        eprintln!("SKIPPED: there is no openssl program");
        return;
    }
    run(&format!("req -new -newkey rsa:2048 -nodes -subj {subject} -keyout v1.key -out v1.csr"));
    run("x509 -req -in v1.csr -signkey v1.key -out v1.crt");
    for file in ["v3", "v1"] {
        install(&mut server, dir.path(), file);
        let extra = "sslmode=require channel_binding=require password='sécret \\'x'";
        let mut session = connect(&server.tcp("u_scram", extra)).unwrap();
        assert!(is_encrypted(&mut session), "{file}");
    }
}

/// A root, a server's certificate of X.509 version 1 and a client's, with the commands of PostgreSQL's documentation.
#[test]
fn certificates_of_version_1() {
    let mut server = start(18);
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &str| {
        let arguments = arguments.split(' ');
        let output = Command::new("openssl").args(arguments).current_dir(dir.path()).output();
        output.is_ok_and(|output| output.status.success())
    };
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("ext"), "[v3_ca]\nbasicConstraints=critical,CA:TRUE\n").unwrap();
    // Two roots of one name: only the key tells them apart.
    for root in ["root", "other"] {
        if !run(&format!("req -new -nodes -out {root}.csr -keyout {root}.key -subj /CN=root")) {
            eprintln!("SKIPPED: there is no openssl program");
            return;
        }
        assert!(run(&format!(
            "x509 -req -in {root}.csr -days 365 -extfile ext -extensions v3_ca -signkey {root}.key -out {root}.crt"
        )));
    }
    for (file, name) in [("leaf", SERVER_NAME), ("client", "u_cert")] {
        assert!(run(&format!(
            "req -new -nodes -out {file}.csr -keyout {file}.key -subj /CN={name}"
        )));
        assert!(run(&format!(
            "x509 -req -in {file}.csr -days 365 -CA root.crt -CAkey root.key -CAcreateserial -out {file}.crt"
        )));
    }
    // A certificate that the leaf has signed: the leaf is no authority.
    assert!(run(&format!(
        "req -new -nodes -out below.csr -keyout below.key -subj /CN={SERVER_NAME}"
    )));
    assert!(run(
        "x509 -req -in below.csr -days 365 -CA leaf.crt -CAkey leaf.key -CAcreateserial -out below.crt"
    ));
    let install = |server: &mut Server, file: &str| install(server, dir.path(), file);
    let password = "password='sécret \\'x'";
    install(&mut server, "leaf");
    for version in ["TLSv1.2", "TLSv1.3"] {
        let version =
            format!("ssl_min_protocol_version={version} ssl_max_protocol_version={version}");
        let with = |host: &str, root: &str, mode: &str| {
            let root = path(root);
            let extra = format!("{password} {version} sslmode={mode} sslrootcert={root}");
            server.tcp("u_scram", &format!("{extra} host={host} hostaddr=127.0.0.1"))
        };
        for mode in ["require", "verify-ca", "verify-full"] {
            let mut session = connect(&with(SERVER_NAME, "root.crt", mode)).unwrap();
            assert!(is_encrypted(&mut session), "{version} {mode}");
        }
        connect(&with("other.pgapace.test", "root.crt", "verify-ca")).unwrap();
        assert!(refused(&with("other.pgapace.test", "root.crt", "verify-full")).contains("name"));
        assert!(refused(&with(SERVER_NAME, "other.crt", "verify-ca")).contains("version 1"));
        // Encrypted, whatever the version: sslmode=prefer must not fall back.
        let extra = format!("{password} {version} sslmode=prefer");
        assert!(is_encrypted(&mut connect(&server.tcp("u_scram", &extra)).unwrap()));
    }
    // The client's certificate, with its key in both forms.
    assert!(run("pkey -in client.key -outform DER -out client.der"));
    let root = std::fs::read_to_string(path("root.crt")).unwrap();
    let sql = format!(
        "COPY (SELECT {}) TO PROGRAM 'base64 -d > authority.crt'",
        wire::quote_literal(&base64(&root))
    );
    server.cluster.sql("postgres", &sql).unwrap();
    server.cluster.set("ssl_ca_file", "authority.crt").unwrap();
    for key in ["client.key", "client.der"] {
        std::fs::set_permissions(path(key), Permissions::from_mode(0o600)).unwrap();
        let extra = format!("sslmode=require sslcert={} sslkey={}", path("client.crt"), path(key));
        connect(&server.tcp("u_cert", &extra)).unwrap();
    }
    install(&mut server, "below");
    let extra = format!("{password} sslmode=verify-ca sslrootcert={}", path("leaf.crt"));
    assert!(refused(&server.tcp("u_scram", &extra)).contains("version 1"));
}

/// Encodes base64 on the server, so that the test needs no library for it.
fn base64(text: &str) -> String {
    let sql = "SELECT translate(encode(convert_to($1, 'UTF8'), 'base64'), E'\\n', '')";
    let mut session = server(18).session();
    session.query(sql, &[Some(text)]).unwrap().one().unwrap().str(0).unwrap().to_owned()
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
