//! The commit and the date of the build, for `pgapace --version`.
//!
//! Nothing is fetched. The commit is that of the repository around the sources, or of
//! packaging/commit.txt, which `git archive` fills, or unknown. Debug builds have none: each commit
//! would compile the program again.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SOURCE_DATE_EPOCH");
    // Not `env!`: a target directory may be used again for sources that were moved.
    let directory = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let root = Path::new(&directory).join("../..");
    let version = env!("CARGO_PKG_VERSION");
    let details = if std::env::var("PROFILE").as_deref() == Ok("release") {
        let commit = of_repository(&root).or_else(|| of_archive(&root));
        let commit = commit.unwrap_or_else(|| "unknown".to_owned());
        format!("commit {commit}, built {}", date(seconds()))
    } else {
        "debug build".to_owned()
    };
    println!("cargo:rustc-env=PGAPACE_VERSION={version} ({details})");
}

/// The commit of the repository whose root this is.
fn of_repository(root: &Path) -> Option<String> {
    // Sources in a directory of another repository are not its commit.
    if !root.join(".git").exists() {
        return None;
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let text = text.trim();
        (output.status.success() && !text.is_empty()).then(|| text.to_owned())
    };
    // Every commit and checkout adds a line to it.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={}", root.join(log).display());
    }
    git(&["describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"])
}

/// The commit that `git archive` wrote.
fn of_archive(root: &Path) -> Option<String> {
    let file = root.join("packaging/commit.txt");
    println!("cargo:rerun-if-changed={}", file.display());
    let text = std::fs::read_to_string(file).ok()?;
    let commit = text.trim();
    (!commit.is_empty() && commit.chars().all(|c| c.is_ascii_hexdigit())).then(|| commit.to_owned())
}

/// The time of the build, in seconds since 1970.
fn seconds() -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    given.unwrap_or_else(now)
}

/// The day in UTC, as 2026-01-31. Source: Howard Hinnant, `civil_from_days`,
/// <https://howardhinnant.github.io/date_algorithms.html>.
fn date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    // Years of this calendar begin in March.
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", year_of_era + era * 400 + next)
}
