//! The only test of its process: what is freed before or beside it would count.
#![cfg(target_os = "linux")]

use malloc::{MAPPED_FROM, return_large_blocks};

const BLOCKS: usize = 64;
const BLOCK: usize = 8 * MAPPED_FROM;

/// Memory of this process in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

/// A block of which every page is in memory.
fn block(bytes: usize) -> Vec<u8> {
    vec![1; bytes]
}

/// Large blocks are freed between small ones that stay.
#[test]
fn large_blocks_are_returned_to_the_system() {
    // A sanitizer has an allocator of its own, and keeps what is freed, to recognize its use.
    let sanitized = std::env::var_os("ASAN_OPTIONS").is_some();
    let fixed = return_large_blocks();
    assert!(fixed || sanitized || !cfg!(target_env = "gnu"));
    // Otherwise the C library would no longer map blocks of this size.
    drop(block(2 * BLOCK));
    let (large, small): (Vec<_>, Vec<_>) = (0..BLOCKS).map(|_| (block(BLOCK), block(64))).unzip();
    let before = resident();
    drop(large);
    let returned = before.saturating_sub(resident());
    drop(small);
    assert!(sanitized || returned > BLOCKS * BLOCK / 10 * 9, "{returned} bytes were returned");
}
