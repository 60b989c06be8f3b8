//! Tries the .deb in a fresh Debian root: makes the root, and runs the tests `package::` of the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::Places;
use crate::command::{self, cargo, exists, output};
use crate::packages;
use crate::program::Program;
use crate::stage;

/// Version of the package that is upgraded, if no other one is given.
const BEFORE: &str = "0.0.1";
const SUITE: &str = "bookworm";

/// Tries a package, unless this machine cannot: then it says why.
pub(crate) fn run(places: &Places, program: &Program, before: Option<&Path>) -> Result<()> {
    let Some(archive) = root_archive(places)? else { return Ok(()) };
    let deb = packages::deb_file(places, program, &program.version);
    let before = match before {
        Some(before) => before.to_owned(),
        None => {
            // The folder may have the files of another architecture's package, which was made last.
            stage::fill(places, program)?;
            packages::deb(places, program, Some(BEFORE))?
        }
    };
    let folder = places.dist.join("try");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    fs::hard_link(archive, folder.join("root.tar"))?;
    fs::copy(before, folder.join("before.deb"))?;
    fs::copy(&deb, folder.join("now.deb"))?;
    for download in [&deb, &places.dist.join("SHA256SUMS")] {
        fs::copy(download, folder.join(download.file_name().unwrap_or_default()))?;
    }
    let mut test = cargo();
    test.current_dir(&places.root).env("PGAPACE_PACKAGES", &folder);
    test.args(["test", "--locked", "--package", "pgapace", "--test", "main", "package::"]);
    command::run(test.args(["--", "--nocapture"]))
}

/// The archive of a Debian root with PostgreSQL's programs, which is made once.
fn root_archive(places: &Places) -> Result<Option<PathBuf>> {
    let skipped = |why: &str| {
        eprintln!("SKIPPED: the package is not tried: {why}");
        Ok(None)
    };
    if output(Command::new("id").arg("-u"))? != b"0\n" {
        return skipped("only root can make a root of Debian and enter it");
    }
    let archive = places.dist.join(format!("{SUITE}.tar"));
    if archive.exists() {
        return Ok(Some(archive));
    }
    if !exists("mmdebstrap") {
        return skipped("mmdebstrap is not installed: apt-get install mmdebstrap");
    }
    let partial = archive.with_extension("partial.tar");
    let mut mmdebstrap = Command::new("mmdebstrap");
    mmdebstrap.args(["--quiet", "--variant=minbase", "--include=postgresql", SUITE]);
    if let Err(error) = command::run(mmdebstrap.arg(&partial)) {
        return skipped(&format!("no root of Debian {SUITE} can be made: {error}"));
    }
    fs::rename(partial, &archive)?;
    Ok(Some(archive))
}
