//! Certificates of many kinds, by their keys, signatures and names.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use super::certificates::SERVER_NAME;
use super::tls::tls;
use super::{Server, connect, is_encrypted, refused, server, start};

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
