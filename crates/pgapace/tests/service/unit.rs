//! The systemd unit, as systemd itself reads it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{must, skipped};

fn unit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd/pgapace@.service")
}

#[test]
fn systemd_finds_no_fault_and_little_exposure() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        skipped("service::unit", "systemd-analyze is not installed (Debian package systemd)");
        return;
    }
    // The unit names an installed program, which verify looks for.
    let directory = must(tempfile::tempdir());
    let file = directory.path().join("pgapace@shop.service");
    let text = must(fs::read_to_string(unit()));
    assert!(text.contains("ExecStart=/usr/bin/pgapace run"));
    must(fs::write(&file, text.replace("/usr/bin/pgapace", env!("CARGO_BIN_EXE_pgapace"))));
    for arguments in [&["verify", "--man=no"][..], &["security", "--offline=yes", "--threshold=20"]]
    {
        let command = Command::new("systemd-analyze").args(arguments).arg(&file).output();
        let said = must(command);
        let (output, errors) =
            (String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
        assert!(said.status.success(), "{arguments:?}:\n{output}{errors}");
        assert!(!errors.contains("pgapace@"), "{arguments:?}:\n{errors}");
    }
}

/// A unit is ready when it streams, which may take hours. `apt` and `dnf` would wait for that.
#[test]
fn an_upgrade_of_the_package_does_not_wait_for_the_services() {
    for script in ["debian/postinst", "rpm/post.sh"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(script);
        let text = must(fs::read_to_string(file));
        let restarts: Vec<_> = text.lines().filter(|line| line.contains("restart '")).collect();
        assert_eq!(restarts.len(), 1, "{script}");
        assert!(restarts[0].contains("systemctl --no-block try-restart"), "{script}: {restarts:?}");
    }
}

/// Exit codes of docs/verbs.md that a restart may mend; the unit restarts after all others but 0.
#[test]
fn no_restart_after_what_it_cannot_mend() {
    let text = must(fs::read_to_string(unit()));
    let line = text.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus="));
    let listed: Vec<u8> =
        line.unwrap_or_default().split(' ').map(|code| must(code.parse())).collect();
    // Internal errors, servers that are away or refuse, a subscription that is in use, a full disk.
    let mendable = [1, 4, 5, 8, 12];
    // Of --until and of verbs that are no services.
    let others = [11, 14, 15, 16, 17, 18, 20];
    let documented =
        must(fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verbs.md")));
    let documented = documented.split("## Exit codes").nth(1).unwrap_or_default();
    let codes = documented.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next());
    let codes = codes.filter_map(|code| code.parse::<u8>().ok()).filter(|code| *code != 0);
    let codes: Vec<_> = codes.collect();
    assert!(codes.len() >= 20, "{codes:?}");
    for code in codes {
        let places = [&listed[..], &mendable, &others];
        let found = places.iter().filter(|place| place.contains(&code)).count();
        assert_eq!(found, 1, "decide whether systemd restarts after exit code {code}");
    }
}
