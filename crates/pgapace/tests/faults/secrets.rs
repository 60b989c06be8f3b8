//! Passwords appear in no message.

use std::process::Command;

use testbed::{Program, Result};

use crate::support::{DB, NAME, Site, executable, expect_exit, finish, pgapace};

const SECRET: &str = "hunter2-Zaphod";
const WRONG: &str = "wrong-Trillian";

fn site() -> Result<Site> {
    let site = Site::with_password(SECRET)?;
    site.publisher.sql(DB, "INSERT INTO t VALUES (1)")?;
    Ok(site)
}

#[test]
fn no_password_in_any_output() -> Result<()> {
    let site = site()?;
    let (from, to) = (site.publisher.port(), site.subscriber.port());
    let good =
        |port| format!("host=127.0.0.1 port={port} dbname={DB} user=secretive password={SECRET}");
    let wrong = |port| good(port).replace(SECRET, WRONG);
    let uri = |port, password: &str| {
        format!("postgresql://secretive:{password}@127.0.0.1:{port}/{DB}?application_name=x")
    };
    let run = |publisher: &str, subscriber: &str| -> Program {
        pgapace("run")
            .args(["--log-level", "trace", "--publisher", publisher, "--subscriber", subscriber])
            .args(["--publication", "pub", "--name", NAME, "--until", "current"])
            .args(["--connect-timeout", "1"])
    };
    let nowhere = format!("host=nowhere.invalid user=secretive password={SECRET}");
    // The error for an invalid connection string does not show the password either.
    let broken = format!("host=127.0.0.1 password={SECRET} bogus=1");
    let unbalanced = format!("host=127.0.0.1 password='{SECRET}");
    let bad_uri = format!("postgresql://secretive:{SECRET}@127.0.0.1:notaport/{DB}");
    let bad_option = format!("postgresql://secretive:{SECRET}@127.0.0.1/{DB}?bogus=1");
    let runs = [
        (good(from), good(to), 0),
        (uri(from, SECRET), uri(to, SECRET), 0),
        (wrong(from), good(to), 4),
        (good(from), wrong(to), 5),
        (uri(from, WRONG), good(to), 4),
        (good(from), uri(to, WRONG), 5),
        (nowhere.clone(), good(to), 4),
        (good(from), nowhere, 5),
        (good(1), good(to), 4),
        (good(from), format!("{} sslmode=require", good(to)), 5),
        (broken.clone(), good(to), 3),
        (good(from), broken, 3),
        (unbalanced, good(to), 3),
        (bad_uri, good(to), 3),
        (good(from), bad_option, 3),
    ];
    for (publisher, subscriber, code) in &runs {
        for format in ["human", "json"] {
            let mut run = site.spawn(&run(publisher, subscriber).args(["--log-format", format]))?;
            expect_exit(&mut run, *code, &[])?;
            expect_silence(&run.log());
        }
    }
    // Passwords from the environment and from a file, and the output of --help.
    let help = finish(&pgapace("run").arg("--help").env("PGAPACE_PUBLISHER", good(from)));
    expect_silence(&help.stdout);
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("pgapace.toml");
    std::fs::write(&file, format!("publisher = \"{}\"\ntarget = 7\n", good(from)))?;
    expect_silence(&finish(&pgapace("run").arg("--config").arg(&file)).expect(3, &[]).log);
    std::fs::write(&file, format!("publisher = \"{}\"\nnonsense\n", good(from)))?;
    expect_silence(&finish(&pgapace("run").arg("--config").arg(&file)).expect(3, &[]).log);
    std::fs::write(&file, format!("subscription = \"{}\"\n", good(from)))?;
    expect_silence(&finish(&pgapace("run").arg("--config").arg(&file)).expect(3, &[]).log);
    // Connection strings that were not quoted, or have no flag.
    let password = format!("password={SECRET}");
    let uri = uri(from, SECRET);
    for stray in [
        executable().args(["run", "--publisher", "host=a", &password]),
        executable().args(["run", "--publisher", "host=a", "--", &password]),
        executable().args(["run", &uri]),
        executable().args(["status", "--brief", &uri]),
        executable().arg(&uri),
        executable().args(["run", "--until", &uri]),
        executable().args(["run", "--workers", &password]),
        executable().args(["run", "--streaming", &uri]),
        executable().args(["run", &format!("--{password}")]),
        executable().args(["status", "--watch", &uri]),
    ] {
        let finished = finish(&stray);
        expect_silence(&finished.stdout);
        expect_silence(&finished.expect(2, &["error:"]).log);
    }
    // The state on the subscriber does not contain the password.
    let state = "SELECT string_agg(s::text, ' ') FROM pgapace.subscription s";
    expect_silence(&site.subscriber.query_one_text(DB, state)?);
    let logs = Command::new("cat").arg(site.subscriber.log_file()).output()?;
    assert!(!String::from_utf8_lossy(&logs.stdout).contains(WRONG));
    Ok(())
}

fn expect_silence(output: &str) {
    for secret in [SECRET, WRONG] {
        assert!(!output.contains(secret), "a password in:\n{output}");
    }
}
