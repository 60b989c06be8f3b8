//! The folder from which a container image is built: everything that the image has, and the container
//! file.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::Places;
use crate::program::Program;
use crate::stage::{set_mode, write};

/// Makes the folder. `docker build FOLDER` or `podman build FOLDER` make the image.
pub(crate) fn folder(places: &Places, program: &Program) -> Result<PathBuf> {
    let folder = places.dist.join(format!("container-{}", program.debian_architecture()));
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    write(&folder.join("root/pgapace"), &fs::read(&program.file)?)?;
    set_mode(&folder.join("root/pgapace"), 0o755)?;
    // A name for the user, and a place for the spool.
    write(&folder.join("root/etc/passwd"), b"pgapace:x:65532:65532::/:/\n")?;
    write(&folder.join("root/etc/group"), b"pgapace:x:65532:\n")?;
    fs::create_dir_all(folder.join("root/var/tmp"))?;
    set_mode(&folder.join("root/var/tmp"), 0o1777)?;
    fs::copy(places.root.join("packaging/container/Containerfile"), folder.join("Containerfile"))?;
    Ok(folder)
}
