//! Starts a cluster, says where it is, and kills itself as the out-of-memory killer would: what
//! the guardian is for. The test `guardian` runs it.

use testbed::{Cluster, servers};

fn main() -> testbed::Result<()> {
    let major = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(15);
    let cluster = Cluster::builder(&servers::find_or_fetch(major)?).start()?;
    println!("{}", cluster.postmaster_pid().unwrap_or_default());
    println!("{}", cluster.data_dir().display());
    println!("{}", cluster.socket_dir().display());
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::KILL)
        .map_err(|errno| testbed::Error::other(errno.to_string()))
}
