//! All files of a package, under the paths that they have when it is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::Places;
use crate::command::output;
use crate::program::Program;

/// Files of the repository, and where they go.
const FILES: [(&str, &str); 9] = [
    ("packaging/systemd/pgapace@.service", "usr/lib/systemd/system/pgapace@.service"),
    ("packaging/example.toml", "usr/share/doc/pgapace/examples/pgapace.toml"),
    ("contrib/grafana-dashboard.json", "usr/share/doc/pgapace/examples/grafana-dashboard.json"),
    ("contrib/prometheus-alerts.yml", "usr/share/doc/pgapace/examples/prometheus-alerts.yml"),
    ("docs/privileges.sql", "usr/share/doc/pgapace/privileges.sql"),
    ("README.md", "usr/share/doc/pgapace/README.md"),
    ("CHANGELOG.md", "usr/share/doc/pgapace/CHANGELOG.md"),
    ("docs/settings.md", "usr/share/doc/pgapace/settings.md"),
    ("LICENSE", "usr/share/doc/pgapace/copyright"),
];

/// Completion scripts by shell.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/pgapace"),
    ("zsh", "usr/share/zsh/vendor-completions/_pgapace"),
    ("fish", "usr/share/fish/vendor_completions.d/pgapace.fish"),
];

/// Fills the folder of a program, from nothing.
pub(crate) fn fill(places: &Places, program: &Program) -> Result<PathBuf> {
    let stage = places.dist.join("stage");
    if stage.exists() {
        fs::remove_dir_all(&stage).context("empty the folder of staged files")?;
    }
    let put = |path: &str, contents: &[u8]| write(&stage.join(path), contents);
    put("usr/bin/pgapace", &fs::read(&program.file)?)?;
    set_mode(&stage.join("usr/bin/pgapace"), 0o755)?;
    for (from, to) in FILES {
        let contents = fs::read(places.root.join(from)).with_context(|| format!("read {from}"))?;
        put(to, &contents)?;
    }
    let speaker = speaker(places, program)?;
    let says = |arguments: &[&str]| output(Command::new(&speaker).args(arguments));
    for (shell, path) in COMPLETIONS {
        put(path, &says(&["completions", shell])?)?;
    }
    put("usr/share/man/man1/pgapace.1", &says(&["man"])?)?;
    for verb in verbs(&String::from_utf8_lossy(&says(&["--help"])?)) {
        put(&format!("usr/share/man/man1/pgapace-{verb}.1"), &says(&["man", &verb])?)?;
    }
    Ok(stage)
}

/// A program that this machine can execute, for pages and completions: those of another architecture
/// are the same.
fn speaker(places: &Places, program: &Program) -> Result<PathBuf> {
    if program.is_native() {
        return Ok(program.file.clone());
    }
    Ok(crate::program::build_native(places)?.file)
}

/// The verbs that `--help` lists.
fn verbs(help: &str) -> Vec<String> {
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands = commands.take_while(|line| !line.is_empty());
    let names = commands.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect()
}

pub(crate) fn write(file: &Path, contents: &[u8]) -> Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(file, contents).with_context(|| format!("write {}", file.display()))?;
    set_mode(file, 0o644)
}

pub(crate) fn set_mode(file: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(file, fs::Permissions::from_mode(mode))
        .with_context(|| format!("set the permissions of {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::verbs;

    #[test]
    fn the_verbs_are_those_of_the_help() {
        let help = "About\n\nCommands:\n  run     Apply\n  check   Check\n          more\n  help    Help\n\nOptions:\n  -x  y\n";
        assert_eq!(verbs(help), ["run", "check"]);
    }
}
