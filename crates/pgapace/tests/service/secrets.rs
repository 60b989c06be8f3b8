//! Passwords come from files that only their owner can read, and stand in no list of processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use testbed::program::Process;
use testbed::{Program, Result, wait_until};

use crate::support::{DB, NAME, PATIENCE, Site, expect_exit, finish, pgapace};

const SECRET: &str = "hunter2-Trillian";

/// Two servers whose role `secretive` has a password, and a directory for files.
struct Secrets {
    site: Site,
    directory: TempDir,
}

impl Secrets {
    fn new() -> Result<Self> {
        let site = Site::with_password(SECRET)?;
        Ok(Self { site, directory: tempfile::tempdir()? })
    }

    fn conninfo(port: u16) -> String {
        format!("host=127.0.0.1 port={port} dbname={DB} user=secretive")
    }

    fn publisher(&self) -> String {
        Self::conninfo(self.site.publisher.port())
    }

    fn subscriber(&self) -> String {
        Self::conninfo(self.site.subscriber.port())
    }

    /// A file that only its owner can read.
    fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let file = self.directory.path().join(name);
        fs::write(&file, text)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        Ok(file)
    }
}

fn run() -> Program {
    pgapace("run").args(["--publication", "pub", "--name", NAME]).env_remove("PGPASSWORD")
}

/// Waits until the program streams, and looks for the password where other users see it.
fn streams_in_secret(run: &mut Process) -> Result<()> {
    wait_until(PATIENCE, "pgapace to stream", || {
        assert!(run.is_running(), "{}", run.log());
        Ok(run.events("streaming") > 0)
    })?;
    let arguments = fs::read(format!("/proc/{}/cmdline", run.pid()))?;
    assert!(!String::from_utf8_lossy(&arguments).contains(SECRET));
    assert!(!run.log().contains(SECRET), "{}", run.log());
    run.terminate()?;
    assert!(run.wait(PATIENCE)?.success(), "{}", run.log());
    Ok(())
}

#[test]
fn passwords_come_from_files_of_connection_strings_the_password_file_and_credentials() -> Result<()>
{
    let secrets = Secrets::new()?;
    let site = &secrets.site;
    let with_password = |conninfo: &str| format!("\n{conninfo} password={SECRET}\n");
    let publisher = secrets.file("publisher", &with_password(&secrets.publisher()))?;
    let subscriber = secrets.file("subscriber", &with_password(&secrets.subscriber()))?;
    let flags = run().arg("--publisher-file").arg(&publisher);
    streams_in_secret(&mut site.spawn(&flags.arg("--subscriber-file").arg(&subscriber))?)?;

    // Relative to the configuration file. A flag overrides what the file says in another way.
    let file = secrets.file(
        "pgapace.toml",
        "publisher-file = \"publisher\"\nsubscriber = \"host=nowhere.invalid\"\n",
    )?;
    let flags = run().arg("--config").arg(&file).arg("--subscriber-file").arg(&subscriber);
    streams_in_secret(&mut site.spawn(&flags.current_dir("/"))?)?;

    let passfile = secrets.file("pgpass", &format!("127.0.0.1:*:{DB}:secretive:{SECRET}\n"))?;
    let flags = run().args(["--publisher", &secrets.publisher()]);
    let flags = flags.args(["--subscriber", &secrets.subscriber()]).env("PGPASSFILE", &passfile);
    streams_in_secret(&mut site.spawn(&flags)?)?;

    // As systemd passes them with LoadCredential.
    let flags = run().env("CREDENTIALS_DIRECTORY", secrets.directory.path());
    streams_in_secret(&mut site.spawn(&flags)?)?;
    let given = flags.args(["--publisher", "host=127.0.0.1 port=1 connect_timeout=1"]);
    expect_exit(&mut site.spawn(&given.args(["--connect-timeout", "0"]))?, 4, &[])
}

#[test]
fn a_file_that_others_can_read_is_refused_if_it_has_a_password() -> Result<()> {
    let secrets = Secrets::new()?;
    let site = &secrets.site;
    let publisher = format!("{} password={SECRET}", secrets.publisher());
    let conninfo = secrets.file("publisher", &publisher)?;
    let config = secrets.file(
        "pgapace.toml",
        &format!(
            "subscriber = \"{} password={SECRET}\"\npublisher-file = \"publisher\"\n",
            secrets.subscriber()
        ),
    )?;
    let start = || site.spawn(&run().arg("--config").arg(&config).args(["--until", "current"]));
    let permit = |file: &Path, mode| fs::set_permissions(file, fs::Permissions::from_mode(mode));
    for mode in [0o640, 0o604, 0o660] {
        for file in [&conninfo, &config] {
            permit(file, mode)?;
            let shown = file.display().to_string();
            let said = [&shown, "has a password", &format!("0{mode:o}"), "chmod 0600"];
            let mut refused = start()?;
            expect_exit(&mut refused, 3, &said)?;
            assert!(!refused.log().contains(SECRET));
            permit(file, 0o600)?;
        }
    }
    expect_exit(&mut start()?, 0, &[])?;
    // Without a password there is nothing to hide.
    let open = secrets.file("open.toml", &format!("publisher = \"{}\"\n", secrets.publisher()))?;
    permit(&open, 0o644)?;
    let flags = run().arg("--config").arg(&open).arg("--until").arg("current");
    let flags = flags.args(["--subscriber", &secrets.subscriber()]).env("PGPASSWORD", SECRET);
    expect_exit(&mut site.spawn(&flags)?, 0, &[])
}

#[test]
fn a_password_on_the_command_line_is_warned_of_and_files_exclude_the_string() {
    let nowhere = format!("host=127.0.0.1 port=1 password={SECRET}");
    let flags = run().args(["--publisher", &nowhere, "--subscriber", "host=127.0.0.1 port=1"]);
    let log = finish(&flags.args(["--connect-timeout", "0"])).log;
    assert_eq!(testbed::program::events(&log, "password_on_command_line"), 1, "{log}");
    assert!(log.contains("--publisher-file") && !log.contains(SECRET), "{log}");

    finish(&run().args(["--publisher", &nowhere, "--publisher-file", "/none"])).expect(2, &[]);
    finish(&run().args(["--publisher-file", "/none", "--subscriber", "host=x"]))
        .expect(3, &["cannot read --publisher-file /none"]);
}

#[test]
fn check_says_how_each_connection_is_protected() -> Result<()> {
    let secrets = Secrets::new()?;
    let (site, tcp) = (&secrets.site, secrets.publisher());
    let check = pgapace("check").args(["--publisher", &tcp, "--publication", "pub"]);
    let check = check.args(["--subscriber", &site.subscriber.conninfo(DB), "--name", NAME]);
    let report = finish(&check.env("PGPASSWORD", SECRET)).stdout;
    let line = |side: &str, text: &str| {
        let found = report.lines().any(|line| line.contains(side) && line.contains(text));
        assert!(found, "{report}");
    };
    line("publisher", "loopback address, without TLS");
    line("subscriber", "Unix socket, without TLS");
    Ok(())
}

/// Each of many sessions looks for its password there.
#[test]
fn a_password_file_that_others_can_read_is_warned_of_once() -> Result<()> {
    let secrets = Secrets::new()?;
    let site = &secrets.site;
    let file = secrets.file("pgpass", "*:*:*:*:other\n")?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644))?;
    let flags = run().args(["--publisher", &site.publisher.conninfo(DB)]);
    let flags = flags.args(["--subscriber", &site.subscriber.conninfo(DB)]);
    let mut run = site.spawn(&flags.args(["--until", "current"]).env("PGPASSFILE", &file))?;
    expect_exit(&mut run, 0, &[])?;
    assert_eq!(run.events("password_file_ignored"), 1, "{}", run.log());
    Ok(())
}
