//! The spool returns exactly what was written and not cut off, and detects everything else.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;

use engine::assemble::{SpoolCommand, SpoolId};

use super::Spool;
use crate::error::Class;

fn spool(limit: Option<u64>) -> (tempfile::TempDir, Spool) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let spool = Spool::new(directory.path(), limit);
    spool.check().expect("usable");
    (directory, spool)
}

fn append(id: u64, block: &[u8]) -> SpoolCommand {
    SpoolCommand::Append { id: SpoolId(id), block: block.to_vec() }
}

/// Reads all bytes of a transaction with this length.
fn read(spool: &mut Spool, id: u64, length: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < length {
        bytes.extend_from_slice(&spool.read(SpoolId(id)).expect("readable"));
    }
    bytes
}

#[test]
fn random_commands_equal_a_model() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        let (directory, mut spool) = spool(None);
        let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
        for _ in 0..random.usize(1..200) {
            let id = random.u64(0..4);
            match random.u8(0..10) {
                0..=5 => {
                    let block: Vec<u8> =
                        (0..random.usize(1..5000)).map(|_| random.u8(..)).collect();
                    model.entry(id).or_default().extend_from_slice(&block);
                    spool.carry_out(append(id, &block)).expect("written");
                }
                6..=8 => {
                    let Some(bytes) = model.get_mut(&id) else { continue };
                    let length = random.usize(0..=bytes.len());
                    bytes.truncate(length);
                    let (id, length) = (SpoolId(id), length as u64);
                    spool.carry_out(SpoolCommand::Truncate { id, length }).expect("cut");
                }
                _ => {
                    if model.remove(&id).is_some() {
                        spool.carry_out(SpoolCommand::Discard { id: SpoolId(id) }).expect("gone");
                    }
                }
            }
        }
        for (id, bytes) in model {
            assert_eq!(read(&mut spool, id, bytes.len()), bytes);
            spool.discard(SpoolId(id));
        }
        assert_eq!(spool.used, 0);
        let names = std::fs::read_dir(directory.path()).expect("readable").count();
        assert_eq!(names, 0, "files have no names");
    }
}

#[test]
fn the_limit_is_for_all_transactions_together() {
    let (_directory, mut spool) = spool(Some(1000));
    spool.carry_out(append(1, &[1; 400])).expect("fits");
    spool.carry_out(append(2, &[2; 400])).expect("fits");
    let failure = spool.carry_out(append(1, &[1; 400])).expect_err("too much");
    assert_eq!(failure.class, Class::Spool);
    assert!(failure.to_string().contains("--spool-limit"), "{failure}");
    assert!(!failure.is_transient());
    spool.carry_out(SpoolCommand::Truncate { id: SpoolId(2), length: 10 }).expect("cut");
    spool.carry_out(append(1, &[1; 400])).expect("fits again");
    assert_eq!(read(&mut spool, 1, 800), [1; 800]);
    assert_eq!(read(&mut spool, 2, 10), [2; 10]);
}

#[test]
fn damage_is_noticed() {
    for offset in [0, 4, 8, 107, 108, 115] {
        let (_directory, mut spool) = spool(None);
        spool.carry_out(append(1, &[1; 100])).expect("written");
        spool.carry_out(append(1, &[2; 100])).expect("written");
        let file = spool.files[&SpoolId(1)].file();
        file.write_all_at(&[0xff], offset).expect("damaged");
        let failure = (0..2).find_map(|_| spool.read(SpoolId(1)).err()).expect("noticed");
        assert_eq!(failure.class, Class::Spool);
        assert!(failure.to_string().contains("other bytes than were written"), "{failure}");
    }
    let (_directory, mut spool) = spool(None);
    spool.carry_out(append(1, &[1; 100])).expect("written");
    spool.files[&SpoolId(1)].file().set_len(50).expect("cut");
    assert_eq!(spool.read(SpoolId(1)).expect_err("noticed").class, Class::Spool);
}

#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let spool = Spool::new(std::path::Path::new("/proc/no such directory"), None);
    let failure = spool.check().expect_err("unusable").to_string();
    assert!(failure.contains("/proc/no such directory"), "{failure}");
    assert!(failure.contains("--spool-directory"), "{failure}");
}

#[test]
fn too_many_open_files_may_pass() {
    let (_directory, spool) = spool(None);
    let failure = |error: rustix::io::Errno| spool.failure(&error.into(), "write");
    let too_many = failure(rustix::io::Errno::MFILE);
    assert!(
        too_many.is_transient() && too_many.hint.is_some_and(|hint| hint.contains("LimitNOFILE"))
    );
    assert!(!failure(rustix::io::Errno::NOSPC).is_transient());
}
