//! A full spool or disk stops the run, with nothing lost.

use testbed::compare::TableName;
use testbed::{Program, Result};

use super::limits::{rows, site};
use crate::support::{DB, PATIENCE, expect_exit};

/// A full spool ends the run, and no change is lost.
#[test]
fn a_full_spool_stops_with_nothing_lost() -> Result<()> {
    let site = site(&[])?;
    let directory = tempfile::tempdir()?;
    let spool = directory.path().to_string_lossy().into_owned();
    let program = site.program().args(["--memory-limit", "16", "--spool-directory", &spool]);
    let mut run = site.spawn_streaming(&program.clone().args(["--spool-limit", "6"]))?;
    let mut session = site.publisher.connect(DB)?;
    session.batch_execute(&format!("BEGIN; {}", rows(1, 5000)))?;
    site.publisher.sql(DB, "INSERT INTO small VALUES (1)")?;
    site.wait_until_applied(&mut run)?;
    session.batch_execute(&rows(10_000, 5000))?;
    expect_exit(&mut run, 12, &["--spool-limit", "Nothing is lost", "--streaming off"])?;
    // The same before the end of the transaction is received.
    let mut run = site.spawn(&program.clone().args(["--spool-limit", "6"]))?;
    expect_exit(&mut run, 12, &["--spool-limit"])?;
    session.batch_execute("COMMIT")?;
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t"), TableName::from("small")])?;
    // A missing spool directory is detected at startup.
    run.terminate()?;
    run.wait(PATIENCE)?;
    let program = site.program().args(["--spool-directory", "/nonexistent"]);
    expect_exit(&mut site.spawn(&program)?, 12, &["/nonexistent", "--spool-directory"])
}

/// A full disk is reported. Only root can create one.
#[test]
fn a_full_disk_stops_with_nothing_lost() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=2m", "tmpfs"])
        .arg(directory.path())
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !mounted {
        eprintln!("cannot mount a small file system: not tested");
        return Ok(());
    }
    let _mount = Mount(directory.path().to_owned());
    let site = site(&[])?;
    let spool = directory.path().to_string_lossy().into_owned();
    let program = site.program().args(["--memory-limit", "16", "--spool-directory", &spool]);
    let mut run = site.spawn_streaming(&program)?;
    site.publisher.sql(DB, &format!("BEGIN; {}; COMMIT", rows(1, 10_000)))?;
    expect_exit(
        &mut run,
        12,
        &["cannot write to the spool", "Nothing is lost", "--streaming off"],
    )?;
    let mut run = site.spawn_streaming(&site.program())?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

/// A file of the spool that reaches a limit of its size is reported like a full disk.
#[test]
fn a_spool_beyond_the_limit_of_a_file_stops_with_nothing_lost() -> Result<()> {
    let site = site(&[])?;
    let program = site.program().args(["--memory-limit", "16"]);
    let mut run = site.spawn_streaming(&program)?;
    let prlimit = Program::new("prlimit").args(["--pid", &run.pid().to_string()]);
    let limited = prlimit.arg("--fsize=1000000:").output()?;
    assert!(limited.status.success(), "{}", String::from_utf8_lossy(&limited.stderr));
    site.publisher.sql(DB, &format!("BEGIN; {}; COMMIT", rows(1, 10_000)))?;
    expect_exit(&mut run, 12, &["cannot write to the spool", "Nothing is lost", "ulimit -f"])?;
    let mut run = site.spawn_streaming(&program)?;
    site.wait_until_applied(&mut run)?;
    site.expect_equal(&[TableName::from("t")])
}

struct Mount(std::path::PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(&self.0).status();
    }
}
