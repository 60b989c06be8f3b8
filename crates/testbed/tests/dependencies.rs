//! Every dependency has a permitted licence, comes from crates.io, and is not banned. The lists are those of `deny.toml`,
//! which `cargo deny check` reads too; this test needs no program that must be installed first.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The name that Cargo gives to crates.io.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The packages that the platform of this machine needs, as `cargo metadata` shows them.
fn packages() -> Vec<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .expect("cargo metadata");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let mut metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    match metadata["packages"].take() {
        Value::Array(packages) => packages,
        other => panic!("no list of packages: {other}"),
    }
}

fn text<'a>(package: &'a Value, field: &str) -> &'a str {
    package[field].as_str().unwrap_or_default()
}

/// The strings of a list in `deny.toml`; of a list of tables, their field `crate`.
fn listed(section: &str, list: &str) -> Vec<String> {
    let file = root().join("deny.toml");
    let configuration: toml::Table =
        std::fs::read_to_string(file).expect("deny.toml").parse().expect("TOML");
    let values = configuration[section][list].as_array().expect("a list");
    let name = |value: &toml::Value| {
        let name = value.get("crate").unwrap_or(value);
        name.as_str().expect("a name").to_owned()
    };
    values.iter().map(name).collect()
}

#[test]
fn licences_are_permitted() {
    let allowed = listed("licenses", "allow");
    let allowed: Vec<_> = allowed
        .iter()
        .map(|name| spdx::Licensee::parse(name).unwrap_or_else(|error| panic!("{error}")))
        .collect();
    let packages = packages();
    assert!(packages.len() > 100, "{}", packages.len());
    for package in &packages {
        let name = text(package, "name");
        let licence = text(package, "license");
        let expression = spdx::Expression::parse_mode(licence, spdx::ParseMode::LAX)
            .unwrap_or_else(|error| panic!("{name}: {licence:?}: {error}"));
        let permitted = expression
            .evaluate(|required| allowed.iter().any(|licensee| licensee.satisfies(required)));
        assert!(permitted, "{name}: licence {licence} is not in deny.toml");
    }
}

#[test]
fn sources_are_this_repository_and_crates_io() {
    for package in packages() {
        let source = text(&package, "source");
        let local = package["source"].is_null();
        assert!(local || source == CRATES_IO, "{}: {source}", text(&package, "name"));
    }
}

#[test]
fn no_banned_crate_is_used() {
    let banned = listed("bans", "deny");
    assert!(!banned.is_empty());
    for package in packages() {
        let name = text(&package, "name");
        assert!(!banned.iter().any(|crate_name| crate_name == name), "{name} is banned");
    }
}
