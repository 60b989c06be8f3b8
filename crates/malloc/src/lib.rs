//! How the C library returns freed memory to the system.
//!
//! By default glibc maps only blocks that are larger than any that was ever freed (`mallopt(3)`,
//! "dynamic mmap threshold"). After the first large buffer all of them come from the heaps of the
//! threads, where small blocks keep the space of large ones from being returned: with a memory limit of
//! 16 MB, 40 transactions of 1 MB and 34 threads, 37 to 49 MB were in use, depending on which thread
//! ran when. With a fixed threshold it is 26 or 27 MB, and neither large nor small transactions are
//! applied more slowly. musl has a fixed threshold of the same size.
//!
//! This is the only crate with unsafe code.

/// Size in bytes from which blocks are mapped, and returned as soon as they are freed. It is glibc's
/// initial value.
pub const MAPPED_FROM: usize = 128 << 10;

/// Makes the C library return large blocks as soon as they are freed: a process in which some were freed
/// already keeps what these left. Has no effect in a C library other than glibc, or if the environment
/// variable `MALLOC_MMAP_THRESHOLD_` or the tunable of that name says how large the blocks are.
///
/// Returns whether the C library will do so.
pub fn return_large_blocks() -> bool {
    let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
    if std::env::var_os("MALLOC_MMAP_THRESHOLD_").is_some()
        || tunables.to_string_lossy().contains("malloc.mmap_threshold")
    {
        return false;
    }
    fix_threshold()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn fix_threshold() -> bool {
    let bytes = const { MAPPED_FROM as libc::c_int };
    // SAFETY: mallopt takes two numbers and no memory of ours, and holds the lock of the main heap while it
    // sets the threshold. The glibc manual calls it MT-Unsafe because other threads read the threshold
    // without that lock (const:mallopt). It is an aligned word of which they find the old or the new
    // value, each of which is valid: a block is freed by the mark that it carries, whatever the threshold
    // is (malloc/malloc.c, do_set_mmap_threshold and __libc_free). The program has no other threads yet.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, bytes) == 1 }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn fix_threshold() -> bool {
    false
}
