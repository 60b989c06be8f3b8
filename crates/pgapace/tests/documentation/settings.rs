//! `docs/settings.md` is what the program says about its settings.

use std::path::Path;
use std::process::Command;

use crate::support::must;

#[test]
fn the_reference_of_settings_is_current() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let made = must(Command::new(env!("CARGO_BIN_EXE_pgapace")).arg("settings").output());
    assert!(made.status.success());
    assert!(
        must(std::fs::read(document)) == made.stdout,
        "docs/settings.md is not current: cargo run -- settings > docs/settings.md"
    );
}
