//! How much memory the system lets this process have: a container with less than the usual limit
//! must not be ended for it.

use std::fs;
use std::path::Path;

/// Where the system shows control groups.
const MOUNT: &str = "/sys/fs/cgroup";
/// Version 1 says so for "no limit", rounded down to pages.
const NO_LIMIT: u64 = 1 << 62;

/// Bytes that the control groups of this process allow it, and all others in them, together; none
/// without a limit.
pub(super) fn limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_of(&groups, Path::new(MOUNT))
}

/// The least limit of a group of the process and the groups around it. `groups` is
/// `/proc/self/cgroup`; of one that cannot be found under the mount (in a container, paths may be
/// those of the host) the mount itself is taken.
fn limit_of(groups: &str, mount: &Path) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (root, file) = if controllers.is_empty() {
            (mount.to_owned(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (mount.join("memory"), "memory.limit_in_bytes")
        } else {
            return None;
        };
        let inside = root.join(path.trim_start_matches('/'));
        let around = inside.ancestors().take_while(|group| group.starts_with(&root));
        around.filter_map(|group| read(&group.join(file))).min()
    });
    limits.min()
}

/// "max" stands for no limit.
fn read(file: &Path) -> Option<u64> {
    let bytes: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (bytes < NO_LIMIT).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{fs, limit_of};

    #[test]
    fn the_least_limit_counts() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mount = directory.path();
        let write = |file: &str, text: &str| {
            let file = mount.join(file);
            fs::create_dir_all(file.parent().expect("has one")).expect("made");
            fs::write(file, text).expect("written");
        };
        let unified = "0::/a/b\n";
        assert_eq!(limit_of(unified, mount), None);
        write("a/b/memory.max", "max\n");
        assert_eq!(limit_of(unified, mount), None);
        write("a/memory.max", "1000\n");
        assert_eq!(limit_of(unified, mount), Some(1000));
        write("a/b/memory.max", "500\n");
        assert_eq!(limit_of(unified, mount), Some(500));
        // In a container the path may be one that only the host has.
        write("memory.max", "700\n");
        assert_eq!(limit_of("0::/host/scope\n", mount), Some(700));
        // Version 1: a tree for each controller.
        let first = "5:cpu,cpuacct:/x\n4:memory:/docker/1\n1:name=systemd:/x\n";
        assert_eq!(limit_of(first, mount), None);
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit_of(first, mount), None);
        write("memory/docker/1/memory.limit_in_bytes", "300\n");
        assert_eq!(limit_of(first, mount), Some(300));
        assert_eq!(limit_of("nonsense", mount), None);
    }
}
