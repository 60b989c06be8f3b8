//! Data directories that are copied, because initdb takes as much processor time as many a test.
//!
//! initdb runs once per process for each kind of cluster. A copy gets a system identifier of its own, as
//! a directory of initdb has: programs tell servers apart by it. It is in `pg_control`, and in the first
//! page of each WAL segment. The unused end of a segment is a hole in the file, so that it is not copied.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Cluster;
use crate::error::{Context, Error, Result};

/// Offset of `xlp_sysid` in the long header of a WAL segment's first page (`xlog_internal.h`).
const IDENTIFIER_IN_SEGMENT: u64 = 24;

/// The program initdb and its arguments.
pub(super) type Kind = (PathBuf, Vec<String>);

/// Fills the data directory of `cluster`. `initdb` creates a cluster of the same kind, which is never
/// started.
pub(super) fn fill(
    cluster: &Cluster,
    kind: Kind,
    initdb: impl FnOnce() -> Result<Cluster>,
) -> Result<()> {
    // Guardian processes remove them after the end of the process.
    static TEMPLATES: Mutex<BTreeMap<Kind, &'static Cluster>> = Mutex::new(BTreeMap::new());
    let template = {
        let mut templates = TEMPLATES.lock().unwrap_or_else(PoisonError::into_inner);
        match templates.get(&kind) {
            Some(template) => *template,
            None => {
                let template = initdb()?;
                for segment in segments(&template.data)? {
                    release_end(&segment)?;
                }
                let template = &*Box::leak(Box::new(template));
                templates.insert(kind, template);
                template
            }
        }
    };
    cluster.copy_storage(&template.data, &cluster.data)?;
    identify(&cluster.data)
}

/// Gives a copied data directory a new system identifier.
fn identify(data: &Path) -> Result<()> {
    let control = data.join("global/pg_control");
    let mut bytes = read(&control)?;
    let end = checksum_offset(&bytes)
        .ok_or_else(|| Error::other(format!("{} has no checksum", control.display())))?;
    let mut old = [0; 8];
    old.copy_from_slice(&bytes[..8]);
    let new = new_identifier().to_ne_bytes();
    bytes[..8].copy_from_slice(&new);
    let checksum = crc32c(&bytes[..end]).to_ne_bytes();
    bytes[end..end + 4].copy_from_slice(&checksum);
    write(&control, &bytes)?;
    for segment in segments(data)? {
        let failed = || format!("identify {}", segment.display());
        let file = fs::File::options().read(true).write(true).open(&segment).context(failed)?;
        let mut found = [0; 8];
        file.read_exact_at(&mut found, IDENTIFIER_IN_SEGMENT).context(failed)?;
        if found != old {
            return Err(Error::other(format!(
                "{} has another system identifier",
                segment.display()
            )));
        }
        file.write_all_at(&new, IDENTIFIER_IN_SEGMENT).context(failed)?;
    }
    Ok(())
}

/// The WAL segments of a data directory.
fn segments(data: &Path) -> Result<Vec<PathBuf>> {
    let wal = data.join("pg_wal");
    let failed = || format!("read {}", wal.display());
    let mut segments = Vec::new();
    for entry in fs::read_dir(&wal).context(failed)? {
        let path = entry.context(failed)?.path();
        if path.is_file() {
            segments.push(path);
        }
    }
    Ok(segments)
}

/// Makes the zeros at the end of a file a hole. Its length and contents stay as they are.
fn release_end(path: &Path) -> Result<()> {
    let bytes = read(path)?;
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let file = fs::File::options().write(true).open(path);
    file.and_then(|file| {
        file.set_len(used as u64)?;
        file.set_len(bytes.len() as u64)
    })
    .context(|| format!("release the end of {}", path.display()))
}

/// Made as in `BootStrapXLOG`, with a random number in place of microseconds and process ID.
fn new_identifier() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_secs() << 32 | u64::from(fastrand::u32(..))
}

/// The checksum is the last field of `ControlFileData`, whose length depends on the version. Zeros follow.
fn checksum_offset(control: &[u8]) -> Option<usize> {
    (64..1024.min(control.len()) - 4)
        .step_by(4)
        .find(|end| control[*end..*end + 4] == crc32c(&control[..*end]).to_ne_bytes())
}

/// CRC-32C, as in `pg_crc32c.h`.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 }
        })
    })
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).context(|| format!("read {}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn the_checksum_is_found() {
        let mut control = vec![7; 96];
        let checksum = crc32c(&control).to_ne_bytes();
        control.extend(checksum);
        control.resize(8192, 0);
        assert_eq!(checksum_offset(&control), Some(96));
        assert_eq!(checksum_offset(&[7; 8192]), None);
    }
}
